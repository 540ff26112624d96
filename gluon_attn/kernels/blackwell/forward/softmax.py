"""The softmax role: a warpgroup to each query tile, a row to each of its threads."""

from channels import SignalProducer, TensorMemoryConsumer, Turn, turn_of
from gluon_attn.runtime.compat import aggregate, gl, jit

from ...common.row_stats import finite, first_maximum
from ..arithmetic import larger
from .scores import load_scores, store_probabilities
from .tmem import ALPHA, MAX, SUM, store_statistic
from .work import first_work


@aggregate
class Ends:
    """The ends of a softmax role's channels. Immutable: `acquire` and what takes a turn return the next `Ends`."""

    scores: TensorMemoryConsumer
    bias: gl.tuple  # of one SharedMemoryConsumer, or of none
    alphas: SignalProducer
    tails: SignalProducer
    turn: Turn

    @jit
    def acquire_scores(self):
        slot, scores = self.scores.acquire()
        return slot, gl.aggregate_replace(self, scores=scores)

    @jit
    def acquire_bias(self):
        """(a tuple of one slot, or of none; the next Ends)."""
        slots, ends = (), ()
        for i in gl.static_range(len(self.bias)):
            slot, end = self.bias[i].acquire()
            slots, ends = slots + (slot,), ends + (end,)
        return slots, gl.aggregate_replace(self, bias=ends)

    @jit
    def take_turn(self):
        return gl.aggregate_replace(self, turn=self.turn.take())


@aggregate
class RowStats:
    max: gl.tensor  # [ROWS] fp32: running maximum of the raw scores, NaN from the first NaN on; see `first_maximum`
    sum: gl.tensor  # [ROWS] fp32: running sum of the probabilities


@jit
def first_block(ends, rows, block, scale, dtype: gl.constexpr, CONFIG: gl.constexpr):
    """The first block walked: nothing to rescale. Masked whether it needs it or not, once per row block; unlike on
    Hopper in 16 bits."""
    slot, ends = ends.acquire_scores()
    bias, ends = ends.acquire_bias()
    pieces, row_max = load_scores(slot.memory, bias, rows, block, scale, MASKED=True, CONFIG=CONFIG)
    if len(bias) > 0:  # scores of hidden keys may be finite there: below this they are as -inf
        row_max = first_maximum(row_max, scale.log2)
    ends = ends.take_turn()
    sums = store_probabilities(slot, ends, pieces, row_max, scale.log2, dtype, MASKED=True, CONFIG=CONFIG)
    ends.turn.pass_on()
    return RowStats(first_maximum(row_max, scale.log2), sums), ends


@jit
def next_block(ends, stats, rows, block, scale, dtype: gl.constexpr, MASKED: gl.constexpr, CONFIG: gl.constexpr):
    """A further block: its row statistics, and the factor for what was accumulated before to the correction role."""
    slot, ends = ends.acquire_scores()
    bias, ends = ends.acquire_bias()
    pieces, row_max = load_scores(slot.memory, bias, rows, block, scale, MASKED, CONFIG)
    row_max = larger(stats.max, row_max)
    growth = (stats.max - finite(row_max, MASKED)) * scale.log2  # <= 0, or NaN
    if CONFIG.rescale_threshold > 0:
        # A maximum that is a little too small does no harm: P just exceeds 1, up to 2^threshold.
        keep = growth >= -CONFIG.rescale_threshold
        row_max, growth = gl.where(keep, stats.max, row_max), gl.where(keep, 0.0, growth)
    alpha = gl.exp2(growth)
    store_statistic(slot.memory, ALPHA, alpha)
    ends.alphas.release()
    ends = ends.take_turn()
    sums = store_probabilities(slot, ends, pieces, row_max, scale.log2, dtype, MASKED, CONFIG)
    ends.turn.pass_on()
    return RowStats(row_max, stats.sum * alpha + sums), ends


@jit
def consumer_of_bias(wires, QUERY_TILE: gl.constexpr):
    if wires.bias[0] is None:
        return ()
    else:
        return (wires.biases[QUERY_TILE].consumer(),)


@jit
def softmax(wires, order, operands, QUERY_TILE: gl.constexpr):
    """From the scores of one query tile to its probabilities, block after block, and its row statistics."""
    ROWS: gl.constexpr = operands.q.block_shape[-2]
    CONFIG: gl.constexpr = wires.CONFIG
    dtype: gl.constexpr = operands.v.dtype
    ends = Ends(
        wires.scores.consumer(QUERY_TILE),
        consumer_of_bias(wires, QUERY_TILE),
        wires.alphas.producer(QUERY_TILE),
        wires.tails.producer(QUERY_TILE),
        turn_of(wires.turns, QUERY_TILE, CONFIG.exp_turns),
    )
    statistics = wires.statistics.producer(QUERY_TILE)
    scores = wires.scores.slot(QUERY_TILE).memory

    work = first_work(wires, order)
    while work.is_left():
        all_rows = work.rows()
        rows = all_rows.slice(QUERY_TILE * ROWS, ROWS)
        scale = operands.score_scale(rows)
        # Both query tiles walk what either of them sees.
        key_range = all_rows.key_range().masked_as(rows.key_range())
        # The first block is masked in any case.
        unmasked, end = gl.maximum(key_range.masked_steps(), 1), key_range.unmasked_end_step()

        stats, ends = first_block(ends, rows, key_range.block(0), scale, dtype, CONFIG)
        if rows.MASK.hides_late_keys:  # otherwise no block but the first one needs a mask before the unmasked ones
            for j in range(1, unmasked):
                block = key_range.block(j)
                stats, ends = next_block(ends, stats, rows, block, scale, dtype, MASKED=True, CONFIG=CONFIG)
        for j in range(unmasked, end):
            block = key_range.block(j)
            stats, ends = next_block(ends, stats, rows, block, scale, dtype, MASKED=False, CONFIG=CONFIG)
        if rows.MASK.hides_early_keys:
            for j in range(gl.maximum(end, 1), key_range.steps()):
                block = key_range.block(j)
                stats, ends = next_block(ends, stats, rows, block, scale, dtype, MASKED=True, CONFIG=CONFIG)

        store_statistic(scores, MAX, stats.max)
        store_statistic(scores, SUM, stats.sum)
        statistics.release()
        work = work.next()
