"""TMA on Blackwell: padded fp4, and rows by index."""

import pytest
import torch

from tests.compat import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tma,
    tma_blackwell,
)
from tests.gluon_cpu.layouts import MATRIX
from tests.gluon_cpu.support import addresses, descriptor, load_tile, new_barrier, normal, poisoned, same, store_matrix


@jit
def load_padded_fp4(desc, out_ptr, raw_ptr):
    tile = load_tile(desc, 4, 64)  # as many bytes as come from global memory
    store_matrix(out_ptr, tile.load(MATRIX))
    raw = tile.reinterpret(gl.uint8, [32, 128], gl.NVMMASharedLayout(128, 8, 2))
    values = load_matrix_where_data_is(raw)
    store_matrix(raw_ptr, values)


@jit
def load_matrix_where_data_is(raw):
    """Of each 16 bytes the first 8; the gaps hold nothing."""
    columns = gl.arange(0, 64, gl.SliceLayout(0, MATRIX))
    rows = gl.arange(0, 32, gl.SliceLayout(1, MATRIX))
    index = (columns // 8 * 16 + columns % 8)[None, :] + gl.zeros([32, 64], gl.int32, MATRIX) + 0 * rows[:, None]
    return raw.gather(index, axis=1)


@pytest.mark.parametrize("mode", ["fast", "lowered"])
def test_padded_fp4(blackwell_launch, mode):
    """Eight bytes of sixteen values each, and eight bytes of a gap behind them."""
    x = torch.randint(0, 256, (30, 256), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    layout = gl.NVMMASharedLayout.get_default_for([32, 64], gl.uint8, fp4_padded=True)
    out, raw = (poisoned(32, 64, dtype=torch.uint8) for _ in range(2))
    desc = TensorDescriptor.from_tensor(x, [32, 64], layout)
    blackwell_launch(load_padded_fp4, (1,), desc, out, raw, mode=mode)
    want = torch.zeros(32, 64, dtype=torch.uint8)
    want[:26] = x[4:, 64:128]
    same(out, want)
    same(raw, want)


INDEX = gl.constexpr(gl.SliceLayout(0, gl.BlockedLayout([1, 4], [32, 1], [1, 4], [1, 0])))


def rows_of(x: torch.Tensor) -> TensorDescriptor:
    """For single rows; the layout is that of all 32 together."""
    desc = descriptor(x, [1, 64])
    desc.layout = gl.NVMMASharedLayout(128, 16, 2)
    return desc


@jit
def gather_rows(desc, index_ptr, out_ptr, column):
    tile = gl.allocate_shared_memory(desc.dtype, [32, 64], desc.layout)
    loaded = new_barrier(1)
    gl.barrier()
    index = gl.load(index_ptr + gl.arange(0, 32, INDEX))
    mbarrier.expect(loaded, tile.nbytes_per_cta)
    tma_blackwell.async_gather(desc, index, column, loaded, tile)
    mbarrier.wait(loaded, 0)
    store_matrix(out_ptr, tile.load(MATRIX))


def test_gather_of_rows(launch):
    x, out = normal(100, 80, dtype=torch.bfloat16), poisoned(32, 64, dtype=torch.bfloat16)
    index = torch.randint(0, 100, (32,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    index[:4] = torch.tensor([99, 0, 99, 120])  # repeated, and out of bounds: zeros
    launch(gather_rows, (1,), rows_of(x), index, out, 32, target="sm_100a")
    padded = torch.zeros(121, 96, dtype=torch.bfloat16)
    padded[:100, :80] = x
    same(out, padded[index.long(), 32:])


@jit
def scatter_rows(desc, index_ptr, x_ptr):
    tile = gl.allocate_shared_memory(desc.dtype, [32, 64], desc.layout)
    tile.store(gl.load(addresses(x_ptr, 32, 64, MATRIX)))
    fence_async_shared()
    index = gl.load(index_ptr + gl.arange(0, 32, INDEX))
    tma_blackwell.async_scatter(desc, index, 0, tile)
    tma.store_wait(0)


def test_scatter_of_rows(launch):
    x, out = normal(32, 64, dtype=torch.bfloat16), torch.zeros(100, 64, dtype=torch.bfloat16)
    index = torch.randperm(100, generator=torch.Generator().manual_seed(0))[:32].to(torch.int32)
    launch(scatter_rows, (1,), rows_of(out), index, x, target="sm_100a", outputs=[])
    want = torch.zeros(100, 64, dtype=torch.bfloat16)
    want[index.long()] = x
    same(out, want)
