"""What the machine does not know is an error that names the construct and the kernel's line, never a wrong number."""

from pathlib import Path
from typing import Any

import pytest
import torch

import gluon_cpu
from gluon_cpu.ir.tensor_memory import tensor_memory_offsets
from gluon_cpu.ir.types import MemDesc, Scalar
from tests.compat import (
    TensorDescriptor,
    blackwell,
    cluster,
    gl,
    jit,
    mbarrier,
    tma,
    tma_blackwell,
)
from tests.gluon_cpu.support import (
    MATRIX,
    MATRIX_COPIES,
    ROW_COPIES,
    ROW_HALVES,
    descriptor,
    new_barrier,
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
def reduce_a_copy(desc):
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout, gl.zeros([32, 32], gl.float32, MATRIX_COPIES))
    tma.async_atomic_add(desc, [0, 0], tile)  # <- every CTA adds
    tma.store_wait(0)
    cluster.barrier()


def test_reduction_of_a_tile_that_every_cta_holds():
    desc = descriptor(torch.zeros(32, 32), [32, 32], cga=[[0, 0]])
    refused(reduce_a_copy, desc, marker="every CTA adds", words="every CTA holds", num_ctas=2)


@jit
def gather_split_rows(desc, out_ptr):
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], gl.NVMMASharedLayout(128, 32, 2, cga_layout=[[1, 0]]))
    loaded = new_barrier(1)
    cluster.barrier()
    ROWS: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 4], [32, 1], [1, 4], [1, 0], [[1, 0]]))
    rows = gl.arange(0, 32, ROWS)
    mbarrier.expect(loaded, tile.nbytes_per_cta)
    tma_blackwell.async_gather(desc, rows, 0, loaded, tile)  # <- rows over CTAs
    mbarrier.wait(loaded, 0)
    cluster.barrier()


def test_gather_of_rows_over_ctas():
    layout = gl.NVMMASharedLayout(128, 32, 2, cga_layout=[[1, 0]])
    desc = TensorDescriptor.from_tensor(normal(64, 32), [1, 32], layout)
    options: dict[str, Any] = {"target": "sm_100a", "num_ctas": 2}
    with pytest.raises((NotImplementedError, RuntimeError)):  # Triton itself refuses some forms
        gluon_cpu.launch(gather_split_rows, (1,), desc, poisoned(1), **options)


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
def atomic_of_all_ctas(out_ptr):
    i = gl.arange(0, 128, ROW_COPIES)
    gl.atomic_add(out_ptr + i, 1)  # <- both CTAs add


def test_atomics_on_replicated_pointers():
    out = torch.zeros(128, dtype=torch.int32)
    refused(atomic_of_all_ctas, out, marker="both CTAs add", words="several CTAs hold", num_ctas=2)


@jit
def gather_over_ctas(out_ptr):
    tile = gl.allocate_shared_memory(gl.int32, [256], gl.SwizzledSharedLayout(1, 1, 1, [0], [[1]]))
    i = gl.arange(0, 256, ROW_HALVES)
    tile.store(i)
    gl.store(out_ptr + i, tile.gather(255 - i, axis=0))  # <- gather over CTAs


def test_gather_over_ctas():
    out = poisoned(256, dtype=torch.int32)
    refused(gather_over_ctas, out, marker="gather over CTAs", words="across CTAs", num_ctas=2)


@jit
def packed_fp32(x_ptr, out_ptr):
    i = gl.arange(0, 256, gl.BlockedLayout([2], [32], [4], [0]))
    x = gl.load(x_ptr + i)
    gl.store(out_ptr + i, blackwell.add2(x, x))  # <- fp32 in pairs


def test_packed_fp32_on_hopper():
    refused(packed_fp32, normal(256), poisoned(256), marker="fp32 in pairs", words="which Hopper has not")


def test_descriptor_that_rounds():
    layout = gl.NVMMASharedLayout.get_default_for([32, 32], gl.float32)
    desc = TensorDescriptor.from_tensor(normal(32, 32), [32, 32], layout, round_f32_to_tf32=True)
    with pytest.raises(NotImplementedError, match="desc: a descriptor with round_f32_to_tf32"):
        gluon_cpu.launch(whole_load, (1,), desc, poisoned(32, 32))


@jit
def whole_load(desc, out_ptr):
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout)
    loaded = new_barrier(1)
    gl.barrier()
    mbarrier.expect(loaded, 4096)
    tma.async_load(desc, [0, 0], loaded, tile)
    mbarrier.wait(loaded, 0)
    gl.store(out_ptr + gl.arange(0, 32, gl.SliceLayout(1, MATRIX)), gl.sum(tile.load(MATRIX), 1))


def test_warmup():
    with gluon_cpu.machine(), pytest.raises(NotImplementedError, match="warmup"):
        whole_load.warmup(descriptor(normal(32, 32), [32, 32]), poisoned(32), grid=(1,))
