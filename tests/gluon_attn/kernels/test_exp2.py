"""Exponentials by polynomial on Hopper, over the range that they are for."""

import torch

import gluon_cpu
from channels.compat import gl, jit
from gluon_attn.kernels.hopper.exp2 import half_by_polynomial

ROWS, COLUMNS = 64, 64
ACCUMULATOR = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))


@jit
def powers(x_ptr, out_ptr, M: gl.constexpr, N: gl.constexpr):
    m = gl.arange(0, M, gl.SliceLayout(1, ACCUMULATOR))[:, None]
    n = gl.arange(0, N, gl.SliceLayout(0, ACCUMULATOR))[None, :]
    gl.store(out_ptr + m * N + n, half_by_polynomial(gl.load(x_ptr + m * N + n)))


def test_both_halves_of_the_columns():
    """The left one is exact to a few units of fp32, the right one to the polynomial's error; NaN stays NaN."""
    x = torch.linspace(-126.0, 127.0, ROWS * COLUMNS).reshape(ROWS, COLUMNS)[:, torch.randperm(COLUMNS)]
    x[5, 3] = x[5, COLUMNS - 3] = float("nan")
    out = torch.full_like(x, -1.0)
    gluon_cpu.launch(powers, (1,), x, out, ROWS, COLUMNS, num_warps=4, target="sm_90a")
    error = (out.double() / x.double().exp2() - 1).abs()
    assert torch.equal(error.isnan(), x.isnan())
    left, right = error.nan_to_num(0.0).split(COLUMNS // 2, dim=1)
    assert left.max() < 1e-6
    assert 5e-5 < right.max() < 8e-5
