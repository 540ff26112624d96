"""Shared memory: layouts, views, gather and scatter, cp.async; every byte where the hardware has it."""

import pytest
import torch

from tests.compat import async_copy, gl, jit, mbarrier
from tests.gluon_cpu.layouts import MATRIX, MATRIX_COLUMN_HALVES, MATRIX_HALVES, PLAIN, PLAIN_2D, ROW
from tests.gluon_cpu.support import (
    addresses,
    load_matrix,
    new_barrier,
    normal,
    poisoned,
    same,
    small_integers,
    store_matrix,
)

SWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(4, 2, 4, [1, 0]))
NVMMA = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
NVMMA_T = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2, transposed=True))
PADDED = gl.constexpr(gl.PaddedSharedLayout.with_identity_for([[32, 4]], [32, 32], [1, 0]))
LINEAR = gl.constexpr(
    gl.SharedLinearLayout([[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 4], [2, 8], [4, 16], [8, 0], [16, 0]])
)
# Rows in another order, of which each eighth lies four elements further.
PADDED_ROWS = gl.constexpr(
    gl.PaddedSharedLayout(
        [[128, 4]], [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0], [1, 0], [2, 0], [4, 0], [16, 0]], [], [32, 32]
    )
)
LAYOUTS = {
    "plain": PLAIN_2D,
    "swizzled": SWIZZLED,
    "nvmma": NVMMA,
    "nvmma transposed": NVMMA_T,
    "padded": PADDED,
    "padded, rows in another order": PADDED_ROWS,
    "linear": LINEAR,
}


@jit
def through_shared(x_ptr, out_ptr, SHARED: gl.constexpr):
    x = load_matrix(x_ptr, 32, 32, MATRIX)
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], SHARED)
    tile.store(x)
    store_matrix(out_ptr, tile.load(gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])))
    initialised = gl.allocate_shared_memory(gl.float32, [32, 32], SHARED, x + 1.0)
    store_matrix(out_ptr + 1024, initialised.load(MATRIX))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_store_and_load_in_every_layout(launch, layout):
    x = normal(32, 32)
    out = poisoned(2, 32, 32)
    launch(through_shared, (1,), x, out, SHARED=layout)
    same(out, torch.stack([x, x + 1]))


@jit
def views(x_ptr, out_ptr, which):
    tiles = gl.allocate_shared_memory(gl.float32, [2, 32, 64], PLAIN_2D)
    tiles.index(0).store(load_matrix(x_ptr, 32, 64, MATRIX))
    tiles.index(1).store(load_matrix(x_ptr, 32, 64, MATRIX) * 10.0)
    tile = tiles.index(which)
    store_matrix(out_ptr, tile.slice(32, 32, dim=1).load(MATRIX))
    store_matrix(out_ptr + 1024, tile.slice(0, 32, dim=1).permute((1, 0)).load(MATRIX))
    store_matrix(out_ptr + 2048, tile.reshape([64, 32]).slice(32, 32, dim=0).load(MATRIX))


def test_index_slice_permute_reshape(launch):
    x = normal(32, 64)
    for which in (0, 1):
        out = poisoned(3, 32, 32)
        launch(views, (1,), x, out, which)
        y = x * 10 if which else x
        same(out, torch.stack([y[:, 32:], y[:, :32].T, y[16:].reshape(32, 32)]))


@jit
def write_through_a_view(x_ptr, out_ptr):
    tile = gl.allocate_shared_memory(gl.float32, [32, 64], PLAIN_2D)
    tile.store(gl.full([32, 64], 1.0, gl.float32, MATRIX))
    tile.slice(32, 32, dim=1).store(load_matrix(x_ptr, 32, 32, MATRIX))
    store_matrix(out_ptr, tile.load(MATRIX))


def test_a_store_through_a_slice_changes_only_the_slice(launch):
    x = normal(32, 32)
    out = poisoned(32, 64)
    launch(write_through_a_view, (1,), x, out)
    same(out, torch.cat([torch.ones(32, 32), x], dim=1))


@jit
def reinterprets(x_ptr, out_ptr):
    """The bytes of 128 fp32 as 256 bf16, and the second half of them as fp32 again."""
    bytes_ = gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN)
    flat = bytes_.reinterpret(gl.float32, [128], PLAIN)
    flat.store(gl.load(x_ptr + gl.arange(0, 128, ROW)))
    halves = bytes_.reinterpret(gl.bfloat16, [256], PLAIN).load(ROW)
    gl.store(out_ptr + gl.arange(0, 256, ROW), halves.to(gl.float32))
    gl.store(out_ptr + 256 + gl.arange(0, 64, ROW), bytes_.index(1).load(ROW))


def test_reinterpret_sees_the_same_bytes(launch):
    x = normal(128).to(torch.bfloat16).float()  # so that each half is a number
    out = poisoned(320)
    launch(reinterprets, (1,), x, out)
    same(out[:256], x.view(torch.bfloat16).float())
    same(out[256:], x[64:])


@jit
def swizzle_is_physical(x_ptr, out_ptr):
    """Written through one layout, read through another: the element at each physical place."""
    tile = gl.allocate_shared_memory(gl.float32, [16, 32], NVMMA)
    tile.store(load_matrix(x_ptr, 16, 32, MATRIX))
    store_matrix(out_ptr, tile.reinterpret(gl.float32, [16, 32], PLAIN_2D).load(MATRIX))


def test_swizzle_of_128_bytes_is_where_the_hardware_puts_it(launch):
    x = normal(16, 32)
    out = poisoned(16, 32)
    launch(swizzle_is_physical, (1,), x, out)
    rows, columns = torch.meshgrid(torch.arange(16), torch.arange(32), indexing="ij")
    # 16-byte chunks of a 128-byte row are XOR-ed with the row modulo 8.
    same(out, x[rows, columns ^ (rows % 8 * 4)])


@jit
def shared_gather_scatter(x_ptr, index_ptr, out_ptr):
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], SWIZZLED)
    x, index = load_matrix(x_ptr, 32, 32, MATRIX), load_matrix(index_ptr, 32, 32, MATRIX)
    tile.store(x)
    store_matrix(out_ptr, tile.gather(index, axis=1))
    store_matrix(out_ptr + 1024, tile.gather(index, axis=0))
    gl.barrier()
    tile.scatter(x, index, axis=1)
    store_matrix(out_ptr + 2048, tile.load(MATRIX))


def test_gather_and_scatter(launch):
    x = normal(32, 32)
    index = torch.stack([torch.randperm(32, generator=torch.Generator().manual_seed(i)) for i in range(32)])
    out = poisoned(3, 32, 32)
    launch(shared_gather_scatter, (1,), x, index.to(torch.int32), out)
    same(out, torch.stack([x.gather(1, index), x.gather(0, index), torch.empty(32, 32).scatter(1, index, x)]))


@jit
def shared_atomics(index_ptr, out_ptr, old_ptr):
    counts = gl.allocate_shared_memory(gl.int32, [32], PLAIN)
    counts.store(gl.full([32], 100, gl.int32, ROW))
    i = gl.arange(0, 128, ROW)
    index = gl.load(index_ptr + i)
    gl.barrier()
    old = counts.atomic_scatter_add(gl.full([128], 1, gl.int32, ROW), index, axis=0)
    gl.store(old_ptr + i, old)
    gl.barrier()
    counts.atomic_scatter_max(i, index, axis=0, mask=i >= 120)
    gl.barrier()
    gl.store(out_ptr + gl.arange(0, 32, ROW), counts.load(ROW))


def test_atomic_scatter(launch):
    index = torch.randint(0, 32, (128,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    out, old = poisoned(32, dtype=torch.int32), poisoned(128, dtype=torch.int32)
    launch(shared_atomics, (1,), index, out, old)
    count = torch.bincount(index, minlength=32).to(torch.int32) + 100
    for i in range(120, 128):
        count[index[i]] = max(int(count[index[i]]), i)
    same(out, count)
    for slot in range(32):  # each adder saw another value: 100, 101, ...
        seen = old[index == slot].sort().values
        same(seen, torch.arange(100, 100 + len(seen), dtype=torch.int32))


@jit
def cp_async_groups(x_ptr, out_ptr):
    tiles = gl.allocate_shared_memory(gl.float32, [2, 16, 32], PLAIN_2D)
    for i in gl.static_range(2):
        async_copy.async_load(tiles.index(i), addresses(x_ptr + i * 512, 16, 32, MATRIX))
        async_copy.commit_group()
    async_copy.wait_group(1)
    gl.barrier()
    store_matrix(out_ptr, tiles.index(0).load(MATRIX))
    async_copy.wait_group(0)
    gl.barrier()
    store_matrix(out_ptr + 512, tiles.index(1).load(MATRIX))


def test_cp_async_groups_complete_in_order(launch):
    x = normal(2, 16, 32)
    out = poisoned(2, 16, 32)
    launch(cp_async_groups, (1,), x, out)
    same(out, x)


@jit
def cp_async_masked(x_ptr, out_ptr, length):
    tile = gl.allocate_shared_memory(gl.float32, [128], PLAIN)
    i = gl.arange(0, 128, ROW)
    async_copy.async_load(tile, x_ptr + i, mask=i < length)
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.barrier()
    gl.store(out_ptr + i, tile.load(ROW))


def test_cp_async_fills_masked_elements_with_zero(launch):
    x, out = normal(100), poisoned(128)
    launch(cp_async_masked, (1,), x, out, 100)
    same(out, torch.cat([x, torch.zeros(28)]))


@jit
def cp_async_signals(x_ptr, out_ptr):
    tile = gl.allocate_shared_memory(gl.float32, [128], PLAIN)
    loaded = new_barrier(128)  # every thread of the four warps arrives
    gl.barrier()
    i = gl.arange(0, 128, ROW)
    async_copy.async_load(tile, x_ptr + i)
    async_copy.mbarrier_arrive(loaded, increment_count=False)
    mbarrier.wait(loaded, 0)
    gl.store(out_ptr + i, tile.load(ROW))
    mbarrier.invalidate(loaded)


def test_cp_async_arrives_on_an_mbarrier(launch):
    x, out = normal(128), poisoned(128)
    launch(cp_async_signals, (1,), x, out)
    same(out, x)


@jit
def reused(x_ptr, out_ptr):
    """Two buffers that are never alive at the same time: the compiler may give them the same bytes."""
    i = gl.arange(0, 128, ROW)
    first = gl.allocate_shared_memory(gl.float32, [128], PLAIN, gl.load(x_ptr + i))
    a = first.load(ROW)
    second = gl.allocate_shared_memory(gl.float32, [128], PLAIN, a * 2.0)
    gl.store(out_ptr + i, second.load(ROW) + a)


def test_buffers_that_share_bytes(launch):
    x, out = normal(128), poisoned(128)
    launch(reused, (1,), x, out)
    same(out, x * 2 + x)


@jit
def shared_across_ctas(x_ptr, out_ptr):
    """A tile sharded by rows over two CTAs; each loads its own rows back, then the columns cross."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0], [[1, 0]])
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], LAYOUT, load_matrix(x_ptr, 32, 32, MATRIX_HALVES))
    store_matrix(out_ptr, gl.convert_layout(tile.load(MATRIX_HALVES), MATRIX_COLUMN_HALVES))


def test_sharded_shared_memory(launch):
    x, out = small_integers(32, 32), poisoned(32, 32)
    launch(shared_across_ctas, (1,), x, out, num_ctas=2)
    same(out, x)


@jit
def narrow_types(x_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    tile = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [128], PLAIN, gl.load(x_ptr + i))
    gl.store(out_ptr + i, tile.load(ROW))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int64], ids=str
)
def test_element_types(launch, dtype):
    x, out = normal(128).to(dtype), poisoned(128, dtype=dtype)
    launch(narrow_types, (1,), x, out)
    same(out.float(), x.float())


@jit
def gather_scatter_of_a_half(out_ptr):
    at, all_of_it = gl.arange(0, 128, ROW), gl.arange(0, 256, ROW)
    tile = gl.allocate_shared_memory(gl.int32, [256], PLAIN, all_of_it)
    half = tile.slice(128, 128, dim=0)
    gl.store(out_ptr + at, half.gather(127 - at, axis=0))
    gl.barrier()
    half.scatter(at + 1000, 127 - at, axis=0)
    gl.store(out_ptr + 128 + all_of_it, tile.load(ROW))


def test_gather_and_scatter_of_a_slice(launch):
    out = poisoned(384, dtype=torch.int32)
    launch(gather_scatter_of_a_half, (1,), out)
    i = torch.arange(128, dtype=torch.int32)
    same(out, torch.cat([255 - i, i, 1127 - i]))


@jit
def quarter_of_padded(x_ptr, out_ptr):
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], PADDED, load_matrix(x_ptr, 32, 32, MATRIX))
    store_matrix(out_ptr, tile.slice(16, 16, dim=0).slice(16, 16, dim=1).load(MATRIX))


def test_slices_of_a_padded_layout(launch):
    x, out = normal(32, 32), poisoned(16, 16)
    launch(quarter_of_padded, (1,), x, out)
    same(out, x[16:, 16:])
