"""Gradients by what callers and autograd give: what is refused by name, what autograd keeps, no second derivatives."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from gluon_attn import attention
from gluon_attn.device import Device
from gluon_attn.gradients import attention_backward
from tests.gluon_attn.backward.test_gradients import BF16, HOPPER, tensors


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


def test_a_bias_that_is_no_tensor():
    q = torch.zeros(1, 1, 8, 64, dtype=BF16)
    lse = torch.zeros(1, 1, 8)
    with pytest.raises(TypeError, match=r"^bias: expected a torch.Tensor, got list"):
        attention_backward(None, None, q, q, q, q, lse, bias=[1.0], device=HOPPER)  # type: ignore[arg-type]
