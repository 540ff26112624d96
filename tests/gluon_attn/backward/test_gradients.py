"""The gradients of attention on CPU tensors, executed by gluon_cpu: numbers, edges, refusals, races."""

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

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


def test_refused_by_name():
    q, k, v, dout, _ = tensors("one query, one key")
    inputs = [t.requires_grad_() for t in (q, k, v)]
    with pytest.raises(NotImplementedError, match=r"^out: expected None, as gradients are asked for"):
        attention(*inputs, out=torch.empty_like(dout), device=Device.hopper())
    with pytest.raises(NotImplementedError, match=r"^device: expected a Hopper card, as gradients are asked for"):
        attention(*inputs, device=Device.blackwell())
    fp8 = [t.detach().to(torch.float8_e4m3fn).requires_grad_() for t in inputs]
    with pytest.raises(NotImplementedError, match=r"^q: expected float16 or bfloat16, as gradients are asked for"):
        attention(*fp8, device=Device.hopper())
    with pytest.raises(TypeError, match=r"^deterministic: expected a bool"):
        attention(*inputs, device=Device.hopper(), deterministic=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^q_scale: expected None"):
        attention(*inputs, q_scale=torch.ones(1, 1), device=Device.hopper())
    with pytest.raises(TypeError, match=r"^device: expected a gluon_attn Device"):
        attention(*inputs, device="hopper")  # type: ignore[arg-type]
    out = attention(*inputs, device=Device.hopper())
    (dq,) = torch.autograd.grad(out, inputs[0], dout, create_graph=True)
    with pytest.raises(NotImplementedError, match="gradients of its gradients are not supported"):
        dq.float().sum().backward()


def test_tensors_of_another_call_are_refused():
    q, k, v, dout, _ = tensors("one block")
    out, lse = attention(q, k, v, device=HOPPER, return_lse=True)
    given: dict[str, Any] = {"dout": dout, "dlse": lse, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    wrong: list[tuple[str, Any, str]] = [
        ("dout", dout[:, :, :8], r"expected shape \(1, 1, 64, 128\)"),
        ("out", out.float(), "expected dtype torch.bfloat16"),
        ("lse", lse.double(), "expected dtype torch.float32"),
        ("dlse", lse[..., :3], r"expected shape \(1, 1, 64\)"),
        ("q", q.double(), "expected dtype float16, bfloat16, .* got torch.float64"),
        ("out", out.mT.contiguous().mT, r"expected stride 1 in the last dimension, got 64; call .contiguous\(\) on it"),
        ("sinks", [0.0], "expected a torch.Tensor, got list; give that of the same call"),
        ("bias", [0.0], "expected a torch.Tensor, got list"),
        ("dlse", 0.0, "expected a torch.Tensor or None, got float; give None for zeros"),
        ("dout", dout.to_sparse(), r"expected a dense tensor, got one of layout torch.sparse_coo; call .to_dense\(\)"),
        ("v", torch.nested.nested_tensor([v[0]]), "expected a dense tensor, got a nested one"),
        ("deterministic", 1, "expected a bool, got int; give True or False"),
        ("layout", "thd", r"expected one of \('bhsd', 'bshd'\), got 'thd'"),
        ("scale", [1.0], "expected a float or None, got list; give a number"),
        ("device", "cuda", "expected a gluon_attn Device or None, got str"),
    ]
    wrong += [
        (name, None, "expected a torch.Tensor, got NoneType; give that") for name in ("q", "k", "v", "out", "lse")
    ]
    for name in ("q", "k", "v", "out"):
        shifted = torch.empty(given[name].numel() + 1, dtype=BF16)[1:].view(given[name].shape)
        wrong.append((name, shifted, "expected a base address that is a multiple of 16 bytes, got 0x.*slice at"))
    attention_backward(**given, device=HOPPER)  # of which the launch is known
    for name, value, message in wrong:
        with pytest.raises((TypeError, ValueError), match=f"^{name}: {message}"):
            attention_backward(**{"device": HOPPER, **given, name: value})
    with pytest.raises(NotImplementedError, match="expected a Hopper card"):
        attention_backward(**given, device=Device.blackwell())


@pytest.mark.parametrize("name", ["q", "v", "out", "lse", "sinks"])
def test_memory_that_is_not_what_it_reads_as_is_refused(name):
    """Also after a call with the same shapes. dO and dLSE are copied where they are such."""
    q, k, v, dout, dlse = tensors("one query, one key")
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "sinks": torch.ones(1)}
    given["out"], given["lse"] = attention(**given, device=HOPPER, return_lse=True)
    want = attention_backward(dout, dlse, **given, device=HOPPER)
    negated = [torch._neg_view(-t) for t in (dout, dlse)]
    for got, expected in zip(attention_backward(*negated, **given, device=HOPPER), want, strict=True):
        assert torch.equal(got, expected)
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor that is stored as it reads"):
        attention_backward(dout, dlse, **given | {name: torch._neg_view(-given[name])}, device=HOPPER)
    freed = given[name].clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"^{name}: expected a storage of at least"):
        attention_backward(dout, dlse, **given | {name: freed}, device=HOPPER)


def without_memory(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


NO_MODE = contextlib.nullcontext
UNREADABLE: dict[str, tuple[Callable[[Tensor], Tensor], str, Any]] = {
    "sparse": (Tensor.to_sparse, r"expected a dense tensor, got one of layout torch.sparse_coo", NO_MODE),
    "freed": (without_memory, "expected a storage of at least", NO_MODE),
    "with a tangent": (
        lambda t: forward_ad.make_dual(t, torch.ones_like(t)),
        "expected a tensor without a tangent",
        forward_ad.dual_level,
    ),
}


@pytest.mark.parametrize("mode", [NO_MODE, partial(FlopCounterMode, display=False)], ids=["eager", "by operators"])
@pytest.mark.parametrize("kind", UNREADABLE)
def test_gradients_of_autograd_that_no_kernel_can_read_are_refused(kind, mode):
    """As for an explicit call."""
    make, message, within = UNREADABLE[kind]
    q, k, v, dout, dlse = tensors("one query, one key")
    inputs = [t.requires_grad_() for t in (q, k, v)]
    with mode():
        out, lse = attention(*inputs, return_lse=True, device=HOPPER)
        with within():
            for name, one in (("dout", [make(dout), dlse]), ("dlse", [dout, make(dlse)])):
                with pytest.raises((TypeError, ValueError, NotImplementedError), match=f"^{name}: {message}"):
                    torch.autograd.grad([out, lse], inputs, one, retain_graph=True)
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    given = {name: t.detach() for name, t in given.items()}
    with within():
        for name, one in (("dout", [make(dout), dlse]), ("dlse", [dout, make(dlse)])):
            with pytest.raises((TypeError, ValueError, NotImplementedError), match=f"^{name}: {message}"):
                attention_backward(*one, **given, device=HOPPER)


@pytest.mark.parametrize("mode", [NO_MODE, partial(FlopCounterMode, display=False)], ids=["eager", "by operators"])
def test_several_gradients_in_one_are_refused(mode):
    q, k, v, dout, _ = tensors("one query, one key")
    inputs = [t.requires_grad_() for t in (q, k, v)]
    with mode():
        out = attention(*inputs, device=HOPPER)
        with pytest.raises(NotImplementedError, match=r"^dout: expected a plain tensor, got several in one, as is_gra"):
            torch.autograd.grad(out, inputs, torch.stack([dout, dout]), is_grads_batched=True)


def test_gradients_of_autograd_without_memory_are_zero():
    q, k, v, dout, dlse = tensors("one query, one key")
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out, lse = attention(*inputs, return_lse=True, device=HOPPER)
    zeros = torch._efficientzerotensor(dout.shape, dtype=dout.dtype)
    got = torch.autograd.grad([out, lse], inputs, [zeros, dlse], retain_graph=True)
    want = torch.autograd.grad(lse, inputs, dlse, retain_graph=True)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
    assert not any(grad is not None and grad.any() for grad in torch.autograd.grad(out, inputs, zeros))


def test_tensors_that_autograd_keeps_elsewhere():
    """As torch.autograd.graph.save_on_cpu does, whose tensors come back contiguous, whatever they were."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 24, 64, generator=generator).bfloat16() for _ in range(4))
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    options: dict[str, Any] = {"device": HOPPER, "deterministic": True}
    want = torch.autograd.grad(attention(*inputs, **options), inputs, dout)

    def kept(t: Tensor) -> Tensor:
        return t.clone(memory_format=torch.contiguous_format)

    with torch.autograd.graph.saved_tensors_hooks(kept, lambda t: t):
        out = attention(*inputs, **options)
    for one, other in zip(torch.autograd.grad(out, inputs, dout), want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("warm", [False, True])
def test_tensors_that_autograd_keeps_at_other_addresses_are_refused_where_tma_cannot_read(warm):
    """As hooks that pack all into one buffer may give them."""
    q, k, v, dout, _ = tensors("one block")
    inputs = [t.requires_grad_() for t in (q, k, v)]
    if warm:
        torch.autograd.grad(attention(*inputs, device=Device.hopper()), inputs, dout)

    def moved(t: Tensor) -> Tensor:
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)

    with torch.autograd.graph.saved_tensors_hooks(moved, lambda t: t):
        out = attention(*inputs, device=Device.hopper())
    with pytest.raises(ValueError, match=r"^q: expected a base address that is a multiple of 16 bytes, got 0x"):
        torch.autograd.grad(out, inputs, dout)


@pytest.mark.parametrize("name", ["q", "sinks", "bias"])
def test_no_second_derivative_of_the_explicit_call(name):
    """Results say so if they are differentiated, whatever requires grad."""
    given: dict[str, Any] = {
        "q": torch.ones(1, 2, 24, 64, dtype=BF16),
        "sinks": torch.ones(2),
        "bias": torch.ones(1, 2, 24, 24),
    }
    out, lse = attention(k=given["q"], v=given["q"], **given, return_lse=True, device=HOPPER)
    given[name].requires_grad_()
    call: Any = partial(attention_backward, out, lse, k=given["q"].detach(), v=given["q"].detach(), out=out, lse=lse)
    dq, *_ = call(**given, device=HOPPER)
    with pytest.raises(NotImplementedError, match=r"^attention: gradients of its gradients are not supported"):
        dq.float().sum().backward()
    with torch.no_grad():
        assert not call(**given, device=HOPPER)[0].requires_grad


def test_the_explicit_call_in_a_graph():
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 24, 64, generator=generator).bfloat16() for _ in range(4))
    bias = torch.randn(1, 2, 24, 24, generator=generator).requires_grad_()
    options: dict[str, Any] = {"sinks": torch.ones(2), "bias": bias, "causal": True, "device": HOPPER}
    with torch.no_grad():
        out, lse = attention(q, k, v, **options, return_lse=True)
    call: Any = partial(attention_backward, **options, deterministic=True)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        found, want = (function(dout, None, q, k, v, out, lse) for function in (compiled, call))
    assert len(want) == 5
    for one, other in zip(found, want, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"attention_backward: expected a call under torch.no_grad"):
        compiled(dout, None, q, k, v, out, lse)


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


def test_a_bias_that_is_no_tensor():
    q = torch.zeros(1, 1, 8, 64, dtype=BF16)
    lse = torch.zeros(1, 1, 8)
    with pytest.raises(TypeError, match=r"^bias: expected a torch.Tensor, got list"):
        attention_backward(None, None, q, q, q, q, lse, bias=[1.0], device=HOPPER)  # type: ignore[arg-type]
