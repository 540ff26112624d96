"""A ring of slots between two roles: by hand, and by a channel; the same kernel twice."""

import torch
from course import broken, check, descriptor
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.language.nvidia.hopper import tma as copy

from channels import SharedMemoryChannel, close_all, init_all, tma

TILE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))


@jit
def load_by_hand(x_desc, tiles, filled, freed, SLOTS: gl.constexpr):
    ROWS: gl.constexpr = x_desc.block_shape[0]
    steps = x_desc.shape[0] // ROWS // gl.num_programs(0)
    for step in range(steps):
        slot, lap = step % SLOTS, step // SLOTS
        mbarrier.wait(freed.index(slot), (lap & 1) ^ 1)
        mbarrier.expect(filled.index(slot), x_desc.nbytes_per_cta)
        row = (gl.program_id(0) * steps + step) * ROWS
        copy.async_load(x_desc, [row, 0], filled.index(slot), tiles.index(slot))


@jit
def double_by_hand(x_desc, out_ptr, tiles, filled, freed, SLOTS: gl.constexpr, WRONG: gl.constexpr):
    ROWS: gl.constexpr = x_desc.block_shape[0]
    steps = x_desc.shape[0] // ROWS // gl.num_programs(0)
    for step in range(steps):
        slot, lap = step % SLOTS, step // SLOTS
        mbarrier.wait(filled.index(slot), lap & 1)
        x = tiles.index(slot).load(TILE)
        if WRONG != "fence":
            fence_async_shared()
        if WRONG == "slot":
            slot = (step + 1) % SLOTS
        mbarrier.arrive(freed.index(slot))
        store(out_ptr, (gl.program_id(0) * steps + step) * ROWS, 0, x_desc.shape[1], 2 * x)


@jit
def store(out_ptr, row, column, width, x):
    rows = row + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    columns = column + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    gl.store(out_ptr + rows[:, None] * width + columns[None, :], x.to(out_ptr.dtype.element_ty))


@jit
def by_hand(x_desc, out_ptr, SLOTS: gl.constexpr, WRONG: gl.constexpr = ""):
    tiles = gl.allocate_shared_memory(x_desc.dtype, [SLOTS] + x_desc.block_shape, x_desc.layout)
    filled, freed = mbarrier.allocate_mbarrier(batch=SLOTS), mbarrier.allocate_mbarrier(batch=SLOTS)
    for i in gl.static_range(SLOTS):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(freed.index(i), count=1)
    gl.barrier()
    gl.warp_specialize(
        [
            (double_by_hand, (x_desc, out_ptr, tiles, filled, freed, SLOTS, WRONG)),
            (load_by_hand, (x_desc, tiles, filled, freed, SLOTS)),
        ],
        [1],
        [24],
    )
    for i in gl.static_range(SLOTS):
        mbarrier.invalidate(filled.index(i))
        mbarrier.invalidate(freed.index(i))


@jit
def load(tiles, x_desc):
    ROWS: gl.constexpr = x_desc.block_shape[0]
    steps = x_desc.shape[0] // ROWS // gl.num_programs(0)
    end = tiles.producer()
    for step in range(steps):
        slot, end = end.acquire()
        tma.load(slot, x_desc, [(gl.program_id(0) * steps + step) * ROWS, 0])


@jit
def double(tiles, x_desc, out_ptr):
    ROWS: gl.constexpr = x_desc.block_shape[0]
    steps = x_desc.shape[0] // ROWS // gl.num_programs(0)
    end = tiles.consumer()
    for step in range(steps):
        slot, end = end.acquire()
        x = slot.part(0).load(TILE)
        slot.release_accessed()
        store(out_ptr, (gl.program_id(0) * steps + step) * ROWS, 0, x_desc.shape[1], 2 * x)


@jit
def by_channel(x_desc, out_ptr, SLOTS: gl.constexpr):
    tiles = SharedMemoryChannel.alloc(x_desc, SLOTS=SLOTS, CONSUMERS=1)
    init_all((tiles,))
    gl.warp_specialize([(double, (tiles, x_desc, out_ptr)), (load, (tiles, x_desc))], [1], [24])
    close_all((tiles,))


def run(kernel, x, out, programs: int = 1, slots: int = 3, **options):
    kernel[(programs,)](descriptor(x, [64, 64]), out, SLOTS=slots, **options)


def checked(kernel, **options) -> None:
    x, out = torch.randn(448, 64), torch.full((448, 64), float("nan"))
    run(kernel, x, out, **options)
    assert torch.equal(out, 2 * x)


def main() -> None:
    check(lambda: checked(by_hand), "by hand, 3 slots")
    check(lambda: checked(by_channel), "by a channel, 3 slots")
    check(lambda: checked(by_channel, slots=1), "by a channel, 1 slot")
    broken(lambda: checked(by_hand, WRONG="slot"), "frees the wrong slot")
    broken(lambda: checked(by_hand, WRONG="fence"), "no fence before a slot is freed")


if __name__ == "__main__":
    main()
