"""The gradient of sinks: dsink = sum over all rows of exp(sink - LSE) · (dLSE - rowsum(dO * O))."""

from gluon_attn.runtime.compat import gl, jit

from ...common.score_mod import LOG2_E

ROWS = gl.constexpr(1024)  # at a time


@jit(do_not_specialize=["batches", "heads", "rows"])
def sum_sinks(
    dsinks_ptr,  # (H,), to be written
    sinks_ptr,  # as dsinks_ptr
    lse_log2_ptr,  # (B, H, 1, rows) fp32, as `prepare_backward` leaves it: +inf in a row that counts nowhere
    delta_ptr,  # as lse_log2_ptr: rowsum(dO * O) - dLSE
    batches,
    heads,
    rows,
):
    """One program for each head, which adds its rows up in a fixed order."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    head = gl.program_id(0)
    sink = gl.load(sinks_ptr + head).to(gl.float32) * LOG2_E
    row = gl.arange(0, ROWS, LAYOUT)
    sums = gl.zeros([ROWS], gl.float32, LAYOUT)
    for batch in range(batches):
        of_head = (batch * heads + head).to(gl.int64) * rows
        for first in range(0, rows, ROWS):
            inside = first + row < rows
            lse = gl.load(lse_log2_ptr + of_head + first + row, mask=inside, other=float("inf"))
            delta = gl.load(delta_ptr + of_head + first + row, mask=inside, other=0.0)
            sums -= gl.exp2(sink - lse) * delta
    gl.store(dsinks_ptr + head, gl.sum(sums, axis=0).to(dsinks_ptr.dtype.element_ty))
