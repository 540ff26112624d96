"""What generated code can call."""

import math
import operator
from typing import Any

import numpy as np

from .asm import run_asm
from .fpsan import embed, unembed
from .libdevice import libdevice
from .ops.cluster import Meeting
from .ops.global_ops import scalar
from .ops.misc import assemble, part_of
from .ops.tcgen05 import clc_cancelled, clc_program, unpack_fp4
from .poison import divide
from .values import (
    DTYPES,
    UNSIGNED,
    cast_float,
    cast_float_down,
    float_to_int,
    full,
    truncating_div,
    truncating_rem,
)


def sdiv(a: Any, b: Any) -> Any:
    """Integer division towards zero."""
    return divide(a, b, truncating_div)


def srem(a: Any, b: Any) -> Any:
    return divide(a, b, truncating_rem)


def floordiv(a: Any, b: Any) -> Any:
    return divide(a, b, operator.floordiv)


def mod(a: Any, b: Any) -> Any:
    return divide(a, b, operator.mod)


def exp2(x: Any) -> Any:
    return np.exp2(x)


def rsqrt(x: Any) -> Any:
    return (np.float32(1.0) / np.sqrt(x)).astype(x.dtype)


def fma(a: Any, b: Any, c: Any) -> Any:
    """One rounding: exact in double for fp32 and narrower, but for rare double roundings."""
    dtype = np.result_type(a, b, c)
    if dtype == np.float64:
        return a * b + c
    out = np.asarray(a, np.float64) * np.asarray(b, np.float64) + np.asarray(c, np.float64)
    return out.astype(dtype) if isinstance(out, np.ndarray) and out.ndim else dtype.type(out)


def upper_half(a: Any, b: Any, bits: int) -> Any:
    """The upper half of the product of unsigned integers of `bits`, which come as uint64."""
    if bits < 64:
        return (a * b >> np.uint64(bits)).astype(UNSIGNED[bits // 8])
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
    middle = (a0 * b0 >> half) + (a1 * b0 & low) + (a0 * b1 & low)
    return a1 * b1 + (a1 * b0 >> half) + (a0 * b1 >> half) + (middle >> half)


def unpack_fp4_to(x: Any, dtype: Any, axis: int) -> Any:
    return unpack_fp4(x, axis).astype(dtype)


def erf(x: Any) -> Any:
    values = np.asarray(x)
    out = np.frompyfunc(math.erf, 1, 1)(values.astype(np.float64))
    return np.asarray(out, np.float64).astype(values.dtype)[()]


def row_max(x: Any, axis: int) -> Any:
    """Maximum that ignores NaN; numpy's plain maximum is four times as fast and differs only where there is one."""
    out = x.max(axis)
    return np.fmax.reduce(x, axis) if np.isnan(out).any() else out


def fold(function: Any, arrays: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
    """Reduce along an axis by a function of pairs, halves against halves."""
    parts = tuple(np.moveaxis(a, axis, 0) for a in arrays)
    while parts[0].shape[0] > 1:
        n = parts[0].shape[0]
        half = n // 2
        merged = function(*(p[:half] for p in parts), *(p[half : 2 * half] for p in parts))
        merged = tuple(
            np.broadcast_to(np.asarray(m, p.dtype), p[:half].shape) for m, p in zip(merged, parts, strict=True)
        )
        if n % 2:
            merged = tuple(np.concatenate([m, p[-1:]]) for m, p in zip(merged, parts, strict=True))
        parts = merged
    return tuple(p[0] for p in parts)


def by_element(function: Any) -> Any:
    """A function of arrays that calls one of scalars, which returns a tuple, for each element."""

    def combine(*arrays: Any) -> tuple[Any, ...]:
        shape, columns = arrays[0].shape, [[scalar(x) for x in a.reshape(-1)] for a in arrays]
        results = zip(*(function(*row) for row in zip(*columns, strict=True)), strict=True)
        return tuple(np.array(r, a.dtype).reshape(shape) for r, a in zip(results, arrays, strict=False))

    return combine


def accumulate(function: Any, arrays: tuple[Any, ...], axis: int, reverse: bool) -> tuple[Any, ...]:
    parts = tuple(np.moveaxis(a, axis, 0) for a in arrays)
    if reverse:
        parts = tuple(p[::-1] for p in parts)
    outs = tuple(np.empty_like(p) for p in parts)
    carry = tuple(p[0] for p in parts)
    for i in range(parts[0].shape[0]):
        if i:
            carry = function(*carry, *(p[i] for p in parts))
        for o, c in zip(outs, carry, strict=True):
            o[i] = c
    if reverse:
        outs = tuple(o[::-1] for o in outs)
    return tuple(np.moveaxis(o, 0, axis) for o in outs)


def map_packed(function: Any, arrays: tuple[Any, ...], pack: int, results: int) -> tuple[Any, ...]:
    """Apply a function of `pack` neighbouring elements of each array."""
    shape = arrays[0].shape
    if pack == 1:
        out = function(*arrays)
        return tuple(np.broadcast_to(np.asarray(o), shape) for o in out)
    arguments = [a.reshape(-1, pack)[:, i] for a in arrays for i in range(pack)]
    out = function(*arguments)
    wide = arguments[0].shape
    columns = [np.broadcast_to(np.asarray(o), wide) for o in out]
    return tuple(np.stack(columns[r * pack : (r + 1) * pack], -1).reshape(shape) for r in range(results))


def map_scalars(function: Any, arrays: tuple[Any, ...], pack: int, results: int) -> tuple[Any, ...]:
    """The same for a function with control flow, element by element."""
    shape = arrays[0].shape
    columns = [[scalar(x) for x in a.reshape(-1)] for a in arrays]
    outs: list[list[Any]] = [[] for _ in range(results)]
    for start in range(0, len(columns[0]), pack):
        got = function(*(column[start + i] for column in columns for i in range(pack)))
        for r in range(results):
            outs[r] += got[r * pack : (r + 1) * pack]
    return tuple(np.array(o).reshape(shape) for o in outs)


def _shift_amount(b: Any, bits: int) -> tuple[Any, Any]:
    amount = b.astype(np.int64)
    inside = (amount >= 0) & (amount < bits)
    return np.where(inside, amount, 0), inside


def shift_shli(a: Any, b: Any, bits: int) -> Any:
    amount, inside = _shift_amount(b, bits)
    return np.where(inside, np.left_shift(a, amount.astype(a.dtype)), np.zeros((), a.dtype))


def shift_shrsi(a: Any, b: Any, bits: int) -> Any:
    amount, inside = _shift_amount(b, bits)
    return np.right_shift(a, np.where(inside, amount, bits - 1).astype(a.dtype))


def shift_shrui(a: Any, b: Any, bits: int) -> Any:
    amount, inside = _shift_amount(b, bits)
    unsigned = a.view(a.dtype.str.replace("i", "u"))
    shifted = np.right_shift(unsigned, amount.astype(unsigned.dtype)).view(a.dtype)
    return np.where(inside, shifted, np.zeros((), a.dtype))


HELPERS = (
    full, cast_float, float_to_int, scalar, assemble, part_of, Meeting, exp2, rsqrt, fma, erf, row_max, fold,
    accumulate, by_element, map_packed, map_scalars, shift_shli, shift_shrsi, shift_shrui, run_asm, clc_cancelled,
    clc_program, sdiv, srem, floordiv, mod, upper_half, unpack_fp4_to, cast_float_down, embed, unembed, libdevice,
)  # fmt: skip


def namespace() -> dict[str, Any]:
    names: dict[str, Any] = {helper.__name__: helper for helper in HELPERS}
    names |= {"np": np}
    names |= {f"D_{name}": dtype for name, dtype in DTYPES.items()}
    names |= {f"U{width}": dtype for width, dtype in ((1, np.uint8), (2, np.uint16), (4, np.uint32), (8, np.uint64))}
    return names
