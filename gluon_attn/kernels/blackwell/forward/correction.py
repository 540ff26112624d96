"""The correction role: a warpgroup that keeps the accumulated outputs to the running maximum, and takes them out."""

from channels import SignalConsumer, SignalProducer, TensorMemoryConsumer
from gluon_attn.runtime.compat import (
    aggregate,
    gl,
    jit,
    tensor_memory_descriptor,
)

from ...common.operands import unshift
from ...common.row_stats import inverse, log_sum_exp
from ..arithmetic import scale_rows
from .tmem import (
    ALPHA,
    MAX,
    SUM,
    load_statistic,
    own_statistic_of,
)
from .work import first_work

OUTPUT_COLUMNS = gl.constexpr(32)  # at a time in registers, of which this role has few


@jit
def scale_in_place(output, factors, PACKED: gl.constexpr):
    """Rows of `output` [ROWS, D] fp32, tensor memory, times `factors` [ROWS]."""
    PIECES: gl.constexpr = output.shape[1] // OUTPUT_COLUMNS
    for i in gl.static_range(PIECES):
        piece = output.slice(i * OUTPUT_COLUMNS, OUTPUT_COLUMNS)
        piece.store(scale_rows(piece.load(), factors, PACKED))


@jit
def rescale(scores, output, TILE: gl.constexpr):
    """O times alpha; with a threshold, only if a row of this CTA needs it."""
    if TILE.rescale_threshold > 0:
        own = own_statistic_of(scores, ALPHA).load()  # [128, 1]
        needed = gl.max(gl.max((own != 1.0).to(gl.int32), axis=1), axis=0)
        if needed != 0:
            scale_in_place(output, load_statistic(scores, ALPHA), TILE.packed_arithmetic)
    else:
        scale_in_place(output, load_statistic(scores, ALPHA), TILE.packed_arithmetic)


@jit
def take_out(output, factors, result, PACKED: gl.constexpr):
    """O = `output` [ROWS, D] fp32, tensor memory, times `factors` [ROWS], rounded into shared memory."""
    PIECES: gl.constexpr = output.shape[1] // OUTPUT_COLUMNS
    for i in gl.static_range(PIECES):
        values = scale_rows(output.slice(i * OUTPUT_COLUMNS, OUTPUT_COLUMNS).load(), factors, PACKED)
        result.slice(i * OUTPUT_COLUMNS, OUTPUT_COLUMNS, dim=1).store(values.to(result.dtype))


@aggregate
class Lane:
    """The ends of one query tile. Immutable: what moves an end on returns the next `Lane`."""

    scores: tensor_memory_descriptor  # where the softmax role leaves alpha, max and sum
    alphas: SignalConsumer
    outputs: TensorMemoryConsumer
    statistics: SignalConsumer
    statistics_read: SignalProducer

    @jit
    def correct(self, TILE: gl.constexpr):
        """Rescale the output for one key block. That its last product is done follows from alpha: alpha was made of
        scores that were issued after that product, and the tensor cores finish in order."""
        alphas = self.alphas.acquire()
        rescale(self.scores, self.outputs.slot.memory, TILE)
        self.outputs.slot.release()
        return Lane(self.scores, alphas, self.outputs, self.statistics, self.statistics_read)

    @jit
    def read_statistics(self):
        """(max [ROWS], sum [ROWS], the next Lane) of a tile whose softmax is done."""
        statistics = self.statistics.acquire()
        row_max, row_sum = load_statistic(self.scores, MAX), load_statistic(self.scores, SUM)
        self.statistics_read.release()
        return row_max, row_sum, Lane(self.scores, self.alphas, self.outputs, statistics, self.statistics_read)

    @jit
    def take_out(self, results, factors, PACKED: gl.constexpr):
        """Wait for the last product, and hand O to the store role. Returns (the results' next end, the next Lane)."""
        output, outputs = self.outputs.acquire()
        result, results = results.acquire()
        take_out(output.memory, factors, result.view(output.memory.shape), PACKED)
        output.release()
        result.publish()
        return results, Lane(self.scores, self.alphas, outputs, self.statistics, self.statistics_read)


@jit
def lane_of(wires, LANE: gl.constexpr):
    return Lane(
        wires.scores.slot(LANE).memory,
        wires.alphas.consumer(LANE),
        wires.outputs.consumer(LANE),
        wires.statistics.consumer(LANE),
        wires.statistics_read.producer(LANE),
    )


@jit
def store_lse(operands, tile, rows, row_max, row_sum, scale_log2):
    lse = log_sum_exp(row_max, row_sum * unshift(operands.v.dtype), scale_log2)
    row = rows.first + gl.arange(0, rows.ROWS, lse.type.layout)
    head = (tile.batch * operands.q.shape[1] + tile.head).to(gl.int64)
    gl.store(operands.lse + head * rows.q_len + row, lse, mask=row < rows.q_len)


@jit
def correction(wires, schedule, operands, q_scales, k_scales, v_scales, TILE: gl.constexpr):
    """Rescales the outputs block after block, then divides them by the row sums; stores LSE."""
    ROWS: gl.constexpr = operands.q.block_shape[2]
    one, two = lane_of(wires, 0), lane_of(wires, 1)
    results = wires.results.producer()

    work = first_work(wires, schedule, TILE)
    while work.number < schedule.tiles:
        tile = schedule.tile(work.number)
        for _ in range(1, schedule.rows(tile).blocks()):
            one = one.correct(TILE)
            two = two.correct(TILE)

        # Both at once, as the products of the next tile wait for it.
        max_one, sum_one, one = one.read_statistics()
        max_two, sum_two, two = two.read_statistics()
        scale_log2 = operands.score_scale(q_scales, k_scales, tile)
        v_scale = operands.output_scale(v_scales, tile)
        results, one = one.take_out(results, inverse(sum_one) * v_scale, TILE.packed_arithmetic)
        results, two = two.take_out(results, inverse(sum_two) * v_scale, TILE.packed_arithmetic)
        rows = schedule.rows(tile)
        store_lse(operands, tile, rows.part(0, ROWS), max_one, sum_one, scale_log2)
        store_lse(operands, tile, rows.part(ROWS, ROWS), max_two, sum_two, scale_log2)
        work = work.next()
