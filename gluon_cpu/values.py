"""Element types as numpy has them, and the conversions that need care."""

from typing import Any

import ml_dtypes
import numpy as np

from .poison import Poisoned

DTYPES: dict[str, Any] = {
    "i1": np.dtype(np.bool_), "i8": np.dtype(np.int8), "i16": np.dtype(np.int16), "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64), "index": np.dtype(np.int64), "ptr": np.dtype(np.int64),
    "f16": np.dtype(np.float16), "f32": np.dtype(np.float32), "f64": np.dtype(np.float64),
    "bf16": np.dtype(ml_dtypes.bfloat16), "f8E4M3FN": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8E5M2": np.dtype(ml_dtypes.float8_e5m2),
}  # fmt: skip
BF16 = DTYPES["bf16"]
F32 = DTYPES["f32"]
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def to_f32(x: Any) -> Any:
    if x.dtype == BF16:
        # A bf16 is the upper half of an fp32: three times as fast as the general conversion.
        return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32, copy=False)


def cast_float(x: Any, dtype: Any) -> Any:
    """Between float formats, rounding to nearest even; to fp8 it saturates, infinities too, as PTX's satfinite does."""
    if isinstance(x, np.ndarray) and dtype == F32:
        return to_f32(x)
    if dtype == DTYPES["f8E4M3FN"]:
        x = np.clip(np.asarray(x, np.float32), -448.0, 448.0)
    elif dtype == DTYPES["f8E5M2"]:
        x = np.clip(np.asarray(x, np.float32), -57344.0, 57344.0)
    return np.asarray(x).astype(dtype) if isinstance(x, np.ndarray) else dtype.type(x)


def cast_float_down(x: Any, dtype: Any) -> Any:
    """To a narrower float format, towards zero; what is beyond its largest number becomes that."""
    wide = np.asarray(x)
    near = np.asarray(cast_float(wide, dtype))
    # Of a format's numbers of one sign, the next towards zero is the one with the next lower bits.
    bits = near.view(UNSIGNED[dtype.itemsize])
    too_far = np.abs(near.astype(np.float64)) > np.abs(wide.astype(np.float64))
    out = (bits - too_far.astype(bits.dtype)).view(dtype)
    return out if isinstance(x, np.ndarray) else out[()]


def float_to_int(x: Any, dtype: Any) -> Any:
    """Towards zero, saturating, NaN to 0, as PTX converts."""
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    wide = np.nan_to_num(np.asarray(x, np.float64), nan=0.0, posinf=float(high), neginf=float(low))
    clipped = np.clip(np.trunc(wide), float(low), float(high))
    whole = np.where(clipped >= 2.0**63, high, clipped).astype(np.int64) if dtype != np.uint64 else clipped
    return whole.astype(dtype)


def truncating_div(a: Any, b: Any) -> Any:
    """Integer division towards zero."""
    if not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray):
        q = abs(a) // abs(b)
        return q if (a >= 0) == (b > 0) else -q
    dtype = (a if isinstance(a, np.ndarray) else b).dtype
    a, b = np.asarray(a, dtype), np.asarray(b, dtype)
    q = a // b
    rest = a - q * b
    return (q + ((rest != 0) & ((rest < 0) != (a < 0)))).astype(dtype)


def truncating_rem(a: Any, b: Any) -> Any:
    if not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray):
        r = abs(a) % abs(b)
        return r if a >= 0 else -r
    return np.asarray(np.fmod(a, b), (a if isinstance(a, np.ndarray) else b).dtype)


def full(x: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """A whole array of a value that may be a scalar or have extents of 1."""
    if isinstance(x, np.ndarray):
        return x if x.shape == shape else np.broadcast_to(x, shape)
    if isinstance(x, Poisoned):
        return np.broadcast_to(x, shape)
    if not isinstance(x, int | float | np.generic):
        return x  # a product that is still under way
    out = np.empty(shape, dtype)
    out[...] = x
    return out
