"""Attention in plain PyTorch: the specification that the kernels are tested against."""

import torch
from torch import Tensor


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, layout: str = "bhsd"
) -> tuple[Tensor, Tensor]:
    """softmax(scale · Q Kᵀ + mask) V and the log-sum-exp of its scores, in the dtype of the inputs, materialising S.

    q: (B, H, Sq, D); k, v: (B, Hkv, Sk, D) with H a multiple of Hkv; with layout "bshd", dimensions 1 and 2 swapped.
    causal: query i sees keys j <= i + Sk - Sq (aligned to the bottom right, as flash-attention has it; the `is_causal`
    of torch's scaled_dot_product_attention is aligned to the top left). scale: default 1/sqrt(D).

    Returns (O in the layout and dtype of q, LSE (B, H, Sq), natural log, fp32 or, for float64 inputs, float64).
    A row that sees no key has O = 0 and LSE = -inf.
    """
    if layout == "bshd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (t.repeat_interleave(q.shape[1] // max(t.shape[1], 1), dim=1) for t in (k, v))
    statistics = torch.promote_types(q.dtype, torch.float32)

    scores = (q @ k.mT).to(statistics) * scale
    if causal:
        rows = torch.arange(q.shape[2], device=q.device)[:, None]
        keys = torch.arange(k.shape[2], device=q.device)[None, :]
        scores = scores.masked_fill(keys > rows + (k.shape[2] - q.shape[2]), float("-inf"))
    lse = scores.logsumexp(dim=-1)
    # exp(-inf - lse) is NaN only where lse is -inf too: in rows that see no key.
    p = (scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp()
    out = p.to(v.dtype) @ v
    return (out.transpose(1, 2) if layout == "bshd" else out), lse
