"""Lesson 10, the exercise's solution: a fused MLP, out = relu(X W1ᵀ) W2ᵀ, whose hidden layer is never in memory.

python docs/learn/solution_mlp.py
"""

import torch
from course import check, descriptor, normal
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from channels import SharedMemoryChannel, close_all, init_all, tma

ROLES = gl.constexpr(2)  # consumers, each with 64 rows of X


@jit
def load(inputs, first, second, x_desc, w1_desc, w2_desc):
    """One warp: X once; then a block of W1's rows and of W2's columns for each block of hidden units."""
    row = gl.program_id(0) * ROLES * x_desc.block_shape[0]
    x, _ = inputs.producer().acquire()
    tma.load(x, (x_desc, x_desc), ([row, 0], [row + x_desc.block_shape[0], 0]))
    first, second = first.producer(), second.producer()
    for hidden in range(0, w1_desc.shape[0], w1_desc.block_shape[0]):
        w1, first = first.acquire()
        tma.load(w1, w1_desc, [hidden, 0])
        w2, second = second.acquire()
        tma.load(w2, w2_desc, [0, hidden])


@jit
def issue(x, w1, HIDDEN: gl.constexpr):
    """The first product of a block: [64, hidden units] fp32, to be waited for."""
    units = gl.zeros([x.shape[0], w1.shape[0]], gl.float32, HIDDEN)
    return warpgroup_mma(x, w1.permute((1, 0)), units, use_acc=False, is_async=True)


@jit
def activated(units, dtype: gl.constexpr, LEFT: gl.constexpr):
    return gl.convert_layout(gl.maximum(units, 0.0).to(dtype), LEFT)


@jit
def multiply(inputs, first, second, staged, w1_desc, out_desc, ROLE: gl.constexpr):
    """A warpgroup. The next first product is issued before the second one of this block, as in lesson 5."""
    UNITS: gl.constexpr = w1_desc.block_shape[0]
    COLUMNS: gl.constexpr = out_desc.block_shape[1]
    HIDDEN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, UNITS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    slot, _ = inputs.consumer().acquire()
    x = slot.part(ROLE)
    first, second = first.consumer(), second.consumer()
    acc = gl.zeros([x.shape[0], COLUMNS], gl.float32, OUT)

    w1, first = first.acquire()
    units = warpgroup_mma_wait(0, deps=[issue(x, w1.part(0), HIDDEN)])
    w1.release()
    left = activated(units, out_desc.dtype, LEFT)
    for _ in range(UNITS, w1_desc.shape[0], UNITS):
        w1, first = first.acquire()
        units = issue(x, w1.part(0), HIDDEN)
        w2, second = second.acquire()
        acc = warpgroup_mma(left, w2.part(0).permute((1, 0)), acc, is_async=True)
        units = warpgroup_mma_wait(1, deps=[units])
        w1.release()
        following = activated(units, out_desc.dtype, LEFT)
        acc, _ = warpgroup_mma_wait(0, deps=[acc, left])
        w2.release()
        left = following
    w2, second = second.acquire()
    acc = warpgroup_mma(left, w2.part(0).permute((1, 0)), acc, is_async=True)
    acc, _ = warpgroup_mma_wait(0, deps=[acc, left])
    w2.release()

    tile = staged.index(ROLE)
    tile.store(acc.to(out_desc.dtype))
    tma.store_own(out_desc, [(gl.program_id(0) * ROLES + ROLE) * x.shape[0], 0], tile)
    tma.wait_stores_read()


@jit
def mlp(x_desc, w1_desc, w2_desc, out_desc):
    inputs = SharedMemoryChannel.alloc((x_desc, x_desc), SLOTS=1, CONSUMERS=ROLES)
    first = SharedMemoryChannel.alloc(w1_desc, SLOTS=2, CONSUMERS=ROLES)
    second = SharedMemoryChannel.alloc(w2_desc, SLOTS=2, CONSUMERS=ROLES)
    staged = gl.allocate_shared_memory(out_desc.dtype, [ROLES] + out_desc.block_shape, out_desc.layout)
    init_all((inputs, first, second))
    gl.warp_specialize(
        [
            (multiply, (inputs, first, second, staged, w1_desc, out_desc, 0)),
            (multiply, (inputs, first, second, staged, w1_desc, out_desc, 1)),
            (load, (inputs, first, second, x_desc, w1_desc, w2_desc)),
        ],
        [4, 1],
        [240, 24],
    )
    close_all((inputs, first, second))


def run(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, out: torch.Tensor) -> None:
    """x: [rows, D]; w1: [hidden, D]; w2: [columns, hidden]; out: [rows, columns]; bf16.

    rows: a multiple of 128; hidden: of 64; D and columns: 64 or 128, as all of them lie in a tile.
    """
    columns, units = out.shape[1], 64
    blocks = ((x, [64, x.shape[1]]), (w1, [units, x.shape[1]]), (w2, [columns, units]), (out, [64, columns]))
    mlp[(len(x) // 128,)](*(descriptor(t, block) for t, block in blocks))


def checked() -> None:
    x, w1, w2 = normal(256, 64), normal(256, 64, seed=1), normal(128, 256, seed=2)
    out = torch.full((256, 128), float("nan"), dtype=torch.bfloat16)
    run(x, w1, w2, out)
    want = torch.relu(x.float() @ w1.float().T) @ w2.float().T
    torch.testing.assert_close(out.float(), want, atol=0.02 * want.abs().max().item(), rtol=0)


def main() -> None:
    check(checked, "a fused MLP")


if __name__ == "__main__":
    main()
