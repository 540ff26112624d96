"""Lesson 7: a persistent kernel that doubles; an item is two tiles. It is right with one item to a program only.

python docs/learn/exercise_07.py
"""

import torch
from course import descriptor, exercise, lesson
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from channels import SharedMemoryChannel, close_all, init_all, tma

store = lesson("03_ring").store
TILE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))


@jit
def load(tiles, x_desc, items):
    end = tiles.producer()
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        for tile in range(2):
            slot, end = end.acquire()
            tma.load(slot, x_desc, [item * 128 + tile * 64, 0])


@jit
def double(tiles, x_desc, out_ptr, items):
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        end = tiles.consumer()
        for tile in range(2):
            slot, end = end.acquire()
            x = slot.part(0).load(TILE)
            slot.release_accessed()
            store(out_ptr, item * 128 + tile * 64, 0, x_desc.shape[1], 2 * x)


@jit
def kernel(x_desc, out_ptr, items):
    tiles = SharedMemoryChannel.alloc(x_desc, SLOTS=3, CONSUMERS=1)
    init_all((tiles,))
    gl.warp_specialize([(double, (tiles, x_desc, out_ptr, items)), (load, (tiles, x_desc, items))], [1], [24])
    close_all((tiles,))


def run(programs: int = 2) -> None:
    x, out = torch.randn(512, 64), torch.full((512, 64), float("nan"))
    kernel[(programs,)](descriptor(x, [64, 64]), out, 4)
    assert torch.equal(out, 2 * x)


if __name__ == "__main__":
    exercise(run)
