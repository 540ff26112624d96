"""GEMM on Hopper; then two products with something elementwise between them, which may be softmax: attention."""

import math

import torch
from course import broken, check, descriptor, lesson, normal
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from channels import SharedMemoryChannel, close_all, init_all, tma

store = lesson("03_ring").store


@jit
def load_operands(operands, a_desc, b_desc):
    row, column = gl.program_id(0) * a_desc.block_shape[0], gl.program_id(1) * b_desc.block_shape[0]
    end = operands.producer()
    for k in range(0, a_desc.shape[1], a_desc.block_shape[1]):
        slot, end = end.acquire()
        tma.load(slot, (a_desc, b_desc), ([row, k], [column, k]))


@jit
def multiply(operands, a_desc, b_desc, c_ptr, EARLY: gl.constexpr):
    COLUMNS: gl.constexpr = b_desc.block_shape[0]
    ACCUMULATOR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    end = operands.consumer()
    acc = gl.zeros([a_desc.block_shape[0], COLUMNS], gl.float32, ACCUMULATOR)
    for _ in range(0, a_desc.shape[1], a_desc.block_shape[1]):
        slot, end = end.acquire()
        acc = warpgroup_mma(slot.part(0), slot.part(1).permute((1, 0)), acc, is_async=True)
        if EARLY:
            slot.release()
        acc = warpgroup_mma_wait(0, deps=[acc])
        if not EARLY:
            slot.release()
    store(c_ptr, gl.program_id(0) * a_desc.block_shape[0], gl.program_id(1) * COLUMNS, b_desc.shape[0], acc)


@jit
def gemm(a_desc, b_desc, c_ptr, EARLY: gl.constexpr = False):
    operands = SharedMemoryChannel.alloc((a_desc, b_desc), SLOTS=3, CONSUMERS=1)
    init_all((operands,))
    gl.warp_specialize(
        [(multiply, (operands, a_desc, b_desc, c_ptr, EARLY)), (load_operands, (operands, a_desc, b_desc))], [1], [24]
    )
    close_all((operands,))


@jit
def relu(scores, high, total):
    return gl.maximum(scores, 0.0), total * 0 + 1, high, total + gl.sum(gl.maximum(scores, 0.0), axis=1)


@jit
def softmax(scores, high, total):
    new_high = gl.maximum(high, gl.max(scores, axis=1))
    factor = gl.exp2(high - new_high)
    p = gl.exp2(scores - new_high[:, None])
    return p, factor, new_high, factor * total + gl.sum(p, axis=1)


@jit
def load(queries, keys_values, q_desc, k_desc, v_desc, length):
    q, _ = queries.producer().acquire()
    head = gl.program_id(1) * length
    tma.load(q, q_desc, [head + gl.program_id(0) * q_desc.block_shape[0], 0])
    end = keys_values.producer()
    for key in range(0, length, k_desc.block_shape[0]):
        slot, end = end.acquire()
        tma.load(slot, (k_desc, v_desc), ([head + key, 0], [head + key, 0]))


@jit
def attend(queries, keys_values, out_ptr, length, scale_log2, BETWEEN: gl.constexpr):
    ROWS: gl.constexpr = queries.tiles[0].shape[1]
    KEYS: gl.constexpr = keys_values.tiles[0].shape[1]
    D: gl.constexpr = keys_values.tiles[0].shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    q, _ = queries.consumer().acquire()
    end = keys_values.consumer()
    acc = gl.zeros([ROWS, D], gl.float32, OUT)
    high = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    for _ in range(0, length, KEYS):
        slot, end = end.acquire()
        scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
        scores = warpgroup_mma(q.part(0), slot.part(0).permute((1, 0)), scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        p, factor, high, total = BETWEEN(scores * scale_log2, high, total)
        acc *= gl.convert_layout(factor, gl.SliceLayout(1, OUT))[:, None]
        p = gl.convert_layout(p.to(out_ptr.dtype.element_ty), gl.DotOperandLayout(0, OUT, 2))
        acc = warpgroup_mma(p, slot.part(1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        slot.release()
    total = gl.convert_layout(total, gl.SliceLayout(1, OUT))
    store(out_ptr, gl.program_id(1) * length + gl.program_id(0) * ROWS, 0, D, acc / total[:, None])


@jit
def attention(q_desc, k_desc, v_desc, out_ptr, length, scale_log2, BETWEEN: gl.constexpr):
    queries = SharedMemoryChannel.alloc(q_desc, SLOTS=1, CONSUMERS=1)
    keys_values = SharedMemoryChannel.alloc((k_desc, v_desc), SLOTS=2, CONSUMERS=1)
    init_all((queries, keys_values))
    gl.warp_specialize(
        [
            (attend, (queries, keys_values, out_ptr, length, scale_log2, BETWEEN)),
            (load, (queries, keys_values, q_desc, k_desc, v_desc, length)),
        ],
        [1],
        [24],
    )
    close_all((queries, keys_values))


def run(q, k, v, out, heads: int = 1, between=softmax) -> None:
    """q, k, v, out: [heads * length, D] in bf16; length: a multiple of 128."""
    length, d = len(q) // heads, q.shape[1]
    descs = descriptor(q, [64, d]), descriptor(k, [128, d]), descriptor(v, [128, d])
    attention[(length // 64, heads)](*descs, out, length, d**-0.5 * math.log2(math.e), BETWEEN=between)


def checked(between=softmax) -> None:
    q, k, v = normal(3, 2 * 256, 64)
    out = torch.full_like(q, float("nan"))
    run(q, k, v, out, heads=2, between=between)
    q, k, v, out = (t.view(2, 256, 64).float() for t in (q, k, v, out))
    scores = q @ k.mT * 64**-0.5
    p = torch.softmax(scores, 2) if between is softmax else torch.relu(scores)
    torch.testing.assert_close(out, p / p.sum(2, keepdim=True) @ v, atol=2e-2, rtol=2e-2)


def checked_gemm(early: bool = False) -> None:
    a, b, c = normal(128, 320), normal(256, 320, seed=1), torch.full((128, 256), float("nan"))
    gemm[(2, 2)](descriptor(a, [64, 64]), descriptor(b, [128, 64]), c, EARLY=early)
    torch.testing.assert_close(c, a.float() @ b.float().T, atol=1e-3, rtol=1e-3)


def main() -> None:
    check(checked_gemm, "GEMM")
    check(lambda: checked(relu), "GEMM, relu, GEMM")
    check(checked, "attention")
    broken(lambda: checked_gemm(early=True), "a slot is freed before its product is done")


if __name__ == "__main__":
    main()
