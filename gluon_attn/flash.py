"""The functions of FlashAttention-3's `flash_attn_interface`, by these kernels: same parameters, same meaning.

    from gluon_attn.flash import flash_attn_func

What these kernels do not compute raises NotImplementedError by name. Two parameters only choose between speeds there,
and do nothing here, where the tuning table chooses: `num_splits` and `pack_gqa`. `learnable_sink` is
FlashAttention-4's, and is given by name.
"""

from typing import Any, NoReturn

from torch import Tensor

from .api import attention, refuse
from .checks import Window, two_limits
from .features import NOT_THERE
from .varlen import attention_varlen


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """O (B, Sq, H, D), and with `return_attn_probs` LSE (B, H, Sq) besides, natural logarithm, fp32.

    Args:
        q: (B, Sq, H, D). k, v: (B, Sk, Hkv, D), H a multiple of Hkv. One whose last stride is not 1 is copied. V's head
            dim may be another one, which O has too.
        softmax_scale: default 1/sqrt(D).
        causal: aligned to the bottom right: query i sees keys j <= i + Sk - Sq. A row that sees none has O = 0.
        window_size: (left, right), keys that a query sees before and after its own position, aligned as `causal`; -1 or
            None: no limit. attention_chunk: a query sees its own chunk of so many keys only; 0: no limit.
        q_descale, k_descale, v_descale: of fp8 inputs, (B, Hkv) fp32, contiguous.
        deterministic: gradients in a fixed order. False: as `torch.use_deterministic_algorithms` says.
        softcap: scores become softcap · tanh(score / softcap); 0: as they are. qv, sm_margin: as they are by default.
        learnable_sink: (H,), of each head a further score, without a value, as FlashAttention-4 has it.

    Raises:
        NotImplementedError: what is not supported so far, by its name.
        TypeError, ValueError: as `gluon_attn.attention`, by that function's names: scale, return_lse, sinks, q_scale,
            k_scale and v_scale.
    """
    refuse_what_is_missing(qv, sm_margin)
    return attention(
        *with_columns_together(q, k, v),
        causal=causal,
        window=window_of(window_size),
        chunk=attention_chunk or None,
        softcap=softcap or None,
        scale=softmax_scale,
        layout="bshd",
        return_lse=return_attn_probs,
        deterministic=deterministic or None,
        sinks=learnable_sink,
        q_scale=q_descale,
        k_scale=k_descale,
        v_scale=v_descale,
    )


def refuse_what_is_missing(qv: Any, sm_margin: int) -> None:
    if qv is not None:
        refuse({"qv": qv}, "flash_attn_func")
    if sm_margin:
        raise NotImplementedError(
            "sm_margin: leaving processors to others is not supported so far; leave the argument out"
        )


def with_columns_together(*tensors: Any) -> list[Any]:
    """Those whose last stride is not 1 copied."""
    return [t.contiguous() if isinstance(t, Tensor) and t.dim() and t.stride(-1) != 1 else t for t in tensors]


def window_of(window_size: Window) -> Window:
    """As `attention` has it, where -1 is no number of keys."""
    limits = two_limits("window_size", window_size, no_limit="-1 or None")
    left, right = (limit if limit is not None and limit >= 0 else None for limit in limits)
    return left, right


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """O (T, H, D), and with `return_attn_probs` LSE (H, T) besides, of sequences packed one after the other.

    Args:
        q: (T, H, D). k, v: (U, Hkv, D). cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k: as for
            `gluon_attn.attention_varlen`. q_descale, k_descale, v_descale: (B, Hkv), of B sequences.
        The others: as for `flash_attn_func`.

    Raises:
        As `flash_attn_func`. NotImplementedError besides: seqused_q, by which some of a sequence's queries count.
    """
    refuse_what_is_missing(qv, sm_margin)
    if seqused_q is not None:
        missing("seqused_q", "a number of queries that count", "give it as cu_seqlens_q of rows that are all computed")
    q, k, v = with_columns_together(q, k, v)
    return attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_k=seqused_k,
        causal=causal,
        window=window_of(window_size),
        chunk=attention_chunk or None,
        softcap=softcap or None,
        scale=softmax_scale,
        return_lse=return_attn_probs,
        deterministic=deterministic or None,
        sinks=learnable_sink,
        q_scale=q_descale,
        k_scale=k_descale,
        v_scale=v_descale,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> NoReturn:
    """Not supported so far."""
    missing("flash_attn_with_kvcache", NOT_THERE["k_cache"], "call flash_attn_func with all keys")


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: Any = None
) -> NoReturn:
    """Not supported so far."""
    missing("flash_attn_combine", "adding up attention to parts of the keys", "call flash_attn_func with all keys")


def missing(function: str, what: str, instead: str) -> NoReturn:
    raise NotImplementedError(f"{function}: {what} is not supported so far; {instead}")
