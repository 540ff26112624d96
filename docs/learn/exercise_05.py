"""Lesson 5: two roles take turns in doubling the halves of each tile. It hangs.

python docs/learn/exercise_05.py
"""

import torch
from course import descriptor, exercise, lesson
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from channels import SharedMemoryChannel, SignalChannel, close_all, init_all, tma, turn_of

store = lesson("03_ring").store
TILE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))


@jit
def load(tiles, x_desc):
    end = tiles.producer()
    for row in range(0, x_desc.shape[0], 64):
        slot, end = end.acquire()
        tma.load(slot, (x_desc, x_desc), ([row, 0], [row, 64]))


@jit
def double(tiles, turns, x_desc, out_ptr, ROLE: gl.constexpr):
    end, turn = tiles.consumer(), turn_of(turns, ROLE, True)
    slot, end = end.acquire()
    for row in range(0, x_desc.shape[0], 64):
        turn = turn.take()
        x = slot.part(ROLE).load(TILE)
        slot.release_accessed()
        if row + 64 < x_desc.shape[0]:
            slot, end = end.acquire()
        turn.pass_on()
        store(out_ptr, row, ROLE * 64, x_desc.shape[1], 2 * x)


@jit
def kernel(x_desc, out_ptr):
    tiles = SharedMemoryChannel.alloc((x_desc, x_desc), SLOTS=1, CONSUMERS=2)
    turns = SignalChannel.alloc(SIGNALS=2)
    init_all((tiles, turns))
    gl.warp_specialize(
        [
            (double, (tiles, turns, x_desc, out_ptr, 0)),
            (double, (tiles, turns, x_desc, out_ptr, 1)),
            (load, (tiles, x_desc)),
        ],
        [4, 1],
        [64, 24],
    )
    close_all((tiles, turns))


def run() -> None:
    x, out = torch.randn(256, 128), torch.full((256, 128), float("nan"))
    kernel[(1,)](descriptor(x, [64, 64]), out)
    assert torch.equal(out, 2 * x)


if __name__ == "__main__":
    exercise(run)
