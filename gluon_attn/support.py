"""Whether `attention` takes a call: what a hook asks before it makes one."""

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .api import (
    autocast,
    check_call,
    check_differentiable,
    check_options,
    check_scales,
    plan_of,
    wants_gradient,
)
from .call import Extras, Options, Window, both_segment_ids, keep, key_of
from .checks import check_seqlens, hashable
from .device import Device
from .forward.configs import ForwardConfig
from .mask_mod import MaskMod
from .mask_mod import compiled_part as compiled_mask
from .ops import card_in_graph, check_in_graph
from .score_mod import ScoreMod, compiled_part
from .tensors import FP8_DTYPES, PACKED
from .tuning import active

REFUSALS = (NotImplementedError, RuntimeError, TypeError, ValueError)  # what `attention` raises before it computes

# Whether there is something to compute, for what `plan_of` has taken, by `key_of` and the tables that were loaded.
_taken: dict[tuple[Any, ...], bool] = {}


def supports(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    return_lse: bool = False,
    deterministic: bool | None = None,
    out: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    num_ctas: int | None = None,
    config: ForwardConfig | None = None,
    device: Device | None = None,
    needs_grad: bool | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    **unsupported: Any,
) -> str | None:
    """Why `attention` refuses these arguments, in the words that it raises; None if it takes them. With cu_seqlens_q:
    why `attention_varlen` does.

    Compiles nothing and runs nothing on a card. It makes the checks that `attention` makes, and nothing else, so that
    both agree. Fake tensors alone it refuses under their mode too, where `attention` takes them. Asked again for the
    same shapes and strides, it takes a few microseconds.

    Under torch.autocast it asks for the memory of q, k and v in another dtype, as `attention` does. It raises
    torch.OutOfMemoryError where there is none.

    needs_grad: whether gradients will be asked for. None: as `attention` finds it, by grad mode and `requires_grad`.
    """
    try:
        score_function, read = compiled_part(score_mod)
        mask, read_by_mask = compiled_mask(mask_mod)
        options = Options(
            causal,
            hashable(window),
            chunk,
            softcap,
            score_function,
            scale,
            layout,
            deterministic,
            num_ctas,
            config,
            device,
            mask,
        )
        q_ids, k_ids = both_segment_ids(segment_ids)
        extras = Extras(
            out, q_scale, k_scale, v_scale, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seqused_k, q_ids, k_ids,
            bias, read, read_by_mask,
        )  # fmt: skip
        packed = {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        packed["seqused_k"] = seqused_k
        for name, given in packed.items():
            if cu_seqlens_q is None and given is not None:
                return f"{name}: expected with packed sequences only; give cu_seqlens_q too, or leave it out"
        if cu_seqlens_q is not None and layout not in ("bhsd", PACKED):
            return f"layout: packed sequences have one layout, {PACKED!r}, got {layout!r}; leave it out"
        if cu_seqlens_q is not None:
            longest = check_seqlens(max_seqlen_q, max_seqlen_k)
            options = options._replace(layout=PACKED, max_seqlens=longest)
        function = "attention" if cu_seqlens_q is None else "attention_varlen"
        check_options(return_lse, deterministic, unsupported, function)
        gradient = (
            torch.is_grad_enabled() and wants_gradient(q, k, v, sinks, bias) if needs_grad is None else needs_grad
        )
        q, k, v = autocast(q, k, v, convert=torch.empty_like)  # memory for what attention() converts to, no numbers
        if is_compiling():
            card_in_graph(extras, options)
        if gradient:
            check_differentiable(q, k, v, extras, options)
        with torch.no_grad() if gradient or needs_grad is False else contextlib.nullcontext():
            check_forward(q, k, v, extras, options)
    except torch.OutOfMemoryError:
        raise  # a RuntimeError too, but no reason why these arguments are refused
    except REFUSALS as refusal:
        return str(refusal)
    return None


def check_forward(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options) -> None:
    """What `attention` refuses without gradients."""
    if is_compiling():  # shapes may be symbols, which are no key
        check_in_graph(q, k, v, extras, options)
        plan_of(q, k, v, extras, options)
        return
    tables = active()
    try:
        key = key_of(q, k, v, extras, options), tables
        computes = _taken[key]
    except (AttributeError, KeyError, RuntimeError, TypeError):
        # New; or no dense tensor, or not hashable: plan_of() says what is wrong.
        computes = plan_of(q, k, v, extras, options, tables) is not None
        keep(_taken, key, computes)
    else:
        check_call(q, k, v, extras)
    if computes and q.dtype in FP8_DTYPES:
        check_scales(extras.scales)
