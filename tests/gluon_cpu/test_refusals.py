"""What the machine does not know is an error that names the construct and the kernel's line, never a wrong number."""

import re

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


# What the page says that the compiler does.


@jit
def int8_into_fp32():
    a = gl.allocate_shared_memory(gl.int8, [128, 64], gl.NVMMASharedLayout(64, 8, 2))
    b = gl.allocate_shared_memory(gl.int8, [64, 64], gl.NVMMASharedLayout(64, 8, 2))
    COLUMNS: gl.constexpr = blackwell.TensorMemoryLayout([128, 64], col_stride=1)
    acc = blackwell.allocate_tensor_memory(gl.float32, [128, 64], COLUMNS)
    blackwell.tcgen05_mma(a, b, acc, use_acc=False)


@jit
def store_padded_fp4():
    PADDED: gl.constexpr = blackwell.TensorMemoryLayout([128, 64], col_stride=1, fp4_padded=True)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 64], [32, 1], [4, 1], [0, 1])
    tile = blackwell.allocate_tensor_memory(gl.int8, [128, 64], PADDED)
    tile.store(gl.full([128, 64], 1, gl.int8, LAYOUT))


@pytest.mark.parametrize(("kernel", "words"), [(int8_into_fp32, "accumulator dtype"), (store_padded_fp4, "tmem_store")])
def test_the_compiler_refuses_it_at_once(kernel, words):
    with pytest.raises(RuntimeError, match=f"the compiler refuses it(.|\n)*{words}"):
        gluon_cpu.launch(kernel, (1,), target="sm_100a")


def ptx_of(kernel, *arguments, **options) -> str:
    with gluon_cpu.machine(target=options.pop("target", "sm_90a")):
        return kernel.warmup(*arguments, grid=(1,), num_ctas=2, **options).asm["ptx"]


@pytest.mark.parametrize("kernel", [scan_over_ctas, copy_into_the_other_half])
def test_the_compiler_refuses_it_later(kernel, capfd):
    with pytest.raises(RuntimeError, match="PassManager::run failed"):
        ptx_of(kernel, poisoned(256, dtype=torch.int32))
    assert "failed to legalize operation" in capfd.readouterr().err


def test_an_addition_to_copies_is_by_one_cta_in_its_own():
    ptx = ptx_of(add_to_copies)
    [rank] = re.findall(r"mov\.u32 \t(%r\d+), %cluster_ctarank;", ptx)
    [addition] = set(re.findall(r"@(%p\d+) red\.shared\.cta\.", ptx))
    assert re.search(rf"setp\.eq\.b32 \t{addition}, {rank}, 0;", ptx)


def test_a_gather_over_ctas_reaches_no_other_one():
    ptx = ptx_of(gather_registers, poisoned(256, dtype=torch.int32))
    assert "mapa" not in ptx
    assert "shared::cluster" not in ptx


def test_a_box_in_parts_moves_the_coordinate_of_the_batch():
    boxes, tiles = (gl.NVMMASharedLayout(128, 32, n, cga_layout=[[1] + [0] * (n - 1)]) for n in (3, 2))
    desc = TensorDescriptor.from_tensor(normal(64, 4, 32), [64, 1, 32], boxes)
    ptx = ptx_of(load_a_column_of_a_batch, desc, SHARED=tiles)
    [place] = re.findall(r"tensor\.3d\S* \[%r\d+\], \[%rd\d+, \{(%r\d+), (%r\d+), (%r\d+)\}\]", ptx)
    column, batch, row = place
    assert re.search(rf"or\.b32 \t{batch}, %r\d+, 1;", ptx)  # the batch's number and 32 for CTA 1
    assert column == row
    assert f"mov.b32 \t{row}, 0;" in ptx
