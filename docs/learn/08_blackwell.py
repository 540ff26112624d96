"""Attention on Blackwell: roles that load, multiply, compute softmax and correct; on one CTA, two and four."""

import math

import torch
from course import check, descriptor, lesson, normal
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, tcgen05_mma

from channels import SharedMemoryChannel, TensorMemoryChannel, close_all, init_all, tma

TARGET = "sm_100a"
softmax = lesson("04_products").softmax


@jit
def weights_in(scores, dtype: gl.constexpr):
    return scores.slice(0, scores.shape[1] // 2).reinterpret(dtype, scores.shape, scores.layout)


@jit
def load(queries, keys, values, q_desc, k_desc, v_desc, length):
    head = gl.program_id(1) * length
    q, _ = queries.producer().acquire()
    tma.load(q, q_desc, [head + gl.program_id(0) * q_desc.block_shape[0], 0])
    keys, values = keys.producer(), values.producer()
    for key in range(head, head + length, k_desc.block_shape[0]):
        k, keys = keys.acquire()
        tma.load(k, k_desc, [key, 0])
        v, values = values.acquire()
        tma.load(v, v_desc, [key, 0])
    keys.drain()
    values.drain()


@jit
def multiply(queries, keys, values, scores, outputs, steps):
    q, _ = queries.consumer().acquire()
    keys, values, scores, outputs = keys.consumer(), values.consumer(), scores.producer(), outputs.producer()
    for step in range(steps + 2):
        s, scores = scores.acquire()
        if step >= 2:
            out, outputs = outputs.acquire()
            v, values = values.acquire()
            tcgen05_mma(weights_in(s.memory, v.part(0).dtype), v.part(0), out.memory, use_acc=step > 2)
            v.release_after_products()
            out.publish_after_products()
        if step < steps:
            k, keys = keys.acquire()
            tcgen05_mma(q.part(0), k.part(0).permute((1, 0)), s.memory, use_acc=False)
            k.release_after_products()
            s.publish_after_products()


@jit
def weigh(scores, factors, dtype: gl.constexpr, steps, scale_log2):
    LAYOUT: gl.constexpr = scores.slot().memory.get_reg_layout()
    high = gl.full([scores.memory.shape[1]], -float("inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    total = gl.zeros([scores.memory.shape[1]], gl.float32, gl.SliceLayout(1, LAYOUT))
    scores, factors = scores.consumer(), factors.producer()
    for step in range(steps):
        s, scores = scores.acquire()
        p, factor, high, total = softmax(s.memory.load() * scale_log2, high, total)
        weights = weights_in(s.memory, dtype)
        weights.store(gl.convert_layout(p.to(dtype), weights.get_reg_layout()))
        s.release()
        if step > 0:
            f, factors = factors.acquire()
            f.part(0).store(factor)
            f.publish()
    f, factors = factors.acquire()
    f.part(0).store(1 / total)
    f.publish()


@jit
def correct(outputs, factors, staged, out_desc, row, steps):
    outputs, factors = outputs.consumer(), factors.consumer()
    for step in range(1, steps + 1):
        out, outputs = outputs.acquire()
        f, factors = factors.acquire()
        acc = out.memory.load()
        acc *= f.part(0).load(gl.SliceLayout(1, acc.type.layout))[:, None]
        f.release()
        if step < steps:
            out.memory.store(acc)
            out.release()
        else:
            staged.store(acc.to(out_desc.dtype))
    tma.store_own(out_desc, [row, 0], staged)
    tma.wait_stores_read()


@jit
def attention(q_desc, k_desc, v_desc, out_desc, length, scale_log2, LAYOUTS: gl.constexpr):
    PAIR: gl.constexpr = gl.num_ctas() > 1
    SHAPE: gl.constexpr = [q_desc.block_shape[0], k_desc.block_shape[0]]
    queries = SharedMemoryChannel.alloc(q_desc, SLOTS=1, CONSUMERS=0, TWO_CTAS=PAIR)
    keys = SharedMemoryChannel.alloc(k_desc, SLOTS=2, CONSUMERS=0, TWO_CTAS=PAIR, MULTICAST=gl.num_ctas() > 2)
    values = SharedMemoryChannel.alloc(v_desc, SLOTS=2, CONSUMERS=0, TWO_CTAS=PAIR, MULTICAST=gl.num_ctas() > 2)
    scores = TensorMemoryChannel.alloc(gl.float32, SHAPE, LAYOUTS[0], SLOTS=2)
    outputs = TensorMemoryChannel.alloc(gl.float32, out_desc.block_shape, LAYOUTS[1])
    numbers = gl.allocate_shared_memory(gl.float32, [2, SHAPE[0]], LAYOUTS[2])
    factors = SharedMemoryChannel.over(numbers, SLOTS=2, CONSUMERS=1)
    staged = gl.allocate_shared_memory(out_desc.dtype, out_desc.block_shape, out_desc.layout)
    channels = (queries, keys, values, scores, outputs, factors)
    init_all(channels)
    steps, row = length // SHAPE[1], gl.program_id(1) * length + gl.program_id(0) * SHAPE[0]
    gl.warp_specialize(
        [
            (weigh, (scores, factors, out_desc.dtype, steps, scale_log2)),
            (correct, (outputs, factors, staged, out_desc, row, steps)),
            (multiply, (queries, keys, values, scores, outputs, steps)),
            (load, (queries, keys, values, q_desc, k_desc, v_desc, length)),
        ],
        [4, 1, 1],
        [160, 24, 24],
    )
    close_all(channels)


HALVES = {1: ([], [], []), 2: ([[1, 0]], [[1, 0]], [[0, 1]])}
HALVES[4] = ([[1, 0], [2, 0]], [[1, 0], [0, 0]], [[0, 1], [0, 0]])


def run(q, k, v, out, heads: int = 1, ctas: int = 1) -> None:
    length, d, (of_q, of_k, of_v) = len(q) // heads, q.shape[1], HALVES[ctas]
    tiles = ((q, 128 * ctas, of_q), (k, 128, of_k), (v, 128, of_v), (out, 128 * ctas, of_q))
    descs = (descriptor(t, [rows, d], cga_layout) for t, rows, cga_layout in tiles)
    in_memory = (TensorMemoryLayout((128, n), 1, cga_layout=of_q, two_ctas=ctas > 1) for n in (128, d))
    layouts = (*in_memory, gl.SwizzledSharedLayout(1, 1, 1, [0], [[basis[0]] for basis in of_q]))
    attention[(length // (128 * ctas), heads)](*descs, length, d**-0.5 * math.log2(math.e), layouts, num_ctas=ctas)


def checked(ctas: int) -> None:
    q, k, v = normal(3, 512, 64)
    out = torch.full_like(q, float("nan"))
    run(q, k, v, out, ctas=ctas)
    want = torch.softmax(q.float() @ k.float().T * 64**-0.5, 1) @ v.float()
    torch.testing.assert_close(out.float(), want, atol=2e-2, rtol=2e-2)


def main() -> None:
    for ctas in HALVES:
        check(lambda ctas=ctas: checked(ctas), f"attention, CTAs: {ctas}", target=TARGET)


if __name__ == "__main__":
    main()
