"""The softmax role: a warpgroup to each query tile, a row to each of its threads."""

from channels import SignalConsumer, SignalProducer, TensorMemoryConsumer
from gluon_attn.compat import aggregate, gl, jit

from ..common.row_stats import finite
from ..common.turns import Turn, turn_of
from .arithmetic import exp2, multiply_add, row_sums, split_columns
from .operands import shift_log2
from .tmem import ALPHA, MAX, SUM, probabilities_of, store_statistic
from .work import first_work


@aggregate
class Ends:
    """The ends of a softmax role's channels. Immutable: `acquire` and what takes a turn return the next `Ends`."""

    scores: TensorMemoryConsumer
    alphas: SignalProducer
    tails: SignalProducer
    turn: Turn

    @jit
    def acquire_scores(self):
        slot, scores = self.scores.acquire()
        return slot, Ends(scores, self.alphas, self.tails, self.turn)

    @jit
    def take_turn(self):
        return Ends(self.scores, self.alphas, self.tails, self.turn.take())


@aggregate
class RowStats:
    max: gl.tensor  # [ROWS] fp32: running maximum of the raw scores; -inf in a row that has seen no key
    sum: gl.tensor  # [ROWS] fp32: running sum of the probabilities


@jit
def load_scores(scores, rows, block, MASKED: gl.constexpr, TILE: gl.constexpr):
    """S in TILE.exp_pieces tensors side by side, -inf where masked, and the maximum of each row [ROWS] fp32.

    All of S is in registers before anything is written over it.
    """
    LOADS: gl.constexpr = TILE.load_pieces
    WIDTH: gl.constexpr = scores.shape[1] // LOADS
    pieces = ()
    row_max = None
    for i in gl.static_range(LOADS):
        piece, piece_max = load_piece(scores, rows, block, i * WIDTH, WIDTH, MASKED, TILE.max_in_load)
        pieces = pieces + split_columns(piece, TILE.exp_pieces // LOADS)
        row_max = piece_max if row_max is None else gl.maximum(row_max, piece_max)
    return pieces, row_max


@jit
def load_piece(
    scores,
    rows,
    block,
    FIRST_COLUMN: gl.constexpr,
    WIDTH: gl.constexpr,
    MASKED: gl.constexpr,
    MAX_IN_LOAD: gl.constexpr,
):
    piece = scores.slice(FIRST_COLUMN, WIDTH)
    if MAX_IN_LOAD and not MASKED:
        values, row_max = piece.load_max()
        row_max = gl.convert_layout(row_max, gl.SliceLayout(1, values.type.layout), assert_trivial=True)
    else:
        values = piece.load()
        if MASKED:
            values = rows.mask(values, block, FIRST_COLUMN)
        row_max = gl.max(values, axis=1)
    return values, row_max


@jit
def store_piece(p, values, INDEX: gl.constexpr):
    WIDTH: gl.constexpr = values.shape[1]
    piece = p.slice(INDEX * WIDTH, WIDTH)
    LAYOUT: gl.constexpr = piece.get_reg_layout()
    piece.store(gl.convert_layout(values.to(p.dtype), LAYOUT, assert_trivial=True))


@jit
def probabilities(scores, offset, scale_log2, MASKED: gl.constexpr, TILE: gl.constexpr):
    """exp2(scores * scale_log2 + offset), [M, N] fp32; a masked block has zeros, which a polynomial would not give."""
    column = gl.convert_layout(offset, gl.SliceLayout(1, scores.type.layout), assert_trivial=True)[:, None]
    exponents = multiply_add(scores, scale_log2, column, TILE.packed_arithmetic)
    return exp2(exponents, 0 if MASKED else TILE.polynomial_columns, TILE.packed_arithmetic)


@jit
def store_probabilities(
    slot, ends, pieces, row_max, scale_log2, dtype: gl.constexpr, MASKED: gl.constexpr, TILE: gl.constexpr
):
    """P rounded to `dtype` over the scores, piece by piece, and the slot freed. Returns the row sums [ROWS] fp32."""
    p = probabilities_of(slot.memory, dtype)
    offset = shift_log2(dtype) - finite(row_max, MASKED) * scale_log2
    sums = None
    PIECES: gl.constexpr = TILE.exp_pieces
    for i in gl.static_range(PIECES):
        values = probabilities(pieces[i], offset, scale_log2, MASKED, TILE)
        store_piece(p, values, i)
        if TILE.early_p and i == 2:
            slot.release()
        piece_sums = gl.convert_layout(row_sums(values, TILE.packed_arithmetic), row_max.type.layout, assert_trivial=True)
        sums = piece_sums if sums is None else sums + piece_sums
    if TILE.early_p:
        ends.tails.release()
    else:
        slot.release()
    return sums


@jit
def first_block(ends, rows, block, scale_log2, dtype: gl.constexpr, TILE: gl.constexpr):
    """The first block walked: nothing to rescale. Masked whether it needs it or not, as on Hopper: once per tile."""
    slot, ends = ends.acquire_scores()
    pieces, row_max = load_scores(slot.memory, rows, block, MASKED=True, TILE=TILE)
    ends = ends.take_turn()
    sums = store_probabilities(slot, ends, pieces, row_max, scale_log2, dtype, MASKED=True, TILE=TILE)
    ends.turn.pass_on()
    return RowStats(row_max, sums), ends


@jit
def next_block(ends, stats, rows, block, scale_log2, dtype: gl.constexpr, MASKED: gl.constexpr, TILE: gl.constexpr):
    """A further block: its row statistics, and the factor for what was accumulated before to the correction role."""
    slot, ends = ends.acquire_scores()
    pieces, row_max = load_scores(slot.memory, rows, block, MASKED, TILE)
    row_max = gl.maximum(stats.max, row_max)
    growth = (stats.max - finite(row_max, MASKED)) * scale_log2  # <= 0
    if TILE.rescale_threshold > 0:
        # A maximum that is a little too small does no harm: P just exceeds 1, up to 2^threshold.
        keep = growth >= -TILE.rescale_threshold
        row_max, growth = gl.where(keep, stats.max, row_max), gl.where(keep, 0.0, growth)
    alpha = gl.exp2(growth)
    store_statistic(slot.memory, ALPHA, alpha)
    ends.alphas.release()
    ends = ends.take_turn()
    sums = store_probabilities(slot, ends, pieces, row_max, scale_log2, dtype, MASKED, TILE)
    ends.turn.pass_on()
    return RowStats(row_max, stats.sum * alpha + sums), ends


@jit
def softmax(wires, schedule, operands, q_scales, k_scales, LANE: gl.constexpr, TILE: gl.constexpr):
    """From the scores of one query tile to its probabilities, block after block, and its row statistics."""
    ROWS: gl.constexpr = operands.q.block_shape[2]
    dtype: gl.constexpr = operands.v.dtype
    turn = turn_of(wires.turns, LANE, TILE.exp_turns)
    ends = Ends(wires.scores.consumer(LANE), wires.alphas.producer(LANE), wires.tails.producer(LANE), turn)
    statistics = wires.statistics.producer(LANE)
    scores = wires.scores.slot(LANE).memory

    work = first_work(wires, schedule, TILE)
    while work.item < schedule.items:
        for i in range(schedule.tiles_in(work.item)):
            tile = schedule.tile(work.item, i)
            rows = schedule.rows(tile.first_row + LANE * ROWS, ROWS)
            scale_log2 = operands.score_scale(q_scales, k_scales, tile)
            blocks = schedule.rows(tile.first_row, schedule.BLOCK_M).blocks()
            last = blocks - 1
            masked = gl.maximum(blocks - rows.unmasked_blocks(), 1)  # the first is masked in any case

            stats, ends = first_block(ends, rows, last, scale_log2, dtype, TILE)
            if schedule.CAUSAL:  # otherwise no block but the first one needs a mask
                for j in range(1, masked):
                    stats, ends = next_block(ends, stats, rows, last - j, scale_log2, dtype, MASKED=True, TILE=TILE)
            for j in range(masked, blocks):
                stats, ends = next_block(ends, stats, rows, last - j, scale_log2, dtype, MASKED=False, TILE=TILE)

            store_statistic(scores, MAX, stats.max)
            store_statistic(scores, SUM, stats.sum)
            statistics.release()
        work = work.next()
