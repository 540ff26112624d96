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
from .problem import in_bhsd, output_dtype

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
    causal: bool,
    left: int | None,
    right: int | None,
    chunk: int | None,
    scale: float | None,
    layout: str,
    deterministic: bool | None,
    num_ctas: int | None,
    card: str,
) -> tuple[Tensor, Tensor]:
    """(O, LSE), as `attention` has them. left, right: its window. card: one of CARDS, to execute it on the CPU; "" for
    the tensors' own."""
    from .api import attend

    options = Options(causal, (left, right), chunk, scale, layout, None, num_ctas, None, CARDS[card])
    with torch.no_grad():  # what records gradients here is the operator
        out, lse = attend(q, k, v, Extras(), options, return_lse=True)
    return out, lse


@forward.register_fake
def _(
    q: Tensor, k: Any, v: Any, causal: Any, left: Any, right: Any, chunk: Any, scale: Any, layout: str, *others: Any
) -> tuple[Tensor, Tensor]:
    batch, heads, q_len, _ = in_bhsd(q, layout).shape
    return torch.empty_like(q, dtype=output_dtype(q.dtype)), q.new_empty((batch, heads, q_len), dtype=torch.float32)


@torch.library.custom_op("gluon_attn::backward", mutates_args=())
def backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    left: int | None,
    right: int | None,
    chunk: int | None,
    scale: float | None,
    layout: str,
    deterministic: bool | None,
    card: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV), as `attention_backward` has them."""
    options = Options(causal, (left, right), chunk, scale, layout, deterministic, device=CARDS[card])
    return differentiate(dout, dlse, q, k, v, out, lse, options, key_of(q, k, v, Extras(), options))


@backward.register_fake
def _(dout: Any, dlse: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *options, _, card = inputs  # but for num_ctas
    ctx.save_for_backward(q, k, v, *output)
    ctx.options = (*options, card)
    ctx.set_materialize_grads(False)


def backward_of(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = (None, None, None) if dout is dlse is None else backward(dout, dlse, *ctx.saved_tensors, *ctx.options)
    return (*grads, *(None,) * (len(ctx.options) + 1))


forward.register_autograd(backward_of, setup_context=save)


def flops(q: Shape, k: Shape, v: Shape, layout: str, mask: Mask, products: tuple[int, int]) -> int:
    """As `torch.utils.flop_counter` asks for them: 2 for each column, of so many `products` over those of Q and over
    those of V, for each query and key that it sees."""
    (batch, heads, q_len), kv_len = (q[:3], k[2]) if layout == "bhsd" else ((q[0], q[2], q[1]), k[1])
    of_pair = 2 * (products[0] * q[3] + products[1] * v[3])
    return batch * heads * visible_pairs(q_len, kv_len, mask) * of_pair


@register_flop_formula(torch.ops.gluon_attn.forward)
def _(
    q: Shape, k: Shape, v: Shape, causal: bool, left: Any, right: Any, chunk: Any, scale: Any, layout: str, *_: Any,
    **__: Any,
) -> int:  # fmt: skip
    return flops(q, k, v, layout, Mask(causal=causal, left=left, right=right, chunk=chunk), FORWARD_PRODUCTS)


@register_flop_formula(torch.ops.gluon_attn.backward)
def _(dout: Any, dlse: Any, q: Shape, k: Shape, v: Shape, out: Any, lse: Any, causal: bool, left: Any, right: Any,
      chunk: Any, scale: Any, layout: str, *_: Any, **__: Any) -> int:  # fmt: skip
    return flops(q, k, v, layout, Mask(causal=causal, left=left, right=right, chunk=chunk), BACKWARD_PRODUCTS)


def attention_op(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options) -> tuple[Tensor, Tensor]:
    """What `attention` is in a graph."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad) and options.device:
        require_gradients(q, None, options.device)
    card = card_in_graph(extras, options)
    causal, (left, right), chunk, scale, layout, deterministic, num_ctas, *_ = options
    return forward(q, k, v, causal, left, right, chunk, scale, layout, deterministic, num_ctas, card)


def not_in_a_graph(extras: Extras, options: Options) -> dict[str, Any]:
    """Arguments that an operator does not take, by name."""
    return {"config": options.config} | extras._asdict()


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
