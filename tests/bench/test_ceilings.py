"""What the memory and the tensor cores allow."""

import dataclasses

import pytest

from bench.ceilings import Ceilings
from bench.points import Point


def test_intensity_and_ceiling():
    point = Point(head_dim=128, causal=False, length=1024, batch=2, heads=8, heads_per_kv_head=4)
    assert point.bytes == 2 * (2 * 2 * 8 * 1024 * 128 + 2 * 2 * 2 * 1024 * 128)  # Q and O, K and V, of two bytes each
    assert point.intensity == pytest.approx(4 * 2 * 8 * 1024**2 * 128 / point.bytes)
    fp8 = dataclasses.replace(point, dtype="e4m3", heads_per_kv_head=1)
    assert fp8.bytes == 2 * 8 * 1024 * 128 * (1 + 2 + 1 + 1)
    limits = Ceilings(matrix_tflops=700.0, copy_tbps=4.0)
    assert limits.tflops(100.0) == 400.0
    assert limits.tflops(1000.0) == 700.0
