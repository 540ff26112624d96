"""The softmax role: a warpgroup that takes its query rows from QKᵀ to O."""

from gluon_attn.runtime.compat import gl, jit, warpgroup_mma, warpgroup_mma_wait

from ...common.operands import probability_dtype, unshift
from ...common.turns import turn_of
from ..layouts import accumulator_layout, left_operand_layout
from ..packing import join_quarters, quarters, unpack
from .online_softmax import RowStats, finish, may_compare_as_integers, next_maximum, probabilities, rescale, total
from .store import finish_stores, store_lse, store_output
from .wires import Blocks
from .work import first_work, may_skip


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
    if v.tiles.dtype.primitive_bitwidth == 16:
        return v.view([BLOCK_N, D])
    else:
        return v.view([D, BLOCK_N]).permute((1, 0))


@jit
def first_block(q, blocks, rows, block, operands, scales, tile, SCORES: gl.constexpr):
    """(P [ROWS, BLOCK_N], packed; its row statistics; what scores and what the output are multiplied with; next ends)
    of the first block walked.

    It has nothing to rescale and no product of an earlier block to overlap with. Without a causal mask it alone may
    need one, as keys end in it, maybe within it; so one kernel serves every length.
    """
    k, keys = blocks.keys.acquire()
    turn = blocks.turn.take()
    scores = multiply_qk(q, k.view([rows.BLOCK_N, q.shape[1]]), SCORES)
    turn.pass_on()
    # Beside the product: in fp8, scales are loaded.
    q_scales, k_scales, v_scales = scales
    scale_log2 = operands.score_scale(q_scales, k_scales, tile, OPTIONAL=True)
    v_scale = operands.output_scale(v_scales, tile, OPTIONAL=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    k.release()
    # 8-bit kernels always mask: without, they were up to 7 % slower from 1024 keys on (docs/tuning.md).
    if rows.CAUSAL or q.dtype.primitive_bitwidth == 8 or rows.masked_blocks() > 0:
        scores = rows.mask(scores, block)
    row_max = gl.max(scores, axis=1)
    p, sums = probabilities(quarters(scores), row_max, scale_log2, q.dtype, MASKED=True)
    return join_quarters(p), RowStats(row_max, total(sums)), scale_log2, v_scale, Blocks(keys, blocks.values, turn)


@jit
def next_block(
    q,
    p,
    acc,
    stats,
    blocks,
    rows,
    block,
    scale_log2,
    wires,
    SCORES: gl.constexpr,
    MASKED: gl.constexpr,
    AS_INTEGERS: gl.constexpr = False,
):
    """One step: the scores of this block and the product P V of the block before, then the softmax: a part of it beside
    that product, the rest beside those of the other roles. Returns what it updates, but for `wires`."""
    k, keys = blocks.keys.acquire()
    turn = blocks.turn.take()
    scores = multiply_qk(q, k.view([rows.BLOCK_N, q.shape[1]]), SCORES)
    v, values = blocks.values.acquire()
    left = to_left_operand(p, q.dtype, acc.type.layout)
    acc = warpgroup_mma(left, right_operand(v, rows.BLOCK_N, q.shape[1]), acc, is_async=True)
    if wires.TILE.turns != "scores":
        turn.pass_on()

    scores = warpgroup_mma_wait(1, deps=[scores])  # QKᵀ was issued first and is done; PV goes on
    k.release()
    if wires.TILE.turns == "scores":
        turn.pass_on()
    if MASKED:
        scores = rows.mask(scores, block)
    row_max, alpha = next_maximum(scores, stats, scale_log2, MASKED, AS_INTEGERS)
    parts = quarters(scores)
    early, early_sums = probabilities(parts[: wires.TILE.early_exp], row_max, scale_log2, q.dtype, MASKED)
    if wires.TILE.early_exp > 0:
        # The same slot again: it passes at once, but the assembler moves no exponential past its branch.
        blocks.values.acquire()
    # Not after the last exponential: once PV is done, P of this block takes the registers of P of the last one, and the
    # exponentials left hide the multiplications of O.
    acc, _ = warpgroup_mma_wait(0, deps=[acc, held_registers(p, left)])
    v.release()
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    late, late_sums = probabilities(parts[wires.TILE.early_exp :], row_max, scale_log2, q.dtype, MASKED)
    stats = RowStats(row_max, rescale(stats.sum, alpha) + total(early_sums + late_sums))
    return join_quarters(early + late), acc, stats, Blocks(keys, values, turn)


@jit
def last_product(p, acc, blocks, rows):
    """P V of the last block, with nothing left to overlap."""
    v, values = blocks.values.acquire()
    left = to_left_operand(p, v.tiles.dtype, acc.type.layout)
    acc = warpgroup_mma(left, right_operand(v, rows.BLOCK_N, acc.shape[1]), acc, is_async=True)
    acc, _ = warpgroup_mma_wait(0, deps=[acc, held_registers(p, left)])
    v.release()
    return acc, Blocks(blocks.keys, values, blocks.turn)


@jit
def softmax(wires, schedule, operands, o_ptr, q_scales, k_scales, v_scales, ROLE: gl.constexpr):
    """Computes and stores O and LSE of its ROWS of every tile."""
    BLOCK_N: gl.constexpr = operands.k.block_shape[2]
    ROWS: gl.constexpr = operands.q.block_shape[2]
    D: gl.constexpr = operands.q.block_shape[3]
    BITS: gl.constexpr = operands.q.dtype.primitive_bitwidth
    SCORES: gl.constexpr = accumulator_layout(operands.q.layout, BLOCK_N, BITS)
    OUT: gl.constexpr = accumulator_layout(operands.q.layout, D, BITS)
    queries = wires.queries.consumer()
    blocks = Blocks(
        wires.keys.consumer(), wires.values.consumer(), turn_of(wires.turns, ROLE, wires.TILE.turns != "none")
    )

    work = first_work(schedule)
    while work.is_left():
        tile = work.tile()
        tile_rows = schedule.rows(tile)
        part = work.part(ROLE, wires.queries.PARTS)
        rows = tile_rows.part(part * ROWS, ROWS)
        last = rows.blocks() - 1

        q_slot, queries = queries.acquire()
        q = q_slot.view([ROWS, D], part=part)
        if may_skip(schedule.CAUSAL, ROLE, wires.queries.PARTS):
            for _ in range(rows.blocks(), tile_rows.blocks()):
                blocks = blocks.skip()

        scales = (q_scales, k_scales, v_scales)
        p, stats, scale_log2, v_scale, blocks = first_block(q, blocks, rows, last, operands, scales, tile, SCORES)
        as_integers = wires.TILE.integer_max  # if not, only the loop with floats is compiled
        if wires.TILE.integer_max:
            as_integers = may_compare_as_integers(stats.max, scale_log2)
        acc = gl.zeros([ROWS, D], gl.float32, OUT)
        if schedule.CAUSAL:  # otherwise no block but the first one needs a mask
            for j in range(1, rows.masked_blocks()):
                p, acc, stats, blocks = next_block(
                    q, p, acc, stats, blocks, rows, last - j, scale_log2, wires, SCORES, MASKED=True
                )
        unmasked = gl.maximum(rows.masked_blocks(), 1)
        if as_integers:
            for j in range(unmasked, rows.blocks()):
                p, acc, stats, blocks = next_block(
                    q, p, acc, stats, blocks, rows, last - j, scale_log2, wires, SCORES, MASKED=False, AS_INTEGERS=True
                )
        else:
            for j in range(unmasked, rows.blocks()):
                p, acc, stats, blocks = next_block(
                    q, p, acc, stats, blocks, rows, last - j, scale_log2, wires, SCORES, MASKED=False
                )
        if not wires.TILE.stage_in_queries:
            q_slot.release()
        factor, lse = finish(stats, scale_log2, v_scale, unshift(operands.q.dtype), gl.SliceLayout(1, OUT))
        store_lse(lse, operands, tile, rows)
        acc, blocks = last_product(p, acc, blocks, rows)
        out = acc * factor[:, None]
        store_output(out.to(operands.o.dtype), o_ptr, operands, wires, q_slot, part, tile, rows, ROLE)
        work = work.next()
    finish_stores(wires)
