"""NVIDIA's library functions of floats: every one of them, against torch and exact fractions."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from tests.compat import libdevice
from tests.gluon_cpu.libdevice_kernels import (
    N,
    away,
    bounds,
    close,
    name_of,
    numbers,
    run,
)
from tests.gluon_cpu.support import normal, same

FLOATS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    libdevice.abs: torch.abs,
    libdevice.floor: torch.floor,
    libdevice.ceil: torch.ceil,
    libdevice.trunc: torch.trunc,
    libdevice.rint: torch.round,
    libdevice.nearbyint: torch.round,
    libdevice.round: away,
    libdevice.sqrt: torch.sqrt,
    libdevice.sqrt_rn: torch.sqrt,
    libdevice.rsqrt: torch.rsqrt,
    libdevice.cbrt: lambda x: x.abs().pow(1 / 3) * torch.sign(x),
    libdevice.rcbrt: lambda x: 1 / (x.abs().pow(1 / 3) * torch.where(torch.signbit(x), -1.0, 1.0)),
    libdevice.exp: torch.exp,
    libdevice.exp2: torch.exp2,
    libdevice.exp10: lambda x: torch.pow(10.0, x),
    libdevice.expm1: torch.expm1,
    libdevice.log: torch.log,
    libdevice.log2: torch.log2,
    libdevice.log10: torch.log10,
    libdevice.log1p: torch.log1p,
    libdevice.sin: torch.sin,
    libdevice.cos: torch.cos,
    libdevice.tan: torch.tan,
    libdevice.asin: torch.asin,
    libdevice.acos: torch.acos,
    libdevice.atan: torch.atan,
    libdevice.sinh: torch.sinh,
    libdevice.cosh: torch.cosh,
    libdevice.tanh: torch.tanh,
    libdevice.asinh: torch.asinh,
    libdevice.acosh: torch.acosh,
    libdevice.atanh: torch.atanh,
    libdevice.erf: torch.erf,
    libdevice.erfc: torch.erfc,
    libdevice.erfcx: torch.special.erfcx,
    libdevice.erfinv: torch.erfinv,
    libdevice.erfcinv: lambda x: torch.erfinv(1 - x),
    libdevice.normcdf: torch.special.ndtr,
    libdevice.normcdfinv: torch.special.ndtri,
    libdevice.lgamma: torch.lgamma,
    libdevice.cyl_bessel_i0: torch.special.i0,
    libdevice.cyl_bessel_i1: torch.special.i1,
}
FAST: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    libdevice.fast_sinf: torch.sin,
    libdevice.fast_cosf: torch.cos,
    libdevice.fast_tanf: torch.tan,
    libdevice.fast_expf: torch.exp,
    libdevice.fast_exp10f: lambda x: torch.pow(10.0, x),
    libdevice.fast_logf: torch.log,
    libdevice.fast_log2f: torch.log2,
    libdevice.fast_log10f: torch.log10,
    libdevice.saturatef: lambda x: x.nan_to_num(nan=0.0).clamp(0, 1),
    libdevice.rsqrt_rn: torch.rsqrt,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("function", FLOATS, ids=name_of)
def test_functions_of_one_float(launch, function, dtype):
    x = numbers(dtype)
    if function is libdevice.lgamma:
        x[9] = 7.0  # at -inf torch and C differ
    if function in (libdevice.erfcinv, libdevice.erfinv, libdevice.normcdfinv):
        x = torch.linspace(0.01, 0.99, N, dtype=dtype)
    close(run(launch, function, x), FLOATS[function](x.double()))


@pytest.mark.parametrize("function", FAST, ids=name_of)
def test_fast_functions(launch, function):
    x = numbers(torch.float32)
    close(run(launch, function, x), FAST[function](x.double()))


def test_gamma(launch):
    x = torch.cat([torch.arange(1.0, 30.0), torch.linspace(-5.4, 5.4, N - 29)]).double()
    want = torch.tensor([math.gamma(v) for v in x.tolist()], dtype=torch.float64)
    close(run(launch, libdevice.tgamma, x), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sines_of_multiples_of_pi(launch, dtype):
    x = torch.arange(N, dtype=dtype) / 4 - 12
    s = math.sqrt(0.5)
    close(run(launch, libdevice.sinpi, x), torch.tensor([0, s, 1, s, 0, -s, -1, -s] * 16, dtype=torch.float64))
    close(run(launch, libdevice.cospi, x), torch.tensor([1, s, 0, -s, -1, -s, 0, s] * 16, dtype=torch.float64))
    same(run(launch, libdevice.sinpi, x)[::4].abs(), torch.zeros(32, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_predicates_and_exponents(launch, dtype):
    x = numbers(dtype)
    predicates = {libdevice.isnan: torch.isnan, libdevice.isinf: torch.isinf, libdevice.signbit: torch.signbit}
    predicates[libdevice.finitef if dtype == torch.float32 else libdevice.isfinited] = torch.isfinite
    for function, want in predicates.items():
        same(run(launch, function, x, result=torch.int32) != 0, want(x))
    whole = torch.where(x == 0, -(2**31), torch.frexp(x).exponent - 1)
    whole = torch.where(x.isinf(), 2**31 - 1, torch.where(x.isnan(), -(2**31), whole))
    same(run(launch, libdevice.ilogb, x, result=torch.int32), whole.to(torch.int32))
    logs = torch.where(x == 0, -math.inf, (torch.frexp(x).exponent - 1).to(dtype))
    same(run(launch, libdevice.logb, x), torch.where(x.isfinite(), logs, x.abs()))


PAIRS: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    libdevice.atan2: torch.atan2,
    libdevice.hypot: torch.hypot,
    libdevice.rhypot: lambda a, b: 1 / torch.hypot(a, b),
    libdevice.pow: torch.pow,
    libdevice.copysign: torch.copysign,
    libdevice.fmod: torch.fmod,
    libdevice.fdim: lambda a, b: torch.where(a.isnan() | b.isnan(), math.nan, (a - b).clamp(min=0)),
    libdevice.nextafter: torch.nextafter,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("function", PAIRS, ids=name_of)
def test_functions_of_two_floats(launch, function, dtype):
    x, y = normal(N, seed=1).to(dtype) * 3, normal(N, seed=2).to(dtype)
    x[:4], y[:4] = torch.tensor([0.0, -0.0, 5.0, math.nan]), torch.tensor([1.0, 1.0, 2.0, 1.0])
    wide = (x, y) if function is libdevice.nextafter else (x.double(), y.double())
    close(run(launch, function, x, y), PAIRS[function](*wide))


def test_functions_of_several_floats(launch):
    x, y, z, w = (normal(N, seed=n).double() for n in range(4))
    three, four = (x * x + y * y + z * z).sqrt(), (x * x + y * y + z * z + w * w).sqrt()
    close(run(launch, libdevice.norm3d, x, y, z), three)
    close(run(launch, libdevice.rnorm3d, x, y, z), 1 / three)
    close(run(launch, libdevice.norm4d, x, y, z, w), four)
    close(run(launch, libdevice.rnorm4d, x, y, z, w), 1 / four)
    close(run(launch, libdevice.fma, x, y, z), x * y + z)
    f = [t.float() for t in (x, y)]
    close(run(launch, libdevice.fast_dividef, *f), f[0].double() / f[1])
    close(run(launch, libdevice.fast_powf, f[0].abs(), f[1]), f[0].abs().double() ** f[1].double())
    remainders = [math.remainder(a, b) for a, b in zip((x * 9).tolist(), y.tolist(), strict=True)]
    same(run(launch, libdevice.remainder, x * 9, y), torch.tensor(remainders, dtype=torch.float64))


def test_functions_of_a_float_and_an_integer(launch):
    x, n = normal(N).double(), torch.arange(N, dtype=torch.int32) % 21 - 10
    for function in (libdevice.ldexp, libdevice.scalbn):
        same(run(launch, function, x, n), x * 2.0**n)
    close(run(launch, libdevice.pow, x, n), x**n)


def test_bessel_functions(launch):
    """Values from tables, and relations between the functions."""
    one, three = torch.ones(N, dtype=torch.float64), torch.full((N,), 3, dtype=torch.float64)
    two, five = torch.full((N,), 2, dtype=torch.int32), torch.full((N,), 5, dtype=torch.int32)
    got = [
        run(launch, libdevice.j0, one), run(launch, libdevice.j1, one), run(launch, libdevice.y0, one),
        run(launch, libdevice.y1, one), run(launch, libdevice.jn, two, one, result=torch.float64),
        run(launch, libdevice.jn, five, three, result=torch.float64),
    ]  # fmt: skip
    table = [0.7651976866, 0.4400505857, 0.0882569642, -0.7812128213, 0.1149034849, 0.0430284349]
    torch.testing.assert_close(torch.stack(got)[:, 0], torch.tensor(table).double(), rtol=1e-7, atol=1e-7)
    n, x = torch.arange(N, dtype=torch.int32) % 12 - 3, normal(N).double().abs() * 4 + 0.5
    j, next_j = (run(launch, libdevice.jn, n + k, x, result=torch.float64) for k in (0, 1))
    y, next_y = (run(launch, libdevice.yn, n + k, x, result=torch.float64) for k in (0, 1))
    torch.testing.assert_close(next_j * y - j * next_y, 2 / (math.pi * x), rtol=1e-5, atol=0)  # the Wronskian
    same(run(launch, libdevice.jn, 0 * n, x, result=torch.float64), run(launch, libdevice.j0, x))


# Rounding that is asked for


EXACT: dict[str, tuple[dict[str, Any], Callable[..., Fraction]]] = {
    "add": (
        {"rn": libdevice.add_rn, "rz": libdevice.add_rz, "rd": libdevice.add_rd, "ru": libdevice.add_ru},
        lambda a, b: a + b,
    ),
    "sub": (
        {"rn": libdevice.sub_rn, "rz": libdevice.sub_rz, "rd": libdevice.sub_rd, "ru": libdevice.sub_ru},
        lambda a, b: a - b,
    ),
    "mul": (
        {"rn": libdevice.mul_rn, "rz": libdevice.mul_rz, "rd": libdevice.mul_rd, "ru": libdevice.mul_ru},
        lambda a, b: a * b,
    ),
    "div": (
        {"rn": libdevice.div_rn, "rz": libdevice.div_rz, "rd": libdevice.div_rd, "ru": libdevice.div_ru},
        lambda a, b: a / b,
    ),
    "rcp": (
        {"rn": libdevice.rcp_rn, "rz": libdevice.rcp_rz, "rd": libdevice.rcp_rd, "ru": libdevice.rcp_ru},
        lambda a: 1 / a,
    ),
    "fma": (
        {"rn": libdevice.fma_rn, "rz": libdevice.fma_rz, "rd": libdevice.fma_rd, "ru": libdevice.fma_ru},
        lambda a, b, c: a * b + c,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_arithmetic_rounds_as_asked(launch, name, dtype):
    functions, exactly = EXACT[name]
    count = exactly.__code__.co_argcount
    operands = [torch.randn(N, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in range(count)]
    operands[-1] *= torch.tensor(2.0).double() ** (torch.arange(N) % 40 - 20)
    operands = [t.to(dtype) for t in operands]
    kind = {torch.float32: np.float32, torch.float64: np.float64}[dtype]
    for mode, function in functions.items():
        got = run(launch, function, *operands).tolist()
        for value, *parts in zip(got, *(t.tolist() for t in operands), strict=True):
            assert bounds(exactly(*map(Fraction, parts)), value, kind, mode), (mode, parts, value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_roots_round_as_asked(launch, dtype):
    x = torch.rand(N, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype) * 100
    x[:3] = torch.tensor([4.0, 9.0, 2.0])
    kind: Any = {torch.float32: np.float32, torch.float64: np.float64}[dtype]
    for mode, function in {"rz": libdevice.sqrt_rz, "rd": libdevice.sqrt_rd, "ru": libdevice.sqrt_ru}.items():
        got = run(launch, function, x).tolist()
        assert got[:2] == [2, 3]
        for value, square in zip(got, x.tolist(), strict=True):
            up, down = (Fraction(float(np.nextafter(kind(value), kind(d)))) for d in (math.inf, 0))
            if mode == "ru":
                assert down**2 < Fraction(square) <= Fraction(value) ** 2
            else:
                assert Fraction(value) ** 2 <= Fraction(square) < up**2


def test_rounding_at_the_ends(launch):
    """Beyond the largest number, and a sum that is zero."""
    x = torch.full((N,), 3e38)
    assert run(launch, libdevice.add_rz, x, x)[0] == torch.finfo(torch.float32).max
    assert run(launch, libdevice.add_rd, x, x)[0] == torch.finfo(torch.float32).max
    assert run(launch, libdevice.add_ru, x, x)[0] == math.inf
    assert run(launch, libdevice.add_rd, -x, -x)[0] == -math.inf
    assert bool(torch.signbit(run(launch, libdevice.add_rd, x, -x)).all())
    assert not bool(torch.signbit(run(launch, libdevice.add_ru, x, -x)).any())
    assert run(launch, libdevice.div_rd, x, 0 * x)[0] == math.inf
