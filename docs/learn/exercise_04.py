"""Lesson 4: C = A Bᵀ. It is broken in two places: it hangs, and then it gives wrong numbers.

python docs/learn/exercise_04.py
"""

import torch
from course import descriptor, exercise, lesson, normal
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from channels import SharedMemoryChannel, close_all, init_all, tma

store = lesson("03_ring").store
ACCUMULATOR = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@jit
def load(operands, a_desc, b_desc):
    end = operands.producer()
    for k in range(0, a_desc.shape[1], 64):
        slot, end = end.acquire()
        tma.load(slot, (a_desc, b_desc), ([0, k], [0, k]))


@jit
def multiply(operands, a_desc, c_ptr):
    end = operands.consumer()
    acc = gl.zeros([64, 64], gl.float32, ACCUMULATOR)
    for _ in range(0, a_desc.shape[1], 64):
        slot, end = end.acquire()
        acc = warpgroup_mma(slot.part(0), slot.part(1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        slot.publish()
    store(c_ptr, 0, 0, 64, acc)


@jit
def gemm(a_desc, b_desc, c_ptr):
    operands = SharedMemoryChannel.alloc((a_desc, b_desc), SLOTS=2, CONSUMERS=1)
    init_all((operands,))
    gl.warp_specialize([(multiply, (operands, a_desc, c_ptr)), (load, (operands, a_desc, b_desc))], [1], [24])
    close_all((operands,))


def run() -> None:
    a, b, c = normal(64, 320), normal(64, 320, seed=1), torch.full((64, 64), float("nan"))
    gemm[(1,)](descriptor(a, [64, 64]), descriptor(b, [64, 64]), c)
    torch.testing.assert_close(c, a.float() @ b.float().T, atol=1e-3, rtol=1e-3)


if __name__ == "__main__":
    exercise(run)
