"""Causal attention by a persistent kernel: the order of work, and a table of settings."""

import math

import torch
from course import check, descriptor, lesson, normal
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from channels import SharedMemoryChannel, SignalChannel, close_all, init_all, tma, turn_of

Wires, softmax = lesson("05_turns").Wires, lesson("04_products").softmax


@jit
def place(item, items, heads, ORDER: gl.constexpr):
    blocks, programs = items // heads, gl.num_programs(0)
    if ORDER == "by head":
        head, block = item // blocks, item % blocks
    else:
        lap = item // programs
        turned = (2 * lap + 1) * programs - 1 - item
        if ORDER == "snake":
            item = gl.where((lap % 2 == 1) & ((lap + 1) * programs <= items), turned, item)
        head, block = item % heads, blocks - 1 - item // heads
    return head, block


@jit
def load(wires, q_desc, k_desc, v_desc, length, heads, items, ORDER: gl.constexpr):
    queries, keys, values = wires.queries.producer(), wires.keys.producer(), wires.values.producer()
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head, block = place(item, items, heads, ORDER)
        row = head * length + block * k_desc.block_shape[0]
        q, queries = queries.acquire()
        tma.load(q, (q_desc, q_desc), ([row, 0], [row + q_desc.block_shape[0], 0]))
        for step in range(block + 1):
            k, keys = keys.acquire()
            tma.load(k, k_desc, [row - step * k_desc.block_shape[0], 0])
            v, values = values.acquire()
            tma.load(v, v_desc, [row - step * k_desc.block_shape[0], 0])


@jit
def attend(wires, out_desc, length, heads, items, scale_log2, ROLE: gl.constexpr, ORDER: gl.constexpr):
    ROWS: gl.constexpr = out_desc.block_shape[0]
    KEYS: gl.constexpr = wires.keys.tiles[0].shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, out_desc.block_shape[1], 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    queries, turn = wires.queries.consumer(), turn_of(wires.turns, ROLE, True)
    keys, values, staged = wires.keys.consumer(), wires.values.consumer(), wires.output.index(ROLE)
    rows = ROLE * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    hidden = rows[:, None] < gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))[None, :]
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head, block = place(item, items, heads, ORDER)
        slot, queries = queries.acquire()
        acc = gl.zeros([ROWS, out_desc.block_shape[1]], gl.float32, OUT)
        high = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
        k, keys = keys.acquire()
        scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
        scores = warpgroup_mma(slot.part(ROLE), k.part(0).permute((1, 0)), scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        k.release()
        scores = gl.where(hidden, -float("inf"), scores * scale_log2)
        p, _, high, total = softmax(scores, high, total)
        p = gl.convert_layout(p.to(out_desc.dtype), LEFT)
        for _ in range(block):
            k, keys = keys.acquire()
            turn = turn.take()
            scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
            scores = warpgroup_mma(slot.part(ROLE), k.part(0).permute((1, 0)), scores, use_acc=False, is_async=True)
            v, values = values.acquire()
            acc = warpgroup_mma(p, v.part(0), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            turn.pass_on()
            k.release()
            next_p, factor, high, total = softmax(scores * scale_log2, high, total)
            acc, _ = warpgroup_mma_wait(0, deps=[acc, p])
            v.release()
            acc *= gl.convert_layout(factor, gl.SliceLayout(1, OUT))[:, None]
            p = gl.convert_layout(next_p.to(out_desc.dtype), LEFT)
        slot.release()
        v, values = values.acquire()
        acc = warpgroup_mma(p, v.part(0), acc, is_async=True)
        acc, _ = warpgroup_mma_wait(0, deps=[acc, p])
        v.release()
        tma.wait_stores_read()
        staged.store((acc / gl.convert_layout(total, gl.SliceLayout(1, OUT))[:, None]).to(out_desc.dtype))
        tma.store_own(out_desc, [head * length + (block * 2 + ROLE) * ROWS, 0], staged)
    tma.wait_stores_read()


@jit
def causal(q_desc, k_desc, v_desc, out_desc, length, heads, scale_log2, ORDER: gl.constexpr):
    wires = Wires(
        queries=SharedMemoryChannel.alloc((q_desc, q_desc), SLOTS=1, CONSUMERS=2),
        keys=SharedMemoryChannel.alloc(k_desc, SLOTS=2, CONSUMERS=2),
        values=SharedMemoryChannel.alloc(v_desc, SLOTS=2, CONSUMERS=2),
        turns=SignalChannel.alloc(SIGNALS=2),
        output=gl.allocate_shared_memory(out_desc.dtype, [2] + out_desc.block_shape, out_desc.layout),
    )
    channels = (wires.queries, wires.keys, wires.values, wires.turns)
    init_all(channels)
    items = length // k_desc.block_shape[0] * heads
    gl.warp_specialize(
        [
            (attend, (wires, out_desc, length, heads, items, scale_log2, 0, ORDER)),
            (attend, (wires, out_desc, length, heads, items, scale_log2, 1, ORDER)),
            (load, (wires, q_desc, k_desc, v_desc, length, heads, items, ORDER)),
        ],
        [4, 1],
        [240, 24],
    )
    close_all(channels)


TABLE = ((0, "by head"), (2048, "snake"))  # (from length, order)


def pick(length: int) -> str:
    return [order for first, order in TABLE if first <= length][-1]


def run(q, k, v, out, heads: int = 1, programs: int = 2, order: str = "") -> None:
    """q, k, v, out: [heads * length, D] in bf16; length: a multiple of 128. programs: 0 for one to each item."""
    length, d = len(q) // heads, q.shape[1]
    descs = (descriptor(t, [rows, d]) for t, rows in ((q, 64), (k, 128), (v, 128), (out, 64)))
    items, order = length // 128 * heads, order or pick(length)
    causal[(min(programs or items, items),)](*descs, length, heads, d**-0.5 * math.log2(math.e), ORDER=order)


def checked(programs: int, order: str) -> None:
    q, k, v = normal(3, 3 * 384, 64)
    out = torch.full_like(q, float("nan"))
    run(q, k, v, out, heads=3, programs=programs, order=order)
    q, k, v, out = (t.view(1, 3, 384, 64).float() for t in (q, k, v, out))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)


def main() -> None:
    for programs, order in ((0, "by head"), (2, "by head"), (2, "longest first"), (2, "snake")):
        check(lambda programs=programs, order=order: checked(programs, order), f"{programs or 9} programs, {order}")


if __name__ == "__main__":
    main()
