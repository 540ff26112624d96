"""Attention of packed sequences, and its gradients, as operators of torch; as ops.py has them of a batch."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .call import Extras, Options, key_of
from .gradients import differentiate, require_gradients
from .kernels.common.mask import visible_pairs
from .ops import BACKWARD_PRODUCTS, CARDS, FORWARD_PRODUCTS, card_in_graph, mask_of
from .problem import PACKED, empty_output


@torch.library.custom_op("gluon_attn::forward_varlen", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    causal: bool,
    left: int | None,
    right: int | None,
    chunk: int | None,
    softcap: float | None,
    scale: float | None,
    deterministic: bool | None,
    num_ctas: int | None,
    card: str,
) -> tuple[Tensor, Tensor]:
    """(O, LSE), as `attention_varlen` has them. left, right, card: as `gluon_attn::forward` has them."""
    from .api import attend

    options = Options(
        causal, (left, right), chunk, softcap, None, scale, PACKED, None, num_ctas, None, CARDS[card],
        max_seqlens=(max_seqlen_q, max_seqlen_k),
    )  # fmt: skip
    extras = extras_of(cu_seqlens_q, cu_seqlens_k, seqused_k, sinks, alibi_slopes)
    with torch.no_grad():  # what records gradients here is the operator
        out, lse = attend(q, k, v, extras, options, return_lse=True)
    return out, lse


def extras_of(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqused_k: Tensor | None, sinks: Tensor | None, slopes: Tensor | None
) -> Extras:
    return Extras(
        sinks=sinks, alibi_slopes=slopes, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k
    )


@forward.register_fake
def _(q: Tensor, k: Any, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    rows, heads, _ = q.shape
    return empty_output(q, v), q.new_empty((heads, rows), dtype=torch.float32)


@torch.library.custom_op("gluon_attn::backward_varlen", mutates_args=())
def backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    left: int | None,
    right: int | None,
    chunk: int | None,
    softcap: float | None,
    scale: float | None,
    deterministic: bool | None,
    card: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dQ, dK, dV, dsinks), as `attention_varlen_backward` has them; dsinks is empty if there are no sinks."""
    options = Options(
        causal, (left, right), chunk, softcap, None, scale, PACKED, deterministic, device=CARDS[card],
        max_seqlens=(max_seqlen_q, max_seqlen_k),
    )  # fmt: skip
    extras = extras_of(cu_seqlens_q, cu_seqlens_k, seqused_k, sinks, alibi_slopes)
    dq, dk, dv, *others = differentiate(
        dout, dlse, q, k, v, out, lse, extras, options, key_of(q, k, v, extras, options)
    )
    return dq, dk, dv, others[0] if others else q.new_empty(0)


SINKS_AT = 10  # of the arguments


@backward.register_fake
def _(dout: Any, dlse: Any, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sinks = others[SINKS_AT - 5]
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsinks


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_q, cu_k, used_k, max_q, max_k, sinks, alibi_slopes, *options, _, card = inputs  # but for num_ctas
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k, used_k, sinks, alibi_slopes)
    ctx.options = (max_q, max_k, *options, card)
    ctx.set_materialize_grads(False)


def backward_of(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: under checkpointing it may not be asked for again
    if dout is dlse is None:
        return (None,) * 19
    *grads, dsinks = backward(dout, dlse, *saved, *ctx.options)
    return (*grads, *(None,) * 5, None if saved[8] is None else dsinks, *(None,) * 10)


forward.register_autograd(backward_of, setup_context=save)


def lengths_of(starts: Tensor, longest: int) -> list[int]:
    """Of the sequences; of fake ones, as torch's own formulas have it, `longest` each. Waits for the card."""
    if starts.is_meta or type(starts).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return [longest] * (len(starts) - 1)
    return [end - first for first, end in pairwise(starts.tolist())]


def flops(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[Any], options: Sequence[Any], products: Any) -> int:
    """As `ops.flops`, of each sequence. lengths: cu_seqlens_q, cu_seqlens_k, seqused_k and the longest of both."""
    cu_q, cu_k, used_k, max_q, max_k = lengths
    keys = lengths_of(cu_k, max_k)
    if used_k is not None and not used_k.is_meta and type(used_k).__torch_dispatch__ is Tensor.__torch_dispatch__:
        keys = used_k.tolist()
    mask = mask_of(options)
    pairs = sum(visible_pairs(a, b, mask) for a, b in zip(lengths_of(cu_q, max_q), keys, strict=True))
    return q.shape[1] * pairs * 2 * (products[0] * q.shape[2] + products[1] * v.shape[2])


@register_flop_formula(torch.ops.gluon_attn.forward_varlen, get_raw=True)
def _(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, used_k: Any, max_q: int, max_k: int, sinks: Any, slopes: Any,
    *options: Any, **_: Any,
) -> int:  # fmt: skip
    return flops(q, k, v, (cu_q, cu_k, used_k, max_q, max_k), options, FORWARD_PRODUCTS)


@register_flop_formula(torch.ops.gluon_attn.backward_varlen, get_raw=True)
def _(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cu_q: Any, cu_k: Any, used_k: Any, sinks: Any,
    slopes: Any, max_q: int, max_k: int, *options: Any, **_: Any,
) -> int:  # fmt: skip
    return flops(q, k, v, (cu_q, cu_k, used_k, max_q, max_k), options, BACKWARD_PRODUCTS)


def attention_varlen_op(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options) -> tuple[Tensor, Tensor]:
    """What `attention_varlen` is in a graph."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad) and options.device:
        require_gradients(q, None, options)
    card = card_in_graph(extras, options)
    causal, (left, right), chunk, softcap, _, scale, _, deterministic, num_ctas, *_ = options
    max_q, max_k = options.max_seqlens or (0, 0)
    return forward(
        q, k, v, extras.cu_seqlens_q, extras.cu_seqlens_k, extras.seqused_k, max_q, max_k, extras.sinks,
        extras.alibi_slopes, causal, left, right, chunk, softcap, scale, deterministic, num_ctas, card,
    )  # fmt: skip
