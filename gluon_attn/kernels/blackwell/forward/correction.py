"""The correction role: a warpgroup that keeps the accumulated outputs to the running maximum, and takes them out."""

from channels import SignalConsumer, SignalProducer, TensorMemoryConsumer
from gluon_attn.runtime.compat import aggregate, gl, jit, tensor_memory_descriptor

from ...common.operands import unshift
from ...common.row_stats import inverse, log_sum_exp, with_sink
from ...common.sequence import store_lse
from ..arithmetic import scale_rows
from .tmem import ALPHA, MAX, SUM, load_statistic, own_statistic_of
from .work import first_work

OUTPUT_COLUMNS = gl.constexpr(32)  # at a time in registers, of which this role has few
# What exponentials by polynomial make of -inf is not 0, but less than this for any number of keys.
LEAST_SUM = gl.constexpr(2.0**-64)


@jit
def scale_in_place(output, factors, PACKED: gl.constexpr):
    """Rows of `output` [ROWS, D] fp32, tensor memory, times `factors` [ROWS]."""
    PIECES: gl.constexpr = output.shape[1] // OUTPUT_COLUMNS
    for i in gl.static_range(PIECES):
        piece = output.slice(i * OUTPUT_COLUMNS, OUTPUT_COLUMNS)
        piece.store(scale_rows(piece.load(), factors, PACKED))


@jit
def rescale(scores, output, CONFIG: gl.constexpr):
    """O times alpha; with a threshold, only if a row of this CTA needs it."""
    if CONFIG.rescale_threshold > 0:
        own = own_statistic_of(scores, ALPHA).load()  # [128, 1]
        needed = gl.max(gl.max((own != 1.0).to(gl.int32), axis=1), axis=0)
        if needed != 0:
            scale_in_place(output, load_statistic(scores, ALPHA), CONFIG.packed_arithmetic)
    else:
        scale_in_place(output, load_statistic(scores, ALPHA), CONFIG.packed_arithmetic)


@jit
def take_out(output, factors, result, PACKED: gl.constexpr):
    """O = `output` [ROWS, D] fp32, tensor memory, times `factors` [ROWS], rounded into shared memory."""
    PIECES: gl.constexpr = output.shape[1] // OUTPUT_COLUMNS
    for i in gl.static_range(PIECES):
        values = scale_rows(output.slice(i * OUTPUT_COLUMNS, OUTPUT_COLUMNS).load(), factors, PACKED)
        result.slice(i * OUTPUT_COLUMNS, OUTPUT_COLUMNS, dim=1).store(values.to(result.dtype))


@aggregate
class QueryTile:
    """The ends of one query tile. Immutable: what moves an end on returns the next `QueryTile`."""

    scores: tensor_memory_descriptor  # where the softmax role leaves alpha, max and sum
    alphas: SignalConsumer
    outputs: TensorMemoryConsumer
    statistics: SignalConsumer
    statistics_read: SignalProducer

    @jit
    def correct(self, CONFIG: gl.constexpr):
        """Rescale the output for one key block. That its last product is done follows from alpha: alpha was made of
        scores that were issued after that product, and the tensor cores finish in order."""
        alphas = self.alphas.acquire()
        output = self.outputs.next_slot()
        rescale(self.scores, output.memory, CONFIG)
        output.release()
        return gl.aggregate_replace(self, alphas=alphas)

    @jit
    def read_statistics(self, CONFIG: gl.constexpr):
        """(max [ROWS], sum [ROWS], the next QueryTile), once the softmax of a row block is done."""
        statistics = self.statistics.acquire()
        row_max, row_sum = load_statistic(self.scores, MAX), load_statistic(self.scores, SUM)
        self.statistics_read.release()
        if CONFIG.polynomial_columns > 0:  # of -inf they are not 0, and of NaN not NaN
            row_sum = gl.where(row_sum < LEAST_SUM, 0.0, row_sum)
            row_sum = gl.where(row_max == float("inf"), float("nan"), row_sum)
        return row_max, row_sum, gl.aggregate_replace(self, statistics=statistics)

    @jit
    def take_out(self, results, factors, PACKED: gl.constexpr):
        """Wait for the last product, and hand O to the store role. Returns (the results' next end, the next
        QueryTile)."""
        output, outputs = self.outputs.acquire()
        result, results = results.acquire()
        take_out(output.memory, factors, result.view(output.memory.shape), PACKED)
        output.release()
        result.publish()
        return results, gl.aggregate_replace(self, outputs=outputs)


@jit
def query_tile_of(wires, QUERY_TILE: gl.constexpr):
    return QueryTile(
        wires.scores.slot(QUERY_TILE).memory,
        wires.alphas.consumer(QUERY_TILE),
        wires.outputs.consumer(QUERY_TILE),
        wires.statistics.consumer(QUERY_TILE),
        wires.statistics_read.producer(QUERY_TILE),
    )


@jit
def correction(wires, order, operands):
    """Rescales the outputs block after block, then divides them by the row sums; stores LSE."""
    ROWS: gl.constexpr = operands.q.block_shape[-2]
    UNSHIFT: gl.constexpr = unshift(operands.v.dtype)
    one, two = query_tile_of(wires, 0), query_tile_of(wires, 1)
    results = wires.results.producer()

    work = first_work(wires, order)
    while work.is_left():
        rows = work.rows()
        for _ in range(1, rows.key_range().steps()):
            one = one.correct(wires.CONFIG)
            two = two.correct(wires.CONFIG)

        # Both at once, as the products of the next row block wait for it.
        max_one, sum_one, one = one.read_statistics(wires.CONFIG)
        max_two, sum_two, two = two.read_statistics(wires.CONFIG)
        scale_log2, sink = operands.score_scale(rows).log2, operands.sink(rows.block)
        v_scale = operands.output_scale(rows.block)
        sum_one = with_sink(max_one, sum_one, scale_log2, sink, UNSHIFT)
        sum_two = with_sink(max_two, sum_two, scale_log2, sink, UNSHIFT)
        results, one = one.take_out(results, inverse(sum_one) * v_scale, wires.CONFIG.packed_arithmetic)
        results, two = two.take_out(results, inverse(sum_two) * v_scale, wires.CONFIG.packed_arithmetic)
        lse_one = log_sum_exp(max_one, sum_one * UNSHIFT, scale_log2, sink)
        lse_two = log_sum_exp(max_two, sum_two * UNSHIFT, scale_log2, sink)
        store_lse(operands.lse, operands.q.shape, rows.slice(0, ROWS), lse_one)
        store_lse(operands.lse, operands.q.shape, rows.slice(ROWS, ROWS), lse_two)
        work = work.next()
