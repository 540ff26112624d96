"""Attention in plain PyTorch: the specification that the kernels are tested against."""

from typing import Any

import torch
from torch import Tensor

from .tensors import FP8_DTYPES, output_dtype


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    chunk: int | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale · Q Kᵀ + mask) V and the log-sum-exp of its scores, in the dtype of the inputs, materialising S.

    q: (B, H, Sq, D); k, v: (B, Hkv, Sk, D) with H a multiple of Hkv; with layout "bshd", dimensions 1 and 2 swapped. V
    and O may have another head dim.
    causal: query i sees keys j <= i + Sk - Sq (aligned to the bottom right, as flash-attention has it; the `is_causal`
    of torch's scaled_dot_product_attention is aligned to the top left).
    window: (left, right): with p = i + Sk - Sq, query i sees keys from p - left to p + right; None: no limit.
    chunk: query i sees keys j of its own chunk alone, j // chunk == p // chunk, rounded down; None: of all.
    segment_ids: ((B, Sq), (B, Sk)), or one for both: a query sees keys of its own id alone.
    mask: bool, broadcast to (B, H, Sq, Sk): whether a query sees a key, for what `attention` has as a mask_mod.
    Of all these together, a query sees what all of them let through.
    scale: default 1/sqrt(D).
    softcap: scores, scaled, become softcap · tanh(score / softcap). alibi_slopes: (H,) or (B, H): minus the slope times
    |i + Sk - Sq - j|. bias: broadcast to (B, H, Sq, Sk), is added to them. sinks: (H,): for each row a further score
    that has no value.
    q_scale, k_scale, v_scale: (B, Hkv), for fp8 inputs: what they are multiplied with, default 1; that is then done in
    fp32, and the rest too.
    cu_seqlens_q, cu_seqlens_k, seqused_k: of packed sequences, as `attention_varlen` has them: then q is (T, H, D), k
    and v (U, Hkv, D), there is no layout, and LSE is (H, T). Rows that are in no sequence have O = 0 and LSE = -inf.

    Returns (O in the layout and dtype of q (of fp8 inputs: bfloat16), LSE (B, H, Sq), natural log, fp32 or, for float64
    inputs, float64).
    A row that sees no key, or has scores of -inf alone, has O = 0 and LSE = -inf, but NaN where V is NaN or infinite. A
    score of NaN makes O and LSE NaN; one of +inf makes O NaN and LSE +inf.
    """
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        of_sequences = {"alibi_slopes": alibi_slopes, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        same: dict[str, Any] = {
            "causal": causal, "window": window, "chunk": chunk, "scale": scale, "softcap": softcap, "sinks": sinks
        }  # fmt: skip
        return reference_of_packed(q, k, v, (cu_seqlens_q, cu_seqlens_k, seqused_k), of_sequences, same)
    if q.dtype in FP8_DTYPES:
        kv_heads = k.shape[1 if layout == "bhsd" else 2]
        q, k, v = (dequantise(t, by, kv_heads, layout) for t, by in ((q, q_scale), (k, k_scale), (v, v_scale)))
        changes: dict[str, Any] = {
            "causal": causal, "window": window, "chunk": chunk, "softcap": softcap, "alibi_slopes": alibi_slopes,
            "sinks": sinks, "segment_ids": segment_ids, "mask": mask, "bias": bias,
        }  # fmt: skip
        out, lse = reference_attention(q, k, v, scale=scale, layout=layout, **changes)
        return out.to(torch.bfloat16), lse
    if layout == "bshd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (t.repeat_interleave(q.shape[1] // max(t.shape[1], 1), dim=1) for t in (k, v))
    statistics = torch.promote_types(q.dtype, torch.float32)

    scores = (q @ k.mT).to(statistics) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if alibi_slopes is not None:
        q_index = torch.arange(q.shape[2], device=q.device)[:, None] + (k.shape[2] - q.shape[2])
        distance = (q_index - torch.arange(k.shape[2], device=q.device)).abs()
        scores = scores - alibi_slopes.to(statistics)[..., None, None] * distance
    if bias is not None:
        scores = scores + bias.to(statistics)
    scores = masked(scores, causal=causal, window=window, chunk=chunk)
    if segment_ids is not None:
        of_queries, of_keys = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        scores = scores.masked_fill(of_queries[:, None, :, None] != of_keys[:, None, None, :], float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(statistics)[:, None])
    # exp(-inf - lse) is NaN only where lse is -inf too: in rows that see no key.
    p = (scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp()
    out = p.to(v.dtype) @ v
    return (out.transpose(1, 2) if layout == "bshd" else out), lse


def reference_of_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[Tensor, Tensor, Tensor | None],
    of_sequences: dict[str, Tensor | None],
    same: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """A loop over the sequences. of_sequences: options that have, if they are of two dimensions, a row for each."""
    starts_q, starts_k = (t.tolist() for t in lengths[:2])
    used = None if lengths[2] is None else lengths[2].tolist()
    out = q.new_zeros((*q.shape[:2], v.shape[-1]), dtype=output_dtype(q.dtype))
    statistics = torch.float32 if q.dtype in FP8_DTYPES else torch.promote_types(q.dtype, torch.float32)
    lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), dtype=statistics, device=q.device)
    for i in range(len(starts_q) - 1):
        rows = slice(starts_q[i], starts_q[i + 1])
        keys = slice(starts_k[i], starts_k[i + 1] if used is None else starts_k[i] + used[i])
        own: dict[str, Any] = {n: t if t is None or t.dim() < 2 else t[i : i + 1] for n, t in of_sequences.items()}
        of_one = reference_attention(q[None, rows], k[None, keys], v[None, keys], layout="bshd", **own, **same)
        out[rows], lse[:, rows] = of_one[0][0], of_one[1][0]
    return out, lse


def masked(scores: Tensor, *, causal: bool, window: tuple[int | None, int | None], chunk: int | None) -> Tensor:
    """Scores (..., Sq, Sk), -inf where a query does not see a key. The options are those of `reference_attention`."""
    if not causal and window == (None, None) and chunk is None:
        return scores
    q_len, kv_len = scores.shape[-2:]
    positions = torch.arange(q_len, device=scores.device)[:, None] + (kv_len - q_len)
    keys = torch.arange(kv_len, device=scores.device)[None, :]
    left, right = window
    hidden = torch.zeros(q_len, kv_len, dtype=torch.bool, device=scores.device)
    if causal:
        hidden |= keys > positions
    if left is not None:
        hidden |= keys < positions - left
    if right is not None:
        hidden |= keys > positions + right
    if chunk is not None:
        hidden |= keys // chunk != positions // chunk
    return scores.masked_fill(hidden, float("-inf"))


def dequantise(t: Tensor, scale: Tensor | None, kv_heads: int, layout: str = "bhsd") -> Tensor:
    """An fp8 tensor in fp32, each head times the number in `scale` (B, kv_heads) of the KV head it belongs to."""
    if scale is None:
        return t.float()
    heads_dim = 1 if layout == "bhsd" else 2
    by_head = scale.repeat_interleave(t.shape[heads_dim] // max(kv_heads, 1), dim=1)
    return t.float() * by_head.unflatten(1, (-1, 1, 1) if layout == "bhsd" else (1, -1, 1))
