"""The public call for packed sequences of unlike lengths."""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .api import attend, autocast, check_differentiable, check_options, wants_gradient
from .call import Extras, Options, Window
from .checks import check_types_of_seqlens, hashable, require_no_negative
from .device import Device
from .forward.configs import ForwardConfig
from .gradients import Attention, differentiate_call
from .mask_mod import MaskMod
from .mask_mod import compiled_part as compiled_mask
from .ops import attention_op, is_seen_by_a_mode
from .score_mod import ScoreMod, compiled_part
from .tensors import PACKED


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window: Window = (None, None),
    chunk: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    out: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    num_ctas: int | None = None,
    config: ForwardConfig | None = None,
    device: Device | None = None,
    **unsupported: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of each of B sequences, whose rows lie one after the other in the same tensors.

    As a loop over the sequences gives it, and with the same config bit for bit; but in one launch, and one before that
    lists the work on the card, longest first. Nothing is copied, nothing is padded, nothing waits for the card. A
    length compiles nothing and is in no grid: a CUDA graph may be replayed with other numbers in cu_seqlens_q,
    cu_seqlens_k and seqused_k.

    Args:
        q: (T, H, D), T queries of all sequences together. k, v: (U, Hkv, D). Dtypes, D and strides as for `attention`.
        cu_seqlens_q: (B + 1,) int32, contiguous, on q's card: where each sequence begins, and where the last ends. 0
            comes first, the numbers never fall, the last is at most T. cu_seqlens_k: likewise, of keys. A sequence may
            have no query, or no key. Nobody looks at the numbers, which are on the card: with others, what is written
            where is open. `check_cu_seqlens` looks.
        max_seqlen_q, max_seqlen_k: ints, the most rows that a sequence has. They are there as in flash-attention:
            nothing depends on them.
        seqused_k: (B,) int32, contiguous, on q's card: of each sequence's keys, how many of the first count; default:
            all. What lies in the others is not looked at.
        causal, window, chunk: within a sequence, aligned to the bottom right of its own queries and keys.
        alibi_slopes: (H,) or (B, H) fp32. score_mod, mask_mod: their `batch` is the number of the sequence, their
            positions and lengths are those of the sequence.
        q_scale, k_scale, v_scale: (B, Hkv) fp32.
        softcap, sinks, scale, return_lse, deterministic, out, num_ctas, config, device: as for `attention`. The tuning
            table is asked for B sequences of T / B queries and U / B keys.

    On Hopper, in 16 bits, q, k, v and sinks have gradients, see `attention_varlen_backward`. Under torch.compile and
    torch.export it is one operator, `gluon_attn::forward`.

    Returns:
        O, (T, H, D); with return_lse, (O, LSE), LSE (H, T) fp32. Rows of q past cu_seqlens_q[-1] have none: what is
        in `out` there stays. A row that sees no key has O = 0, and LSE = -inf or, with
        sinks, LSE = its sink.

    Raises:
        As `attention` does.
    """
    check_options(return_lse, deterministic, unsupported, "attention_varlen")
    check_types_of_seqlens(max_seqlen_q, max_seqlen_k)
    function, read = compiled_part(score_mod)
    mask, read_by_mask = compiled_mask(mask_mod)
    options = Options(
        causal, hashable(window), chunk, softcap, function, scale, PACKED, deterministic, num_ctas, config, device,
        mask, max_seqlens=(max_seqlen_q, max_seqlen_k),
    )  # fmt: skip
    extras = Extras(
        out, q_scale, k_scale, v_scale, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seqused_k, of_score_mod=read,
        of_mask_mod=read_by_mask,
    )  # fmt: skip
    if is_compiling() or is_seen_by_a_mode(extras, options):
        both = attention_op(*autocast(q, k, v), extras, options)
        return both if return_lse else both[0]
    if max_seqlen_q < 0 or max_seqlen_k < 0:  # not asked in a graph, where they may be what the card tells
        require_no_negative(max_seqlen_q, max_seqlen_k)
    if torch.is_grad_enabled() and wants_gradient(q, k, v, sinks):
        q, k, v = autocast(q, k, v)
        check_differentiable(q, k, v, extras, options)
        out, lse = Attention.apply(q, k, v, sinks, None, extras, options, attend)
        return (out, lse) if return_lse else out
    return attend(q, k, v, extras, options, return_lse)


def attention_varlen_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window: Window = (None, None),
    chunk: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    scale: float | None = None,
    deterministic: bool | None = None,
    device: Device | None = None,
) -> tuple[Tensor, ...]:
    """`attention_backward` of packed sequences: what `attention_varlen` calls in a backward pass.

    Args:
        dout, dlse: as for `attention_backward`, but of the shapes of O, (T, H, D), and LSE, (H, T).
        All others: as `attention_varlen` was given them; out, lse: what it returned.

    Returns:
        dQ, dK, dV, and dsinks if there are sinks. 0 in rows past the last sequence, and of keys that do not count: what
        the inputs hold there reaches nothing.

    Raises:
        As `attention_backward` does.
    """
    check_types_of_seqlens(max_seqlen_q, max_seqlen_k)
    if not is_compiling():
        require_no_negative(max_seqlen_q, max_seqlen_k)
    function, read = compiled_part(score_mod)
    mask, read_by_mask = compiled_mask(mask_mod)
    options = Options(
        causal, hashable(window), chunk, softcap, function, scale, PACKED, deterministic, device=device, mask_mod=mask,
        max_seqlens=(max_seqlen_q, max_seqlen_k),
    )  # fmt: skip
    extras = Extras(
        sinks=sinks, alibi_slopes=alibi_slopes, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k, of_score_mod=read, of_mask_mod=read_by_mask,
    )  # fmt: skip
    return differentiate_call(dout, dlse, q, k, v, out, lse, extras, options)
