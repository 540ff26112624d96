"""Lesson 2: copies four tiles. It is broken in two places.

python docs/learn/exercise_02.py
"""

import torch
from course import descriptor, exercise
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@jit
def copy(x_desc, out_desc):
    tiles = gl.allocate_shared_memory(x_desc.dtype, [2] + x_desc.block_shape, x_desc.layout)
    filled = mbarrier.allocate_mbarrier()
    mbarrier.init(filled, count=2)
    for step in range(4):
        tma.store_wait(1)
        tile = tiles.index(step % 2)
        mbarrier.expect(filled, tile.nbytes_per_cta)
        tma.async_load(x_desc, [step * 64, 0], filled, tile)
        mbarrier.wait(filled, step & 1)
        tma.async_store(out_desc, [step * 64, 0], tile)
    mbarrier.invalidate(filled)


def run() -> None:
    x, out = torch.randn(256, 64), torch.full((256, 64), float("nan"))
    copy[(1,)](descriptor(x, [64, 64]), descriptor(out, [64, 64]))
    assert torch.equal(out, x)


if __name__ == "__main__":
    exercise(run)
