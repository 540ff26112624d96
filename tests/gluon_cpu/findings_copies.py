"""Kernels with one bug each in their copies: by TMA, and by `cp.async`. As findings_hopper.py."""

from tests.compat import async_copy, fence_async_shared, gl, jit, mbarrier, tma
from tests.gluon_cpu.layouts import MATRIX, PLAIN, ROW
from tests.gluon_cpu.support import load_matrix, new_barrier, store_matrix


@jit
def load_not_awaited(desc, out_ptr, BUG: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout, gl.zeros([32, 32], gl.float32, MATRIX))
    loaded = new_barrier(1)
    fence_async_shared()
    gl.barrier()
    mbarrier.expect(loaded, 4096)
    tma.async_load(desc, [0, 0], loaded, tile)  # <- load in flight
    if not BUG:
        mbarrier.wait(loaded, 0)
    store_matrix(out_ptr, tile.load(MATRIX))  # <- read of a load in flight
    mbarrier.wait(loaded, 0)


@jit
def two_loads_into_one_slot(desc, out_ptr, BUG: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout)
    loaded = new_barrier(1)
    gl.barrier()
    mbarrier.expect(loaded, 4096 + 4096 * BUG)
    tma.async_load(desc, [0, 0], loaded, tile)  # <- first load into the slot
    if not BUG:
        mbarrier.wait(loaded, 0)
        mbarrier.expect(loaded, 4096)
    tma.async_load(desc, [32, 0], loaded, tile)  # <- second load into the slot
    mbarrier.wait(loaded, 0 if BUG else 1)
    store_matrix(out_ptr, tile.load(MATRIX))


@jit
def tile_reused(desc, BUG: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout)
    for step in range(2):
        tile.store(gl.full([32, 32], 1.0, gl.float32, MATRIX) * step)  # <- tile written again
        fence_async_shared()
        tma.async_store(desc, [step * 32, 0], tile)  # <- store still reads
        if not BUG:
            tma.store_wait(0)
    tma.store_wait(0)


@jit
def store_wait_too_weak(desc, BUG: gl.constexpr):
    tiles = gl.allocate_shared_memory(gl.float32, [2, 32, 32], desc.layout)
    for step in range(4):
        tma.store_wait(2 if BUG else 1)
        tiles.index(step % 2).store(gl.full([32, 32], 1.0, gl.float32, MATRIX))  # <- staged over
        fence_async_shared()
        tma.async_store(desc, [step * 32, 0], tiles.index(step % 2))  # <- one of two stores
    tma.store_wait(0)


@jit
def exit_before_read(desc, BUG: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout, gl.zeros([32, 32], gl.float32, MATRIX))
    fence_async_shared()
    tma.async_store(desc, [0, 0], tile)  # <- store outlives the CTA
    if not BUG:
        tma.store_wait(0)


@jit
def read_back(desc, out_ptr, copy_ptr, BUG: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout, gl.zeros([32, 32], gl.float32, MATRIX))
    fence_async_shared()
    tma.async_store(desc, [0, 0], tile)  # <- write on its way
    tma.store_wait(0, read_only=BUG)
    store_matrix(copy_ptr, load_matrix(out_ptr, 32, 32, MATRIX))  # <- read of what was stored
    tma.store_wait(0)


@jit
def stage(tile, staged, FENCE: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [1, 1], [1, 0])
    tile.store(gl.full([32, 32], 1.0, gl.float32, LAYOUT))  # <- generic write
    if FENCE:
        fence_async_shared()
    mbarrier.arrive(staged)


@jit
def send(desc, tile, staged, FENCE: gl.constexpr):
    mbarrier.wait(staged, 0)
    if FENCE:
        fence_async_shared()
    tma.async_store(desc, [0, 0], tile)  # <- engine reads
    tma.store_wait(0)


@jit
def fence_between_roles(desc, AT_WRITER: gl.constexpr, AT_SENDER: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout)
    staged = new_barrier(1)
    gl.barrier()
    gl.warp_specialize([(send, (desc, tile, staged, AT_SENDER)), (stage, (tile, staged, AT_WRITER))], [1])


@jit
def take(tile, filled, freed, out_ptr, BUG: gl.constexpr):
    mbarrier.wait(filled, 0)
    x = tile.load(MATRIX)  # <- generic read
    if not BUG:
        fence_async_shared()
    mbarrier.arrive(freed)
    rows = gl.arange(0, 32, gl.SliceLayout(1, MATRIX))
    columns = gl.arange(0, 32, gl.SliceLayout(0, MATRIX))
    gl.store(out_ptr + rows[:, None] * 32 + columns[None, :], x)


@jit
def refill(desc, tile, filled, freed):
    mbarrier.expect(filled, 4096)
    tma.async_load(desc, [0, 0], filled, tile)
    mbarrier.wait(freed, 0)
    mbarrier.expect(filled, 4096)
    tma.async_load(desc, [0, 0], filled, tile)  # <- engine overwrites what was read
    mbarrier.wait(filled, 1)


@jit
def overwritten_after_a_read(desc, out_ptr, BUG: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout)
    filled, freed = new_barrier(1), new_barrier(1)
    fence_async_shared()
    gl.barrier()
    gl.warp_specialize([(take, (tile, filled, freed, out_ptr, BUG)), (refill, (desc, tile, filled, freed))], [1])


@jit
def fence_within_a_role(desc):
    """Without a fence in the source: the compiler puts one in."""
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout)
    tile.store(gl.full([32, 32], 1.0, gl.float32, MATRIX))
    tma.async_store(desc, [0, 0], tile)
    tma.store_wait(0)


@jit
def copy_not_awaited(x_ptr, out_ptr, BUG: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [128], PLAIN, gl.zeros([128], gl.float32, ROW))
    gl.barrier()
    i = gl.arange(0, 128, ROW)
    async_copy.async_load(tile, x_ptr + i)  # <- cp.async in flight
    async_copy.commit_group()
    async_copy.wait_group(1 if BUG else 0)
    gl.barrier()
    gl.store(out_ptr + i, tile.load(ROW))  # <- read of a cp.async in flight
    async_copy.wait_group(0)
