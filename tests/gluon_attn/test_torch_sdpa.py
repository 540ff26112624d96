"""The overrides of torch's operators for FlashAttention and cuDNN, on the CPU: stand-ins for them are overridden, ours
run on gluon_cpu."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library, get_kernel
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gluon_attn import attention, reference_attention, torch_sdpa
from gluon_attn.device import Device
from gluon_attn.gradients import attention_backward
from gluon_attn.testing import check, check_gradients

HOPPER = Device.hopper()
FLASH = torch.ops.aten._flash_attention_forward
INPLACE = getattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace", None)  # from torch 2.12 on
SDPA = torch.ops.aten._scaled_dot_product_flash_attention
SDPA_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
FLASH_BACKWARD = torch.ops.aten._flash_attention_backward
CUDNN = torch.ops.aten._scaled_dot_product_cudnn_attention
CUDNN_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
RNG = (torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64))
SEED = torch.zeros((), dtype=torch.int64)


def q_of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape or (1, 2, 40, 64), generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


class Originals:
    """Stand-ins for torch's own kernels, which say what they were called with and return what tells them from ours."""

    def __init__(self, key: str) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.library = Library("aten", "IMPL", key)
        for name in filter(partial(hasattr, torch.ops.aten), torch_sdpa.FLASH | torch_sdpa.CUDNN):
            self.library.impl(name, self.stand_in(name))

    def stand_in(self, name: str) -> Any:
        def original(*args: Any, **kw: Any) -> Any:
            self.calls.append((name, args, kw))
            query = args[1] if "backward" in name or "inplace" in name else args[0]
            o, lse = torch.full_like(query, 7), torch.full(query.shape[:3], 7.0)
            if "backward" in name:
                return tuple(torch.full_like(t, 7) for t in args[1:4])
            if "inplace" in name:
                return lse
            if "cudnn" in name:
                o, lse = torch.full((*query.shape[:-1], args[2].shape[-1]), 7.0, dtype=query.dtype), lse[..., None]
                return o, lse, None, None, query.shape[2], args[1].shape[2], SEED, SEED, None
            if "scaled" in name:
                return o, lse, None, None, query.shape[2], args[1].shape[2], *RNG, torch.empty(0)
            return o, lse, *RNG, torch.empty(0)

        return original


def by_flash(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return SDPA(q, k, v, **options)


def by_cudnn(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return CUDNN(q, k, v, None, True, **options)


@pytest.fixture
def originals() -> Iterator[Originals]:
    stand_ins = Originals("CPU")
    yield stand_ins
    stand_ins.library._destroy()


@pytest.fixture
def calls(originals) -> Iterator[list[Any]]:
    """Those that went to torch's own kernels, while ours are in their place."""
    handle = torch_sdpa.override("CPU", HOPPER)
    yield originals.calls
    handle.remove()


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

    monkeypatch.setattr(torch_sdpa, "attention_backward", spy)
    q = q_of().requires_grad_()
    try:
        torch.use_deterministic_algorithms(True)
        grads = [torch.autograd.grad(by(q, q, q)[0].sum(), q)[0] for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*grads)
    assert told == [True, True]
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

    for name in ("attention", "attention_backward"):
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
    assert made == ["attention"] * (1 if is_kept else 2) + ["attention_backward"]
    assert calls == []


Q, K, B = q_of(), q_of(1, 2, 24, 64), q_of(1, 40, 2, 64)
SEQUENCES = torch.tensor([0, 40], dtype=torch.int32)
PACKED = (SEQUENCES, SEQUENCES, 40, 40, 0.0, False, False)
DENSE = (None, None, 40, 40, 0.0, False, False)
LSE = torch.zeros(1, 2, 40)
BIAS = torch.zeros(1, 1, 40, 40, dtype=torch.bfloat16)
OF_CUDNN = (SEED, SEED, None, None, None, 40, 40)
NOT_OURS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "dropout": (SDPA, (Q, Q, Q, 0.5), {}),
    "debug mask": (SDPA, (Q, Q, Q, 0.0, False, True), {}),
    "causal, more queries": (SDPA, (Q, K, K, 0.0, True), {}),
    "causal, more keys": (SDPA, (K, Q, Q, 0.0, True), {"scale": 0.5}),
    "a single query": (SDPA, (Q[:, :, :1], Q, Q), {}),
    "fp32": (SDPA, (Q.float(),) * 3, {}),
    "head dim": (SDPA, (Q[..., :36],) * 3, {}),
    "strides": (SDPA, (Q, Q, Q.mT.contiguous().mT), {}),
    "scale": (SDPA, (Q, Q, Q), {"scale": -1.0}),
    "no keys": (SDPA, (Q, Q[:, :, :0], Q[:, :, :0]), {}),
    "no queries": (SDPA, (Q[:, :, :0], Q, Q), {}),
    "dropout, backward": (SDPA_BACKWARD, (Q, Q, Q, Q, Q, LSE, None, None, 40, 40, 0.5, False, *RNG), {}),
    "causal, backward": (SDPA_BACKWARD, (Q, Q, K, K, Q, LSE, None, None, 40, 24, 0.0, True, *RNG), {}),
    "fp32, backward": (SDPA_BACKWARD, (*(Q.float(),) * 5, LSE, None, None, 40, 40, 0.0, False, *RNG), {"scale": 0.5}),
    "LSE's shape": (SDPA_BACKWARD, (Q, Q, Q, Q, Q, LSE[..., None], None, None, 40, 40, 0.0, False, *RNG), {}),
    "packed, keys that begin elsewhere": (FLASH, (B[0], B[0], B[0], SEQUENCES, SEQUENCES.clone(), *PACKED[2:]), {}),
    "packed, fewer keys": (FLASH, (B[0], B[0, :24], B[0, :24], *PACKED), {}),
    "packed, some keys used": (FLASH, (B[0], B[0], B[0], *PACKED), {"seqused_k": torch.tensor([8], dtype=torch.int32)}),
    "packed, int64": (FLASH, (B[0], B[0], B[0], SEQUENCES.long(), SEQUENCES.long(), *PACKED[2:]), {}),
    "window, unequal lengths": (
        FLASH,
        (q_of(1, 24, 2, 64), B, B, None, None, 24, 40, 0.0, False, False),
        {"window_size_left": 8},
    ),
    "slopes": (FLASH, (B, B, B, *DENSE), {"alibi_slopes": torch.zeros(2)}),
    "lengths": (FLASH, (B, B, B, *DENSE), {"seqused_k": torch.tensor([8], dtype=torch.int32)}),
    "packed, in place": (INPLACE, (B[0], B[0], B[0], B[0], *PACKED), {}),
    "out that is q": (INPLACE, (B, B, B, B, *DENSE), {}),
    "cuDNN: dropout": (CUDNN, (Q, Q, Q, None, True, 0.5), {}),
    "cuDNN: dropout, causal, no LSE": (CUDNN, (Q, Q, Q, None, False, 0.5, True), {"scale": 0.5}),
    "cuDNN: bias": (CUDNN, (Q, Q, Q, BIAS, True), {}),
    "cuDNN: bias, no LSE": (CUDNN, (Q, Q, Q, BIAS, False), {"scale": 0.5}),
    "cuDNN: debug mask": (CUDNN, (Q, Q, Q, None, True, 0.0, False, True), {}),
    "cuDNN: causal, more keys": (CUDNN, (K, Q, Q, None, True, 0.0, True), {"scale": 0.5}),
    "cuDNN: a single query": (CUDNN, (Q[:, :, :1], Q, Q, None, True), {}),
    "cuDNN: fp32": (CUDNN, (*(Q.float(),) * 3, None, True), {}),
    "cuDNN: strides": (CUDNN, (Q, Q, Q.mT.contiguous().mT, None, True), {}),
    "cuDNN: no keys": (CUDNN, (Q, Q[:, :, :0], Q[:, :, :0], None, True), {}),
    "cuDNN: V's head dim": (CUDNN, (Q, Q, Q[..., :32], None, True), {}),
    "cuDNN: V's head dim, Q expanded": (
        CUDNN,
        (q_of(1, 1, 40, 192).expand(1, 2, 40, 192), q_of(1, 2, 40, 192), q_of(1, 2, 40, 128), None, True),
        {},
    ),
    "cuDNN: dropout, backward": (CUDNN_BACKWARD, (*(Q,) * 5, LSE[..., None], *OF_CUDNN, 0.5, False), {}),
    "cuDNN: bias, backward": (
        CUDNN_BACKWARD,
        (*(Q,) * 5, LSE[..., None], SEED, SEED, BIAS, None, None, 40, 40, 0.0, True),
        {"scale": 0.5},
    ),
    "cuDNN: packed, backward": (
        CUDNN_BACKWARD,
        (*(Q,) * 5, LSE[..., None], SEED, SEED, None, SEQUENCES, SEQUENCES, 40, 40, 0.0, False),
        {},
    ),
    "cuDNN: fp32, backward": (CUDNN_BACKWARD, (*(Q.float(),) * 5, LSE[..., None], *OF_CUDNN, 0.0, False), {}),
    "cuDNN: causal, backward": (CUDNN_BACKWARD, (Q, Q, K, K, Q, LSE[..., None], *OF_CUDNN, 0.0, True), {}),
    "cuDNN: LSE's shape": (CUDNN_BACKWARD, (*(Q,) * 5, LSE[..., None].expand(1, 2, 40, 2), *OF_CUDNN, 0.0, False), {}),
    "cuDNN: no LSE, backward": (CUDNN_BACKWARD, (*(Q,) * 5, None, *OF_CUDNN, 0.0, False), {}),
    "cuDNN: V's head dim, backward": (
        CUDNN_BACKWARD,
        (Q[..., :32], Q, Q, Q[..., :32], Q[..., :32], LSE[..., None], *OF_CUDNN, 0.0, False),
        {},
    ),
    "packed, backward, keys that begin elsewhere": (
        FLASH_BACKWARD,
        (B[0], B[0], B[0], B[0], B[0], LSE[0], SEQUENCES, SEQUENCES.clone(), 40, 40, 0.0, False, *RNG),
        {},
    ),
}


def flat(results: Any) -> list[Any]:
    return list(results) if isinstance(results, tuple | list) else [results]


@pytest.mark.parametrize("name", [name for name, (op, *_) in NOT_OURS.items() if op])
def test_all_else_goes_to_torchs_own(name, originals):
    """With all of its arguments, and what comes back is what it returns."""
    op, args, kw = NOT_OURS[name]
    want = flat(op(*args, **kw))
    handle = torch_sdpa.override("CPU", HOPPER)
    try:
        got = flat(op(*args, **kw))
    finally:
        handle.remove()
    (_, *direct), (_, *through) = originals.calls
    for one, other in zip(direct, through, strict=True):
        pairs = (one.items(), other.items()) if isinstance(one, dict) else (enumerate(one), enumerate(other))
        plain, handed_on = ({n: x for n, x in some if x is not None and x is not False} for some in pairs)
        assert plain.keys() == handed_on.keys()
        assert all(x is handed_on[n] if isinstance(x, Tensor) else x == handed_on[n] for n, x in plain.items())
    for one, other in zip(want, got, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


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


def check_varlen_attn(lengths: list[int], window: tuple[int, int], device: str) -> None:
    """torch's own function for packed sequences, and its gradients, against torch's SDPA of each in float64."""
    inputs = [t.to(device).requires_grad_() for t in q_of(3, sum(lengths), 2, 64)]
    starts = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
    q, k, v = inputs
    out = varlen_attn(q, k, v, starts, starts, max(lengths), max(lengths), window_size=window)
    assert isinstance(out, Tensor)
    dout = q_of(*out.shape).to(device)
    grads = torch.autograd.grad(out, inputs, dout)
    first = 0
    for length in lengths:
        rows = slice(first, first + length)
        wide = [t.detach()[rows].double().transpose(0, 1).requires_grad_() for t in inputs]
        mask = torch.ones(length, length, dtype=torch.bool, device=device)
        mask = mask if window[1] < 0 else mask.tril(window[1])
        mask = mask if window[0] < 0 else mask.triu(-window[0])
        q, k, v = wide
        with sdpa_kernel(SDPBackend.MATH):
            want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        want_grads = torch.autograd.grad(want, wide, dout[rows].double().transpose(0, 1))
        for one, other in zip((out, *grads), (want, *want_grads), strict=True):
            error = (one.detach()[rows].double() - other.transpose(0, 1)).norm()
            assert error < 0.02 * other.norm(), f"off by {error:.3e} of {other.norm():.3e}"
        first += length


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (16, 8)])
def test_varlen_attn(window, calls):
    check_varlen_attn([30, 5, 25], window, "cpu")
    assert calls == []


@pytest.mark.parametrize("by", [by_flash, by_cudnn])
def test_on_blackwell_the_gradients_are_torchs(by, originals):
    handle = torch_sdpa.override("CPU", Device.blackwell())
    q = q_of().requires_grad_()
    try:
        out = by(q, q, q)[0]
        out.sum().backward()
    finally:
        handle.remove()
    name = "flash" if by is by_flash else "cudnn"
    assert [name for name, *_ in originals.calls] == [f"_scaled_dot_product_{name}_attention_backward"]
    assert torch.equal(out, attention(q.detach(), q.detach(), q.detach(), device=Device.blackwell()))  # type: ignore[arg-type]


def test_afterwards_all_is_as_before(originals):
    q = q_of()
    for _ in range(2):
        torch_sdpa.override("CPU", HOPPER).remove()
        assert (SDPA(q, q, q)[0] == 7).all()
    assert len(originals.calls) == 2
    originals.library._destroy()
    with pytest.raises(NotImplementedError):
        SDPA(q, q, q)


def test_hooks_are_not_imported_unasked():
    """With all that they import, and register."""
    program = "import sys, gluon_attn; sys.exit(bool({'gluon_attn.torch_sdpa', 'gluon_attn.flash'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


def test_registered_and_not_active():
    assert torch_sdpa.NAME in list_flash_attention_impls()
    assert current_flash_attention_impl() is None


def test_without_cuda_nothing_changes():
    """A program that turns it on runs on such a machine too."""
    if torch.version.cuda:
        pytest.skip("this torch is built with CUDA")
    q = q_of()
    want = F.scaled_dot_product_attention(q, q, q)
    try:
        activate_flash_attention_impl(torch_sdpa.NAME)
        assert current_flash_attention_impl() == torch_sdpa.NAME
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), want)
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(SDPA.default.name(), "CUDA")
    finally:
        restore_flash_attention_impl()
    with torch_sdpa.enabled():
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), want)


def order() -> list[SDPBackend]:
    """Of the backends that are on."""
    return torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)


def test_order_and_backends_stay_within():
    before = torch._C._get_sdp_priority_order(), order()
    with torch_sdpa.enabled():
        assert (torch._C._get_sdp_priority_order(), order()) == before
    ordered = [SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]
    with sdpa_kernel(ordered, set_priority=True), torch_sdpa.enabled():
        assert order() == ordered
    with torch_sdpa.enabled():
        torch.backends.cuda.enable_cudnn_sdp(False)
        assert SDPBackend.CUDNN_ATTENTION not in order()
    try:
        assert SDPBackend.CUDNN_ATTENTION not in order()  # as the user said within
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    with pytest.raises(KeyError), torch_sdpa.enabled():
        raise KeyError
    assert (torch._C._get_sdp_priority_order(), order()) == before
    assert not torch_sdpa._registered


class OfCuda:
    """Stand-ins for CUDA's kernels, where there are none. They are called past the dispatcher, as no tensor here is
    CUDA's; and `supports` refuses all, so that a call of ours shows in `asked`, and its handing on in `calls`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.originals = Originals("CUDA")
        self.asked: list[Any] = []
        patch.setattr(torch_sdpa, "supports", self.refuse)

    def refuse(self, *_: Any, **__: Any) -> str:
        self.asked.append(1)
        return "not today"

    def is_ours(self, op: Any, *others: Any) -> bool:
        before, q = len(self.asked), q_of()
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
        assert (get_kernel(op.default, "CUDA").call_boxed(keys, q, q, q, *others)[0] == 7).all()
        return len(self.asked) > before

    def ours(self) -> tuple[bool, bool]:
        """Whether the flash operator is ours, whether cuDNN's is."""
        found = self.is_ours(SDPA), self.is_ours(CUDNN, None, True)
        assert [name for name, *_ in self.originals.calls[-2:]] == [
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_cudnn_attention",
        ]
        return found


@pytest.fixture
def of_cuda(monkeypatch) -> Iterator[OfCuda]:
    if torch.version.cuda:
        pytest.skip("this torch is built with CUDA")
    made = OfCuda(monkeypatch)
    yield made
    restore_flash_attention_impl(_raise_warn=False)
    made.originals.library._destroy()


def test_enabled_overrides_both_activated_the_flash_operators(of_cuda):
    assert of_cuda.ours() == (False, False)
    with torch_sdpa.enabled():
        assert of_cuda.ours() == (True, True)
    assert of_cuda.ours() == (False, False)
    activate_flash_attention_impl(torch_sdpa.NAME)
    assert of_cuda.ours() == (True, False)
    restore_flash_attention_impl()
    assert of_cuda.ours() == (False, False)


def test_enabled_and_activated_in_any_order(of_cuda):
    with torch_sdpa.enabled():
        for _ in range(2):
            activate_flash_attention_impl(torch_sdpa.NAME)
        with torch_sdpa.enabled():  # what was there before is not the one that was activated, which has no cuDNN's
            assert of_cuda.ours() == (True, True)
            restore_flash_attention_impl()
            assert of_cuda.ours() == (True, True)
        assert of_cuda.ours() == (True, True)
    assert of_cuda.ours() == (False, False)


def test_cudnns_stay_where_their_lse_has_other_strides(of_cuda, monkeypatch):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    with torch_sdpa.enabled():
        assert of_cuda.ours() == (True, False)


def test_left_in_any_order(originals):
    """As several threads leave it, each with others still within."""
    q = q_of()
    ours = attention(q, q, q, device=HOPPER)
    assert isinstance(ours, Tensor)
    for leaves_first in (0, 1):
        handles = [torch_sdpa.override("CPU", HOPPER) for _ in range(2)]
        entered = [torch_sdpa.enabled() for _ in range(2)]
        for context in entered:
            context.__enter__()
        assert torch.equal(by_cudnn(q, q, q)[0], ours)
        handles.pop(leaves_first).remove()
        entered.pop(leaves_first).__exit__(None, None, None)
        for by in (by_flash, by_cudnn):
            assert torch.equal(by(q, q, q)[0], ours)
            assert (by(q, q, q, dropout_p=0.5)[0] == 7).all()  # handed on through one that is off
        handles.pop().remove()
        entered.pop().__exit__(None, None, None)
        for by in (by_flash, by_cudnn):
            assert (by(q, q, q)[0] == 7).all()
    assert not torch_sdpa._registered


def test_many_threads(originals):
    """Each turns it on and off in its own time, while the others are in our kernels; afterwards it is off."""
    q = q_of()
    want = attention(q, q, q, device=HOPPER)
    assert isinstance(want, Tensor)

    def work(_: int) -> bool:
        handle = torch_sdpa.override("CPU", HOPPER)
        try:
            with torch_sdpa.enabled():
                return all(torch.equal(by(q, q, q)[0], want) for by in (by_flash, by_cudnn))
        finally:
            handle.remove()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(12)))
    assert all((by(q, q, q)[0] == 7).all() for by in (by_flash, by_cudnn))
    assert not torch_sdpa._registered


def test_the_stand_ins_are_not_ours():
    """Else the tests above would say nothing."""
    q = q_of()
    want, want_lse = reference_attention(q.double(), q.double(), q.double())
    assert (want - 7).abs().min() > 1
    assert (want_lse - 7).abs().max() > 1
