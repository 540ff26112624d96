"""NVIDIA's library functions that convert, and those of integers: against Python's integers."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from tests.compat import gl, jit, libdevice
from tests.gluon_cpu.layouts import ROW
from tests.gluon_cpu.libdevice_kernels import (
    N,
    away,
    bounds,
    name_of,
    run,
)
from tests.gluon_cpu.support import normal, poisoned, same

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
