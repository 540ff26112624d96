"""The gradients of attention: the backward call, and its place in torch's autograd."""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .backward.launch import NOT_THERE, backward_on_card
from .backward.plan import BackwardPlan
from .backward.table import pick_config
from .bias import bias_of
from .call import NO_EXTRAS, NONE_GIVEN, Extras, Options, Window, both_segment_ids, identity, keep, key_of, problem_of
from .checks import check_bool, check_dense, check_device, check_scale_tensor, check_strides, hashable, type_name
from .device import Device
from .mask_mod import MaskMod
from .mask_mod import compiled_part as compiled_mask
from .memory import check_memory, check_stored, is_suspect, refuse_address, refuse_tangent
from .problem import Problem
from .refusals import refuse_unusual
from .runtime.compiler import check_triton_version
from .runtime.kernel import Launches, available
from .score_mod import ScoreMod, compiled_part
from .tensors import FP8_DTYPES, PACKED, SCALES, TMA_ALIGNMENT_BYTES, in_bhsd
from .tuning import Table, active, backward_rows_for

ARCHS = (90,)  # for which there are backward kernels

_launches: dict[tuple[Any, ...], Launches | None] = {}  # by everything they depend on, see api.py


def attention_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    window: Window = (None, None),
    chunk: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    mask_mod: MaskMod | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
    deterministic: bool | None = None,
    device: Device | None = None,
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, sinks and a bias, given those of O and of LSE. What `attention` calls in a backward
    pass.

    Args:
        dout: of O, in O's shape and dtype, with any strides: if TMA cannot take them, it is copied. None: zero.
        dlse: (B, H, Sq) fp32, of LSE; None: zero.
        q, k, v: as `attention` was given them; float16 or bfloat16, on Hopper.
        out, lse: what it returned: O in q's layout, with v's head dim; LSE (B, H, Sq) fp32.
        causal, window, chunk, softcap, alibi_slopes, sinks, bias, score_mod, segment_ids, mask_mod, scale, layout,
            device: as `attention` was given them.
        deterministic: add up dQ in a fixed order, so that each run gives the same bits. None: as
            `torch.use_deterministic_algorithms` says. It takes one int32 more for each block of rows.

    Returns:
        dQ, dK, dV, dsinks if there are sinks, and dbias if there is a bias that requires grad: in the shapes, dtypes
        and, where dense, strides of what they are of; dbias is contiguous. Sums are fp32. A row that sees no key has
        dQ = 0, a key that no row sees dK = dV = 0.

    Raises:
        NotImplementedError: gradients that are not supported, by what stands against it.
        TypeError, ValueError: a tensor that is not as above; the message says which.
        gluon_cpu.Finding: on CPU tensors, a race or another misuse in the kernels.
    """
    function, read = compiled_part(score_mod)
    mask, read_by_mask = compiled_mask(mask_mod)
    options = Options(
        causal, hashable(window), chunk, softcap, function, scale, layout, deterministic, device=device, mask_mod=mask
    )
    q_ids, k_ids = both_segment_ids(segment_ids)
    extras = Extras(
        sinks=sinks, alibi_slopes=alibi_slopes, q_segment_ids=q_ids, k_segment_ids=k_ids, bias=bias, of_score_mod=read,
        of_mask_mod=read_by_mask,
    )  # fmt: skip
    return differentiate_call(dout, dlse, q, k, v, out, lse, extras, options)


def differentiate_call(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: Extras,
    options: Options,
) -> tuple[Tensor, ...]:
    """`differentiate` of what a caller gives as that of a call before. autograd gives what `attention` has checked."""
    for name, t in {"q": q, "k": k, "v": v, "out": out, "lse": lse, **extras.named()}.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type_name(t)}; give that of the same call")
        if t.is_nested:
            check_dense(name, t)
    for name, t in (("dout", dout), ("dlse", dlse)):
        if t is not None and not isinstance(t, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor or None, got {type_name(t)}; give None for zeros")
        if t is not None and t.is_nested:
            check_dense(name, t)
    of_bias = extras.bias is not None and extras.bias.requires_grad
    check_device(options.device, q)
    if options.deterministic is not None:
        check_bool("deterministic", options.deterministic)
    if is_compiling():
        from .ops import gradients_op

        return gradients_op(dout, dlse, q, k, v, out, lse, extras, options, of_bias)
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, **extras.named()}
    if any(map(is_suspect, given.values())):
        for name, t in given.items():
            check_dense(name, t)
        check_memory(**given)
    dout, dlse = usable_gradient("dout", dout), usable_gradient("dlse", dlse)
    arguments = (dout, dlse, q, k, v, out, lse, extras, options, of_bias)
    if torch.is_grad_enabled():  # the others are given for autograd alone, which looks into no Extras
        return Gradients.apply(*arguments, *extras.each())
    return differentiate(*arguments)


@torch.compiler.disable  # where torch.compile broke its graph, it would trace the launch
def differentiate(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: Extras,
    options: Options,
    of_bias: bool = False,
) -> tuple[Tensor, ...]:
    """`attention_backward` of a call, whose tensors may have other strides and addresses than they had there: autograd
    keeps them as its hooks say. of_bias: whether the gradient of its bias is asked for."""
    for name, t in (("q", q), ("k", k), ("v", v), ("out", out), ("bias", extras.bias)):
        if t is not None and t.data_ptr() % TMA_ALIGNMENT_BYTES and t.numel():
            refuse_address(name, t)
    extras.check_alignment()
    deterministic = is_deterministic(options)
    dout = torch.zeros_like(out) if dout is None else readable_by_tma(dout)
    if dlse is not None:
        dlse = dlse.resolve_neg().contiguous()
    # Of keys that do not count nobody computes a gradient.
    like = torch.empty_like if extras.seqused_k is None else torch.zeros_like
    grads = {"dq": torch.empty_like(q), "dk": like(k), "dv": like(v)}
    tables = active()
    try:
        key = key_of_gradients(dout, dlse, q, k, v, out, lse, extras, options, of_bias, tables)
        launch = _launches[key]
    except (KeyError, TypeError):  # new; or an option that is no number, as problem_of() says
        require_gradients(q, None, options)
        problem = problem_of(q, k, v, extras, options)
        check_outputs(q, v, options.layout, out=out, dout=dout, lse=lse, dlse=dlse)
        check_strides("out", out)
        if of_bias:
            require_gradient_of_bias(q, extras.bias, options.layout, deterministic)
        shapes = {"q": q, "k": k, "v": v, "out": out, "dout": dout, **grads}
        launch = prepare(problem, shapes, extras, options.device, deterministic, of_bias, tables)
        keep(_launches, key, launch)
    if extras.sinks is not None:
        grads["dsinks"] = torch.empty_like(extras.sinks)
    if extras.bias is not None and of_bias:
        kind = bias_of(extras.bias, in_bhsd(q, options.layout).shape[:3])
        grads["dbias"] = kind.zero_gradient(extras.bias.shape, q.device)
    if launch is None:
        grads = {name: grad.zero_() for name, grad in grads.items()}
        if extras.sinks is not None and dlse is not None:  # LSE of a row without keys is its sink
            if extras.cu_seqlens_q is not None:  # nor has any after the last sequence
                dlse = torch.where(torch.arange(len(q), device=q.device) < extras.cu_seqlens_q[-1], dlse, 0)[None]
            grads["dsinks"].copy_(dlse.sum((0, 2)))
    else:
        given = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse, "dlse": dlse}
        launch({**NOT_THERE, **extras.given(), **given, **grads})
    if extras.bias is not None and of_bias:
        grads["dbias"] = grads["dbias"].to(extras.bias.dtype).contiguous()
    return tuple(grads.values())


def key_of_gradients(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: Extras,
    options: Options,
    of_bias: bool,
    tables: tuple[Table, ...],
) -> tuple[Any, ...]:
    """All that a launch depends on. tables: that are loaded."""
    return (
        key_of(q, k, v, extras, options), is_deterministic(options), *identity(out), *identity(dout), *identity(lse),
        dlse if dlse is None else identity(dlse), of_bias, tables,
    )  # fmt: skip


def gradients_launch_of(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
    tables: tuple[Table, ...],
) -> Launches | None:
    """What `differentiate` keeps of a call without other tensors; None if it keeps nothing. tables: that were
    loaded."""
    return _launches.get(key_of_gradients(dout, None, q, k, v, out, lse, NO_EXTRAS, options, False, tables))


def differentiate_again(
    launch: Launches, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`differentiate` of a call that it has made before, without other tensors. Who calls has checked what may differ,
    and that TMA reads dout. launch: `gradients_launch_of` such a call."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    given = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse, "dlse": None}
    launch({**NOT_THERE, **NONE_GIVEN, **given, "dq": dq, "dk": dk, "dv": dv})
    return dq, dk, dv


def usable_gradient(name: str, t: Tensor | None) -> Tensor | None:
    """A gradient of what a call returned; zeros without memory are given some. Raises TypeError, ValueError or
    NotImplementedError, by name, for another that has no memory of its own, or a tangent."""
    if t is None or not is_suspect(t):
        return t
    check_dense(name, t)
    if t._is_zerotensor():
        return torch.zeros(t.shape, dtype=t.dtype, device=t.device)
    refuse_unusual(**{name: t})
    check_stored(name, t)
    refuse_tangent(name, t)
    return t


def check_outputs(q: Tensor, v: Tensor, layout: str, **tensors: Tensor | None) -> None:
    """That O, LSE and their gradients are of q, with v's head dim. Raises TypeError or ValueError by name."""
    shape = in_bhsd(q, layout).shape
    for name, t in tensors.items():
        of_rows = name in ("lse", "dlse")
        rows = shape[1:3] if layout == PACKED else shape[:3]
        want = (rows, torch.float32) if of_rows else ((*q.shape[:-1], v.shape[-1]), q.dtype)
        if t is None:
            continue
        if t.dtype != want[1]:
            raise TypeError(f"{name}: expected dtype {want[1]}, got {t.dtype}; convert with .to({want[1]})")
        if t.shape != want[0]:
            raise ValueError(
                f"{name}: expected shape {tuple(want[0])}, got {tuple(t.shape)}; give that of the same call"
            )
        if t.device != q.device:
            raise ValueError(f"{name}: expected device {q.device} (as q), got {t.device}; put all of them on one")
        if of_rows and not t.is_contiguous():
            raise ValueError(
                f"{name}: expected a contiguous tensor, got strides {t.stride()}; call .contiguous() on it"
            )


def prepare(
    problem: Problem,
    tensors: dict[str, Tensor],
    extras: Extras,
    device: Device | None,
    deterministic: bool,
    of_bias: bool,
    tables: tuple[Table, ...],
) -> Launches | None:
    """The launches for tensors of these shapes and strides; None if there is nothing to compute. tables: that are
    loaded."""
    q = tensors["q"]
    if problem.is_empty:
        return None
    chosen = Device.of(q.device) if device is None else device
    check_triton_version(chosen.arch, on_cpu=q.device.type == "cpu")
    config = pick_config(problem, backward_rows_for(chosen, tables), of_bias=of_bias)
    plan = BackwardPlan.of(problem, config, chosen, deterministic=deterministic)
    launches: Callable[..., Launches] = backward_on_card
    if q.device.type == "cpu":
        from .cpu import backward_on_cpu as launches

    return available(partial(launches, plan, tensors, extras.seqused_k is not None, extras.bias, of_bias))


def readable_by_tma(t: Tensor) -> Tensor:
    """The tensor, or a contiguous copy if it is not stored as it reads, or in strides that TMA does not take."""
    aligned = t.data_ptr() % TMA_ALIGNMENT_BYTES == 0
    if aligned and t.is_contiguous() and not t.is_neg():  # nearly always; head dims are multiples of 16 bytes
        return t
    t = t.resolve_neg()
    strides = (s * t.element_size() for s, size in zip(t.stride()[:-1], t.shape[:-1], strict=True) if size > 1)
    aligned = t.data_ptr() % TMA_ALIGNMENT_BYTES == 0 and all(s % TMA_ALIGNMENT_BYTES == 0 for s in strides)
    return t if aligned and t.stride(-1) == 1 else t.clone(memory_format=torch.contiguous_format)


def check_gradients_of_call(q: Tensor, extras: Extras, options: Options, *, in_graph: bool = False) -> None:
    """What a call with gradients asks for beyond one without, but for its device's type. in_graph: the card may be
    another than the one at hand."""
    require_gradients(q, extras.out, options, in_graph=in_graph)
    if isinstance(extras.bias, Tensor) and extras.bias.requires_grad:
        require_gradient_of_bias(q, extras.bias, options.layout, is_deterministic(options))
    refuse_other_gradients(extras.named())
    for name, one in zip(SCALES, extras.scales, strict=True):
        check_scale_tensor(name, one, q, (0, 0))  # of 16 bits: none may be there


def is_deterministic(options: Options) -> bool:
    """Whether gradients are."""
    if options.deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    return options.deterministic


def refuse_other_gradients(named: dict[str, Any]) -> None:
    """For a tensor that a call has besides q, k and v, whose gradient is asked for and is not there."""
    for name, t in named.items():
        if isinstance(t, Tensor) and name not in ("sinks", "bias") and t.requires_grad:
            refuse_gradient(name)


def refuse_gradient(name: str) -> NoReturn:
    raise NotImplementedError(
        f"{name}: expected a tensor that does not require grad, as only q, k, v, sinks and a bias have gradients, got "
        "requires_grad=True in grad mode; call under torch.no_grad(), or .detach() it"
    )


def require_gradients(q: Tensor, out: Tensor | None, options: Options, *, in_graph: bool = False) -> None:
    """NotImplementedError, by name, where attention has no gradients. in_graph: as for `check_gradients_of_call`."""
    device = options.device
    if options.score_mod is not None and options.score_mod.backward is None:
        raise NotImplementedError(
            "score_mod: expected one with a backward function, as gradients are asked for, got one without; give "
            "ScoreMod(forward, backward)"
        )
    instead = "call under torch.no_grad(), or .detach() q, k and v"
    if out is not None:
        raise NotImplementedError(
            f"out: expected None, as gradients are asked for, got a Tensor; leave it out, or {instead}"
        )
    if q.dtype in FP8_DTYPES:
        raise NotImplementedError(
            f"q: expected float16 or bfloat16, as gradients are asked for and fp8 has none, got {q.dtype}; {instead}"
        )
    if device is None and in_graph:
        return
    chosen = Device.of(q.device) if device is None else device
    chosen.require_supported()
    if chosen.arch not in ARCHS:
        raise NotImplementedError(
            f"device: expected a Hopper card, as gradients are asked for and no other has them so far, got "
            f"{chosen.name}; {instead}"
        )


def require_gradient_of_bias(q: Tensor, bias: Any, layout: str, deterministic: bool) -> None:
    """NotImplementedError for a sum in a fixed order. What is no bias is refused elsewhere."""
    if not deterministic or not isinstance(bias, Tensor) or bias.dim() != 4 or q.dim() != 4:
        return
    shape = in_bhsd(q, layout).shape[:3]
    if bias_of(bias, shape).shared:
        raise NotImplementedError(
            f"bias: expected shape {(*shape, bias.shape[3])}, as its gradient is asked for and deterministic, got "
            f"{tuple(bias.shape)}, whose gradient is summed in any order; .expand() it, so that torch sums, or give "
            "deterministic=False"
        )


# Of Extras, what the backward pass needs besides what functions read.
SAVED = (
    "sinks", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "q_segment_ids", "k_segment_ids", "bias",
)  # fmt: skip


class Attention(torch.autograd.Function):
    """(O, LSE) with gradients, of q, k, v, sinks, a bias, what else a call has, and the function that computes them."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        bias: Tensor | None,
        extras: Extras,
        options: Options,
        attend: Any,
    ) -> Any:
        out, lse = attend(q, k, v, extras, options, True)
        if extras.is_empty:
            ctx.save_for_backward(q, k, v, out, lse)
        else:
            read = (*extras.of_score_mod, *extras.of_mask_mod)
            ctx.save_for_backward(q, k, v, out, lse, *(getattr(extras, name) for name in SAVED), *read)
            ctx.read_by_scores = len(extras.of_score_mod)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        dout, dlse = usable_gradient("dout", dout), usable_gradient("dlse", dlse)
        if dout is None and dlse is None:
            return (None,) * 8
        q, k, v, out, lse, *others = ctx.saved_tensors
        extras = NO_EXTRAS
        if others:
            kept, read = dict(zip(SAVED, others, strict=False)), tuple(others[len(SAVED) :])
            by_scores, by_mask = read[: ctx.read_by_scores], read[ctx.read_by_scores :]
            extras = Extras(**kept, of_score_mod=by_scores, of_mask_mod=by_mask)
        of_bias = ctx.needs_input_grad[4]
        arguments = (dout, dlse, q, k, v, out, lse, extras, ctx.options, of_bias)
        # A graph of the backward pass is made if its caller gives create_graph=True.
        grads = Gradients.apply(*arguments) if torch.is_grad_enabled() else differentiate(*arguments)
        dq, dk, dv, *others = grads
        dsinks = None if extras.sinks is None else others.pop(0)
        return dq, dk, dv, dsinks, others.pop(0) if of_bias else None, None, None, None


class Gradients(torch.autograd.Function):
    """`differentiate` where a graph of the backward pass is made: says what is missing if that is used."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        return differentiate(*arguments[:10])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        refuse_second_derivative()


def refuse_second_derivative() -> NoReturn:
    raise NotImplementedError(
        "attention: gradients of its gradients are not supported; leave create_graph=True out, or keep attention "
        "out of what is differentiated twice"
    )
