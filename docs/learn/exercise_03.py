"""Lesson 3: sums the rows of a matrix. It is broken in two places.

python docs/learn/exercise_03.py
"""

import torch
from course import descriptor, exercise
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from channels import SharedMemoryChannel, close_all, init_all, tma

TILE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))


@jit
def load(tiles, x_desc):
    end = tiles.producer()
    for column in range(0, x_desc.shape[1], 64):
        slot, end = end.acquire()
        tma.load(slot, x_desc, [0, column])


@jit
def add(tiles, x_desc, out_ptr):
    end = tiles.consumer()
    sums = gl.zeros([64], gl.float32, gl.SliceLayout(1, TILE))
    for _ in range(64, x_desc.shape[1], 64):
        slot, end = end.acquire()
        sums += gl.sum(slot.part(0).load(TILE), axis=1)
        slot.release()
    gl.store(out_ptr + gl.arange(0, 64, gl.SliceLayout(1, TILE)), sums)


@jit
def sum_rows(x_desc, out_ptr):
    tiles = SharedMemoryChannel.alloc(x_desc, SLOTS=2, CONSUMERS=1)
    init_all((tiles,))
    gl.warp_specialize([(add, (tiles, x_desc, out_ptr)), (load, (tiles, x_desc))], [1], [24])
    close_all((tiles,))


def run() -> None:
    x, out = torch.randint(-4, 5, (64, 320)).float(), torch.full((64,), float("nan"))
    sum_rows[(1,)](descriptor(x, [64, 64]), out)
    assert torch.equal(out, x.sum(1))


if __name__ == "__main__":
    exercise(run)
