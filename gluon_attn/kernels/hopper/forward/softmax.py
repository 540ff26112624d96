"""The softmax role: a warpgroup that takes its query rows from QKᵀ to O."""

from channels import tma, turn_of
from gluon_attn.runtime.compat import aggregate, gl, jit, warpgroup_mma, warpgroup_mma_wait

from ...common.operands import probability_dtype, unshift
from ...common.row_stats import first_maximum
from ...common.sequence import store_lse
from ..layouts import accumulator_layout, left_operand_layout, scores_layout
from ..packing import join_quarters, quarters, unpack
from .online_softmax import RowStats, finish, may_compare_as_integers, next_maximum, probabilities, rescale, total
from .store import store_output
from .wires import Blocks
from .work import first_work, may_skip_early_keys, may_skip_late_keys, share_of


@jit
def multiply_qk(q, k, LAYOUT: gl.constexpr):
    """Issue S = Q Kᵀ: [ROWS, BLOCK_N] fp32, registers, to be waited for."""
    scores = gl.zeros([q.shape[0], k.shape[0]], gl.float32, LAYOUT)
    return warpgroup_mma(q, k.permute((1, 0)), scores, use_acc=False, is_async=True)


@jit
def to_left_operand(p, dtype: gl.constexpr, ACCUMULATOR: gl.constexpr):
    """P [ROWS, BLOCK_N], for values of `dtype`, in the registers that wgmma reads its left operand from."""
    return unpack(p, probability_dtype(dtype), left_operand_layout(ACCUMULATOR, dtype.primitive_bitwidth))


@jit
def held_registers(packed, left):
    """What a wait has to hold on to, so that the product's left operand stays in its registers. The compiler takes no
    8-bit values there; the packed ones are in the same registers."""
    if left.dtype.primitive_bitwidth == 16:
        return left
    else:
        return packed


@jit
def right_operand(v, BLOCK_N: gl.constexpr, D: gl.constexpr):
    """V [BLOCK_N, D] as wgmma reads it: 16-bit values as they are, 8-bit ones from their transposed tile."""
    if v.part(0).dtype.primitive_bitwidth == 16:
        return v.view([BLOCK_N, D])
    else:
        return v.view([D, BLOCK_N]).permute((1, 0))


@aggregate
class State:
    """What a softmax role carries from one key block to the next."""

    blocks: Blocks
    p: gl.tensor  # [ROWS, BLOCK_N], packed: of the block before, whose V is still to come
    stats: RowStats
    acc: gl.tensor  # [ROWS, D] fp32


@jit
def first_block(q, blocks, rows, block, operands, SCORES: gl.constexpr):
    """(P [ROWS, BLOCK_N], packed; its row statistics; the ScoreScale; what the output is multiplied with; next ends)
    of the first block walked.

    It has nothing to rescale and no product of an earlier block to overlap with. Keys end in it, maybe within it, so
    one kernel serves every length: for that it may need a mask where no other block does.
    """
    k, keys = blocks.keys.acquire()
    turn = blocks.turn.take()
    scores = multiply_qk(q, k.view([rows.BLOCK_N, q.shape[1]]), SCORES)
    turn.pass_on()
    # Beside the product: in fp8, scales are loaded.
    scale = operands.score_scale(rows)
    v_scale = operands.output_scale(rows.block)
    scores = warpgroup_mma_wait(0, deps=[scores])
    k.release()
    scores = rows.modified(scores, block, scale.before)
    # 8-bit kernels always mask: without, up to 7 % slower from 1024 keys on: docs/lab_log.md#8-bit-masks.
    if rows.MASK.differs_by_row or q.dtype.primitive_bitwidth == 8 or rows.keys().masked_steps() > 0:
        scores = rows.mask(scores, block)
    row_max = gl.max(scores, axis=1)
    p, sums = probabilities(quarters(scores), row_max, scale.log2, q.dtype, MASKED=True)
    stats = RowStats(first_maximum(row_max, scale.log2), total(sums))
    return join_quarters(p), stats, scale, v_scale, Blocks(keys, blocks.values, turn)


@jit
def next_block(state, q, rows, block, scale, CONFIG: gl.constexpr, MASKED: gl.constexpr, AS_INTEGERS: gl.constexpr):
    """One step: the scores of this block and the product P V of the block before, then the softmax: a part of it beside
    that product, the rest beside those of the other roles. Returns the next State."""
    p, acc, stats, blocks = state.p, state.acc, state.stats, state.blocks
    SCORES: gl.constexpr = scores_layout(acc.type.layout, rows.BLOCK_N)
    k, keys = blocks.keys.acquire()
    turn = blocks.turn.take()
    scores = multiply_qk(q, k.view([rows.BLOCK_N, q.shape[1]]), SCORES)
    v, values = blocks.values.acquire()
    left = to_left_operand(p, q.dtype, acc.type.layout)
    acc = warpgroup_mma(left, right_operand(v, rows.BLOCK_N, q.shape[1]), acc, is_async=True)

    scores = warpgroup_mma_wait(1, deps=[scores])  # QKᵀ was issued first and is done; PV goes on
    k.release()
    turn.pass_on()
    scores = rows.modified(scores, block, scale.before)
    if MASKED:
        scores = rows.mask(scores, block)
    row_max, alpha = next_maximum(scores, stats, scale.log2, MASKED, AS_INTEGERS)
    pieces = quarters(scores)
    early, early_sums = probabilities(pieces[: CONFIG.early_exp], row_max, scale.log2, q.dtype, MASKED)
    if CONFIG.early_exp > 0:
        blocks.values.wait_again()  # passes at once, but the assembler moves no exponential past its branch
    # Not after the last exponential: once PV is done, P of this block takes the registers of P of the last one, and the
    # exponentials left hide the multiplications of O.
    acc, _ = warpgroup_mma_wait(0, deps=[acc, held_registers(p, left)])
    v.release()
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    late, late_sums = probabilities(pieces[CONFIG.early_exp :], row_max, scale.log2, q.dtype, MASKED)
    stats = RowStats(row_max, rescale(stats.sum, alpha) + total(early_sums + late_sums))
    return State(Blocks(keys, values, turn), join_quarters(early + late), stats, acc)


@jit
def walk(
    state,
    q,
    rows,
    first,
    end,
    scale,
    CONFIG: gl.constexpr,
    MASKED: gl.constexpr,
    AS_INTEGERS: gl.constexpr = False,
):
    """Steps `first` to `end` - 1 of the rows' key range."""
    keys = rows.keys()
    for step in range(first, end):
        state = next_block(state, q, rows, keys.block(step), scale, CONFIG, MASKED, AS_INTEGERS)
    return state


@jit
def last_product(p, acc, blocks, rows):
    """P V of the last block, with nothing left to overlap."""
    v, values = blocks.values.acquire()
    left = to_left_operand(p, v.part(0).dtype, acc.type.layout)
    acc = warpgroup_mma(left, right_operand(v, rows.BLOCK_N, acc.shape[1]), acc, is_async=True)
    acc, _ = warpgroup_mma_wait(0, deps=[acc, held_registers(p, left)])
    v.release()
    return acc, Blocks(blocks.keys, values, blocks.turn)


@jit
def softmax(wires, order, operands, ROLE: gl.constexpr):
    """Computes and stores O and LSE of its share of every row block."""
    CONFIG: gl.constexpr = wires.CONFIG
    BLOCK_N: gl.constexpr = operands.k.block_shape[2]
    ROWS: gl.constexpr = operands.q.block_shape[2]
    D: gl.constexpr = operands.q.block_shape[3]
    BITS: gl.constexpr = operands.q.dtype.primitive_bitwidth
    SCORES: gl.constexpr = accumulator_layout(operands.q.layout, BLOCK_N, BITS)
    OUT: gl.constexpr = accumulator_layout(operands.q.layout, D, BITS)
    queries = wires.queries.consumer()
    turn = turn_of(wires.turns, ROLE, CONFIG.turns)
    blocks = Blocks(wires.keys.consumer(), wires.values.consumer(), turn)

    work = first_work(order)
    while work.is_left():
        all_rows = work.rows()
        share = share_of(work, order.lengths.MASK, ROLE, wires.queries.PARTS)
        rows = all_rows.slice(share * ROWS, ROWS)
        last = rows.keys().block(0)

        q_slot, queries = queries.acquire()
        q = q_slot.view([ROWS, D], part=share)
        if may_skip_late_keys(rows.MASK, ROLE, wires.queries.PARTS):
            for _ in range(rows.keys().end, all_rows.keys().end):
                blocks = blocks.skip()

        p, stats, scale, v_scale, blocks = first_block(q, blocks, rows, last, operands, SCORES)
        as_integers = CONFIG.integer_max  # if not, only the loop with floats is compiled
        if CONFIG.integer_max:
            as_integers = may_compare_as_integers(stats.max, scale.log2)
        state = State(blocks, p, stats, gl.zeros([ROWS, D], gl.float32, OUT))
        keys = rows.keys()
        if rows.MASK.hides_late_keys:  # otherwise no block but the first one needs a mask before the unmasked ones
            state = walk(state, q, rows, 1, keys.masked_steps(), scale, CONFIG, MASKED=True)
        unmasked, end = gl.maximum(keys.masked_steps(), 1), keys.unmasked_end_step()
        if as_integers:
            state = walk(state, q, rows, unmasked, end, scale, CONFIG, MASKED=False, AS_INTEGERS=True)
        else:
            state = walk(state, q, rows, unmasked, end, scale, CONFIG, MASKED=False)
        if rows.MASK.hides_early_keys:
            state = walk(state, q, rows, gl.maximum(end, 1), keys.steps(), scale, CONFIG, MASKED=True)
        if not CONFIG.stage_in_queries:
            q_slot.release()
        sink, UNSHIFT = operands.sink(rows.block), unshift(operands.q.dtype)
        factor, lse = finish(state.stats, scale.log2, sink, v_scale, UNSHIFT, gl.SliceLayout(1, OUT))
        store_lse(operands.lse, operands.q.shape, rows, lse)
        acc, blocks = last_product(state.p, state.acc, state.blocks, rows)
        if may_skip_early_keys(rows.MASK, ROLE, wires.queries.PARTS):  # before the store: others wait for their turns
            for _ in range(all_rows.keys().first, rows.keys().first):
                blocks = blocks.skip()
        out = acc * factor[:, None]
        store_output(out.to(operands.o.dtype), wires, operands, rows, q_slot, share, ROLE)
        work = work.next()
    tma.wait_stores_read()  # before the role ends: what its stores still read must not go away
