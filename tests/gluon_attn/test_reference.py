"""The specification itself, against torch's own attention and against the definition written out row by row."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from gluon_attn import reference_attention

NEG_INF = float("-inf")


def qkv(batch, heads, kv_heads, q_len, kv_len, head_dim, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    return tuple(torch.randn(batch, h, s, head_dim, generator=generator).to(dtype) for h, s in shapes)


def row_by_row(q, k, v, causal, scale):
    """The definition: one row at a time, only over the keys that it sees."""
    batch, heads, q_len, _ = q.shape
    kv_heads, kv_len = k.shape[1:3]
    out = torch.full_like(q, float("nan"))
    lse = torch.full((batch, heads, q_len), float("nan"), dtype=q.dtype)
    for b in range(batch):
        for h in range(heads):
            keys, values = k[b, h * kv_heads // heads], v[b, h * kv_heads // heads]
            for i in range(q_len):
                seen = max(0, min(kv_len, i + kv_len - q_len + 1)) if causal else kv_len
                if seen == 0:
                    out[b, h, i], lse[b, h, i] = 0.0, NEG_INF
                else:
                    scores = keys[:seen] @ q[b, h, i] * scale
                    lse[b, h, i] = torch.logsumexp(scores, dim=0)
                    out[b, h, i] = torch.softmax(scores, dim=0) @ values[:seen]
    return out, lse


# batch, heads, KV heads, Sq, Sk, D
SHAPES = {
    "one query, one key": (1, 1, 1, 1, 1, 8),
    "one query": (2, 2, 2, 1, 13, 16),
    "square": (2, 3, 3, 12, 12, 32),
    "more keys": (1, 2, 2, 7, 19, 16),
    "GQA 4:1": (2, 8, 2, 9, 11, 16),
    "MQA": (1, 4, 1, 6, 10, 40),
}
MORE_QUERIES = {
    "more queries": (1, 2, 2, 11, 5, 16),
    "more queries, GQA": (2, 4, 2, 10, 3, 8),
    "one key": (1, 2, 1, 4, 1, 8),
}


@pytest.mark.parametrize("shape", (SHAPES | MORE_QUERIES).values(), ids=(SHAPES | MORE_QUERIES).keys())
def test_full_equals_sdpa(shape):
    q, k, v = qkv(*shape)
    out, _ = reference_attention(q, k, v)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, enable_gqa=True), rtol=1e-12, atol=1e-12)


# Torch gives NaN to rows without a key, so only shapes without any.
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_causal_equals_sdpa_aligned_to_the_bottom_right(shape):
    q, k, v = qkv(*shape)
    out, _ = reference_attention(q, k, v, causal=True)
    mask = causal_lower_right(q.shape[2], k.shape[2])
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)


def test_causal_is_not_torchs_is_causal():
    q, k, v = qkv(1, 1, 1, 4, 8, 16)
    out, _ = reference_attention(q, k, v, causal=True)
    top_left = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert not torch.allclose(out, top_left, atol=1e-2)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", (SHAPES | MORE_QUERIES).values(), ids=(SHAPES | MORE_QUERIES).keys())
def test_equals_the_definition_row_by_row(shape, causal):
    q, k, v = qkv(*shape)
    out, lse = reference_attention(q, k, v, causal=causal, scale=0.3)
    want_out, want_lse = row_by_row(q, k, v, causal, 0.3)
    torch.testing.assert_close(out, want_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)


def test_lse_is_the_natural_log():
    q, k, v = qkv(1, 2, 2, 5, 7, 16)
    _, lse = reference_attention(q, k, v)
    assert lse.shape == (1, 2, 5)
    torch.testing.assert_close(lse, torch.logsumexp(q @ k.mT / 4.0, dim=-1), rtol=1e-13, atol=1e-13)
    # 7 equal scores of zero: ln 7, not log2 7.
    _, lse = reference_attention(torch.zeros_like(q), k, v)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(7)), rtol=1e-13, atol=0)


def test_rows_without_a_key():
    q, k, v = qkv(1, 2, 2, 11, 5, 16)
    out, lse = reference_attention(q, k, v, causal=True)
    assert bool((out[:, :, :6] == 0).all())
    assert bool((lse[:, :, :6] == NEG_INF).all())
    assert bool(out[:, :, 6:].isfinite().all())
    assert bool(lse[:, :, 6:].isfinite().all())
    # The first row that sees anything sees key 0 alone.
    torch.testing.assert_close(out[:, :, 6], v[:, :, 0], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_no_keys(dtype, causal):
    q, k, v = qkv(2, 4, 2, 3, 0, 16, dtype)
    out, lse = reference_attention(q, k, v, causal=causal)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert lse.shape == (2, 4, 3)
    assert bool((out == 0).all())
    assert bool((lse == NEG_INF).all())


EMPTY = {
    "no batch": (0, 2, 2, 3, 4, 16),
    "no heads": (2, 0, 0, 3, 4, 16),
    "no queries": (2, 4, 2, 0, 4, 16),
    "no queries, no keys": (2, 4, 2, 0, 0, 16),
}


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", EMPTY.values(), ids=EMPTY.keys())
def test_empty(shape, causal, layout):
    q, k, v = qkv(*shape)
    if layout == "bshd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out, lse = reference_attention(q, k, v, causal=causal, layout=layout)
    assert out.shape == q.shape
    assert lse.shape == (shape[0], shape[1], shape[3])


def test_scale():
    q, k, v = qkv(2, 2, 2, 6, 9, 64)
    default, scaled = (reference_attention(q, k, v, scale=scale) for scale in (None, 0.125))
    torch.testing.assert_close(default, scaled, rtol=1e-13, atol=1e-13)
    out, lse = reference_attention(q, k, v, scale=1.5)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, scale=1.5), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, torch.logsumexp(q @ k.mT * 1.5, dim=-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_layouts_agree(causal):
    q, k, v = qkv(2, 8, 2, 9, 11, 16)
    out, lse = reference_attention(q, k, v, causal=causal)
    swapped = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    out_bshd, lse_bshd = reference_attention(*swapped, causal=causal, layout="bshd")
    torch.testing.assert_close(out_bshd.transpose(1, 2), out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse_bshd, lse, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_computes_in_the_dtype_given(dtype):
    q, k, v = qkv(2, 4, 2, 33, 65, 64, dtype)
    out, lse = reference_attention(q, k, v)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    want_out, want_lse = row_by_row(q.double(), k.double(), v.double(), False, 0.125)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), want_out, rtol=8 * eps, atol=8 * eps)
    torch.testing.assert_close(lse.double(), want_lse, rtol=8 * eps, atol=8 * eps)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_large_scores_stay_finite(causal):
    q, k, v = qkv(1, 2, 2, 16, 24, 32)
    out, lse = reference_attention(1000 * q, k, v, causal=causal)
    assert bool(out.isfinite().all())
    assert bool(lse.isfinite().all())
    want_out, want_lse = row_by_row(1000 * q, k, v, causal, 32**-0.5)
    torch.testing.assert_close(out, want_out, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)


def scales(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.rand(shape, generator=generator) + 0.5 for _ in range(3))
    return q, k, v


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_is_attention_of_what_it_stands_for(dtype, layout):
    """Each head's numbers times its KV head's scale, head by head; O in bf16, LSE in fp32."""
    q, k, v = (t.to(dtype) for t in qkv(2, 6, 3, 9, 11, 16))
    by_q, by_k, by_v = scales(2, 3)
    q64, k64, v64 = (t.double() for t in (q, k, v))
    for b, h in itertools.product(range(2), range(6)):
        q64[b, h] *= by_q[b, h // 2].double()
        if h < 3:
            k64[b, h] *= by_k[b, h].double()
            v64[b, h] *= by_v[b, h].double()
    want, want_lse = row_by_row(q64, k64, v64, True, 0.3)
    if layout == "bshd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    options: dict[str, Any] = {"causal": True, "scale": 0.3, "layout": layout}
    out, lse = reference_attention(q, k, v, **options, q_scale=by_q, k_scale=by_k, v_scale=by_v)
    assert (out.shape, out.dtype, lse.dtype) == (q.shape, torch.bfloat16, torch.float32)
    out = out if layout == "bhsd" else out.transpose(1, 2)
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("missing", ["q_scale", "k_scale", "v_scale"])
def test_a_scale_that_is_left_out_is_1(missing):
    q, k, v = (t.to(torch.float8_e4m3fn) for t in qkv(2, 4, 2, 9, 11, 16))
    given: dict[str, Any] = dict(zip(("q_scale", "k_scale", "v_scale"), scales(2, 2), strict=True))
    with_ones = reference_attention(q, k, v, **(given | {missing: torch.ones(2, 2)}))
    given.pop(missing)
    without = reference_attention(q, k, v, **given)
    assert all(map(torch.equal, without, with_ones))
