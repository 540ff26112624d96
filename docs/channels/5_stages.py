"""out = 2 A + B: a role loads, one computes, one stores, with channels between. Persistent; lengths need not fit.

The middle role is a consumer of one channel and the producer of the next. It fills slots with its own stores.

    python docs/channels/5_stages.py
"""

import torch
from host import compare, descriptor, device, machine
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from channels import SharedMemoryChannel, close_all, init_all, tma

TARGET = "sm_90a"
TILE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))  # of a tile in the registers of four warps
BLOCK = [64, 64]


@jit
def place(tile, out_desc):
    """(first row, first column) of a tile, by its number. The last tiles may reach over the edge of the matrix."""
    columns = gl.cdiv(out_desc.shape[1], out_desc.block_shape[1])
    return tile // columns * out_desc.block_shape[0], tile % columns * out_desc.block_shape[1]


@jit
def load(operands, a_desc, b_desc, out_desc, tiles):
    end = operands.producer()
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = place(tile, out_desc)
        slot, end = end.acquire()
        tma.load(slot, (a_desc, b_desc), ([row, column], [row, column]))  # beyond the edge: zeros


@jit
def compute(operands, results, tiles):
    filled, free = operands.consumer(), results.producer()
    for _ in range(gl.program_id(0), tiles, gl.num_programs(0)):
        slot, filled = filled.acquire()
        a = slot.part(0).load(TILE).to(gl.float32)
        b = slot.part(1).load(TILE)
        slot.release_accessed()  # as the consumer of this channel
        result, free = free.acquire()
        result.part(0).store(2 * a + b)
        result.publish()  # as the producer of that one: not release, which would free it


@jit
def store(results, out_desc, tiles):
    end = results.consumer()
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = place(tile, out_desc)
        slot, end = end.acquire()
        tma.store(out_desc, [row, column], slot.part(0))  # what lies beyond the edge is left out
        tma.wait_stores_read()  # for all stores: so of the two slots one is stored, the other filled meanwhile
        slot.release()  # TMA has read it, and nobody else did


@jit
def scaled_sum(a_desc, b_desc, out_desc, tiles, SLOTS: gl.constexpr):
    operands = SharedMemoryChannel.alloc((a_desc, b_desc), SLOTS=SLOTS, CONSUMERS=1)  # parts of two dtypes
    results = SharedMemoryChannel.alloc(out_desc, SLOTS=2, CONSUMERS=1)
    init_all((operands, results))
    gl.warp_specialize(
        [
            (compute, (operands, results, tiles)),
            (load, (operands, a_desc, b_desc, out_desc, tiles)),
            (store, (results, out_desc, tiles)),
        ],
        [1, 1],
        [24, 24],
    )
    close_all((operands, results))


def main():
    M, N = 200, 152  # no multiples of 64; but rows are multiples of 16 bytes, as TMA wants them
    a = torch.randn(M, N, dtype=torch.bfloat16, device=device(TARGET))
    b = torch.randn(M, N, device=device(TARGET))
    out = torch.full((M, N), float("nan"), device=device(TARGET))
    tiles = -(-M // BLOCK[0]) * -(-N // BLOCK[1])
    with machine(TARGET):
        scaled_sum[(2,)](*(descriptor(t, BLOCK) for t in (a, b, out)), tiles, SLOTS=3)  # two programs, six tiles each
    compare(out, 2 * a.float() + b)


if __name__ == "__main__":
    main()
