"""Lesson 6: its GEMM on two CTAs, with two faults: one of order, one of lifetime.

python docs/learn/exercise_06.py
"""

import torch
from course import descriptor, exercise, lesson, normal
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import cluster, mbarrier, tma

multiply = lesson("06_two_ctas").multiply
SLOTS = gl.constexpr(2)


@jit
def load(a_desc, b_desc, a, b, filled, freed, handover):
    for step in range(a_desc.shape[1] // 64):
        slot, lap = step % SLOTS, step // SLOTS
        mbarrier.arrive(handover.index(slot))
        mbarrier.wait(handover.index(slot), lap & 1)
        mbarrier.wait(freed.index(slot), (lap & 1) ^ 1)
        mbarrier.expect(filled.index(slot), a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
        tma.async_load(a_desc, [0, step * 64], filled.index(slot), a.index(slot))
        tma.async_load(b_desc, [0, step * 64], filled.index(slot), b.index(slot), multicast=True)


@jit
def gemm(a_desc, b_desc, c_ptr):
    a = gl.allocate_shared_memory(a_desc.dtype, [SLOTS] + a_desc.block_shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [SLOTS] + b_desc.block_shape, b_desc.layout)
    filled, freed = mbarrier.allocate_mbarrier(batch=SLOTS), mbarrier.allocate_mbarrier(batch=SLOTS)
    handover = mbarrier.allocate_mbarrier(batch=SLOTS, two_ctas=True)
    ended = mbarrier.allocate_mbarrier(two_ctas=True)
    for i in gl.static_range(SLOTS):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(freed.index(i), count=1)
        mbarrier.init(handover.index(i), count=1)
    mbarrier.init(ended, count=1)
    cluster.barrier()
    gl.warp_specialize(
        [
            (multiply, (a_desc, b_desc, c_ptr, a, b, filled, freed, SLOTS)),
            (load, (a_desc, b_desc, a, b, filled, freed, handover)),
        ],
        [1],
        [24],
    )
    mbarrier.arrive(ended)  # tells the lead that this CTA has ended
    mbarrier.invalidate(ended)


def run() -> None:
    a, b, c = normal(128, 384), normal(64, 384, seed=1), torch.full((128, 64), float("nan"))
    gemm[(1, 1)](descriptor(a, [128, 64], [[1, 0]]), descriptor(b, [64, 64], [[0, 0]]), c, num_ctas=2)
    torch.testing.assert_close(c, a.float() @ b.float().T, atol=1e-3, rtol=1e-3)


if __name__ == "__main__":
    exercise(run)
