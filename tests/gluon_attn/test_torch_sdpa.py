"""The overrides of torch's operators for FlashAttention and cuDNN, on the CPU: stand-ins for them are overridden, ours
run on gluon_cpu."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gluon_attn import reference_attention, sdpa_calls, torch_sdpa
from gluon_attn.cudnn import FASTER_THERE_FROM
from gluon_attn.gradients import attention_backward
from gluon_attn.testing import check, check_gradients
from tests.gluon_attn.sdpa import (
    CUDNN,
    CUDNN_BACKWARD,
    FLASH,
    FLASH_BACKWARD,
    HOPPER,
    INPLACE,
    RNG,
    SDPA,
    SEED,
    by_cudnn,
    by_flash,
    check_varlen_attn,
    q_of,
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 40])
def test_forward_and_backward(causal, head_dim, calls):
    """GQA too; in autograd, which gives the backward operator what the forward one returned."""
    q, k, v = (q_of(1, h, 40, head_dim).requires_grad_() for h in (2, 1, 1))
    out, lse, *others = SDPA(q, k, v, is_causal=causal, scale=0.1)
    check(q.detach(), k.detach(), v.detach(), out.detach(), lse.detach(), causal=causal, scale=0.1)
    assert others[:4] == [None, None, 40, 40]
    assert [(t.shape, t.dtype) for t in others[4:]] == [
        ((2,), torch.uint64),
        ((), torch.uint64),
        ((0,), torch.bfloat16),
    ]
    dout = q_of(2, 1, 40, head_dim).reshape(q.shape)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    check_gradients(q, k, v, dout, grads, causal=causal, scale=0.1)
    assert calls == []


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "of_v"), [(64, 64), (40, 40), (192, 128)])
def test_cudnns_forward_and_backward(causal, head_dim, of_v, calls):
    """As above. Its LSE has a dimension more."""
    q, k, v = (q_of(1, h, 40, d).requires_grad_() for h, d in ((2, head_dim), (1, head_dim), (1, of_v)))
    out, lse, *_ = by_cudnn(q, k, v, is_causal=causal, scale=0.1)
    check(q.detach(), k.detach(), v.detach(), out.detach(), lse.detach().squeeze(-1), causal=causal, scale=0.1)
    dout = q_of(2, 1, 40, of_v).reshape(out.shape)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    check_gradients(q, k, v, dout, grads, causal=causal, scale=0.1)
    assert calls == []


def test_a_backward_that_stays_is_called_with_what_ours_returned(calls, monkeypatch):
    monkeypatch.setitem(FASTER_THERE_FROM, (192, 128), 40)
    q, k, v = (q_of(1, 2, 40, d).requires_grad_() for d in (192, 192, 128))
    out, lse, *_ = by_cudnn(q, k, v, is_causal=True)
    dout = q_of(2, 1, 40, 128).reshape(out.shape)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    assert all(grad.eq(7).all() for grad in grads)
    ((name, args, _),) = calls
    assert name == "_scaled_dot_product_cudnn_attention_backward"
    assert torch.equal(args[4], out)
    assert torch.equal(args[5], lse)


def test_cudnns_gradients_of_other_lses(calls):
    """Without the last dimension, as before torch 2.9; of strides as with TORCH_CUDNN_SDPA_AVOID_RECOMPILE; and with
    lengths that context_parallel gives, which are those of all parts."""
    q, k, v, dout = q_of(4, 1, 2, 40, 64)
    out, lse, *_ = by_cudnn(q, k, v)
    for one in (lse, lse.squeeze(-1), lse.mT.contiguous().mT, lse.transpose(1, 2).contiguous().transpose(1, 2)):
        grads = CUDNN_BACKWARD(dout, q, k, v, out, one, SEED, SEED, None, None, None, 80, 80, 0.0, False)
        check_gradients(q, k, v, dout, grads)
    assert calls == []


def laid_out(results: Any) -> list[Any]:
    return [(t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else t for t in results]


@pytest.mark.parametrize(
    ("by", "of_v"), [(by_flash, 64), (by_cudnn, 64), (by_cudnn, 128)], ids=["flash", "cuDNN", "cuDNN, 192 and 128"]
)
def test_strides_are_what_torch_expects(by, of_v, calls):
    """Of the operator on the meta device, which is what a compiled graph is planned with."""
    packed = q_of(1, 24, 3, 2, 192 if of_v == 128 else of_v)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    q, k, v = (t.requires_grad_() for t in (q, k, v[..., :of_v]))
    results = by(q, k, v)
    on_meta = by(*(t.detach().to("meta").as_strided(t.shape, t.stride()) for t in (q, k, v)))
    assert laid_out(results) == laid_out(on_meta)
    grads = torch.autograd.grad(results[0].sum(), (q, k, v))
    assert [t.stride() for t in grads] == [torch.empty_like(t).stride() for t in (q, k, v)]
    assert calls == []


def test_windows(calls):
    q, k, v, dout = q_of(4, 1, 40, 2, 64)
    window: dict[str, Any] = {"window_size_left": 8, "window_size_right": 3}
    dense = (None, None, 40, 40, 0.0, False)
    out, lse, *_ = FLASH(q, k, v, *dense, False, **window)
    check(q, k, v, out, lse, window=(8, 3), layout="bshd")
    grads = FLASH_BACKWARD(dout, q, k, v, out, lse, *dense, *RNG, **window)
    check_gradients(q, k, v, dout, grads, window=(8, 3), layout="bshd")
    assert calls == []


def test_the_operators_below(calls):
    """(B, S, H, D), one of them with O's memory given."""
    q, k, v = (q_of(1, n, 2, 64) for n in (24, 40, 40))
    dense = (None, None, 24, 40, 0.0, False, False)
    out, lse, *others = FLASH(q, k, v, *dense, window_size_left=-1)
    check(q, k, v, out, lse, layout="bshd")
    assert [tuple(t.shape) for t in others] == [(2,), (), (0,)]
    if INPLACE:
        given = torch.full_like(out, float("nan"))
        assert torch.equal(INPLACE(given, q, k, v, *dense), lse)
        assert torch.equal(given, out)
    dout = torch.ones_like(q).mT.contiguous().mT  # strides that TMA does not take
    # As saved tensors may come back too, by way of a hook.
    for o, of_rows in ((out, lse), (out.mT.contiguous().mT, lse.mT.contiguous().mT)):
        grads = FLASH_BACKWARD(dout, q, k, v, o, of_rows, None, None, 24, 40, 0.0, False, *RNG)
        check_gradients(q, k, v, dout, grads, layout="bshd")
    assert calls == []


@pytest.mark.parametrize("by", [by_flash, by_cudnn])
def test_deterministic_as_torch_is_told(by, calls, monkeypatch):
    told: list[bool] = []

    def spy(*tensors: Any, **options: Any) -> Any:
        told.append(torch.are_deterministic_algorithms_enabled())
        assert options.get("deterministic") is None  # as torch says
        return attention_backward(*tensors, **options)

    monkeypatch.setattr(sdpa_calls, "attention_backward", spy)
    monkeypatch.setattr(sdpa_calls, "_backward", {})
    q, dout = q_of().requires_grad_(), q_of()
    torch.autograd.grad(by(q, q, q)[0], q, dout)
    try:
        torch.use_deterministic_algorithms(True)
        grads = [torch.autograd.grad(by(q, q, q)[0], q, dout)[0] for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*grads)
    assert told == [False, True]  # what came before is known, in a fixed order too
    assert calls == []


@pytest.mark.parametrize("by", [by_flash, by_cudnn])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic, by, calls):
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return by(q * 2, k, v, is_causal=True)[0] * 3

    inputs = [q_of(1, h, 40, 64).requires_grad_() for h in (2, 1, 1)]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    outs = [fn(*inputs) for fn in (compiled, model)]
    assert torch.equal(*outs)
    for one, other in zip(*(torch.autograd.grad(out.sum(), inputs) for out in outs), strict=True):
        torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)
    assert calls == []


@pytest.mark.parametrize("by", [by_flash, by_cudnn])
def test_compiled_before_it_was_turned_on(by, originals):
    """A graph calls the operators as any program does."""

    def model(q: Tensor) -> Tensor:
        return by(q * 2, q, q)[0] * 3

    q = q_of().requires_grad_()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    out = compiled(q)
    torch.autograd.grad(out.sum(), q)
    assert (out == 21).all()
    assert len(originals.calls) == 2
    handle = torch_sdpa.override("CPU", HOPPER)
    try:
        out = compiled(q)
        torch.autograd.grad(out.sum(), q)
        assert torch.equal(out, model(q))
    finally:
        handle.remove()
    assert len(originals.calls) == 2


@pytest.mark.parametrize("by", [by_flash, by_cudnn])
@pytest.mark.parametrize("is_kept", [False, True], ids=["computed again", "kept by a policy"])
def test_checkpointed(is_kept, by, calls, monkeypatch):
    """A policy of what to keep names torch's operator, as ever."""
    made: list[str] = []

    def counted(original: Any) -> Any:
        def run(*args: Any, **kw: Any) -> Any:
            made.append(original.__name__)
            return original(*args, **kw)

        return run

    for name in ("forward_pass", "backward_pass"):
        monkeypatch.setattr(torch_sdpa, name, counted(getattr(torch_sdpa, name)))

    def policy(context: Any, operator: Any, *args: Any, **kw: Any) -> CheckpointPolicy:
        kept = operator in (SDPA.default, CUDNN.default) and is_kept
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return by(q, k, v, is_causal=True)[0] * 3

    q, k, v = inputs = [q_of(1, h, 40, 64).requires_grad_() for h in (2, 1, 1)]
    dout = q_of()
    out = checkpoint(
        model, *inputs, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy)
    )
    check_gradients(q, k, v, 3 * dout, torch.autograd.grad(out, inputs, dout), causal=True)
    assert made == ["forward_pass"] * (1 if is_kept else 2) + ["backward_pass"]
    assert calls == []


@pytest.mark.parametrize("window", [{}, {"window_size_left": 9}])
def test_packed_sequences(window, calls):
    q = q_of(40, 2, 64)
    starts = torch.tensor([0, 25, 40], dtype=torch.int32)
    out, lse, *_ = FLASH(q, q, q, starts, starts, 25, 25, 0.0, True, False, **window)
    left = window.get("window_size_left")
    want, want_lse = reference_attention(
        q.double(), q.double(), q.double(), causal=True, window=(left, None), cu_seqlens_q=starts, cu_seqlens_k=starts
    )
    torch.testing.assert_close(out.double(), want, atol=0.02, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=1e-3)
    wide = q.double().requires_grad_()
    exact, _ = reference_attention(
        wide, wide, wide, causal=True, window=(left, None), cu_seqlens_q=starts, cu_seqlens_k=starts
    )
    narrow = q.clone().requires_grad_()
    own = FLASH(narrow, narrow, narrow, starts, starts, 25, 25, 0.0, True, False, **window)[0]
    dout = torch.randn_like(q)
    got = torch.autograd.grad(own, narrow, dout)[0]
    torch.testing.assert_close(got.double(), torch.autograd.grad(exact, wide, dout.double())[0], atol=0.06, rtol=0.02)
    into = torch.empty_like(q)
    if INPLACE:
        INPLACE(into, q, q, q, starts, starts, 25, 25, 0.0, True, False, **window)
        assert torch.equal(into, out)
    dout = q_of(40, 2, 64).flip(0)
    grads = FLASH_BACKWARD(dout, q, q, q, out, lse, starts, starts, 25, 25, 0.0, True, *RNG, **window)
    inputs = [q.double().requires_grad_() for _ in range(3)]
    want, _ = reference_attention(*inputs, causal=True, window=(left, None), cu_seqlens_q=starts, cu_seqlens_k=starts)
    for one, other in zip(grads, torch.autograd.grad(want, inputs, dout.double()), strict=True):
        torch.testing.assert_close(one.double(), other, atol=0.03, rtol=0.02)
    assert calls == []


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (16, 8)])
def test_varlen_attn(window, calls):
    check_varlen_attn([30, 5, 25], window, "cpu")
    assert calls == []


@pytest.mark.parametrize(
    ("head_dim", "of_v", "timed"),
    [(128, 128, True), (136, 136, False), (184, 184, False), (192, 192, True), (192, 128, True), (64, 32, False)],
)
def test_which_head_dims_are_taken_from_cudnn(head_dim, of_v, timed):
    q, v = (torch.empty(1, 2, 8, d, device="meta") for d in (head_dim, of_v))
    assert sdpa_calls.timed(q, v) == timed
