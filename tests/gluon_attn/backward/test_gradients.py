"""The gradients of attention on CPU tensors, executed by gluon_cpu: numbers, edges, races."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import gluon_cpu
from gluon_attn import attention, reference_attention
from gluon_attn.backward import table as backward_table
from gluon_attn.backward.plan import BackwardPlan
from gluon_attn.backward.table import pick_config
from gluon_attn.device import Device
from gluon_attn.gradients import attention_backward
from gluon_attn.kernels.hopper.backward.reduce import FEW_STEPS
from gluon_attn.problem import Problem
from gluon_attn.testing import backward_call, check_gradients
from tests.slow import slow_if

BF16, FP16 = torch.bfloat16, torch.float16

# (batch, heads, KV heads, queries, keys, head dim, causal, dtype)
CASES = {
    "one block": (1, 1, 1, 64, 128, 128, False, BF16),
    "one query, one key": (1, 1, 1, 1, 1, 64, True, BF16),
    "a block and one more": (1, 1, 1, 129, 129, 64, False, FP16),
    "odd lengths": (1, 2, 2, 201, 333, 128, False, BF16),
    "odd lengths, causal": (1, 1, 1, 201, 333, 128, True, FP16),
    "rows that see no key": (1, 1, 1, 300, 140, 128, True, BF16),
    "many rows that see no key": (1, 1, 1, 400, 3, 64, True, BF16),
    "few queries, many keys": (1, 1, 1, 5, 300, 64, True, BF16),
    "batches and grouped heads": (2, 6, 2, 130, 150, 64, True, BF16),
    "one KV head": (1, 5, 1, 130, 130, 128, False, BF16),
    "four query heads to a KV head": (1, 8, 2, 70, 100, 128, True, FP16),
    "eight query heads to a KV head": (1, 16, 2, 70, 100, 64, True, BF16),
    "a head dim between": (1, 2, 1, 100, 140, 72, True, BF16),
    "the smallest head dim": (1, 1, 1, 100, 140, 8, False, FP16),
    "D=256": (1, 2, 1, 130, 200, 256, True, BF16),
    "D=192, full": (1, 1, 1, 130, 70, 192, False, FP16),
    "D=256, fp16": (1, 1, 1, 65, 129, 256, False, FP16),
}
HOPPER = Device.hopper()
FEW = ("one block", "odd lengths, causal", "rows that see no key", "batches and grouped heads", "D=256")


def tensors(case: str, layout: str = "bhsd", seed: int = 0) -> tuple[Tensor, ...]:
    """q, k, v, dO and dLSE."""
    batch, heads, kv_heads, q_len, kv_len, head_dim, _, dtype = CASES[case]
    generator = torch.Generator().manual_seed(seed)

    def normal(h: int, s: int) -> Tensor:
        shape = (batch, h, s, head_dim) if layout == "bhsd" else (batch, s, h, head_dim)
        return torch.randn(shape, generator=generator).to(dtype)

    q, k, v, dout = normal(heads, q_len), normal(kv_heads, kv_len), normal(kv_heads, kv_len), normal(heads, q_len)
    return q, k, v, dout, torch.randn((batch, heads, q_len), generator=generator)


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    device: Device = HOPPER,
    **options: Any,
) -> list[Any]:
    """By autograd, of attention on gluon_cpu."""
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = attention(*inputs, device=device, return_lse=True, **options)
    outputs, grads = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    return list(torch.autograd.grad(outputs, inputs, grads))


@pytest.mark.parametrize("case", slow_if(lambda case: case not in FEW, CASES))
def test_against_float64(case):
    q, k, v, dout, _ = tensors(case)
    causal = CASES[case][6]
    check_gradients(q, k, v, dout, gradients(q, k, v, dout, causal=causal), causal=causal, what=case)


@pytest.mark.parametrize("case", slow_if(lambda case: case not in FEW[1:3], FEW))
def test_deterministic_of_both_outputs_in_the_other_layout(case):
    q, k, v, dout, dlse = tensors(case, "bshd")
    options: dict[str, Any] = {"causal": CASES[case][6], "layout": "bshd"}
    got = gradients(q, k, v, dout, dlse, deterministic=True, **options)
    check_gradients(q, k, v, dout, got, dlse=dlse, what=case, **options)


def small(sm_count: int) -> Device:
    """A card on which each program has several key blocks."""
    return dataclasses.replace(HOPPER, sm_count=sm_count)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("sm_count", "kv_len"), slow_if(lambda case: case[0] == 1, [(1, 300), (2, 300), (1, 200), (2, 500)])
)
def test_programs_with_several_key_blocks(sm_count, kv_len, causal, deterministic):
    q = torch.randn(1, 2, 140, 64).to(BF16)
    k, v = torch.randn(2, 1, 1, kv_len, 64).to(BF16)
    dout = torch.randn_like(q)
    got = gradients(q, k, v, dout, device=small(sm_count), causal=causal, deterministic=deterministic)
    check_gradients(q, k, v, dout, got, causal=causal)


def test_in_order_some_key_blocks_tell_at_once_and_others_late():
    """Which depends on their steps: of six query heads the first key block has 18, the last one 6. That each way of
    telling is needed is for the campaign of mutants."""
    assert 6 < FEW_STEPS.value < 18
    q, dout = torch.randn(2, 1, 6, 300, 64).to(BF16)
    k, v = torch.randn(2, 1, 1, 300, 64).to(BF16)
    got = gradients(q, k, v, dout, device=small(2), causal=True, deterministic=True)
    check_gradients(q, k, v, dout, got, causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_in_order_programs_of_several_heads_wait_for_nobody_who_waits_for_them(causal):
    """Each goes on to another head, where it may wait for one that still waits for its last addition to the head
    before: a deadlock, unless it has told of that."""
    q, dout = torch.randn(2, 1, 6, 512, 64).to(BF16)
    k, v = torch.randn(2, 1, 6, 512, 64).to(BF16)
    got = gradients(q, k, v, dout, device=small(5), causal=causal, deterministic=True)
    check_gradients(q, k, v, dout, got, causal=causal)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "q_len", "kv_len", "causal", "sm_count"),
    [
        (64, 1100, 200, True, 4),  # row blocks that nobody sees
        (64, 1600, 200, True, 3),
        (128, 600, 200, False, 4),
        (128, 900, 330, False, 2),  # the last of three key blocks
        (256, 600, 200, True, 8),
        (256, 900, 130, False, 5),
    ],
)
@pytest.mark.slow_but(
    "256-600-200-True-8-True", "128-900-330-False-2-False", "64-1100-200-True-4-True", "64-1600-200-True-3-False"
)
def test_shared_key_blocks(head_dim, q_len, kv_len, causal, sm_count, deterministic):
    q, dout = torch.randn(2, 1, 2, q_len, head_dim).to(BF16)
    k, v = torch.randn(2, 1, 1, kv_len, head_dim).to(BF16)
    device = small(sm_count)
    problem = Problem.of(q, k, v, causal=causal)
    plan = BackwardPlan.of(problem, pick_config(problem), device, deterministic=deterministic)
    assert (plan.shared > 0) == (not deterministic or plan.key_blocks * 2 <= sm_count)
    got = gradients(q, k, v, dout, device=device, causal=causal, deterministic=deterministic)
    check_gradients(q, k, v, dout, got, causal=causal)


@pytest.mark.parametrize("what", ["scores times 30", "deep negative scores", "constant V", "dO of one direction"])
def test_unusual_numbers(what):
    q, k, v, dout, _ = tensors("odd lengths, causal")
    if what == "scores times 30":
        q = q * 30
    elif what == "deep negative scores":
        q, k = q.abs(), -k.abs() - 2
    elif what == "constant V":
        v = torch.ones_like(v)
    else:
        dout = torch.ones_like(dout)
    check_gradients(q, k, v, dout, gradients(q, k, v, dout, causal=True), causal=True, what=what)


@pytest.mark.parametrize("case", ["odd lengths, causal", "rows that see no key", "D=256, fp16"])
def test_derivatives_along_directions(case):
    """Against finite differences in float64 of the forward pass alone, which no autograd has had a hand in."""
    q, k, v, dout, dlse = tensors(case)
    causal = CASES[case][6]
    got = gradients(q, k, v, dout, dlse, causal=causal)
    inputs = [t.double() for t in (q, k, v)]

    def loss(*moved: Tensor) -> float:
        out, lse = reference_attention(*moved, causal=causal)
        return float((out * dout).sum() + (lse * dlse).masked_fill(lse == float("-inf"), 0.0).sum())

    step = 1e-5
    for i, (name, grad) in enumerate(zip("qkv", got, strict=True)):
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            direction = torch.randn(grad.shape, generator=generator, dtype=torch.float64)
            ahead, behind = (
                loss(*(t + sign * step * direction if j == i else t for j, t in enumerate(inputs))) for sign in (1, -1)
            )
            want = (ahead - behind) / (2 * step)
            # Rounding moves the sum by 2^-8 or so of the gradient's norm, another gradient by about all of it.
            error = abs(float((grad.double() * direction).sum()) - want)
            assert error <= 0.02 * float(grad.double().norm()), f"d{name}: {error} of {want}"


def test_products_of_inputs_and_gradients():
    """⟨V, dV⟩ = ⟨O, dO⟩ and ⟨Q, dQ⟩ = ⟨K, dK⟩ of a head: V scales O, and Q and K scale the same scores."""
    q, k, v, dout, _ = tensors("odd lengths, causal")
    out = attention(q, k, v, causal=True, device=HOPPER)
    assert isinstance(out, Tensor)
    dq, dk, dv = gradients(q, k, v, dout, causal=True)
    for (a, da), (b, db) in (((v, dv), (out, dout)), ((q, dq), (k, dk))):
        one, other = a.double() * da.double(), b.double() * db.double()
        scale = float(one.square().sum().sqrt() + other.square().sum().sqrt())
        assert abs(float(one.sum() - other.sum())) <= 2.0**-5 * scale


def test_scale():
    q, k, v, dout, _ = tensors("one block")
    check_gradients(q, k, v, dout, gradients(q, k, v, dout, scale=0.3), scale=0.3)


def test_any_strides_of_the_gradient_of_o():
    q, k, v, _, _ = tensors("odd lengths, causal")
    expanded = torch.ones((), dtype=q.dtype).expand(q.shape)
    check_gradients(q, k, v, expanded, gradients(q, k, v, expanded, causal=True), causal=True)
    transposed = torch.randn(*q.shape[:2], q.shape[3], q.shape[2]).to(q.dtype).transpose(2, 3)
    check_gradients(q, k, v, transposed, gradients(q, k, v, transposed, causal=True), causal=True)


def test_inputs_in_larger_tensors_have_gradients_of_their_own():
    q, k, v, dout, _ = tensors("one query, one key")
    packed = torch.randn(1, 40, 3, 2, 64).to(BF16)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    dout = torch.randn(q.shape).to(BF16)
    got = gradients(q, k, v, dout)
    check_gradients(q, k, v, dout, got)
    assert all(grad.stride(-1) == 1 for grad in got)


def test_of_lse_alone():
    q, k, v, _, dlse = tensors("one block")
    inputs = [t.requires_grad_() for t in (q, k, v)]
    _, lse = attention(*inputs, device=Device.hopper(), return_lse=True)
    grads = torch.autograd.grad(lse, inputs, dlse)
    check_gradients(q, k, v, torch.zeros_like(q), grads, dlse=dlse)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 7), (7, 0)])
def test_nothing_to_compute(q_len, kv_len):
    q = torch.randn(1, 2, q_len, 64).to(BF16)
    k, v = torch.randn(2, 1, 2, kv_len, 64).to(BF16)
    for grad, t in zip(gradients(q, k, v, torch.randn_like(q)), (q, k, v), strict=True):
        assert grad.shape == t.shape
        assert not grad.any()


def test_deterministic_follows_torch(monkeypatch):
    q, k, v, dout, _ = tensors("one block")
    asked = []
    monkeypatch.setattr("gluon_attn.gradients.prepare", lambda *given: asked.append(given[4]))
    monkeypatch.setattr("gluon_attn.gradients._launches", {})
    out, lse = attention(q, k, v, device=Device.hopper(), return_lse=True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    attention_backward(dout, None, q, k, v, out, lse, device=Device.hopper())
    attention_backward(dout, None, q, k, v, out, lse, device=Device.hopper(), deterministic=False)
    assert asked == [True, False]


# (head dim, queries, keys, processors): two key blocks to a program, or two programs that share one.
WITH_MORE_SLOTS = ((128, 130, 200, 1), (64, 130, 200, 1), (128, 600, 100, 4))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "q_len", "kv_len", "processors"),
    slow_if(lambda sizes: sizes[0] == 64 or sizes[3] > 1, WITH_MORE_SLOTS),
)
def test_more_slots_of_dq_than_parts(head_dim, q_len, kv_len, processors, deterministic):
    """Which no row of the table has."""
    config = dataclasses.replace(backward_table.HOPPER[head_dim], dq_slots=2, query_slots=2, dout_slots=2)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, 1, length, head_dim, generator=generator).bfloat16() for length in (q_len, kv_len, kv_len, q_len)
    )
    device = small(processors)
    plan = BackwardPlan.of(Problem.of(q, k, v, causal=False), config, device, deterministic=deterministic)
    assert (plan.shared > 0) == (processors > 1)
    out, lse = attention(q, k, v, return_lse=True, device=device)
    call = backward_call(config, dout, q, k, v, out, lse, causal=False, deterministic=deterministic, device=device)
    check_gradients(q, k, v, dout, call(), causal=False)
    gluon_cpu.check(call, schedules=5, quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", ["rows that see no key", pytest.param("D=256", marks=pytest.mark.slow)])
def test_no_schedule_finds_a_race(case, deterministic):
    q, k, v, dout, _ = tensors(case)
    options: dict[str, Any] = {"causal": True, "device": small(1)}  # two key blocks to a program
    out, lse = attention(q, k, v, return_lse=True, **options)
    runs = []

    def run() -> None:
        runs.append(attention_backward(dout, None, q, k, v, out, lse, deterministic=deterministic, **options))

    gluon_cpu.check(run, schedules=15, quiet=True)
    same = [[torch.equal(a, b) for a, b in zip(runs[0], other, strict=True)] for other in runs[1:]]
    assert len(runs) >= 15
    assert all(dk and dv for _, dk, dv in same)
    assert all(dq for dq, _, _ in same) or not deterministic
