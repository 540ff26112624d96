"""Arithmetic: integers wrap and truncate, floats round to nearest even, NaN goes where the operation says."""

import numpy as np
import pytest
import torch
import triton.language as tl

from tests.compat import gl, jit
from tests.gluon_cpu.layouts import ROW
from tests.gluon_cpu.support import normal, poisoned, same

N = 128
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


@jit
def put(out_ptr, row, value):
    """Store one of several results of a kernel: row `row` of the output."""
    gl.store(out_ptr + row * 128 + gl.arange(0, 128, ROW), value)


def integers(dtype: torch.dtype = torch.int32) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs with the edges first; no division by zero and no INT_MIN / -1, which have no defined result."""
    x = [INT_MIN, INT_MAX, INT_MAX, -7, 7, -7, 7, -1, 0, 1, INT_MIN, 65535, -65536]
    y = [1, 1, INT_MAX, 2, -2, -2, 2, INT_MAX, 5, INT_MIN, INT_MAX, 65537, 65536]
    generator = torch.Generator().manual_seed(0)
    more = torch.randint(INT_MIN, INT_MAX, (2, N - len(x)), generator=generator)
    more[1] |= 1
    more[1][more[1] == -1] = 3
    a, b = torch.cat([torch.tensor(x), more[0]]), torch.cat([torch.tensor(y), more[1]])
    return a.to(torch.int32).to(dtype), b.to(torch.int32).to(dtype)


@jit
def int32_ops(x_ptr, y_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    x, y = gl.load(x_ptr + i), gl.load(y_ptr + i)
    put(out_ptr, 0, x + y)
    put(out_ptr, 1, x - y)
    put(out_ptr, 2, x * y)
    put(out_ptr, 3, x // y)
    put(out_ptr, 4, x % y)
    put(out_ptr, 5, -x)
    put(out_ptr, 6, gl.maximum(x, y))
    put(out_ptr, 7, gl.minimum(x, y))
    put(out_ptr, 8, gl.abs(x))
    put(out_ptr, 9, (x & y) | (x ^ ~y))


def test_int32_wraps_and_division_truncates(launch):
    x, y = integers()
    out = poisoned(10, N, dtype=torch.int32)
    launch(int32_ops, (1,), x, y, out)
    a, b = x.long(), y.long()
    quotient = torch.div(a, b, rounding_mode="trunc")
    wide = [
        a + b,
        a - b,
        a * b,
        quotient,
        a - quotient * b,
        -a,
        a.maximum(b),
        a.minimum(b),
        a.abs(),
        (a & b) | (a ^ ~b),
    ]
    same(out, torch.stack(wide).to(torch.int32))
    assert out[3:5, 3].tolist() == [-3, -1], "-7 / 2 is -3 with remainder -1"


@jit
def uint32_ops(x_ptr, y_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    x = gl.load(x_ptr + i).to(gl.uint32, bitcast=True)
    y = gl.load(y_ptr + i).to(gl.uint32, bitcast=True)
    put(out_ptr, 0, (x // y).to(gl.int32, bitcast=True))
    put(out_ptr, 1, (x % y).to(gl.int32, bitcast=True))
    put(out_ptr, 2, (x >> 3).to(gl.int32, bitcast=True))
    put(out_ptr, 3, (x < y).to(gl.int32))
    put(out_ptr, 4, gl.maximum(x, y).to(gl.int32, bitcast=True))
    put(out_ptr, 5, gl.umulhi(x, y).to(gl.int32, bitcast=True))


def test_uint32(launch):
    x, y = integers()
    out = poisoned(6, N, dtype=torch.int32)
    launch(uint32_ops, (1,), x, y, out)
    a, b = (t.numpy().view(np.uint32).astype(np.uint64) for t in (x, y))
    want = np.stack([a // b, a % b, a >> 3, a < b, np.maximum(a, b), (a * b) >> 32]).astype(np.uint32)
    same(out, torch.from_numpy(want.view(np.int32)))


@jit
def shift_ops(x_ptr, amount_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    x, amount = gl.load(x_ptr + i), gl.load(amount_ptr + i)
    put(out_ptr, 0, x << amount)
    put(out_ptr, 1, x >> (amount % 32))
    logical = x.to(gl.uint32, bitcast=True) >> (amount % 32).to(gl.uint32)
    put(out_ptr, 2, logical.to(gl.int32, bitcast=True))


def test_shifts_arithmetic_logical_and_beyond_the_width(launch):
    x, _ = integers()
    amount = torch.arange(N, dtype=torch.int32) % 40
    out = poisoned(3, N, dtype=torch.int32)
    launch(shift_ops, (1,), x, amount, out)
    a, n = x.numpy().astype(np.int64), amount.numpy()
    left = np.where(n < 32, a << np.minimum(n, 31), 0).astype(np.int32)
    logical = (x.numpy().view(np.uint32) >> (n % 32).astype(np.uint32)).view(np.int32)
    same(out, torch.from_numpy(np.stack([left, (a >> (n % 32)).astype(np.int32), logical])))


@jit
def narrow_and_wide_ops(x_ptr, y_ptr, narrow_ptr, wide_ptr):
    i = gl.arange(0, 128, ROW)
    x, y = gl.load(x_ptr + i), gl.load(y_ptr + i)
    put(narrow_ptr, 0, (x.to(gl.int8) + y.to(gl.int8)).to(gl.int32))
    put(narrow_ptr, 1, (x.to(gl.int16) * y.to(gl.int16)).to(gl.int32))
    put(narrow_ptr, 2, x.to(gl.uint8).to(gl.int32))
    put(narrow_ptr, 3, x.to(gl.int8).to(gl.int32))
    put(narrow_ptr, 4, (x != 0).to(gl.int32))
    put(wide_ptr, 0, x.to(gl.int64) * y.to(gl.int64) * 3)
    put(wide_ptr, 1, x.to(gl.uint32, bitcast=True).to(gl.int64))


def test_narrow_and_wide_integers(launch):
    x, y = integers()
    narrow, wide = poisoned(5, N, dtype=torch.int32), poisoned(2, N, dtype=torch.int64)
    launch(narrow_and_wide_ops, (1,), x, y, narrow, wide)
    a, b = x.numpy(), y.numpy()
    i8, i16 = a.astype(np.int8) + b.astype(np.int8), a.astype(np.int16) * b.astype(np.int16)
    rows = [i8, i16, a.astype(np.uint8), a.astype(np.int8), a != 0]
    same(narrow, torch.from_numpy(np.stack([r.astype(np.int32) for r in rows])))
    same(wide, torch.stack([x.long() * y.long() * 3, x.long() & 0xFFFFFFFF]))


@jit
def scalar_ops(a, b, big, out_ptr):
    """The same rules on scalars, which are not tensors."""
    gl.store(out_ptr + 0, a // b)
    gl.store(out_ptr + 1, a % b)
    gl.store(out_ptr + 2, big + big)
    gl.store(out_ptr + 3, a << 33 - b)
    gl.store(out_ptr + 4, gl.where(a < b, a, b))
    gl.store(out_ptr + 5, gl.cdiv(big, 7))
    gl.store(out_ptr + 6, (a * 1.5).to(gl.int32))
    gl.store(out_ptr + 7, gl.maximum(a, b) - gl.minimum(a, b))


def test_scalars(launch):
    out = poisoned(8, dtype=torch.int32)
    launch(scalar_ops, (1,), -7, 2, 2**30 + 5, out)
    assert out.tolist() == [-3, -1, -(2**31) + 10, -(7 << 31) % 2**32 - 2**32, -7, (2**30 + 11) // 7, -10, 9]


SPECIAL = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0, 1e-40]


def special_floats() -> tuple[torch.Tensor, torch.Tensor]:
    """All pairs of special values, then normal ones."""
    pairs = torch.tensor([(a, b) for a in SPECIAL for b in SPECIAL])
    more = normal(2, N - len(pairs))
    return torch.cat([pairs[:, 0], more[0]]), torch.cat([pairs[:, 1], more[1]])


@jit
def float_select_ops(x_ptr, y_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    x, y = gl.load(x_ptr + i), gl.load(y_ptr + i)
    put(out_ptr, 0, gl.maximum(x, y))
    put(out_ptr, 1, gl.minimum(x, y))
    put(out_ptr, 2, gl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL))
    put(out_ptr, 3, gl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL))
    put(out_ptr, 4, gl.where(x < y, x, 7.0))
    put(out_ptr, 5, gl.where(x != y, 1.0, 0.0))
    put(out_ptr, 6, gl.where(x == y, 1.0, 0.0))
    put(out_ptr, 7, gl.where(x >= y, 1.0, 0.0))
    put(out_ptr, 8, gl.abs(x))


def test_maximum_ignores_or_propagates_nan(launch):
    x, y = special_floats()
    out = poisoned(9, N)
    launch(float_select_ops, (1,), x, y, out)
    selected = [torch.fmax(x, y), torch.fmin(x, y), x.maximum(y), x.minimum(y), torch.where(x < y, x, 7.0)]
    compared = [(x != y).float(), (x == y).float(), (x >= y).float()]
    same(out, torch.stack([*selected, *compared, x.abs()]))


@jit
def float_ops(x_ptr, y_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    x, y = gl.load(x_ptr + i), gl.load(y_ptr + i)
    put(out_ptr, 0, x + y)
    put(out_ptr, 1, x * y)
    put(out_ptr, 2, gl.div_rn(x, y))
    put(out_ptr, 3, x % y)
    put(out_ptr, 4, -x)
    put(out_ptr, 5, gl.floor(x))
    put(out_ptr, 6, gl.ceil(x))
    put(out_ptr, 7, gl.sqrt_rn(gl.abs(x)))
    put(out_ptr, 8, gl.clamp(x, -0.5, 0.5))


def test_float_arithmetic(launch):
    x, y = 8 * normal(N, seed=1), normal(N, seed=2)
    out = poisoned(9, N)
    launch(float_ops, (1,), x, y, out)
    root = x.abs().double().sqrt().float()  # torch's own in fp32 is off by a unit here and there
    want = [x + y, x * y, x / y, x.fmod(y), -x, x.floor(), x.ceil(), root, x.clamp(-0.5, 0.5)]
    same(out, torch.stack(want))


@jit
def fma_op(x_ptr, y_ptr, z_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    gl.store(out_ptr + i, gl.fma(gl.load(x_ptr + i), gl.load(y_ptr + i), gl.load(z_ptr + i)))


def test_fma_rounds_once(launch):
    x = torch.full((N,), 1 + 2.0**-12)
    z = -(x * x)  # rounded: x * x + z is zero unless the product is kept exact
    out = poisoned(N)
    launch(fma_op, (1,), x, x, z, out)
    same(out, (x.double() * x.double() + z.double()).float())
    assert out[0] != 0


@jit
def math_ops(x_ptr, out_ptr):
    x = gl.load(x_ptr + gl.arange(0, 128, ROW))
    put(out_ptr, 0, gl.exp(x))
    put(out_ptr, 1, gl.exp2(x))
    put(out_ptr, 2, gl.log(gl.abs(x)))
    put(out_ptr, 3, gl.log2(gl.abs(x)))
    put(out_ptr, 4, gl.sqrt(gl.abs(x)))
    put(out_ptr, 5, gl.rsqrt(gl.abs(x)))
    put(out_ptr, 6, gl.sin(x))
    put(out_ptr, 7, gl.cos(x))
    put(out_ptr, 8, gl.erf(x))
    put(out_ptr, 9, gl.fdiv(1.0, x))


def test_math_functions(launch):
    x = 2 * normal(N)
    out = poisoned(10, N)
    launch(math_ops, (1,), x, out)
    a = x.double()
    want = [a.exp(), a.exp2(), a.abs().log(), a.abs().log2(), a.abs().sqrt(), a.abs().rsqrt()]
    want += [a.sin(), a.cos(), torch.erf(a), 1 / a]
    torch.testing.assert_close(out.double(), torch.stack(want), rtol=2e-6, atol=2e-6)


@jit
def exp2_of_specials(x_ptr, out_ptr):
    x = gl.load(x_ptr + gl.arange(0, 128, ROW))
    put(out_ptr, 0, gl.exp2(x))
    put(out_ptr, 1, gl.log2(x))


def test_exp2_and_log2_of_special_values(launch):
    x = torch.tensor([-float("inf"), float("inf"), float("nan"), 0.0, -1.0, 130.0, -200.0, 1.0] * 16)
    out = poisoned(2, N)
    launch(exp2_of_specials, (1,), x, out)
    inf, nan = float("inf"), float("nan")
    same(out[0, :8], torch.tensor([0.0, inf, nan, 1.0, 0.5, inf, 0.0, 2.0]))
    same(out[1, :4], torch.tensor([nan, inf, nan, -inf]))
    assert out[1, 4].isnan()


@jit
def cast_kernel(x_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    gl.store(out_ptr + i, gl.load(x_ptr + i).to(out_ptr.dtype.element_ty))


HALFWAY = torch.tensor(
    [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-4, 1 + 3 * 2.0**-4, 1 + 2.0**-3]
)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float32, torch.float8_e4m3fn),
        (torch.float32, torch.float8_e5m2),
        (torch.float32, torch.int32),
        (torch.int32, torch.float32),
        (torch.int32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float8_e4m3fn, torch.float32),
        (torch.float8_e5m2, torch.float16),
        (torch.float32, torch.float64),
    ],
    ids=str,
)
def test_casts_round_to_nearest_even_or_truncate_to_int(launch, source, target):
    x = torch.cat([HALFWAY, -HALFWAY, 20 * normal(N - 2 * len(HALFWAY))])
    if source == torch.int32:
        x = x * 2.0**22
    x = x.to(source)
    out = poisoned(N, dtype=target)
    launch(cast_kernel, (1,), x, out)
    same(out.double(), x.to(target).double())


@jit
def bitcast_kernel(x_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    x = gl.load(x_ptr + i)
    put(out_ptr, 0, x.to(gl.int32, bitcast=True))
    flipped = (x.to(gl.uint32, bitcast=True) ^ 0x80000000).to(gl.float32, bitcast=True)
    put(out_ptr, 1, flipped.to(gl.int32, bitcast=True))


def test_bitcast(launch):
    x = special_floats()[0]
    out = poisoned(2, N, dtype=torch.int32)
    launch(bitcast_kernel, (1,), x, out)
    same(out[0], x.view(torch.int32))
    same(out[1].view(torch.float32)[8:64], -x[8:64])


@jit
def half_precision_ops(x_ptr, y_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    x, y = gl.load(x_ptr + i), gl.load(y_ptr + i)
    put(out_ptr, 0, x + y)
    put(out_ptr, 1, x * y)
    put(out_ptr, 2, gl.maximum(x, y))
    put(out_ptr, 3, (x.to(gl.float32) * y.to(gl.float32) + 1.0).to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_rounds_after_each_operation(launch, dtype):
    x, y = normal(N, dtype=dtype, seed=1), normal(N, dtype=dtype, seed=2)
    out = poisoned(4, N, dtype=dtype)
    launch(half_precision_ops, (1,), x, y, out)
    same(out, torch.stack([x + y, x * y, x.maximum(y), (x.float() * y.float() + 1).to(dtype)]))


@jit
def infinities_to_fp8(x_ptr, out_ptr, KIND: gl.constexpr):
    i = gl.arange(0, 128, ROW)
    gl.store(out_ptr + i, gl.load(x_ptr + i).to(KIND).to(gl.float32))


@pytest.mark.parametrize(("kind", "largest"), [(gl.float8e5, 57344.0), (gl.float8e4nv, 448.0)], ids=["e5m2", "e4m3"])
def test_infinities_saturate_in_fp8(launch, kind, largest):
    """PTX compiled for it: cvt.rn.satfinite."""
    x, out = torch.full((128,), float("inf")), poisoned(128)
    x[1::2] *= -1
    launch(infinities_to_fp8, (1,), x, out, kind)
    same(out, x.sign() * largest)
