"""Two CTAs that share a load: multicast and the handover barrier by hand; then attention on two CTAs."""

import math

import torch
from course import broken, check, descriptor, lesson, normal
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import cluster, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.language.nvidia.hopper import tma as copy

store, attention = lesson("03_ring").store, lesson("05_turns").attention


@jit
def load(a_desc, b_desc, a, b, filled, freed, handover, SLOTS: gl.constexpr, HANDOVER: gl.constexpr):
    row, column = gl.program_id(0) * a_desc.block_shape[0], gl.program_id(1) * b_desc.block_shape[0]
    DEPTH: gl.constexpr = a_desc.block_shape[1]
    for step in range(a_desc.shape[1] // DEPTH):
        slot, lap = step % SLOTS, step // SLOTS
        mbarrier.wait(freed.index(slot), (lap & 1) ^ 1)
        if HANDOVER:
            mbarrier.arrive(handover.index(slot))
            mbarrier.wait(handover.index(slot), lap & 1)
        mbarrier.expect(filled.index(slot), a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
        copy.async_load(a_desc, [row, step * DEPTH], filled.index(slot), a.index(slot))
        copy.async_load(b_desc, [column, step * DEPTH], filled.index(slot), b.index(slot), multicast=True)


@jit
def multiply(a_desc, b_desc, c_ptr, a, b, filled, freed, SLOTS: gl.constexpr):
    ROWS: gl.constexpr = a_desc.block_shape[0]
    COLUMNS: gl.constexpr = b_desc.block_shape[0]
    CGA: gl.constexpr = a_desc.layout.cga_layout
    ACCUMULATOR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16], CGA)
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, ACCUMULATOR)
    for step in range(a_desc.shape[1] // a_desc.block_shape[1]):
        slot, lap = step % SLOTS, step // SLOTS
        mbarrier.wait(filled.index(slot), lap & 1)
        acc = warpgroup_mma(a.index(slot), b.index(slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(freed.index(slot))
    store(c_ptr, gl.program_id(0) * ROWS, gl.program_id(1) * COLUMNS, b_desc.shape[0], acc)


@jit
def gemm(a_desc, b_desc, c_ptr, SLOTS: gl.constexpr, HANDOVER: gl.constexpr):
    a = gl.allocate_shared_memory(a_desc.dtype, [SLOTS] + a_desc.block_shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [SLOTS] + b_desc.block_shape, b_desc.layout)
    filled, freed = mbarrier.allocate_mbarrier(batch=SLOTS), mbarrier.allocate_mbarrier(batch=SLOTS)
    handover = mbarrier.allocate_mbarrier(batch=SLOTS, two_ctas=True)
    for i in gl.static_range(SLOTS):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(freed.index(i), count=1)
        mbarrier.init(handover.index(i), count=1)
    cluster.barrier()
    gl.warp_specialize(
        [
            (multiply, (a_desc, b_desc, c_ptr, a, b, filled, freed, SLOTS)),
            (load, (a_desc, b_desc, a, b, filled, freed, handover, SLOTS, HANDOVER)),
        ],
        [1],
        [24],
    )
    cluster.barrier()
    for i in gl.static_range(SLOTS):
        mbarrier.invalidate(filled.index(i))
        mbarrier.invalidate(freed.index(i))
        mbarrier.invalidate(handover.index(i))


def run(q, k, v, out, heads: int = 1) -> None:
    """q, k, v, out: [heads * length, D] in bf16; length: a multiple of 256."""
    length, d = len(q) // heads, q.shape[1]
    q_desc, out_desc = (descriptor(t, [128, d], [[1, 0]]) for t in (q, out))
    k_desc, v_desc = (descriptor(t, [128, d], [[0, 0]]) for t in (k, v))
    arguments = q_desc, k_desc, v_desc, out_desc, out, length, d**-0.5 * math.log2(math.e)
    attention[(length // 256, heads)](*arguments, TURNS=True, WAY="tma", num_ctas=2)


def checked() -> None:
    q, k, v = normal(3, 512, 64)
    out = torch.full_like(q, float("nan"))
    run(q, k, v, out)
    want = torch.softmax(q.float() @ k.float().T * 64**-0.5, 1) @ v.float()
    torch.testing.assert_close(out.float(), want, atol=2e-2, rtol=2e-2)


def checked_gemm(handover: bool = True) -> None:
    a, b, c = normal(128, 320), normal(64, 320, seed=1), torch.full((128, 64), float("nan"))
    a_desc, b_desc = descriptor(a, [128, 64], [[1, 0]]), descriptor(b, [64, 64], [[0, 0]])
    gemm[(1, 1)](a_desc, b_desc, c, SLOTS=2, HANDOVER=handover, num_ctas=2)
    torch.testing.assert_close(c, a.float() @ b.float().T, atol=1e-3, rtol=1e-3)


def main() -> None:
    check(checked_gemm, "GEMM on two CTAs")
    check(checked, "attention on two CTAs")
    broken(lambda: checked_gemm(handover=False), "no handover")


if __name__ == "__main__":
    main()
