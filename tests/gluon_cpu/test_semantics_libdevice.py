"""NVIDIA's library functions: every one of them, against torch, Python's integers and exact fractions."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from tests.compat import gl, jit, libdevice
from tests.gluon_cpu.support import ROW, normal, poisoned, same

N = 128
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, -2.5, math.inf, -math.inf, math.nan, 1e-40, 3e38])


@jit
def of_one(x_ptr, out_ptr, NAME: gl.constexpr):
    i = gl.arange(0, 128, ROW)
    gl.store(out_ptr + i, getattr(libdevice, NAME)(gl.load(x_ptr + i)))


@jit
def of_two(x_ptr, y_ptr, out_ptr, NAME: gl.constexpr):
    i = gl.arange(0, 128, ROW)
    gl.store(out_ptr + i, getattr(libdevice, NAME)(gl.load(x_ptr + i), gl.load(y_ptr + i)))


@jit
def of_three(x_ptr, y_ptr, z_ptr, out_ptr, NAME: gl.constexpr):
    i = gl.arange(0, 128, ROW)
    gl.store(out_ptr + i, getattr(libdevice, NAME)(gl.load(x_ptr + i), gl.load(y_ptr + i), gl.load(z_ptr + i)))


@jit
def of_four(x_ptr, y_ptr, z_ptr, w_ptr, out_ptr, NAME: gl.constexpr):
    i = gl.arange(0, 128, ROW)
    x, y, z, w = gl.load(x_ptr + i), gl.load(y_ptr + i), gl.load(z_ptr + i), gl.load(w_ptr + i)
    gl.store(out_ptr + i, getattr(libdevice, NAME)(x, y, z, w))


KERNELS = {1: of_one, 2: of_two, 3: of_three, 4: of_four}


def run(launch, function: Any, *arguments: torch.Tensor, result: torch.dtype | None = None) -> torch.Tensor:
    out = poisoned(N, dtype=result or arguments[0].dtype)
    launch(KERNELS[len(arguments)], (1,), *arguments, out, NAME=function.__name__, outputs=[])
    return out


def numbers(dtype: torch.dtype, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.cat([SPECIAL, normal(N - len(SPECIAL), seed=seed) * scale]).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within two units in the last place, or thereabouts, of a result in double precision."""
    eps = torch.finfo(got.dtype).eps
    tolerance = max(4 * eps, 1e-13)
    torch.testing.assert_close(got, want.to(got.dtype), rtol=tolerance, atol=tolerance, equal_nan=True)


def away(x: torch.Tensor) -> torch.Tensor:
    return torch.where((x - x.trunc()).abs() >= 0.5, x.trunc() + torch.sign(x), x.trunc())


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


def name_of(x: Any) -> str:
    return getattr(x, "__name__", str(x))


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


def bounds(exact: Fraction, value: float, dtype: Any, mode: str) -> bool:
    """Whether a float is what an exact value rounds to."""
    got = Fraction(value)
    above, below = (Fraction(float(np.nextafter(dtype(value), dtype(d)))) for d in (math.inf, -math.inf))
    if mode == "rn":
        return abs(got - exact) <= min(abs(above - exact), abs(below - exact))
    if mode == "rd" or (mode == "rz" and exact > 0):
        return got <= exact < above
    return below < exact <= got


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


# Conversions

WHOLE = {"rn": torch.round, "rz": torch.trunc, "rd": torch.floor, "ru": torch.ceil}
TO_INTEGER: dict[tuple[torch.dtype, str], dict[str, Any]] = {
    (torch.float32, "int32"): {"rn": libdevice.float2int_rn, "rz": libdevice.float2int_rz,
                               "rd": libdevice.float2int_rd, "ru": libdevice.float2int_ru},
    (torch.float32, "uint32"): {"rn": libdevice.float2uint_rn, "rz": libdevice.float2uint_rz,
                                "rd": libdevice.float2uint_rd, "ru": libdevice.float2uint_ru},
    (torch.float32, "int64"): {"rn": libdevice.float2ll_rn, "rz": libdevice.float2ll_rz,
                               "rd": libdevice.float2ll_rd, "ru": libdevice.float2ll_ru},
    (torch.float32, "uint64"): {"rn": libdevice.float2ull_rn, "rz": libdevice.float2ull_rz,
                                "rd": libdevice.float2ull_rd, "ru": libdevice.float2ull_ru},
    (torch.float64, "int32"): {"rn": libdevice.double2int_rn, "rz": libdevice.double2int_rz,
                               "rd": libdevice.double2int_rd, "ru": libdevice.double2int_ru},
    (torch.float64, "uint32"): {"rn": libdevice.double2uint_rn, "rz": libdevice.double2uint_rz,
                                "rd": libdevice.double2uint_rd, "ru": libdevice.double2uint_ru},
    (torch.float64, "int64"): {"rn": libdevice.double2ll_rn, "rz": libdevice.double2ll_rz,
                               "rd": libdevice.double2ll_rd, "ru": libdevice.double2ll_ru},
    (torch.float64, "uint64"): {"rn": libdevice.double2ull_rn, "rz": libdevice.double2ull_rz,
                                "rd": libdevice.double2ull_rd, "ru": libdevice.double2ull_ru},
}  # fmt: skip


@pytest.mark.parametrize(("source", "target"), TO_INTEGER, ids=str)
def test_floats_to_integers(launch, source, target):
    """They saturate."""
    x = normal(N).to(source) * 1000
    x[:6] = torch.tensor([2.5, -2.5, 0.5, 1e30, -1e30, math.inf])
    limits = np.iinfo(target)
    signed = torch.int32 if limits.bits == 32 else torch.int64
    for mode, function in TO_INTEGER[source, target].items():
        got = run(launch, function, x, result=signed).numpy().view(target)
        whole = WHOLE[mode](x.double()).tolist()
        assert got.tolist() == [int(min(max(v, limits.min), limits.max)) for v in whole], mode


def test_nan_as_an_integer(launch):
    """0; from or to 64 bits, the top bit."""
    x = torch.full((N,), math.nan)
    assert run(launch, libdevice.float2int_rn, x, result=torch.int32)[0] == 0
    assert run(launch, libdevice.float2ll_rn, x, result=torch.int64)[0] == -(2**63)
    assert run(launch, libdevice.double2int_rn, x.double(), result=torch.int32)[0] == -(2**31)


TO_FLOAT: dict[tuple[str, Any], dict[str, Any]] = {
    ("int32", np.float32): {"rn": libdevice.int2float_rn, "rz": libdevice.int2float_rz,
                            "rd": libdevice.int2float_rd, "ru": libdevice.int2float_ru},
    ("uint32", np.float32): {"rn": libdevice.uint2float_rn, "rz": libdevice.uint2float_rz,
                             "rd": libdevice.uint2float_rd, "ru": libdevice.uint2float_ru},
    ("int64", np.float32): {"rn": libdevice.ll2float_rn, "rz": libdevice.ll2float_rz,
                            "rd": libdevice.ll2float_rd, "ru": libdevice.ll2float_ru},
    ("uint64", np.float32): {"rn": libdevice.ull2float_rn, "rz": libdevice.ull2float_rz,
                             "rd": libdevice.ull2float_rd, "ru": libdevice.ull2float_ru},
    ("int64", np.float64): {"rn": libdevice.ll2double_rn, "rz": libdevice.ll2double_rz,
                            "rd": libdevice.ll2double_rd, "ru": libdevice.ll2double_ru},
    ("uint64", np.float64): {"rn": libdevice.ull2double_rn, "rz": libdevice.ull2double_rz,
                             "rd": libdevice.ull2double_rd, "ru": libdevice.ull2double_ru},
    ("int32", np.float64): {"rn": libdevice.int2double_rn},
    ("uint32", np.float64): {"rn": libdevice.uint2double_rn},
}  # fmt: skip


@jit
def of_unsigned(x_ptr, out_ptr, NAME: gl.constexpr, KIND: gl.constexpr):
    i = gl.arange(0, 128, ROW)
    gl.store(out_ptr + i, getattr(libdevice, NAME)(gl.load(x_ptr + i).to(KIND, bitcast=True)))


@pytest.mark.parametrize(("source", "target"), TO_FLOAT, ids=name_of)
def test_integers_to_floats(launch, source, target):
    limits = np.iinfo(source)
    values = np.random.default_rng(0).integers(limits.min, limits.max, N, dtype=source, endpoint=True)
    values[:3] = [0, limits.max, limits.min]
    bits = torch.from_numpy(values.view(source.removeprefix("u")))
    for mode, function in TO_FLOAT[source, target].items():
        out = poisoned(N, dtype={np.float32: torch.float32, np.float64: torch.float64}[target])
        kind = {"uint32": gl.uint32, "uint64": gl.uint64, "int32": gl.int32, "int64": gl.int64}[source]
        launch(of_unsigned, (1,), bits, out, NAME=function.__name__, KIND=kind)
        for value, whole in zip(out.tolist(), values.tolist(), strict=True):
            assert bounds(Fraction(whole), value, target, mode) or value == whole, (mode, whole)


def test_double_to_float_rounds_as_asked(launch):
    x = normal(N).double() * math.pi
    functions = {
        "rn": libdevice.double2float_rn, "rz": libdevice.double2float_rz, "rd": libdevice.double2float_rd,
        "ru": libdevice.double2float_ru,
    }  # fmt: skip
    for mode, function in functions.items():
        for value, exact in zip(run(launch, function, x, result=torch.float32).tolist(), x.tolist(), strict=True):
            assert bounds(Fraction(exact), value, np.float32, mode), mode


def test_rounding_to_long_integers(launch):
    x = torch.cat([torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5]), normal(N - 6) * 1e6])
    same(run(launch, libdevice.llrint, x, result=torch.int64), x.double().round().long())
    same(run(launch, libdevice.llround, x, result=torch.int64), away(x.double()).long())


def test_bits_as_another_type(launch):
    x, d = normal(N), normal(N).double()
    same(run(launch, libdevice.float_as_int, x, result=torch.int32), x.view(torch.int32))
    same(run(launch, libdevice.float_as_uint, x, result=torch.int32), x.view(torch.int32))
    same(run(launch, libdevice.int_as_float, x.view(torch.int32), result=torch.float32), x)
    out = poisoned(N)
    launch(of_unsigned, (1,), x.view(torch.int32), out, NAME=libdevice.uint_as_float.__name__, KIND=gl.uint32)
    same(out, x)
    same(run(launch, libdevice.double_as_longlong, d, result=torch.int64), d.view(torch.int64))
    same(run(launch, libdevice.longlong_as_double, d.view(torch.int64), result=torch.float64), d)
    words = d.view(torch.int64)
    low, high = words.to(torch.int32), (words >> 32).to(torch.int32)
    same(run(launch, libdevice.double2loint, d, result=torch.int32), low)
    same(run(launch, libdevice.double2hiint, d, result=torch.int32), high)
    same(run(launch, libdevice.hiloint2double, high, low, result=torch.float64), d)
    same(run(launch, libdevice.rcp64h, d).view(torch.int64), (1 / d).view(torch.int64) & ~0xFFFFFFFF)


# Integers


def random_integers(dtype: torch.dtype, seed: int) -> torch.Tensor:
    limits = torch.iinfo(dtype)
    values = np.random.default_rng(seed).integers(limits.min, limits.max, N, dtype=np.int64, endpoint=True)
    values[:4] = [0, 1, limits.min, limits.max]
    values[4:40] >>= np.arange(36) % limits.bits
    return torch.from_numpy(values).to(dtype)


def wrapped(value: int, bits: int) -> int:
    return (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_bits_of_integers(launch, dtype):
    x = random_integers(dtype, 0)
    bits = torch.iinfo(dtype).bits
    raw = [v % (1 << bits) for v in x.tolist()]
    assert run(launch, libdevice.clz, x, result=torch.int32).tolist() == [bits - v.bit_length() for v in raw]
    assert run(launch, libdevice.popc, x, result=torch.int32).tolist() == [v.bit_count() for v in raw]
    lowest = [next((i + 1 for i in range(bits) if v >> i & 1), 0) for v in raw]
    assert run(launch, libdevice.ffs, x, result=torch.int32).tolist() == lowest
    turned = [sum((v >> i & 1) << bits - 1 - i for i in range(bits)) for v in raw]
    assert run(launch, libdevice.brev, x).tolist() == [wrapped(v, bits) for v in turned]
    same(run(launch, libdevice.abs, x), x.abs())


INTEGERS: dict[Any, Callable[[int, int], int]] = {
    libdevice.hadd: lambda a, b: a + b >> 1,
    libdevice.rhadd: lambda a, b: a + b + 1 >> 1,
    libdevice.mul24: lambda a, b: wrapped(a, 24) * wrapped(b, 24),
    libdevice.mulhi: lambda a, b: a * b >> 32,
}


@jit
def of_two_unsigned(x_ptr, y_ptr, out_ptr, NAME: gl.constexpr):
    i = gl.arange(0, 128, ROW)
    x, y = gl.load(x_ptr + i).to(gl.uint32, bitcast=True), gl.load(y_ptr + i).to(gl.uint32, bitcast=True)
    gl.store(out_ptr + i, getattr(libdevice, NAME)(x, y).to(gl.int32, bitcast=True))


@pytest.mark.parametrize("function", INTEGERS, ids=name_of)
def test_arithmetic_of_integers(launch, function):
    x, y = random_integers(torch.int32, 1), random_integers(torch.int32, 2)
    y[:4] = y[4:8]
    pairs = list(zip(x.tolist(), y.tolist(), strict=True))
    assert run(launch, function, x, y).tolist() == [wrapped(INTEGERS[function](a, b), 32) for a, b in pairs]
    out = poisoned(N, dtype=torch.int32)
    launch(of_two_unsigned, (1,), x, y, out, NAME=function.__name__)
    mask = 0xFFFFFF if function is libdevice.mul24 else 0xFFFFFFFF
    wide = [(a & mask) * (b & mask) if mask == 0xFFFFFF else INTEGERS[function](a & mask, b & mask) for a, b in pairs]
    assert out.tolist() == [wrapped(v, 32) for v in wide]


def test_bytes_and_differences(launch):
    x, y, z = (random_integers(torch.int32, n) for n in range(3))
    triples = list(zip(x.tolist(), y.tolist(), z.tolist(), strict=True))
    raw = [(a % 2**32 | (b % 2**32) << 32, s) for a, b, s in triples]
    want = [sum((pool >> 8 * (s >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4)) for pool, s in raw]
    assert run(launch, libdevice.byte_perm, x, y, z).tolist() == [wrapped(v, 32) for v in want]
    out = poisoned(N, dtype=torch.int32)
    launch(differences, (1,), x, y, z, out)
    assert out.tolist() == [wrapped(abs(a - b) + c, 32) for a, b, c in triples]


@jit
def differences(x_ptr, y_ptr, z_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    z = gl.load(z_ptr + i).to(gl.uint32, bitcast=True)
    gl.store(out_ptr + i, libdevice.sad(gl.load(x_ptr + i), gl.load(y_ptr + i), z))
