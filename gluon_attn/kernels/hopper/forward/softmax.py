"""The softmax role: a warpgroup that takes its query rows from QKᵀ to O."""

from channels import tma, turn_of
from gluon_attn.runtime.compat import aggregate, constexpr_function, gl, jit, warpgroup_mma, warpgroup_mma_wait

from ...common.operands import probability_dtype, unshift
from ...common.pieces import pieces_of
from ...common.row_stats import first_maximum
from ...common.score_mod import LOG2_E, is_by_distance
from ...common.sequence import store_lse
from ...common.thread_view import halves
from ..inline_asm import widened
from ..layouts import accumulator_layout, left_operand_layout, scores_layout
from ..packing import join_quarters, quarters, unpack
from ..pieces import multiply_transposed, zeros_in_pieces
from .online_softmax import (
    RowStats,
    finish,
    may_compare_as_integers,
    needs_no_maximum,
    next_maximum,
    no_maximum,
    probabilities,
    rescale,
    total,
)
from .store import store_output
from .wires import Ends
from .work import first_work, may_skip_early_keys, may_skip_late_keys, share_of


@constexpr_function
def is_added_by_product(function, dtype):
    """Whether what a SCORE_MOD by distance adds is what the product starts with, which costs no addition. In 8 bits
    tensor cores add with too few bits for that."""
    return is_by_distance(function) and dtype.primitive_bitwidth == 16


@jit
def start_of_scores(rows, block, scale, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """What S = Q Kᵀ starts with, without a bias: [ROWS, BLOCK_N] fp32; None: 0."""
    if is_added_by_product(rows.SCORE_MOD, dtype):
        SHAPE: gl.constexpr = [rows.ROWS, rows.BLOCK_N]
        return rows.added(block, scale.before, SHAPE, LAYOUT)
    else:
        return None


@jit
def bias_of_scores(k, rows, scale_log2, LAYOUT: gl.constexpr, BIAS: gl.constexpr):
    """What S = Q Kᵀ starts with instead: part BIAS of the slot of K, in units of raw scores. [ROWS, BLOCK_N] fp32."""
    factor = LOG2_E / scale_log2
    if k.part(BIAS).shape[2] == 1:
        row = k.view([rows.BLOCK_N], part=BIAS).load(gl.SliceLayout(0, LAYOUT)).to(gl.float32) * factor
        return row[None, :].broadcast_to([rows.ROWS, rows.BLOCK_N])
    else:
        return widened(k.view([rows.ROWS, rows.BLOCK_N], part=BIAS).load(LAYOUT)) * factor


@constexpr_function
def part_of_bias(channel_parts, pieces, role):
    """Which part of a slot of K is the bias of a role: None if there is none, the one row if there is one for all."""
    tiles = channel_parts - pieces
    return None if tiles == 0 else pieces + (role if tiles > 1 else 0)


@jit
def release_keys(k, BIAS: gl.constexpr):
    """A slot of K, of which products have read all but a bias."""
    if BIAS is None:
        k.release()
    else:
        k.release_accessed()


@jit
def after_product(scores, rows, block, scale, dtype: gl.constexpr):
    """Scores that began with `start_of_scores`, as SCORE_MOD makes them: nothing is left to do if the product added
    it."""
    if is_added_by_product(rows.SCORE_MOD, dtype):
        return scores
    else:
        return rows.modified(scores, block, scale.before)


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
def right_operand(v, i, BLOCK_N: gl.constexpr, D: gl.constexpr):
    """Piece i of V, [BLOCK_N, D], as wgmma reads it: 16-bit values as they are, 8-bit ones of a transposed tile."""
    if v.part(0).dtype.primitive_bitwidth == 16:
        return v.view([BLOCK_N, D], part=i)
    else:
        return v.view([D, BLOCK_N], part=i).permute((1, 0))


@jit
def multiply_pv(left, v, acc, BLOCK_N: gl.constexpr):
    """Issue O += P V, piece by piece of its columns, to be waited for."""
    pieces = acc[:0]
    for i in gl.static_range(len(acc)):
        right = right_operand(v, i, BLOCK_N, acc[i].shape[1])
        pieces += (warpgroup_mma(left, right, acc[i], is_async=True),)
    return pieces


@jit
def wait_for_pv(acc, held):
    """Until all products are done. held: see `held_registers`."""
    PIECES: gl.constexpr = len(acc)
    acc = warpgroup_mma_wait(0, deps=acc + (held,))
    return acc[:PIECES]


@jit
def scaled(pieces, factor):
    """[ROWS, D] in pieces, each row times its factor [ROWS]."""
    products = pieces[:0]
    for i in gl.static_range(len(pieces)):
        of_rows = gl.convert_layout(factor, gl.SliceLayout(1, pieces[i].type.layout))[:, None]
        products += (pieces[i] * of_rows,)
    return products


@aggregate
class State:
    """What a softmax role carries from one key block to the next."""

    ends: Ends
    p: gl.tensor  # [ROWS, BLOCK_N], packed: of the block before, whose V is still to come
    stats: RowStats
    acc: gl.tuple  # [ROWS, D] fp32: its pieces


@jit
def first_block(q, ends, rows, block, operands, SCORES: gl.constexpr, BIAS: gl.constexpr):
    """(P [ROWS, BLOCK_N], packed; its row statistics; the ScoreScale; what the output is multiplied with; next ends)
    of the first block walked.

    It has nothing to rescale and no product of an earlier block to overlap with. Keys end in it, maybe within it, so
    one kernel serves every length: for that it may need a mask where no other block does.
    """
    k, keys = ends.keys.acquire()
    if BIAS is None:
        start = None
    else:
        start = bias_of_scores(k, rows, operands.scale_log2, SCORES, BIAS)
    turn = ends.turn.take()
    scores = multiply_transposed(q, pieces_of(k, [rows.BLOCK_N, q[0].shape[1]], 0, len(q)), SCORES, start)
    turn.pass_on()
    # Beside the product: in fp8, scales are loaded; and a slope, so that this product does not start with it.
    scale = operands.score_scale(rows)
    v_scale = operands.output_scale(rows.block)
    scores = warpgroup_mma_wait(0, deps=[scores])
    release_keys(k, BIAS)
    scores = rows.modified(scores, block, scale.before)
    # 8-bit kernels always mask: without, up to 7 % slower from 1024 keys on: docs/lab_log.md#8-bit-masks.
    if rows.MASK.differs_by_row or q[0].dtype.primitive_bitwidth == 8 or rows.key_range().masked_steps() > 0:
        scores = rows.mask(scores, block)
    if needs_no_maximum(rows.SCORE_MOD, q[0].dtype):
        row_max = no_maximum(scores)
    else:
        row_max = gl.max(scores, axis=1)
    if BIAS is not None:  # scores of hidden keys may be finite there: below this they are as -inf
        row_max = first_maximum(row_max, scale.log2)
    p, sums = probabilities(quarters(scores), row_max, scale.log2, q[0].dtype, MASKED=True)
    stats = RowStats(first_maximum(row_max, scale.log2), total(sums))
    return join_quarters(p), stats, scale, v_scale, Ends(keys, ends.values, turn)


@jit
def next_block(
    state,
    q,
    rows,
    block,
    scale,
    CONFIG: gl.constexpr,
    BIAS: gl.constexpr,
    MASKED: gl.constexpr,
    AS_INTEGERS: gl.constexpr,
):
    """One step: the scores of this block and the product P V of the block before, then the softmax: a part of it beside
    that product, the rest beside those of the other roles. Returns the next State."""
    p, acc, stats, ends = state.p, state.acc, state.stats, state.ends
    DTYPE: gl.constexpr = q[0].dtype
    OUT: gl.constexpr = acc[0].type.layout
    SCORES: gl.constexpr = scores_layout(OUT, rows.BLOCK_N)
    NO_MAXIMUM: gl.constexpr = needs_no_maximum(rows.SCORE_MOD, DTYPE)
    HALF: gl.constexpr = CONFIG.half_by_polynomial and not MASKED  # no exponential of -inf
    if BIAS is None:
        start = start_of_scores(rows, block, scale, DTYPE, SCORES)  # before the waits, while there is time
        k, keys = ends.keys.acquire()
    else:
        k, keys = ends.keys.acquire()
        start = bias_of_scores(k, rows, scale.log2, SCORES, BIAS)  # before the wait for a turn
    turn = ends.turn.take()
    scores = multiply_transposed(q, pieces_of(k, [rows.BLOCK_N, q[0].shape[1]], 0, len(q)), SCORES, start)
    v, values = ends.values.acquire()
    left = to_left_operand(p, DTYPE, OUT)
    acc = multiply_pv(left, v, acc, rows.BLOCK_N)

    scores = warpgroup_mma_wait(len(acc), deps=[scores])  # QKᵀ was issued first and is done; PV goes on
    release_keys(k, BIAS)
    turn.pass_on()
    scores = after_product(scores, rows, block, scale, DTYPE)
    if MASKED:
        scores = rows.mask(scores, block)
    if NO_MAXIMUM:
        row_max = no_maximum(scores)
    else:
        row_max, alpha = next_maximum(scores, stats, scale.log2, MASKED, AS_INTEGERS)
    in_quarters = quarters(scores)
    early, early_sums = probabilities(in_quarters[: CONFIG.early_exp], row_max, scale.log2, DTYPE, MASKED, HALF)
    if CONFIG.early_exp > 0:
        ends.values.wait_again()  # passes at once, but the assembler moves no exponential past its branch
    # Not after the last exponential: once PV is done, P of this block takes the registers of P of the last one, and the
    # exponentials left hide the multiplications of O.
    acc = wait_for_pv(acc, held_registers(p, left))
    v.release()
    row_sum = stats.sum
    if not NO_MAXIMUM:
        acc = scaled(acc, alpha)
        row_sum = rescale(row_sum, alpha)
    late, late_sums = probabilities(in_quarters[CONFIG.early_exp :], row_max, scale.log2, DTYPE, MASKED, HALF)
    stats = RowStats(row_max, row_sum + total(early_sums + late_sums))
    return State(Ends(keys, values, turn), join_quarters(early + late), stats, acc)


@jit
def walk(
    state,
    q,
    rows,
    first,
    end,
    scale,
    CONFIG: gl.constexpr,
    BIAS: gl.constexpr,
    MASKED: gl.constexpr,
    AS_INTEGERS: gl.constexpr = False,
):
    """Steps `first` to `end` - 1 of the rows' key range."""
    key_range = rows.key_range()
    for step in range(first, end):
        state = next_block(state, q, rows, key_range.block(step), scale, CONFIG, BIAS, MASKED, AS_INTEGERS)
    return state


@jit
def last_product(p, acc, ends, rows):
    """P V of the last block, with nothing left to overlap."""
    v, values = ends.values.acquire()
    left = to_left_operand(p, v.part(0).dtype, acc[0].type.layout)
    acc = wait_for_pv(multiply_pv(left, v, acc, rows.BLOCK_N), held_registers(p, left))
    v.release()
    return acc, Ends(ends.keys, values, ends.turn)


@constexpr_function
def columns_of_values(desc, bits, config):
    """Of a piece of V, by its descriptor, which in 8 bits may be of V transposed."""
    return desc.block_shape[-1 if bits == 16 or config.transpose_registers > 0 else -2]


@jit
def as_blocks(pieces, desc):
    """O in blocks of `desc`, in its dtype: of as many columns as its pieces have, or of half of them."""
    blocks = pieces[:0]
    for i in gl.static_range(len(pieces)):
        out = pieces[i].to(desc.dtype)
        blocks += halves(out) if out.shape[1] > desc.block_shape[-1] else (out,)
    return blocks


@jit
def softmax(wires, order, operands, ROLE: gl.constexpr):
    """Computes and stores O and LSE of its share of every row block."""
    CONFIG: gl.constexpr = wires.CONFIG
    BLOCK_N: gl.constexpr = operands.k.block_shape[-2]
    ROWS: gl.constexpr = operands.q.block_shape[-2]
    COLUMNS: gl.constexpr = operands.q.block_shape[-1]
    QK: gl.constexpr = wires.QK  # pieces
    V: gl.constexpr = wires.values.PARTS
    ROLES: gl.constexpr = CONFIG.softmax_roles
    BITS: gl.constexpr = operands.q.dtype.primitive_bitwidth
    D: gl.constexpr = columns_of_values(operands.v, BITS, CONFIG)
    SCORES: gl.constexpr = accumulator_layout(operands.q.layout, BLOCK_N, BITS)
    OUT: gl.constexpr = accumulator_layout(operands.q.layout, D, BITS)
    BIAS: gl.constexpr = part_of_bias(wires.keys.PARTS, QK, ROLE)
    queries = wires.queries.consumer()
    turn = turn_of(wires.turns, ROLE, CONFIG.turns)
    ends = Ends(wires.keys.consumer(), wires.values.consumer(), turn)

    work = first_work(order)
    while work.is_left():
        all_rows = work.rows()
        share = share_of(work, order.lengths.MASK, ROLE, ROLES)
        rows = all_rows.slice(share * ROWS, ROWS)
        last = rows.key_range().block(0)

        q_slot, queries = queries.acquire()
        q = pieces_of(q_slot, [ROWS, COLUMNS], share * QK, QK)
        if may_skip_late_keys(rows.MASK, ROLE, ROLES):
            for _ in range(rows.key_range().end, all_rows.key_range().end):
                ends = ends.skip()

        p, stats, scale, v_scale, ends = first_block(q, ends, rows, last, operands, SCORES, BIAS)
        AS_INTEGERS: gl.constexpr = CONFIG.integer_max and not needs_no_maximum(rows.SCORE_MOD, operands.q.dtype)
        as_integers = AS_INTEGERS  # if not, only the loop with floats is compiled
        if AS_INTEGERS:
            as_integers = may_compare_as_integers(stats.max, scale.log2)
        state = State(ends, p, stats, zeros_in_pieces(V, [ROWS, D], OUT))
        key_range = rows.key_range()
        if rows.MASK.hides_late_keys:  # otherwise no block but the first one needs a mask before the unmasked ones
            state = walk(state, q, rows, 1, key_range.masked_steps(), scale, CONFIG, BIAS, MASKED=True)
        unmasked, end = gl.maximum(key_range.masked_steps(), 1), key_range.unmasked_end_step()
        if as_integers:
            state = walk(state, q, rows, unmasked, end, scale, CONFIG, BIAS, MASKED=False, AS_INTEGERS=True)
        else:
            state = walk(state, q, rows, unmasked, end, scale, CONFIG, BIAS, MASKED=False)
        if rows.MASK.hides_early_keys:
            state = walk(state, q, rows, gl.maximum(end, 1), key_range.steps(), scale, CONFIG, BIAS, MASKED=True)
        if not CONFIG.stage_in_queries:
            q_slot.release()
        sink, UNSHIFT = operands.sink(rows.block), unshift(operands.q.dtype)
        factor, lse = finish(state.stats, scale.log2, sink, v_scale, UNSHIFT, gl.SliceLayout(1, OUT))
        store_lse(operands.lse, operands.q.shape, rows, lse)
        acc, ends = last_product(state.p, state.acc, state.ends, rows)
        if may_skip_early_keys(rows.MASK, ROLE, ROLES):  # before the store: others wait for their turns
            for _ in range(all_rows.key_range().first, rows.key_range().first):
                ends = ends.skip()
        out = as_blocks(scaled(acc, factor), operands.o)
        store_output(out, wires, operands, rows, q_slot, share, ROLE)
        work = work.next()
    tma.wait_stores_read()  # before the role ends: what its stores still read must not go away
