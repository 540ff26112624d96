"""FPSan's rings: floats as integers of their width, so that sums and products of them can be compared exactly.

The map keeps the sign bit and is one to one. It takes 0, 1 and -1 to themselves: the last factor is chosen so.
"""

from typing import Any

import numpy as np

from .values import DTYPES, UNSIGNED

FACTOR = 14940041
MANTISSA_BITS = {"f64": 52, "f32": 23, "f16": 10, "bf16": 7, "f8E4M3FN": 3, "f8E5M2": 2}
RINGS = {DTYPES[name]: bits for name, bits in MANTISSA_BITS.items()}


def mixed(bits: Any, width: int, mantissa: int) -> Any:
    """Python integers or arrays of them: the upper ones come to bear on the lower ones."""
    y = bits * FACTOR & (1 << width) - 1
    return y ^ (y >> mantissa & (1 << width - 1 - mantissa) - 1)


def unmixed(y: Any, width: int, mantissa: int) -> Any:
    mask, x = (1 << width - 1 - mantissa) - 1, y
    for _ in range(width // mantissa):  # each time, as many of the lower bits more are right
        x = y ^ (x >> mantissa & mask)
    return x * pow(FACTOR, -1, 1 << width) & (1 << width) - 1


def factors(dtype: Any) -> tuple[int, int, int]:
    """(the last factor for positive, for negative values; width)"""
    width, mantissa = 8 * dtype.itemsize, RINGS[dtype]
    unsigned = UNSIGNED[dtype.itemsize]
    one, minus_one = (int(np.array(v, dtype).view(unsigned)[()]) for v in (1, -1))
    below = 1 << width - 1
    positive = pow(mixed(one, width, mantissa), -1, below)
    negative = -pow(mixed(minus_one, width, mantissa), -1, below) % below
    return positive, negative, width


def integers(x: Any) -> Any:
    return np.asarray(x).view(UNSIGNED[x.dtype.itemsize]).astype(object)


def embed(x: Any, integer: Any) -> Any:
    positive, negative, width = factors(x.dtype)
    bits, sign = integers(x), 1 << width - 1
    factor = np.where(bits & sign, negative, positive).astype(object)
    out = mixed(bits, width, RINGS[x.dtype]) * factor & sign - 1 | bits & sign
    return np.asarray(out, UNSIGNED[x.dtype.itemsize]).view(integer)[()]


def unembed(x: Any, dtype: Any) -> Any:
    positive, negative, width = factors(dtype)
    bits, sign = integers(x), 1 << width - 1
    back = [pow(f, -1, sign) for f in (negative, positive)]
    mixed_bits = bits * np.where(bits & sign, back[0], back[1]).astype(object) & sign - 1
    out = unmixed(mixed_bits, width, RINGS[dtype]) & sign - 1 | bits & sign
    return np.asarray(out, UNSIGNED[dtype.itemsize]).view(dtype)[()]
