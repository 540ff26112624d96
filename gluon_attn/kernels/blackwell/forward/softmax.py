"""The softmax role: a warpgroup to each query tile, a row to each of its threads."""

from channels import SignalProducer, TensorMemoryConsumer
from gluon_attn.runtime.compat import aggregate, gl, jit

from ...common.row_stats import finite
from ...common.turns import Turn, turn_of
from .scores import load_scores, store_probabilities
from .tmem import (
    ALPHA,
    MAX,
    SUM,
    store_statistic,
)
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
    while work.number < schedule.tiles:
        tile = schedule.tile(work.number)
        rows = schedule.rows(tile).part(LANE * ROWS, ROWS)
        scale_log2 = operands.score_scale(q_scales, k_scales, tile)
        blocks = schedule.rows(tile).blocks()
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
