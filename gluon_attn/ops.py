"""Attention and its gradients as operators of torch, opaque to torch.compile and torch.export.

Inductor would rebuild a Gluon kernel that it sees as one of plain Triton; so it sees an operator, by its shapes alone.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .call import Extras, Options
from .checks import (
    check_bool,
    check_chunk_type,
    check_is_tensor,
    check_kind,
    check_layout,
    check_num_ctas,
    check_scale_type,
    check_softcap_type,
    two_limits,
    type_name,
)
from .device import Device
from .gradients import (
    SAVED,
    check_gradients_of_call,
    differentiate,
    refuse_other_gradients,
    refuse_second_derivative,
    require_gradients,
    usable_gradient,
)
from .kernels.common.mask import Mask, visible_pairs
from .memory import refuse_tangent
from .named import function_named, name_of
from .refusals import refuse_transformed
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
    bias: Tensor | None,
    read: Sequence[Tensor],
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    causal: bool,
    left: int | None,
    right: int | None,
    chunk: int | None,
    softcap: float | None,
    score_mod: str | None,
    mask_mod: str | None,
    scale: float | None,
    layout: str,
    deterministic: bool | None,
    num_ctas: int | None,
    card: str,
) -> tuple[Tensor, Tensor]:
    """(O, LSE), as `attention` has them; with cu_seqlens_q and the layout PACKED as `attention_varlen` has them. left,
    right: its window. read: by score_mod, then by mask_mod, which are names, see named.py. card: one of CARDS, to
    execute it on the CPU; "" for the tensors' own."""
    from .api import attend

    tensors = sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seqused_k, q_segment_ids, k_segment_ids, bias
    extras, options = call_of(
        tensors, read, max_seqlen_q, max_seqlen_k, causal, left, right, chunk, softcap, score_mod, mask_mod, scale,
        layout, deterministic, card,
    )  # fmt: skip
    extras = extras._replace(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    options = options._replace(deterministic=None, num_ctas=num_ctas)
    with torch.no_grad():  # what records gradients here is the operator
        out, lse = attend(q, k, v, extras, options, return_lse=True)
    return out, lse


def call_of(
    tensors: Sequence[Tensor | None],
    read: Sequence[Tensor],
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    causal: bool,
    left: int | None,
    right: int | None,
    chunk: int | None,
    softcap: float | None,
    score_mod: str | None,
    mask_mod: str | None,
    scale: float | None,
    layout: str,
    deterministic: bool | None,
    card: str,
) -> tuple[Extras, Options]:
    """What operators have in common, as their parameters have it. tensors: those of SAVED."""
    scores, mask = function_named("score_mod", score_mod), function_named("mask_mod", mask_mod)
    longest = None if max_seqlen_q is None or max_seqlen_k is None else (max_seqlen_q, max_seqlen_k)
    by_scores, by_mask = (0 if function is None else len(function.tensors) for function in (scores, mask))
    named: dict[str, Any] = dict(zip(SAVED, tensors, strict=True))
    extras = Extras(**named, of_score_mod=tuple(read[:by_scores]), of_mask_mod=tuple(read[by_scores:][:by_mask]))
    options = Options(
        causal, (left, right), chunk, softcap, scores, scale, layout, deterministic, device=CARDS[card], mask_mod=mask,
        max_seqlens=longest,
    )  # fmt: skip
    return extras, options


@forward.register_fake
def _(q: Tensor, k: Any, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    layout = dict(zip(ARGUMENTS[3:], others, strict=True))["layout"]
    return empty_output(q, v), q.new_empty(shape_of_lse(q.shape, layout), dtype=torch.float32)


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
    bias: Tensor | None,
    read: Sequence[Tensor],
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    causal: bool,
    left: int | None,
    right: int | None,
    chunk: int | None,
    softcap: float | None,
    score_mod: str | None,
    mask_mod: str | None,
    scale: float | None,
    layout: str,
    deterministic: bool | None,
    card: str,
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dQ, dK, dV, dsinks, dbias), as `attention_backward` has them; dsinks is empty if there are no sinks, and dbias
    if of_bias does not ask for it."""
    tensors = sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seqused_k, q_segment_ids, k_segment_ids, bias
    extras, options = call_of(
        tensors, read, max_seqlen_q, max_seqlen_k, causal, left, right, chunk, softcap, score_mod, mask_mod, scale,
        layout, deterministic, card,
    )  # fmt: skip
    dout, dlse = usable_gradient("dout", dout), usable_gradient("dlse", dlse)
    dq, dk, dv, *others = differentiate(dout, dlse, q, k, v, out, lse, extras, options, of_bias)
    dsinks = q.new_empty(0) if sinks is None else others.pop(0)
    return dq, dk, dv, dsinks, others.pop(0) if of_bias else q.new_empty(0)


@backward.register_fake
def _(dout: Any, dlse: Any, q: Tensor, k: Tensor, v: Tensor, out: Any, lse: Any, *others: Any) -> tuple[Tensor, ...]:
    named = dict(zip(SAVED, others, strict=False))
    dsinks = q.new_empty(0) if named["sinks"] is None else torch.empty_like(named["sinks"])
    dbias = torch.empty_like(named["bias"], memory_format=torch.contiguous_format) if others[-1] else q.new_empty(0)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsinks, dbias


def parameters(name: str) -> tuple[str, ...]:
    """Of an operator."""
    return tuple(argument.name for argument in getattr(torch.ops.gluon_attn, name).default._schema.arguments)


ARGUMENTS, ARGUMENTS_OF_BACKWARD = parameters("forward"), parameters("backward")
# Those after what is saved that both have.
OPTIONS = ARGUMENTS_OF_BACKWARD[ARGUMENTS_OF_BACKWARD.index("max_seqlen_q") : -1]


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    given = dict(zip(ARGUMENTS, inputs, strict=True))
    ctx.save_for_backward(*inputs[:3], *output, *(given[name] for name in SAVED), *given["read"])
    ctx.options = [given[name] for name in OPTIONS]
    ctx.set_materialize_grads(False)


def backward_of(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    given = {name: t for name, t in (("dout", dout), ("dlse", dlse)) if t is not None}
    refuse_transformed(**given)
    for name, t in given.items():
        refuse_tangent(name, t)
    saved = ctx.saved_tensors  # once: under checkpointing it may not be asked for again
    kept, read = saved[: 5 + len(SAVED)], list(saved[5 + len(SAVED) :])
    grads: dict[str, Any] = {"read": [None] * len(read)}
    if dout is not None or dlse is not None:
        of_bias = ctx.needs_input_grad[ARGUMENTS.index("bias")]
        found = backward(dout, dlse, *kept, read, *ctx.options, of_bias)
        has_sinks = kept[5 + SAVED.index("sinks")] is not None
        there = {"q": True, "k": True, "v": True, "sinks": has_sinks, "bias": of_bias}
        grads |= {name: grad for (name, asked), grad in zip(there.items(), found, strict=True) if asked}
    return tuple(grads.get(name) for name in ARGUMENTS)


def no_second_derivative(ctx: Any, *grads: Any) -> NoReturn:
    refuse_second_derivative()


forward.register_autograd(backward_of, setup_context=save)
backward.register_autograd(no_second_derivative)


def flops(given: dict[str, Any], products: tuple[int, int]) -> int:
    """As `torch.utils.flop_counter` asks for them: 2 for each column, of so many `products` over those of Q and over
    those of V, for each query and key that it sees; what functions and documents hide is counted too. given: an
    operator's arguments."""
    q, k, v, mask = (
        given["q"],
        given["k"],
        given["v"],
        Mask(**{n: given[n] for n in ("causal", "left", "right", "chunk")}),
    )
    if given["cu_seqlens_q"] is None:
        (batch, heads, q_len), kv_len = q.shape[:3], k.shape[2]
        if given["layout"] == "bshd":
            q_len, heads, kv_len = heads, q_len, k.shape[1]
        pairs = batch * heads * visible_pairs(q_len, kv_len, mask)
    else:
        names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k")
        each = zip(*numbers_of(*(given[name] for name in names)), strict=True)
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


@register_flop_formula(torch.ops.gluon_attn.forward, get_raw=True)
def _(*given: Any, **_: Any) -> int:
    return flops(dict(zip(ARGUMENTS, given, strict=True)), FORWARD_PRODUCTS)


@register_flop_formula(torch.ops.gluon_attn.backward, get_raw=True)
def _(*given: Any, **_: Any) -> int:
    return flops(dict(zip(ARGUMENTS_OF_BACKWARD, given, strict=True)), BACKWARD_PRODUCTS)


def attention_op(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options) -> tuple[Tensor, Tensor]:
    """What `attention` and `attention_varlen` are in a graph."""
    card = card_in_graph(extras, options)
    check_in_graph(q, k, v, extras, options)
    tensors, read = given_to_operators(q, extras)
    return forward(q, k, v, *tensors, read, *extras.scales, *numbers_in_graph(options), options.num_ctas, card)


def gradients_op(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: Extras,
    options: Options,
    of_bias: bool,
) -> tuple[Tensor, ...]:
    """What `attention_backward` and `attention_varlen_backward` are in a graph."""
    card = card_in_graph(extras, options)
    check_in_graph(q, k, v, extras, options)
    require_gradients(q, None, options, in_graph=True)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, out, lse, *extras.named().values())):
        raise NotImplementedError(
            "attention_backward: expected a call under torch.no_grad() in a graph, as gradients of gradients are not "
            "supported, got tensors that require grad; call it so, or .detach() them"
        )
    tensors, read = given_to_operators(q, extras)
    numbers = numbers_in_graph(options)
    dq, dk, dv, *others = backward(dout, dlse, q, k, v, out, lse, *tensors, read, *numbers, card, of_bias)
    asked = (extras.sinks is not None, of_bias)
    return (dq, dk, dv, *(grad for grad, there in zip(others, asked, strict=True) if there))


def given_to_operators(q: Tensor, extras: Extras) -> tuple[list[Tensor | None], list[Tensor]]:
    """Those of SAVED, and what functions read. Where there is nothing it is q, which is not looked at: AOTInductor
    makes None of an empty list."""
    return [getattr(extras, name) for name in SAVED], [*extras.of_score_mod, *extras.of_mask_mod] or [q]


def numbers_in_graph(options: Options) -> list[Any]:
    """Those of OPTIONS, but for the card."""
    causal, (left, right), chunk, softcap, scores, scale, layout, deterministic, *_ = options
    mask, longest = options.mask_mod, options.max_seqlens or (None, None)
    names = [None if function is None else name_of(function.handle) for function in (scores, mask)]
    return [*longest, causal, left, right, chunk, softcap, *names, scale, layout, deterministic]


def check_in_graph(q: Any, k: Any, v: Any, extras: Extras, options: Options) -> None:
    """What the operator would not refuse by name, when it runs. It refuses all else, shapes and sizes of numbers among
    it, of which a graph should know little."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_is_tensor(name, t)
    check_layout(options.layout, packed=options.max_seqlens is not None)
    check_bool("causal", options.causal)
    two_limits("window", options.window, no_limit="None")
    check_chunk_type(options.chunk)
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_kind(name, t, q, options.layout)
    check_softcap_type(options.softcap)
    check_scale_type(options.scale)
    check_num_ctas(options.num_ctas)
    named = extras.named()
    for name, t in named.items():
        if not isinstance(t, Tensor):
            raise TypeError(
                f"{name}: expected a torch.Tensor or None, got {type_name(t)}; make it with torch.as_tensor, or leave "
                "it out"
            )
    given = {"q": q, "k": k, "v": v, **named}
    refuse_transformed(**given)
    for name, t in given.items():
        refuse_tangent(name, t)
    if torch.is_grad_enabled():
        if any(t.requires_grad for t in (q, k, v, extras.sinks, extras.bias) if t is not None):
            check_gradients_of_call(q, extras, options, in_graph=True)
        refuse_other_gradients(named)


def not_in_a_graph(extras: Extras, options: Options) -> dict[str, Any]:
    """Arguments that an operator does not take, by name."""
    return {"config": options.config, "out": extras.out}


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
