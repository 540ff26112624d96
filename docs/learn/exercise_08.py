"""Lesson 8: C = A Bᵀ by a pair of CTAs on Blackwell. It is broken in two places.

python docs/learn/exercise_08.py
"""

import torch
from course import descriptor, exercise, lesson, normal
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, tcgen05_mma

from channels import SharedMemoryChannel, TensorMemoryChannel, close_all, init_all, tma

TARGET = "sm_100a"
store = lesson("03_ring").store
ACCUMULATOR = gl.constexpr(TensorMemoryLayout((128, 64), 1, cga_layout=[[1, 0]], two_ctas=True))


@jit
def load(operands, a_desc, b_desc):
    end = operands.producer()
    for k in range(0, a_desc.shape[1], 64):
        slot, end = end.acquire()
        tma.load(slot, (a_desc, b_desc), ([0, k], [0, k]))


@jit
def multiply(operands, sums, a_desc):
    end = operands.consumer()
    acc, _ = sums.producer().acquire()
    for k in range(0, a_desc.shape[1], 64):
        slot, end = end.acquire()
        tcgen05_mma(slot.part(0), slot.part(1).permute((1, 0)), acc.memory, use_acc=k > 0)
        slot.release()
    acc.publish_after_products()


@jit
def keep(sums, c_ptr):
    acc, _ = sums.consumer().acquire()
    store(c_ptr, 0, 0, 64, acc.memory.load())


@jit
def gemm(a_desc, b_desc, c_ptr):
    operands = SharedMemoryChannel.alloc((a_desc, b_desc), SLOTS=2, CONSUMERS=0)
    sums = TensorMemoryChannel.alloc(gl.float32, [256, 64], ACCUMULATOR)
    init_all((operands, sums))
    gl.warp_specialize(
        [(keep, (sums, c_ptr)), (multiply, (operands, sums, a_desc)), (load, (operands, a_desc, b_desc))],
        [1, 1],
        [24, 24],
    )
    close_all((operands, sums))


def run() -> None:
    a, b, c = normal(256, 320), normal(64, 320, seed=1), torch.full((256, 64), float("nan"))
    gemm[(1,)](descriptor(a, [256, 64], [[1, 0]]), descriptor(b, [64, 64], [[1, 0]]), c, num_ctas=2)
    torch.testing.assert_close(c, a.float() @ b.float().T, atol=1e-3, rtol=1e-3)


if __name__ == "__main__":
    exercise(run, target=TARGET)
