"""Copy a matrix, tile by tile, through one slot of a channel.

No roles yet: one program does all for its tile.

    python docs/channels/1_copy.py
"""

import torch
from host import compare, descriptor, device, machine
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from channels import SharedMemoryChannel, close_all, init_all, tma

TARGET = "sm_90a"


@jit
def copy(x_desc, out_desc):
    ROWS: gl.constexpr = x_desc.block_shape[0]
    row = gl.program_id(0) * ROWS
    tiles = SharedMemoryChannel.alloc(x_desc, SLOTS=1, CONSUMERS=1)
    init_all((tiles,))

    slot, _ = tiles.producer().acquire()  # the slot is free: passes at once
    tma.load(slot, x_desc, [row, 0])
    slot, _ = tiles.consumer().acquire()  # the slot is filled: waits for the load
    tma.store(out_desc, [row, 0], slot.part(0))
    tma.wait_stores_read()
    slot.release()

    close_all((tiles,))


def main():
    x = torch.randn(256, 64, device=device(TARGET))
    out = torch.full_like(x, float("nan"))
    block = [64, 64]
    with machine(TARGET):
        copy[(256 // 64,)](descriptor(x, block), descriptor(out, block))
    compare(out, x)


if __name__ == "__main__":
    main()
