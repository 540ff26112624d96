"""C = A Bᵀ on Hopper: one role loads A and B into one slot, two warpgroups multiply, TMA stores.

A slot has three unlike parts, filled and freed together: A's rows for each of the two consumers, and a tile of B.

    python docs/channels/3_gemm_hopper.py
"""

import torch
from host import compare, descriptor, device, integers, machine
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from channels import SharedMemoryChannel, close_all, init_all, tma

TARGET = "sm_90a"
ROLES = gl.constexpr(2)  # warpgroups that multiply
ROWS, COLUMNS, DEPTH = 64, 128, 64  # of each one's tile of C; and how much of K a slot holds


@jit
def load(operands, a_desc, b_desc, row, column):
    ROWS: gl.constexpr = a_desc.block_shape[0]
    DEPTH: gl.constexpr = a_desc.block_shape[1]
    end = operands.producer()
    for k in range(0, a_desc.shape[1], DEPTH):
        slot, end = end.acquire()
        tma.load(slot, (a_desc, a_desc, b_desc), ([row, k], [row + ROWS, k], [column, k]))


@jit
def multiply(operands, staged, a_desc, c_desc, row, column, ROLE: gl.constexpr):
    """Computes and stores ROWS x COLUMNS of C."""
    ROWS: gl.constexpr = c_desc.block_shape[0]
    COLUMNS: gl.constexpr = c_desc.block_shape[1]
    DEPTH: gl.constexpr = a_desc.block_shape[1]
    # Warps of one warpgroup below each other; products of 16 rows a warp, 16 deep.
    ACCUMULATOR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    end = operands.consumer()
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, ACCUMULATOR)
    for _ in range(0, a_desc.shape[1], DEPTH):
        slot, end = end.acquire()
        a, b = slot.part(ROLE), slot.part(ROLES)
        acc = warpgroup_mma(a, b.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        slot.release()  # the tensor cores have read it, and that was waited for: no fence needed

    tile = staged.index(ROLE)
    tile.store(acc.to(c_desc.dtype))
    tma.store_own(c_desc, [row + ROLE * ROWS, column], tile)
    tma.wait_stores_read()  # before the role ends: the tile must not go away while the copy reads it


@jit
def gemm(a_desc, b_desc, c_desc, SLOTS: gl.constexpr):
    row = gl.program_id(0) * ROLES * c_desc.block_shape[0]
    column = gl.program_id(1) * c_desc.block_shape[1]
    operands = SharedMemoryChannel.alloc((a_desc, a_desc, b_desc), SLOTS=SLOTS, CONSUMERS=ROLES)
    staged = gl.allocate_shared_memory(c_desc.dtype, [ROLES] + c_desc.block_shape, c_desc.layout)
    init_all((operands,))
    gl.warp_specialize(
        [
            (multiply, (operands, staged, a_desc, c_desc, row, column, 0)),
            (multiply, (operands, staged, a_desc, c_desc, row, column, 1)),
            (load, (operands, a_desc, b_desc, row, column)),
        ],
        [4, 1],
        [232, 40],
    )
    close_all((operands,))


def main():
    M, N, K = 256, 256, 320
    a, b = integers(M, K, target=TARGET), integers(N, K, target=TARGET)
    c = torch.full((M, N), float("nan"), dtype=torch.bfloat16, device=device(TARGET))
    a_desc, b_desc = descriptor(a, [ROWS, DEPTH]), descriptor(b, [COLUMNS, DEPTH])
    with machine(TARGET):
        gemm[(M // (2 * ROWS), N // COLUMNS)](a_desc, b_desc, descriptor(c, [ROWS, COLUMNS]), SLOTS=3)
    compare(c, a.float() @ b.float().T)


if __name__ == "__main__":
    main()
