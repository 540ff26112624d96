"""C = A Bᵀ on Blackwell: pairs of CTAs, whose lead issues the products of both; persistent, two accumulators.

While the epilogue takes one tile's accumulator out of tensor memory, the products of the next tile go into the other.

    python docs/channels/4_gemm_blackwell_pair.py
"""

import torch
from host import compare, descriptor, device, integers, machine
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, tcgen05_mma

from channels import SharedMemoryChannel, TensorMemoryChannel, close_all, init_all, tma

TARGET = "sm_100a"
ROWS, COLUMNS, DEPTH = 256, 128, 64  # of a pair's tile of C; and how much of K a slot holds
HALF_OF_THE_ROWS = [[1, 0]]  # to each CTA of a pair


@jit
def place(tile, c_desc):
    """(first row, first column) of a tile, by its number."""
    columns = c_desc.shape[1] // c_desc.block_shape[1]
    return tile // columns * c_desc.block_shape[0], tile % columns * c_desc.block_shape[1]


@jit
def load(operands, a_desc, b_desc, c_desc, tiles):
    DEPTH: gl.constexpr = a_desc.block_shape[1]
    end = operands.producer()
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = place(tile, c_desc)
        for k in range(0, a_desc.shape[1], DEPTH):
            slot, end = end.acquire()
            tma.load(slot, (a_desc, b_desc), ([row, k], [column, k]))
    end.drain()  # the tensor cores free the last slots; their arrivals must find the barriers alive


@jit
def multiply(operands, accumulators, a_desc, tiles):
    """Issues the products; of a pair only the lead's does."""
    DEPTH: gl.constexpr = a_desc.block_shape[1]
    end, accumulators = operands.consumer(), accumulators.producer()
    for _ in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc, accumulators = accumulators.acquire()
        for k in range(0, a_desc.shape[1], DEPTH):
            slot, end = end.acquire()
            tcgen05_mma(slot.part(0), slot.part(1).permute((1, 0)), acc.memory, use_acc=k > 0)
            slot.release_after_products()
        acc.publish_after_products()


@jit
def epilogue(accumulators, staged, c_desc, tiles):
    accumulators = accumulators.consumer()
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = place(tile, c_desc)
        acc, accumulators = accumulators.acquire()
        values = acc.memory.load()
        acc.release()  # the next products may overwrite it, while this role stores
        tma.wait_stores_read()  # the last tile's
        staged.store(values.to(c_desc.dtype))
        tma.store_own(c_desc, [row, column], staged)
    tma.wait_stores_read()


@jit
def gemm(a_desc, b_desc, c_desc, tiles, SLOTS: gl.constexpr):
    COLUMNS: gl.constexpr = c_desc.block_shape[1]
    ACCUMULATOR: gl.constexpr = TensorMemoryLayout((128, COLUMNS), col_stride=1, cga_layout=[[1, 0]], two_ctas=True)
    operands = SharedMemoryChannel.alloc((a_desc, b_desc), SLOTS=SLOTS, CONSUMERS=0, TWO_CTAS=True)
    accumulators = TensorMemoryChannel.alloc(gl.float32, c_desc.block_shape, ACCUMULATOR, SLOTS=2)
    staged = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_shape, c_desc.layout)
    init_all((operands, accumulators))
    gl.warp_specialize(
        [
            (epilogue, (accumulators, staged, c_desc, tiles)),
            (multiply, (operands, accumulators, a_desc, tiles)),
            (load, (operands, a_desc, b_desc, c_desc, tiles)),
        ],
        [1, 1],
        [24, 24],
    )
    close_all((operands, accumulators))


def main():
    M, N, K = 512, 384, 192
    a, b = integers(M, K, target=TARGET), integers(N, K, target=TARGET)
    c = torch.full((M, N), float("nan"), dtype=torch.bfloat16, device=device(TARGET))
    a_desc = descriptor(a, [ROWS, DEPTH], HALF_OF_THE_ROWS)
    b_desc = descriptor(b, [COLUMNS, DEPTH], HALF_OF_THE_ROWS)
    c_desc = descriptor(c, [ROWS, COLUMNS], HALF_OF_THE_ROWS)
    tiles = (M // ROWS) * (N // COLUMNS)
    with machine(TARGET):
        gemm[(2,)](a_desc, b_desc, c_desc, tiles, SLOTS=3, num_ctas=2)  # two pairs, three tiles each
    compare(c, a.float() @ b.float().T)


if __name__ == "__main__":
    main()
