"""What the machine does not know is an error that names the construct and the kernel's line, never a wrong number."""

from pathlib import Path

import pytest
import torch

import gluon_cpu
from gluon_cpu.ir.tensor_memory import tensor_memory_offsets
from gluon_cpu.ir.types import MemDesc, Scalar
from tests.compat import (
    blackwell,
    gl,
    jit,
)
from tests.gluon_cpu.support import (
    ROW_HALVES,
    normal,
    poisoned,
)

LINES = Path(__file__).read_text(encoding="utf-8").splitlines()


def line_of(marker: str) -> str:
    number = next(i for i, text in enumerate(LINES, 1) if text.endswith(f"# <- {marker}"))
    return f"{Path(__file__).name}:{number}"


def refused(kernel, *arguments, marker: str, words: str, **options) -> None:
    with pytest.raises(NotImplementedError, match=words) as caught:
        gluon_cpu.launch(kernel, (1,), *arguments, **options)
    assert line_of(marker) in str(caught.value)


def test_padded_fp4_in_tensor_memory():
    layout = "#ttng.tensor_memory_encoding<blockM = 128, blockN = 64, colStride = 1, fp4Padded = true>"
    with pytest.raises(NotImplementedError, match="padded fp4 in tensor memory"):
        tensor_memory_offsets(MemDesc((128, 64), Scalar("i8"), layout, "tensor", (128, 64)), 1)


@jit
def add_two(a, b):
    return a + b


@jit
def scan_over_ctas(out_ptr):
    i = gl.arange(0, 256, ROW_HALVES)
    total = gl.associative_scan(i, 0, add_two)  # <- scan over CTAs
    gl.store(out_ptr + i, total)


def test_scan_over_ctas():
    out = poisoned(256, dtype=torch.int32)
    refused(scan_over_ctas, out, marker="scan over CTAs", words="CTA|scan", num_ctas=2)


@jit
def gather_registers(out_ptr):
    i = gl.arange(0, 256, ROW_HALVES)
    gl.store(out_ptr + i, gl.gather(i, 255 - i, 0))  # <- gather over CTAs


def test_gather_of_registers_over_ctas():
    out = poisoned(256, dtype=torch.int32)
    refused(gather_registers, out, marker="gather over CTAs", words="own part alone", num_ctas=2)


@jit
def gather_from_a_half(out_ptr):
    tile = gl.allocate_shared_memory(gl.int32, [512], gl.SwizzledSharedLayout(1, 1, 1, [0], [[1]]))
    i = gl.arange(0, 256, ROW_HALVES)
    gl.store(out_ptr + i, tile.slice(0, 256).gather(255 - i, axis=0))  # <- gather from a part


def test_gather_from_a_part_of_what_ctas_share():
    out = poisoned(256, dtype=torch.int32)
    refused(gather_from_a_half, out, marker="gather from a part", words="a part of a buffer", num_ctas=2)


@jit
def packed_fp32(x_ptr, out_ptr):
    i = gl.arange(0, 256, gl.BlockedLayout([2], [32], [4], [0]))
    x = gl.load(x_ptr + i)
    gl.store(out_ptr + i, blackwell.add2(x, x))  # <- fp32 in pairs


def test_packed_fp32_on_hopper():
    refused(packed_fp32, normal(256), poisoned(256), marker="fp32 in pairs", words="which Hopper has not")
