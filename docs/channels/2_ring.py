"""Sum the rows of a matrix: one role loads tiles into a ring of slots, another adds them up.

While the consumer works on one slot, the copies into the others go on.

    python docs/channels/2_ring.py
"""

import torch
from host import compare, descriptor, device, machine
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from channels import SharedMemoryChannel, close_all, init_all, tma

TARGET = "sm_90a"
TILE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))  # of a tile in the registers of four warps


@jit
def load(tiles, x_desc, row):
    """The producer, one warp: fills slot after slot."""
    COLUMNS: gl.constexpr = x_desc.block_shape[1]
    end = tiles.producer()
    for column in range(0, x_desc.shape[1], COLUMNS):
        slot, end = end.acquire()  # wait until the slot is free
        tma.load(slot, x_desc, [row, column])


@jit
def add(tiles, x_desc, row, out_ptr):
    """The consumer, four warps."""
    ROWS: gl.constexpr = x_desc.block_shape[0]
    COLUMNS: gl.constexpr = x_desc.block_shape[1]
    end = tiles.consumer()
    sums = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, TILE))
    for _ in range(0, x_desc.shape[1], COLUMNS):
        slot, end = end.acquire()  # wait until the slot is filled
        sums += gl.sum(slot.part(0).load(TILE), axis=1)
        slot.release_accessed()  # the tile was read by ordinary loads, so with a fence before the next copy
    gl.store(out_ptr + row + gl.arange(0, ROWS, gl.SliceLayout(1, TILE)), sums)


@jit
def sum_rows(x_desc, out_ptr, SLOTS: gl.constexpr):
    ROWS: gl.constexpr = x_desc.block_shape[0]
    row = gl.program_id(0) * ROWS
    tiles = SharedMemoryChannel.alloc(x_desc, SLOTS=SLOTS, CONSUMERS=1)
    init_all((tiles,))
    gl.warp_specialize(
        [
            (add, (tiles, x_desc, row, out_ptr)),  # the first role runs in the warps that the kernel was launched with
            (load, (tiles, x_desc, row)),
        ],
        [1],  # warps of the other roles
        [24],  # registers of a thread there
    )
    close_all((tiles,))


def main():
    x = torch.randn(128, 320, device=device(TARGET))
    out = torch.full((128,), float("nan"), device=device(TARGET))
    with machine(TARGET):
        sum_rows[(128 // 64,)](descriptor(x, [64, 64]), out, SLOTS=3)
    compare(out, x.sum(dim=1))


if __name__ == "__main__":
    main()
