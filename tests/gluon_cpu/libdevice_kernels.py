"""Kernels that call one of NVIDIA's library functions, its name given, and inputs for them."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from tests.compat import gl, jit, libdevice
from tests.gluon_cpu.layouts import ROW
from tests.gluon_cpu.support import normal, poisoned

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


def name_of(x: Any) -> str:
    return getattr(x, "__name__", str(x))


def away(x: torch.Tensor) -> torch.Tensor:
    return torch.where((x - x.trunc()).abs() >= 0.5, x.trunc() + torch.sign(x), x.trunc())


def bounds(exact: Fraction, value: float, dtype: Any, mode: str) -> bool:
    """Whether a float is what an exact value rounds to."""
    got = Fraction(value)
    above, below = (Fraction(float(np.nextafter(dtype(value), dtype(d)))) for d in (math.inf, -math.inf))
    if mode == "rn":
        return abs(got - exact) <= min(abs(above - exact), abs(below - exact))
    if mode == "rd" or (mode == "rz" and exact > 0):
        return got <= exact < above
    return below < exact <= got
