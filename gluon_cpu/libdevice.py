"""NVIDIA's library functions (`__nv_*`), as numpy, Python or torch compute them.

Rounding that is asked for (`_rn`, `_rz`, `_rd`, `_ru`) is exact. All else is rounded once, from double precision; a
card is off by an ulp or a few, and its `fast_` variants by more.
"""

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from .values import UNSIGNED

Function = Callable[..., Any]
FUNCTIONS: dict[str, Function] = {}  # by the name behind `__nv_`; called with arrays, returns one
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)


def known(symbol: str) -> bool:
    return symbol.removeprefix("__nv_") in FUNCTIONS


def libdevice(symbol: str, dtype: Any, *values: Any) -> Any:
    """What a library function returns, as `dtype`; a scalar of scalars."""
    arrays = [np.asarray(v) for v in values]
    out = np.asarray(FUNCTIONS[symbol.removeprefix("__nv_")](*arrays))
    if out.dtype.kind == "u" and out.dtype.itemsize == dtype.itemsize and dtype.kind in "iu":
        out = out.view(dtype)
    out = out.astype(dtype)
    if out.ndim:
        return out
    return int(out) if dtype.kind in "iu" else out[()]


# Floats: single precision by way of double


def floats(name: str, function: Function) -> None:
    """A function of floats of one type, under both names: `sinf` and `sin`."""

    def single(*arrays: Any) -> Any:
        return np.asarray(function(*(a.astype(np.float64) if a.dtype == F32 else a for a in arrays))).astype(F32)

    FUNCTIONS[f"{name}f"] = single
    FUNCTIONS[name] = function


def elementwise(function: Function) -> Function:
    """A function of Python floats, and integers, for arrays."""

    def apply(*arrays: Any) -> Any:
        return np.asarray(np.frompyfunc(function, len(arrays), 1)(*arrays)).astype(np.float64)

    return apply


def by_torch(name: str) -> Function:
    """One of torch's special functions."""

    def apply(x: Any) -> Any:
        import torch

        return getattr(torch.special, name)(torch.from_numpy(np.ascontiguousarray(x))).numpy().reshape(x.shape)

    return apply


def gamma(x: float) -> float:
    if math.isnan(x) or x == math.inf:
        return x
    if x == 0:
        return math.copysign(math.inf, x)
    if x < 0 and x == math.floor(x):
        return math.nan
    try:
        return math.gamma(x)
    except OverflowError:
        return math.inf


def log_gamma(x: float) -> float:
    if math.isnan(x) or math.isinf(x):
        return abs(x)
    return math.inf if x <= 0 and x == math.floor(x) else math.lgamma(x)


def round_away(x: Any) -> Any:
    """To the nearest whole number, halves away from zero."""
    whole = np.trunc(x)
    return np.where(np.abs(x - whole) >= 0.5, whole + np.copysign(1.0, x), whole)


def remainder(a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b) or math.isinf(a) or b == 0:
        return math.nan
    return math.remainder(a, b)


def bessel_j(n: int, x: float) -> float:
    """Bessel's integral: over a whole period, a plain mean has all digits."""
    if not math.isfinite(x):
        return math.nan if math.isnan(x) else 0.0
    if abs(x) > 1e5:  # the first term for large arguments
        return math.sqrt(2 / (math.pi * abs(x))) * math.cos(abs(x) - (2 * n + 1) * math.pi / 4)
    angle = np.arange(points := 64 + 2 * (abs(int(n)) + int(abs(x)))) * (2 * math.pi / points)
    return float(np.cos(n * angle - x * np.sin(angle)).mean())


def bessel_y(n: int, x: float) -> float:
    """From the orders 0 and 1 upwards, as torch has those: to six digits and more."""
    import torch

    low, high = (
        float(getattr(torch.special, f)(torch.tensor(x, dtype=torch.float64))) for f in ("bessel_y0", "bessel_y1")
    )
    if x <= 0 or not math.isfinite(x):
        return low
    sign, n = (-1.0 if n < 0 and n % 2 else 1.0), abs(int(n))
    for k in range(1, n):
        low, high = high, 2 * k / x * high - low
    return sign * (high if n else low)


def log_base(x: Any) -> Any:
    """The exponent of a float, as a float."""
    out = np.frexp(x)[1] - 1.0
    return np.where(x == 0, -np.inf, np.where(np.isfinite(x), out, np.abs(x)))


def pi_times(function: Function) -> Function:
    """sin(pi x), cos(pi x): exact where they are 0 or 1."""

    def apply(x: Any) -> Any:
        within = np.fmod(x, 2.0)
        eighth = np.rint(within * 2)
        rest = (within - eighth / 2) * np.pi
        quarter = (eighth.astype(np.int64) if np.isfinite(x).all() else np.nan_to_num(eighth).astype(np.int64)) % 4
        s, c = np.sin(rest), np.cos(rest)
        sines = np.select([quarter == 0, quarter == 1, quarter == 2], [s, c, -s], -c)
        cosines = np.select([quarter == 0, quarter == 1, quarter == 2], [c, -s, -c], s)
        return np.where(np.isfinite(x), sines if function is np.sin else cosines, np.nan)

    return apply


SIMPLE: dict[str, Function] = {
    "fabs": np.abs, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "rint": np.rint, "nearbyint": np.rint,
    "round": round_away, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "cbrt": np.cbrt,
    "rcbrt": lambda x: 1 / np.cbrt(x), "exp": np.exp, "exp2": np.exp2, "exp10": lambda x: np.power(10.0, x),
    "expm1": np.expm1, "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p, "sin": np.sin,
    "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "atan2": np.arctan2,
    "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh, "asinh": np.arcsinh, "acosh": np.arccosh,
    "atanh": np.arctanh, "sinpi": pi_times(np.sin), "cospi": pi_times(np.cos), "hypot": np.hypot,
    "rhypot": lambda a, b: 1 / np.hypot(a, b), "norm3d": lambda a, b, c: np.hypot(np.hypot(a, b), c),
    "rnorm3d": lambda a, b, c: 1 / np.hypot(np.hypot(a, b), c), "copysign": np.copysign,
    "norm4d": lambda a, b, c, d: np.hypot(np.hypot(a, b), np.hypot(c, d)),
    "rnorm4d": lambda a, b, c, d: 1 / np.hypot(np.hypot(a, b), np.hypot(c, d)), "fmod": np.fmod,
    "remainder": elementwise(remainder), "pow": np.power, "powi": lambda a, n: np.power(a, n.astype(np.float64)),
    "fdim": lambda a, b: np.where(np.isnan(a) | np.isnan(b), np.nan, np.maximum(a - b, 0)),
    "ldexp": np.ldexp, "scalbn": np.ldexp, "logb": log_base, "tgamma": elementwise(gamma),
    "lgamma": elementwise(log_gamma), "erf": by_torch("erf"), "erfc": by_torch("erfc"), "erfcx": by_torch("erfcx"),
    "erfinv": by_torch("erfinv"), "erfcinv": lambda x: -by_torch("ndtri")(x / 2) / math.sqrt(2),
    "normcdf": by_torch("ndtr"), "normcdfinv": by_torch("ndtri"), "j0": elementwise(lambda x: bessel_j(0, x)),
    "j1": elementwise(lambda x: bessel_j(1, x)), "jn": elementwise(bessel_j), "yn": elementwise(bessel_y),
    "y0": elementwise(lambda x: bessel_y(0, x)), "y1": elementwise(lambda x: bessel_y(1, x)),
    "cyl_bessel_i0": by_torch("i0"), "cyl_bessel_i1": by_torch("i1"),
}  # fmt: skip
for _name, _function in SIMPLE.items():
    floats(_name, _function)

for _name in ("sin", "cos", "tan", "log", "log2", "log10", "exp", "exp10", "pow"):
    FUNCTIONS[f"fast_{_name}f"] = FUNCTIONS[f"{_name}f"]
FUNCTIONS["fast_fdividef"] = lambda a, b: a / b
FUNCTIONS["saturatef"] = lambda x: np.fmin(np.fmax(x, np.float32(0)), np.float32(1))
FUNCTIONS["nextafterf"] = FUNCTIONS["nextafter"] = np.nextafter
FUNCTIONS["frsqrt_rn"] = FUNCTIONS["rsqrtf"]
FUNCTIONS["rcp64h"] = lambda x: upper_word(1 / x)
for _end in ("f", "d"):
    FUNCTIONS[f"isnan{_end}"], FUNCTIONS[f"isinf{_end}"] = np.isnan, np.isinf
    FUNCTIONS[f"signbit{_end}"] = np.signbit
FUNCTIONS["finitef"] = FUNCTIONS["isfinited"] = np.isfinite


def upper_word(x: Any) -> Any:
    """A double of which only the upper 32 bits are kept."""
    return (x.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)


def ilogb(x: Any) -> Any:
    exponents = np.frexp(x.astype(np.float64))[1] - 1
    return np.where(np.isinf(x), 2**31 - 1, np.where((x == 0) | np.isnan(x), -(2**31), exponents))


FUNCTIONS["ilogbf"] = FUNCTIONS["ilogb"] = ilogb


# Rounding that is asked for


def rounded(exact: Fraction | None, plain: Any, dtype: Any, mode: str, sign: int | None = None) -> Any:
    """The float of `dtype` next to an exact value in a direction; `plain` for what is no number.

    sign: of the exact value minus the candidate, where the value itself has no fraction (a root).
    """
    if exact is None:
        return plain
    try:
        near = dtype.type(float(exact)) if sign is None else plain
    except OverflowError:
        near = dtype.type(math.copysign(math.inf, exact))
    if exact == 0:
        return plain
    if math.isinf(near):
        side = -1 if near > 0 else 1
    else:
        difference = exact - Fraction(float(near)) if sign is None else sign
        side = (difference > 0) - (difference < 0)
    if mode == "rn":
        return to_nearest(exact, near, dtype) if sign is None else near
    down = mode == "rd" or (mode == "rz" and exact > 0)
    if down and side < 0:
        return np.nextafter(near, dtype.type(-np.inf))
    if not down and side > 0:
        return np.nextafter(near, dtype.type(np.inf))
    return near


def to_nearest(exact: Fraction, near: Any, dtype: Any) -> Any:
    """Ties to even, without a second rounding."""
    if math.isinf(near):
        return near
    others = [np.nextafter(near, dtype.type(np.inf)), near, np.nextafter(near, dtype.type(-np.inf))]
    finite = [c for c in others if not math.isinf(c)]
    unsigned = UNSIGNED[dtype.itemsize]
    return min(finite, key=lambda c: (abs(exact - Fraction(float(c))), int(np.asarray(c).view(unsigned)) & 1))


def fractions_of(*values: Any) -> list[Fraction] | None:
    return [Fraction(float(v)) for v in values] if all(math.isfinite(float(v)) for v in values) else None


EXACT: dict[str, tuple[Function, Function]] = {  # (of fractions, of floats)
    "add": (lambda a, b: a + b, lambda a, b: a + b),
    "sub": (lambda a, b: a - b, lambda a, b: a - b),
    "mul": (lambda a, b: a * b, lambda a, b: a * b),
    "div": (lambda a, b: a / b if b else None, lambda a, b: a / b),
    "rcp": (lambda a: 1 / a if a else None, lambda a: a.dtype.type(1) / a),
    "fma": (lambda a, b, c: a * b + c, lambda a, b, c: a * b + c),
}


def directed(name: str, mode: str) -> Function:
    exactly, plainly = EXACT[name]

    def one(*values: Any) -> Any:
        dtype = values[0].dtype
        parts = fractions_of(*values)
        plain = zero_towards(plainly(*values), values, name, mode)
        return rounded(exactly(*parts) if parts else None, plain, dtype, mode)

    return each(one)


def zero_towards(plain: Any, values: tuple[Any, ...], name: str, mode: str) -> Any:
    """An exact zero of unlike terms is -0 when rounding down."""
    terms = values if name in ("add", "sub") else ()
    if mode == "rd" and plain == 0 and terms and any(v != 0 for v in terms):
        return -abs(plain)
    return plain


def root(mode: str) -> Function:
    def one(x: Any) -> Any:
        plain = np.sqrt(x)
        if not np.isfinite(plain) or plain == 0:
            return plain
        square = Fraction(float(plain)) ** 2
        exact = Fraction(float(x))
        return rounded(Fraction(1), plain, x.dtype, mode, (exact > square) - (exact < square))

    return each(one)


def each(function: Function) -> Function:
    """A function of numpy scalars for arrays, which keep their type."""

    def apply(*arrays: Any) -> Any:
        shape = np.broadcast_shapes(*(a.shape for a in arrays))
        wide = [np.broadcast_to(a, shape).reshape(-1) for a in arrays]
        return np.array([function(*row) for row in zip(*wide, strict=True)]).reshape(shape)

    return apply


MODES = ("rn", "rz", "rd", "ru")
for _mode in MODES:
    for _name in ("add", "sub", "mul", "div", "rcp"):
        FUNCTIONS[f"f{_name}_{_mode}"] = FUNCTIONS[f"d{_name}_{_mode}"] = directed(_name, _mode)
    FUNCTIONS[f"fmaf_{_mode}"] = FUNCTIONS[f"fma_{_mode}"] = directed("fma", _mode)
    FUNCTIONS[f"fsqrt_{_mode}"] = FUNCTIONS[f"dsqrt_{_mode}"] = root(_mode)
FUNCTIONS["fmaf"] = FUNCTIONS["fma"] = directed("fma", "rn")


# Conversions

WHOLE: dict[str, Function] = {"rn": np.rint, "rz": np.trunc, "rd": np.floor, "ru": np.ceil}


def to_integer(mode: Function, integer: Any, x: Any) -> Any:
    """Saturating. NaN is 0, or, where the source or the result has 64 bits, the result's top bit alone."""
    bounds = np.iinfo(integer)
    top = 1 << bounds.bits - 1 if 8 in (x.dtype.itemsize, bounds.bits // 8) else 0

    def one(v: float) -> int:
        if math.isnan(v):
            return top if bounds.min == 0 else -top
        return int(bounds.max if v > bounds.max else bounds.min if v < bounds.min else int(v))

    values = [one(v) for v in np.atleast_1d(mode(x)).reshape(-1).tolist()]
    return np.array(values, integer).reshape(x.shape)


def to_float(mode: str, dtype: Any, unsigned: Any, x: Any) -> Any:
    def one(v: Any) -> Any:
        return rounded(Fraction(int(v)), dtype.type(int(v)), dtype, mode)

    return each(one)(x.view(unsigned) if unsigned else x).astype(dtype)


def narrowed(mode: str, x: Any) -> Any:
    def one(v: Any) -> Any:
        return rounded(Fraction(float(v)) if math.isfinite(v) else None, np.float32(v), F32, mode)

    return each(one)(x)


for _mode, _whole in WHOLE.items():
    FUNCTIONS[f"double2float_{_mode}"] = functools.partial(narrowed, _mode)
    for _source, _float in (("float", F32), ("double", F64)):
        for _target, _integer in (("int", np.int32), ("uint", np.uint32), ("ll", np.int64), ("ull", np.uint64)):
            FUNCTIONS[f"{_source}2{_target}_{_mode}"] = functools.partial(to_integer, _whole, _integer)
            _unsigned = _integer if _target[0] == "u" else None
            if (_source, _target[-3:]) == ("double", "int") and _mode != "rn":
                continue  # exact, whatever the mode
            FUNCTIONS[f"{_target}2{_source}_{_mode}"] = functools.partial(to_float, _mode, _float, _unsigned)
for _end in ("f", ""):
    FUNCTIONS[f"llrint{_end}"] = functools.partial(to_integer, np.rint, np.int64)
    FUNCTIONS[f"llround{_end}"] = functools.partial(to_integer, round_away, np.int64)

for _name, _to in {
    "int_as_float": np.float32, "uint_as_float": np.float32, "float_as_int": np.int32, "float_as_uint": np.uint32,
    "longlong_as_double": np.float64, "double_as_longlong": np.int64,
}.items():  # fmt: skip
    FUNCTIONS[_name] = functools.partial(lambda to, x: x.view(to), _to)


def from_words(high: Any, low: Any) -> Any:
    high, low = (x.view(np.uint32).astype(np.uint64) for x in np.broadcast_arrays(high, low))
    return (high << np.uint64(32) | low).view(np.float64)


FUNCTIONS["hiloint2double"] = from_words
FUNCTIONS["double2loint"] = lambda x: x.view(np.int64).astype(np.int32)
FUNCTIONS["double2hiint"] = lambda x: (x.view(np.int64) >> 32).astype(np.int32)


# Integers


def integers(name: str, function: Callable[..., int], bits: int, unsigned: bool = False, result: int = 0) -> None:
    """A function of Python integers of `bits`; its result wraps to `result` bits, or as many."""
    width = result or bits

    def apply(*arrays: Any) -> Any:
        def one(*values: Any) -> int:
            out = function(*values)
            return (out + (1 << width - 1)) % (1 << width) - (1 << width - 1)

        columns = [a.view(UNSIGNED[a.dtype.itemsize]) if unsigned else a for a in arrays]
        out = np.frompyfunc(one, len(columns), 1)(*(c.astype(object) for c in columns))
        return np.asarray(out).astype({32: np.int32, 64: np.int64}[width])

    FUNCTIONS[name] = apply


def select_bytes(x: int, y: int, selector: int) -> int:
    pool = [(x | y << 32) >> 8 * i & 0xFF for i in range(8)]
    return sum(pool[selector >> 4 * i & 7] << 8 * i for i in range(4))


def low_24(x: int) -> int:
    return (x + (1 << 23)) % (1 << 24) - (1 << 23)


for _bits, _end in ((32, ""), (64, "ll")):
    integers(f"clz{_end}", lambda x, n=_bits: n - x.bit_length(), _bits, True, 32)
    integers(f"popc{_end}", lambda x: x.bit_count(), _bits, True, 32)
    integers(f"ffs{_end}", lambda x: (x & -x).bit_length(), _bits, True, 32)
    integers(f"brev{_end}", lambda x, n=_bits: int(format(x, f"0{n}b")[::-1], 2), _bits, True)
integers("abs", abs, 32)
integers("llabs", abs, 64)
integers("byte_perm", select_bytes, 32, True)
integers("mulhi", lambda a, b: a * b >> 32, 32)
integers("umulhi", lambda a, b: a * b >> 32, 32, True)
integers("mul64hi", lambda a, b: a * b >> 64, 64)
integers("umul64hi", lambda a, b: a * b >> 64, 64, True)
integers("mul24", lambda a, b: low_24(a) * low_24(b), 32)
integers("umul24", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF), 32, True)
integers("sad", lambda a, b, c: abs(a - b) + c, 32)
integers("usad", lambda a, b, c: abs(a - b) + c, 32, True)
integers("hadd", lambda a, b: a + b >> 1, 32)
integers("uhadd", lambda a, b: a + b >> 1, 32, True)
integers("rhadd", lambda a, b: a + b + 1 >> 1, 32)
integers("urhadd", lambda a, b: a + b + 1 >> 1, 32, True)
