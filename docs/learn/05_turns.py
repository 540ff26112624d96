"""Attention by two consumers that take turns, exponentials beside products, and three ways to store."""

import math

import torch
from course import check, descriptor, lesson, normal
from triton.experimental.gluon import aggregate, jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from channels import SharedMemoryChannel, SignalChannel, close_all, init_all, tma, turn_of

store, softmax = lesson("03_ring").store, lesson("04_products").softmax


@aggregate
class Wires:
    queries: SharedMemoryChannel
    keys: SharedMemoryChannel
    values: SharedMemoryChannel
    turns: SignalChannel
    output: gl.shared_memory_descriptor


@jit
def load(wires, q_desc, k_desc, v_desc, length):
    ROWS: gl.constexpr = q_desc.block_shape[0]
    head = gl.program_id(1) * length
    row = head + gl.program_id(0) * 2 * ROWS
    q, _ = wires.queries.producer().acquire()
    tma.load(q, (q_desc, q_desc), ([row, 0], [row + ROWS, 0]))
    keys, values = wires.keys.producer(), wires.values.producer()
    for key in range(head, head + length, k_desc.block_shape[0]):
        k, keys = keys.acquire()
        tma.load(k, k_desc, [key, 0])
        v, values = values.acquire()
        tma.load(v, v_desc, [key, 0])


@jit
def attend(wires, out_desc, out_ptr, length, scale_log2, ROLE: gl.constexpr, TURNS: gl.constexpr, WAY: gl.constexpr):
    ROWS: gl.constexpr = out_desc.block_shape[0]
    D: gl.constexpr = out_desc.block_shape[1]
    KEYS: gl.constexpr = wires.keys.tiles[0].shape[1]
    CGA: gl.constexpr = out_desc.layout.cga_layout
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16], CGA)
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16], CGA)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    slot, _ = wires.queries.consumer().acquire()
    q = slot.part(ROLE)
    keys, values, turn = wires.keys.consumer(), wires.values.consumer(), turn_of(wires.turns, ROLE, TURNS)
    acc = gl.zeros([ROWS, D], gl.float32, OUT)
    high = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    k, keys = keys.acquire()
    scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = warpgroup_mma(q, k.part(0).permute((1, 0)), scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    k.release()
    p, _, high, total = softmax(scores * scale_log2, high, total)
    p = gl.convert_layout(p.to(out_desc.dtype), LEFT)
    for _ in range(KEYS, length, KEYS):
        k, keys = keys.acquire()
        turn = turn.take()
        scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
        scores = warpgroup_mma(q, k.part(0).permute((1, 0)), scores, use_acc=False, is_async=True)
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
    v, values = values.acquire()
    acc = warpgroup_mma(p, v.part(0), acc, is_async=True)
    acc, _ = warpgroup_mma_wait(0, deps=[acc, p])
    v.release()
    out = acc / gl.convert_layout(total, gl.SliceLayout(1, OUT))[:, None]
    row = gl.program_id(1) * length + (gl.program_id(0) * 2 + ROLE) * ROWS
    write(out.to(out_desc.dtype), wires.output.index(ROLE), out_desc, out_ptr, row, WAY)


@jit
def write(out, staged, out_desc, out_ptr, row, WAY: gl.constexpr):
    D: gl.constexpr = out_desc.block_shape[1]
    if WAY == "registers":
        store(out_ptr, row, 0, D, out)
    else:
        staged.store(out)
        if WAY == "rows":
            CGA: gl.constexpr = out_desc.layout.cga_layout
            BY_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0], CGA)
            store(out_ptr, row, 0, D, staged.load(BY_ROWS))
        else:
            tma.store_own(out_desc, [row, 0], staged)
            tma.wait_stores_read()


@jit
def attention(q_desc, k_desc, v_desc, out_desc, out_ptr, length, scale_log2, TURNS: gl.constexpr, WAY: gl.constexpr):
    wires = Wires(
        queries=SharedMemoryChannel.alloc((q_desc, q_desc), SLOTS=1, CONSUMERS=2),
        keys=SharedMemoryChannel.alloc(k_desc, SLOTS=2, CONSUMERS=2, MULTICAST=gl.num_ctas() > 1),
        values=SharedMemoryChannel.alloc(v_desc, SLOTS=2, CONSUMERS=2, MULTICAST=gl.num_ctas() > 1),
        turns=SignalChannel.alloc(SIGNALS=2),
        output=gl.allocate_shared_memory(out_desc.dtype, [2] + out_desc.block_shape, out_desc.layout),
    )
    channels = (wires.queries, wires.keys, wires.values, wires.turns)
    init_all(channels)
    gl.warp_specialize(
        [
            (attend, (wires, out_desc, out_ptr, length, scale_log2, 0, TURNS, WAY)),
            (attend, (wires, out_desc, out_ptr, length, scale_log2, 1, TURNS, WAY)),
            (load, (wires, q_desc, k_desc, v_desc, length)),
        ],
        [4, 1],
        [240, 24],
    )
    close_all(channels)


def run(q, k, v, out, heads: int = 1, turns: bool = True, way: str = "tma") -> None:
    """q, k, v, out: [heads * length, D] in bf16; length: a multiple of 128."""
    length, d = len(q) // heads, q.shape[1]
    descs = (descriptor(t, [rows, d]) for t, rows in ((q, 64), (k, 128), (v, 128), (out, 64)))
    scale_log2 = d**-0.5 * math.log2(math.e)
    attention[(length // 128, heads)](*descs, out, length, scale_log2, TURNS=turns, WAY=way)


def checked(length: int = 384, **options) -> None:
    q, k, v = normal(3, length, 64)
    out = torch.full_like(q, float("nan"))
    run(q, k, v, out, **options)
    want = torch.softmax(q.float() @ k.float().T * 64**-0.5, 1) @ v.float()
    torch.testing.assert_close(out.float(), want, atol=2e-2, rtol=2e-2)


def main() -> None:
    for way in ("tma", "rows", "registers"):
        check(lambda way=way: checked(way=way), f"turns, stored by {way}")
    check(lambda: checked(turns=False), "no turns")


if __name__ == "__main__":
    main()
