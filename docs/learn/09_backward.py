"""Gradients of attention: five products, dQ summed across programs by TMA, in any order or in a fixed one."""

import torch
from course import broken, check, descriptor, lesson, normal
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from channels import SharedMemoryChannel, close_all, init_all, tma

store = lesson("03_ring").store


@jit
def load(keys_values, queries, k_desc, v_desc, q_desc, do_desc, length):
    ROWS: gl.constexpr = q_desc.block_shape[0]
    head = gl.program_id(1) * length
    key = head + gl.program_id(0) * k_desc.block_shape[0]
    block, _ = keys_values.producer().acquire()
    tma.load(block, (k_desc, v_desc), ([key, 0], [key, 0]))
    end = queries.producer()
    for row in range(head, head + length, ROWS):
        slot, end = end.acquire()
        tma.load(slot, (q_desc, do_desc), ([row, 0], [row, 0]))


@jit
def multiply(a, b, COLUMNS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    product = gl.zeros([a.shape[0], COLUMNS], gl.float32, LAYOUT)
    return warpgroup_mma(a, b, product, use_acc=False, is_async=True)


@jit
def gradient(keys_values, queries, dqs, staged, lse_ptr, delta_ptr, dk_ptr, dv_ptr, length, scale):
    ROWS: gl.constexpr = dqs.tiles[0].shape[1]
    D: gl.constexpr = dqs.tiles[0].shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    block, _ = keys_values.consumer().acquire()
    k, v = block.part(0), block.part(1)
    queries, dqs = queries.consumer(), dqs.producer()
    dk, dv = gl.zeros([k.shape[0], D], gl.float32, OUT), gl.zeros([k.shape[0], D], gl.float32, OUT)
    head = gl.program_id(1) * length
    for row in range(head, head + length, ROWS):
        slot, queries = queries.acquire()
        q, do = slot.part(0), slot.part(1)
        scores, dp = multiply(k, q.permute((1, 0)), ROWS), multiply(v, do.permute((1, 0)), ROWS)
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(0, SCORES))
        lse, delta = gl.load(lse_ptr + rows), gl.load(delta_ptr + rows)
        scores, dp = warpgroup_mma_wait(0, deps=[scores, dp])
        p = gl.exp2(scores * (scale * 1.4426950408889634) - lse[None, :] * 1.4426950408889634)
        ds = (p * (dp - delta[None, :])).to(k.dtype)
        staged.store(ds)
        fence_async_shared()
        p = gl.convert_layout(p.to(k.dtype), gl.DotOperandLayout(0, OUT, 2))
        ds = gl.convert_layout(ds, gl.DotOperandLayout(0, OUT, 2))
        dq = multiply(staged.permute((1, 0)), k, D)
        dv = warpgroup_mma(p, do, dv, is_async=True)
        dk = warpgroup_mma(ds, q, dk, is_async=True)
        dq, dv, dk, p, ds = warpgroup_mma_wait(0, deps=[dq, dv, dk, p, ds])
        slot.release()
        part, dqs = dqs.acquire()
        part.part(0).store(dq * scale)
        part.publish()
    key = head + gl.program_id(0) * k.shape[0]
    store(dk_ptr, key, 0, D, dk * scale)
    store(dv_ptr, key, 0, D, dv)


@jit
def reduce(dqs, dq_desc, turn_ptr, length, ORDER: gl.constexpr):
    ROWS: gl.constexpr = dq_desc.block_shape[0]
    dqs = dqs.consumer()
    head = gl.program_id(1) * length
    for row in range(head, head + length, ROWS):
        slot, dqs = dqs.acquire()
        if ORDER == "fixed":
            gl.atomic_poll(turn_ptr + row // ROWS, gl.program_id(0), sem="acquire")
        if ORDER == "lost":
            tma.store(dq_desc, [row, 0], slot.part(0))
        else:
            tma.add(dq_desc, [row, 0], slot.part(0))
        if ORDER == "fixed":
            tma.wait_stores_done()
            gl.atomic_add(turn_ptr + row // ROWS, 1, sem="release")
        tma.wait_stores_read()
        slot.release()


@jit
def backward(q_desc, k_desc, v_desc, do_desc, dq_desc, lse, delta, dk, dv, turns, length, scale, ORDER: gl.constexpr):
    keys_values = SharedMemoryChannel.alloc((k_desc, v_desc), SLOTS=1, CONSUMERS=1)
    queries = SharedMemoryChannel.alloc((q_desc, do_desc), SLOTS=2, CONSUMERS=1)
    dqs = SharedMemoryChannel.alloc(dq_desc, SLOTS=2, CONSUMERS=1)
    staged = gl.allocate_shared_memory(k_desc.dtype, [k_desc.block_shape[0], q_desc.block_shape[0]], k_desc.layout)
    init_all((keys_values, queries, dqs))
    gl.warp_specialize(
        [
            (gradient, (keys_values, queries, dqs, staged, lse, delta, dk, dv, length, scale)),
            (load, (keys_values, queries, k_desc, v_desc, q_desc, do_desc, length)),
            (reduce, (dqs, dq_desc, turns, length, ORDER)),
        ],
        [1, 1],
        [24, 24],
    )
    close_all((keys_values, queries, dqs))


def run(q, k, v, out, lse, do, dq, dk, dv, heads: int = 1, order: str = "any") -> None:
    """All [heads * length, D]; dq in fp32, zero before; lse in base e; length: a multiple of 64."""
    length, turns = len(q) // heads, torch.zeros(len(q) // 64, dtype=torch.int32, device=q.device)
    delta = (do.float() * out.float()).sum(1)
    descs = (descriptor(t, [64, q.shape[1]]) for t in (q, k, v, do, dq))
    grid, scale = (length // 64, heads), q.shape[1] ** -0.5
    backward[grid](*descs, lse, delta, dk, dv, turns, length, scale, ORDER=order)


def checked(order: str) -> None:
    q, k, v, do = normal(4, 192, 64)
    leaves = [t.float().requires_grad_() for t in (q, k, v)]
    scores = leaves[0] @ leaves[1].T * 64**-0.5
    out = torch.softmax(scores, 1) @ leaves[2]
    out.backward(do.float())
    dq, dk, dv = torch.zeros(192, 64), *torch.full((2, 192, 64), float("nan"))
    run(q, k, v, out.detach(), torch.logsumexp(scores, 1).detach(), do, dq, dk, dv, order=order)
    for got, leaf in zip((dq, dk, dv), leaves, strict=True):
        torch.testing.assert_close(got, leaf.grad, atol=3e-2, rtol=3e-2)


def main() -> None:
    check(lambda: checked("any"), "dQ summed in any order")
    check(lambda: checked("fixed"), "dQ summed in a fixed order")
    broken(lambda: checked("lost"), "dQ stored, not added")


if __name__ == "__main__":
    main()
