"""The interface of FlashAttention-3: its parameters in its order, and what its documentation says of them."""

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from gluon_attn import attention, attention_varlen, flash, reference_attention
from gluon_attn.device import Device
from gluon_attn.testing import check, check_gradients
from tests.slow import slow_if

COMMON = "window_size attention_chunk softcap"
DESCALE = "q_descale k_descale v_descale"
TUNING = "num_splits pack_gqa deterministic sm_margin return_attn_probs"
# As flash_attn_interface.py has them, so that what is given by position means the same.
PARAMETERS = {
    "flash_attn_func": f"q k v softmax_scale causal qv {DESCALE} {COMMON} {TUNING}",
    "flash_attn_varlen_func": (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k softmax_scale causal qv "
        f"{DESCALE} {COMMON} {TUNING}"
    ),
    "flash_attn_with_kvcache": (
        "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table "
        f"cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens {DESCALE} softmax_scale causal {COMMON} "
        "rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin return_softmax_lse"
    ),
    "flash_attn_combine": "out_partial lse_partial out out_dtype",
}


def qkv(q_len: int = 5, kv_len: int = 7, **kw: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, n, h, 64, generator=generator).to(kw.get("dtype", torch.bfloat16))
        for n, h in ((q_len, 2), (kv_len, 1), (kv_len, 1))
    ]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setattr(flash, "attention", functools.partial(attention, device=Device.hopper()))
    monkeypatch.setattr(flash, "attention_varlen", functools.partial(attention_varlen, device=Device.hopper()))


def attend(*args: Any, **kw: Any) -> Any:
    return flash.flash_attn_func(*args, **kw)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_flash_attentions(name):
    parameters = inspect.signature(getattr(flash, name)).parameters
    by_position = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert by_position == PARAMETERS[name].split()
    of_fa4 = ["learnable_sink"] if name in ("flash_attn_func", "flash_attn_varlen_func") else []
    assert [n for n in parameters if n not in by_position] == of_fa4


def test_defaults_are_flash_attentions():
    defaults = {name: p.default for name, p in inspect.signature(flash.flash_attn_func).parameters.items()}
    defaults = {name: x for name, x in defaults.items() if not any(x is y for y in (None, False, inspect._empty))}
    assert defaults == {"window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0, "num_splits": 1, "sm_margin": 0}


@pytest.mark.parametrize(("q_len", "kv_len"), [(2, 5), (5, 2), (40, 40)])
@pytest.mark.parametrize("causal", [False, True])
def test_meaning(q_len, kv_len, causal):
    """Shapes, LSE and, where lengths differ, the alignment: the masks of its documentation."""
    q, k, v = qkv(q_len, kv_len)
    out, lse = attend(q, k, v, 0.3, causal, return_attn_probs=True)
    check(q, k, v, out, lse, causal=causal, scale=0.3, layout="bshd")
    assert torch.equal(attend(q, k, v, softmax_scale=0.3, causal=causal), out)
    seen = torch.ones(q_len, kv_len).tril(kv_len - q_len if causal else kv_len).bool()
    scores = torch.einsum("bqhd,bkd->bhqk", q.double(), k[:, :, 0].double()) * 0.3
    want = scores.masked_fill(~seen, float("-inf")).logsumexp(-1)
    torch.testing.assert_close(lse.double(), want, atol=1e-3, rtol=1e-3)
    if causal and (q_len, kv_len) == (5, 2):
        assert (out[:, :3] == 0).all()  # "If the row of the mask is all zero, the output will be zero"


MASKS: dict[str, tuple[tuple[Any, Any], bool, bool]] = {
    "none": ((-1, -1), False, False),
    "none, as FlashAttention-4 says it": ((None, None), False, False),
    "causal": ((-1, -1), True, True),
    "nothing to the right": ((-1, 0), False, True),
    "both": ((-1, 0), True, True),
    "causal hides more": ((-1, 3), True, True),
    "wider than the lengths": ((6, 4), False, False),
    "wide to the left, causal": ((6, 2), True, True),
}


@pytest.mark.parametrize("name", MASKS)
def test_windows_that_hide_nothing_more(name):
    window, causal, is_causal = MASKS[name]
    q, k, v = qkv()
    out = attend(q, k, v, causal=causal, window_size=window)
    assert torch.equal(out, attend(q, k, v, causal=is_causal))
    assert not torch.equal(out, attend(q, k, v, causal=not is_causal))


@pytest.mark.parametrize("window", [5, None, ("a", 0), (1, 2, 3)])
@pytest.mark.parametrize("function", [flash.flash_attn_func, flash.flash_attn_varlen_func])
def test_windows_that_are_none(function, window):
    tensors, lengths = packed(30, 12)
    given: tuple[Any, ...] = () if function is flash.flash_attn_func else lengths
    with pytest.raises(TypeError, match=r"^window_size: expected .*, got .*; give \(left, right\).* -1 or None for no"):
        function(*tensors, *given, window_size=window)


@pytest.mark.parametrize("window", [(5, -1), (5, 0), (0, 0), (-1, 3), (None, 1)])
@pytest.mark.slow_but("window1", "window2")
def test_windows_that_do(window):
    q, k, v = qkv(40, 50)
    out, lse = attend(q, k, v, window_size=window, return_attn_probs=True)
    left, right = (limit if limit is not None and limit >= 0 else None for limit in window)
    check(q, k, v, out, lse, window=(left, right), layout="bshd")


@pytest.mark.parametrize(("name", "ours", "value"), [("attention_chunk", "chunk", 16), ("softcap", "softcap", 0.5)])
def test_other_names(name, ours, value):
    q, k, v = qkv(40, 50)
    given: dict[str, Any] = {name: value}
    out = attend(q, k, v, causal=True, **given)
    want, _ = reference_attention(q.double(), k.double(), v.double(), causal=True, layout="bshd", **{ours: value})
    torch.testing.assert_close(out.double(), want, atol=0.03, rtol=0)
    assert not torch.allclose(attend(q, k, v, causal=True), out, atol=0.03)


@pytest.mark.parametrize("packed", [False, True])
def test_sinks_have_flash_attention_4s_name(packed):
    q, k, v = qkv(40, 50)
    sinks = torch.tensor([0.5, 3.0], requires_grad=True)
    if packed:
        lengths: Any = (torch.tensor([0, 40]).int(), torch.tensor([0, 50]).int(), 40, 50)
        one: Any = flash.flash_attn_varlen_func(q[0], k[0], v[0], *lengths, learnable_sink=sinks)
        out = one[None]
    else:
        out = attend(q, k, v, learnable_sink=sinks)
    given = sinks.detach().requires_grad_()
    want, _ = reference_attention(q.double(), k.double(), v.double(), sinks=given.double(), layout="bshd")
    torch.testing.assert_close(out.double(), want, atol=0.03, rtol=0)
    assert not torch.allclose(attend(q, k, v), out, atol=0.03)
    out.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(sinks.grad, given.grad, atol=0.1, rtol=0.05)


@pytest.mark.parametrize(
    ("name", "value"),
    [("qv", torch.zeros(1, 5, 2, 64)), ("sm_margin", 8)],
)
def test_what_is_missing_is_refused_by_name(name, value):
    with pytest.raises(NotImplementedError, match=rf"^{name}: .* is not supported so far"):
        attend(*qkv(), **{name: value})


@pytest.mark.parametrize("name", PARAMETERS)
def test_functions_that_are_missing_say_so(name):
    if name not in ("flash_attn_func", "flash_attn_varlen_func"):
        function = getattr(flash, name)
        required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
        with pytest.raises(NotImplementedError, match=rf"^{name}: .* is not supported so far; call flash_attn_func"):
            function(*(None for _ in required))


def attend_varlen(*args: Any, **kw: Any) -> Any:
    return flash.flash_attn_varlen_func(*args, **kw)


def packed(*lengths: int) -> tuple[list[Tensor], tuple[Any, ...]]:
    """([q, k, v], where sequences begin and how long they are at most)."""
    starts = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32)
    return [t[0] for t in qkv(sum(lengths), sum(lengths))], (starts, starts, max(lengths), max(lengths))


@pytest.mark.parametrize(
    "options",
    slow_if(
        lambda options: "causal" not in options,
        [{"causal": True}, {"window_size": (9, 0)}, {"softmax_scale": 0.3}, {"softcap": 0.5}, {"attention_chunk": 16}],
    ),
    ids=str,
)
def test_packed_sequences(options):
    tensors, lengths = packed(30, 12)
    out, lse = attend_varlen(*tensors, *lengths, return_attn_probs=True, **options)
    for rows in (slice(0, 30), slice(30, 42)):
        want: Any = attend(*(t[None, rows] for t in tensors), return_attn_probs=True, **options)
        torch.testing.assert_close(out[rows], want[0][0], atol=0.02, rtol=0)
        torch.testing.assert_close(lse[:, rows], want[1][0], atol=1e-4, rtol=1e-5)


def test_seqused_of_packed_sequences():
    (q, k, v), lengths = packed(30, 12)
    used = torch.tensor([7, 12], dtype=torch.int32)
    out = attend_varlen(q, k, v, *lengths, seqused_k=used)
    want: Any = attend(q[None, :30], k[None, :7], v[None, :7])
    torch.testing.assert_close(out[:30], want[0], atol=0.02, rtol=0)
    with pytest.raises(NotImplementedError, match=r"^seqused_q: .* is not supported so far"):
        attend_varlen(q, k, v, *lengths, seqused_q=used)


def test_what_chooses_between_speeds_changes_nothing():
    q, k, v = qkv()
    assert torch.equal(attend(q, k, v, num_splits=4, pack_gqa=True), attend(q, k, v))


def test_fp8():
    q, k, v = (t.to(torch.float8_e4m3fn) for t in qkv())
    scales = [torch.full((1, 1), x) for x in (0.5, 2.0, 3.0)]
    out = attend(q, k, v, None, False, None, *scales)
    assert out.dtype == torch.bfloat16
    check(q, k, v, out, None, layout="bshd", scales=scales)


def test_other_strides_are_copied():
    q, k, v = qkv()
    other = [t.mT.contiguous().mT for t in (q, k, v)]
    assert torch.equal(attend(*other), attend(q, k, v))


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients(deterministic, monkeypatch):
    asked: list[Any] = []

    def spy(*args: Any, **kw: Any) -> Any:
        asked.append(kw["deterministic"])
        return attention(*args, **kw, device=Device.hopper())

    monkeypatch.setattr(flash, "attention", spy)
    q, k, v = inputs = [t.requires_grad_() for t in qkv(24, 40)]
    out, lse = attend(q, k, v, deterministic=deterministic, return_attn_probs=True)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    grads = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    check_gradients(q, k, v, dout, grads, layout="bshd")
    assert torch.autograd.grad(lse.sum(), q)[0].isfinite().all()
    assert asked == [deterministic or None]  # else as torch.use_deterministic_algorithms says


def test_the_rest_is_said_as_attention_says_it():
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"^v: expected 7 keys \(as k\), got 6"):
        attend(q, k, v[:, :6])
    with pytest.raises(TypeError, match=r"^q: expected a torch.Tensor"):
        attend(None, k, v)


def test_the_reference_is_what_the_masks_say():
    """Else `check` would say nothing of the alignment."""
    q, k, v = (t.double() for t in qkv(2, 5))
    out, _ = reference_attention(q, k, v, causal=True, layout="bshd")
    first, _ = reference_attention(q[:, :1], k[:, :4], v[:, :4], layout="bshd")
    torch.testing.assert_close(out[:, :1], first)
