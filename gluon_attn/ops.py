"""Attention and its gradients as operators of torch, opaque to torch.compile and torch.export.

Inductor would rebuild a Gluon kernel that it sees as one of plain Triton; so it sees an operator, by its shapes alone.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .call import Extras, Options, key_of
from .device import Device
from .gradients import SAVED, differentiate, require_gradients
from .kernels.common.mask import Mask, visible_pairs
from .tensors import empty_output, shape_of_lse

FORWARD_PRODUCTS = (1, 1)  # S, and O
BACKWARD_PRODUCTS = (3, 2)  # S, dQ and dK, and dP and dV

# Devices that an operator's schema can name: it takes no objects.
CARDS = {"": None, "hopper": Device.hopper(), "blackwell": Device.blackwell()}


@torch.library.custom_op("gluon_attn::forward", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    q_segment_ids: Tensor | None,
    k_segment_ids: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    causal: bool,
    left: int | None,
    right: int | None,
    chunk: int | None,
    softcap: float | None,
    scale: float | None,
    layout: str,
    deterministic: bool | None,
    num_ctas: int | None,
    card: str,
) -> tuple[Tensor, Tensor]:
    """(O, LSE), as `attention` has them; with cu_seqlens_q and the layout PACKED as `attention_varlen` has them. left,
    right: its window. card: one of CARDS, to execute it on the CPU; "" for the tensors' own."""
    from .api import attend

    options = Options(
        causal, (left, right), chunk, softcap, None, scale, layout, None, num_ctas, None, CARDS[card],
        max_seqlens=longest_of(max_seqlen_q, max_seqlen_k),
    )  # fmt: skip
    tensors = sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seqused_k, q_segment_ids, k_segment_ids
    with torch.no_grad():  # what records gradients here is the operator
        out, lse = attend(q, k, v, extras_of(*tensors), options, return_lse=True)
    return out, lse


TENSORS = SAVED[:-1]  # arguments that they have after q, k and v, or after out and lse
OPTIONS_AT, LAYOUT_AT = 9, 15  # of the arguments from TENSORS on: `causal`, and the layout


def extras_of(*tensors: Tensor | None) -> Extras:
    """tensors: those of TENSORS."""
    named: dict[str, Any] = dict(zip(TENSORS, tensors, strict=True))
    return Extras(**named)


def longest_of(max_seqlen_q: int | None, max_seqlen_k: int | None) -> tuple[int, int] | None:
    """Of packed sequences; else None."""
    return None if max_seqlen_q is None or max_seqlen_k is None else (max_seqlen_q, max_seqlen_k)


@forward.register_fake
def _(q: Tensor, k: Any, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return empty_output(q, v), q.new_empty(shape_of_lse(q.shape, others[LAYOUT_AT]), dtype=torch.float32)


@torch.library.custom_op("gluon_attn::backward", mutates_args=())
def backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    q_segment_ids: Tensor | None,
    k_segment_ids: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    causal: bool,
    left: int | None,
    right: int | None,
    chunk: int | None,
    softcap: float | None,
    scale: float | None,
    layout: str,
    deterministic: bool | None,
    card: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dQ, dK, dV, dsinks), as `attention_backward` has them; dsinks is empty if there are no sinks."""
    options = Options(
        causal, (left, right), chunk, softcap, None, scale, layout, deterministic, device=CARDS[card],
        max_seqlens=longest_of(max_seqlen_q, max_seqlen_k),
    )  # fmt: skip
    extras = extras_of(sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seqused_k, q_segment_ids, k_segment_ids)
    dq, dk, dv, *others = differentiate(
        dout, dlse, q, k, v, out, lse, extras, options, key_of(q, k, v, extras, options)
    )
    return dq, dk, dv, others[0] if others else q.new_empty(0)


@backward.register_fake
def _(
    dout: Any, dlse: Any, q: Tensor, k: Tensor, v: Tensor, out: Any, lse: Any, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsinks


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, (*options, _, card) = inputs[: 3 + len(TENSORS)], inputs[3 + len(TENSORS) :]  # but for num_ctas
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])
    ctx.options = (*options, card)
    ctx.set_materialize_grads(False)


def backward_of(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: under checkpointing it may not be asked for again
    nothing = (None,) * (len(TENSORS) + len(ctx.options))  # for other tensors than sinks, for options and for num_ctas
    if dout is dlse is None:
        return (None,) * 4 + nothing
    *grads, dsinks = backward(dout, dlse, *saved, *ctx.options)
    return (*grads, None if saved[5] is None else dsinks, *nothing)


forward.register_autograd(backward_of, setup_context=save)


def flops(q: Tensor, k: Tensor, v: Tensor, others: Sequence[Any], products: tuple[int, int]) -> int:
    """As `torch.utils.flop_counter` asks for them: 2 for each column, of so many `products` over those of Q and over
    those of V, for each query and key that it sees. others: an operator's arguments from TENSORS on."""
    lengths, mask = others[2:5], mask_of(others[OPTIONS_AT:])
    if lengths[0] is None:
        (batch, heads, q_len), kv_len = q.shape[:3], k.shape[2]
        if others[LAYOUT_AT] == "bshd":
            q_len, heads, kv_len = heads, q_len, k.shape[1]
        pairs = batch * heads * visible_pairs(q_len, kv_len, mask)
    else:
        each = zip(*numbers_of(*lengths, *others[len(TENSORS) : OPTIONS_AT]), strict=True)
        pairs = q.shape[1] * sum(visible_pairs(q_len, kv_len, mask) for q_len, kv_len in each)
    return pairs * 2 * (products[0] * q.shape[-1] + products[1] * v.shape[-1])


def numbers_of(
    cu_q: Tensor, cu_k: Tensor, used_k: Tensor | None, max_q: int, max_k: int
) -> tuple[list[int], list[int]]:
    """Queries and keys of each of packed sequences; of fake ones, as torch's own formulas have it, as many as the
    longest has. Waits for the card."""
    rows, keys = (
        [end - first for first, end in pairwise(starts.tolist())] if has_numbers(starts) else [most] * (len(starts) - 1)
        for starts, most in ((cu_q, max_q), (cu_k, max_k))
    )
    return rows, used_k.tolist() if used_k is not None and has_numbers(used_k) else keys


def has_numbers(t: Tensor) -> bool:
    return not t.is_meta and type(t).__torch_dispatch__ is Tensor.__torch_dispatch__


def mask_of(options: Sequence[Any]) -> Mask:
    """options: an operator's arguments from `causal` on."""
    causal, left, right, chunk, *_ = options
    return Mask(causal=causal, left=left, right=right, chunk=chunk)


@register_flop_formula(torch.ops.gluon_attn.forward, get_raw=True)
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any, **_: Any) -> int:
    return flops(q, k, v, others, FORWARD_PRODUCTS)


@register_flop_formula(torch.ops.gluon_attn.backward, get_raw=True)
def _(dout: Any, dlse: Any, q: Tensor, k: Tensor, v: Tensor, out: Any, lse: Any, *others: Any, **_: Any) -> int:
    return flops(q, k, v, others, BACKWARD_PRODUCTS)


def attention_op(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options) -> tuple[Tensor, Tensor]:
    """What `attention` and `attention_varlen` are in a graph."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad) and options.device:
        require_gradients(q, None, options)
    card = card_in_graph(extras, options)
    causal, (left, right), chunk, softcap, _, scale, layout, deterministic, num_ctas, *_ = options
    tensors, lengths = [getattr(extras, name) for name in TENSORS], options.max_seqlens or (None, None)
    return forward(
        q, k, v, *tensors, *lengths, causal, left, right, chunk, softcap, scale, layout, deterministic, num_ctas, card
    )


def not_in_a_graph(extras: Extras, options: Options) -> dict[str, Any]:
    """Arguments that an operator does not take, by name."""
    names = ("out", "q_scale", "k_scale", "v_scale", "bias")
    refused = {"config": options.config} | {name: getattr(extras, name) for name in names}
    return refused | {"score_mod": options.score_mod, "mask_mod": options.mask_mod}


def is_seen_by_a_mode(extras: Extras, options: Options) -> bool:
    """Whether a dispatch mode is on, as one that counts FLOPs or that chooses what to keep for a backward pass, and the
    operator can serve the call: modes see operators alone."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    return set(not_in_a_graph(extras, options).values()) == {None} and options.device in CARDS.values()


def card_in_graph(extras: Extras, options: Options) -> str:
    """One of CARDS. NotImplementedError, by name, for another device, and for what no operator takes."""
    for name, value in not_in_a_graph(extras, options).items():
        if value is not None:
            raise NotImplementedError(
                f"{name}: expected None under torch.compile or torch.export, got a value; leave it out, or keep the "
                "call out of the graph by a function of your own under @torch.compiler.disable"
            )
    cards = [name for name, known in CARDS.items() if options.device == known]
    if not cards:
        raise NotImplementedError(
            "device: expected Device.hopper(), Device.blackwell() or None in a graph, got another; leave it out"
        )
    return cards[0]
