"""What the machine does not know is an error that names the construct and the kernel's line, never a wrong number."""

import pytest
import torch

import gluon_cpu
from gluon_cpu.ir.tensor_memory import tensor_memory_offsets
from gluon_cpu.ir.types import MemDesc, Scalar
from tests.compat import TensorDescriptor, async_copy, blackwell, cluster, gl, jit, tma
from tests.gluon_cpu.layouts import PLAIN_COPIES, PLAIN_HALVES, ROW_COPIES, ROW_HALVES
from tests.gluon_cpu.support import descriptor, line_of, new_barrier, normal, poisoned


def refused(kernel, *arguments, marker: str, words: str, **options) -> None:
    with pytest.raises(NotImplementedError, match=words) as caught:
        gluon_cpu.launch(kernel, (1,), *arguments, **options)
    assert line_of(__file__, marker) in str(caught.value)


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
def add_to_copies():
    """Compiled to an addition by CTA 0 in its own copy alone."""
    i = gl.arange(0, 256, ROW_COPIES)
    tile = gl.allocate_shared_memory(gl.int32, [256], PLAIN_COPIES, i)
    tile.atomic_scatter_add(i, i, axis=0)  # <- atomic on copies


def test_atomics_on_copies():
    refused(add_to_copies, marker="atomic on copies", words="those of one alone", num_ctas=2)


@jit
def copy_into_the_other_half(x_ptr):
    tile = gl.allocate_shared_memory(gl.int32, [512], PLAIN_HALVES)
    i = gl.arange(0, 256, ROW_HALVES)
    async_copy.async_load(tile.slice(0, 256), x_ptr + i)  # <- cp.async to a peer


def test_cp_async_into_another_cta():
    x = torch.zeros(256, dtype=torch.int32)
    refused(copy_into_the_other_half, x, marker="cp.async to a peer", words="does not reach", num_ctas=2)


@jit
def load_into_the_other_half(desc):
    tile = gl.allocate_shared_memory(gl.float32, [128, 32], desc.layout)
    loaded = new_barrier(1)
    cluster.barrier()
    tma.async_load(desc, [0, 0], loaded, tile.slice(64, 64, dim=0))  # <- TMA to a peer


def test_tma_into_a_slice_that_one_cta_has():
    desc = descriptor(normal(64, 32), [64, 32], cga=[[1, 0]])
    refused(load_into_the_other_half, desc, marker="TMA to a peer", words="by other than loads", num_ctas=2)


@jit
def load_a_column_of_a_batch(desc, SHARED: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [64, 32], SHARED)
    loaded = new_barrier(1)
    cluster.barrier()
    tma.async_load(desc, [0, 1, 0], loaded, tile)  # <- box in parts


def test_a_box_with_other_dimensions_in_parts():
    """Compiled so that CTA 1 adds its first row to the coordinate of the batch."""
    boxes, tiles = (gl.NVMMASharedLayout(128, 32, n, cga_layout=[[1] + [0] * (n - 1)]) for n in (3, 2))
    desc = TensorDescriptor.from_tensor(normal(64, 4, 32), [64, 1, 32], boxes)
    refused(load_a_column_of_a_batch, desc, marker="box in parts", words="moves wrong ones", SHARED=tiles, num_ctas=2)


@jit
def packed_fp32(x_ptr, out_ptr):
    i = gl.arange(0, 256, gl.BlockedLayout([2], [32], [4], [0]))
    x = gl.load(x_ptr + i)
    gl.store(out_ptr + i, blackwell.add2(x, x))  # <- fp32 in pairs


def test_packed_fp32_on_hopper():
    refused(packed_fp32, normal(256), poisoned(256), marker="fp32 in pairs", words="which Hopper has not")
