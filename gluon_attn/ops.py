"""Attention and its gradients as operators of torch, opaque to torch.compile and torch.export.

Inductor would rebuild a Gluon kernel that it sees as one of plain Triton; so it sees an operator, by its shapes alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .call import Extras, Options, key_of
from .device import Device
from .gradients import differentiate, require_gradients
from .kernels.common.mask import Mask, visible_pairs
from .problem import empty_output, in_bhsd

Shape = Sequence[int]
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
    q_segment_ids: Tensor | None,
    k_segment_ids: Tensor | None,
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
    """(O, LSE), as `attention` has them. left, right: its window. card: one of CARDS, to execute it on the CPU; "" for
    the tensors' own."""
    from .api import attend

    options = Options(causal, (left, right), chunk, softcap, None, scale, layout, None, num_ctas, None, CARDS[card])
    extras = Extras(sinks=sinks, alibi_slopes=alibi_slopes, q_segment_ids=q_segment_ids, k_segment_ids=k_segment_ids)
    with torch.no_grad():  # what records gradients here is the operator
        out, lse = attend(q, k, v, extras, options, return_lse=True)
    return out, lse


OPTIONS_AT, LAYOUT_AT = 7, 13  # of the arguments


@forward.register_fake
def _(q: Tensor, k: Any, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    batch, heads, q_len, _ = in_bhsd(q, others[LAYOUT_AT - 3]).shape
    return empty_output(q, v), q.new_empty((batch, heads, q_len), dtype=torch.float32)


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
    q_segment_ids: Tensor | None,
    k_segment_ids: Tensor | None,
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
    options = Options(causal, (left, right), chunk, softcap, None, scale, layout, deterministic, device=CARDS[card])
    extras = Extras(sinks=sinks, alibi_slopes=alibi_slopes, q_segment_ids=q_segment_ids, k_segment_ids=k_segment_ids)
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
    q, k, v, sinks, alibi_slopes, q_ids, k_ids, *options, _, card = inputs  # but for num_ctas
    ctx.save_for_backward(q, k, v, *output, sinks, alibi_slopes, q_ids, k_ids)
    ctx.options = (*options, card)
    ctx.set_materialize_grads(False)


def backward_of(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: under checkpointing it may not be asked for again
    nothing = (None,) * (len(ctx.options) + 4)  # for what is no tensor, for slopes and for ids
    if dout is dlse is None:
        return (None,) * 4 + nothing
    *grads, dsinks = backward(dout, dlse, *saved, *ctx.options)
    return (*grads, None if saved[5] is None else dsinks, *nothing)


forward.register_autograd(backward_of, setup_context=save)


def flops(q: Shape, k: Shape, v: Shape, layout: str, mask: Mask, products: tuple[int, int]) -> int:
    """As `torch.utils.flop_counter` asks for them: 2 for each column, of so many `products` over those of Q and over
    those of V, for each query and key that it sees."""
    (batch, heads, q_len), kv_len = (q[:3], k[2]) if layout == "bhsd" else ((q[0], q[2], q[1]), k[1])
    of_pair = 2 * (products[0] * q[3] + products[1] * v[3])
    return batch * heads * visible_pairs(q_len, kv_len, mask) * of_pair


def mask_of(options: Sequence[Any]) -> Mask:
    """options: an operator's arguments from `causal` on."""
    causal, left, right, chunk, *_ = options
    return Mask(causal=causal, left=left, right=right, chunk=chunk)


@register_flop_formula(torch.ops.gluon_attn.forward)
def _(q: Shape, k: Shape, v: Shape, *others: Any, **_: Any) -> int:
    return flops(q, k, v, others[LAYOUT_AT - 3], mask_of(others[OPTIONS_AT - 3 :]), FORWARD_PRODUCTS)


@register_flop_formula(torch.ops.gluon_attn.backward)
def _(dout: Any, dlse: Any, q: Shape, k: Shape, v: Shape, out: Any, lse: Any, *others: Any, **_: Any) -> int:
    return flops(q, k, v, others[LAYOUT_AT - 3], mask_of(others[OPTIONS_AT - 3 :]), BACKWARD_PRODUCTS)


def attention_op(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options) -> tuple[Tensor, Tensor]:
    """What `attention` is in a graph."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad) and options.device:
        require_gradients(q, None, options)
    card = card_in_graph(extras, options)
    causal, (left, right), chunk, softcap, _, scale, layout, deterministic, num_ctas, *_ = options
    tensors = extras.sinks, extras.alibi_slopes, extras.q_segment_ids, extras.k_segment_ids
    return forward(q, k, v, *tensors, causal, left, right, chunk, softcap, scale, layout, deterministic, num_ctas, card)


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
