"""The public call: validate, pick a config, launch."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from .call import NO_EXTRAS, NONE_GIVEN, Extras, Options, Window, both_segment_ids, keep, key_of, problem_of
from .checks import check_bool, check_device, check_num_ctas, check_scale_signs, hashable, type_name
from .device import Device
from .features import INSTEAD, NOT_THERE, refuse_together
from .forward.configs import ForwardConfig
from .forward.fits import require_ctas, require_fits, require_supported
from .forward.launch import launches_on_card
from .forward.plan import Plan
from .forward.table import pick_config
from .gradients import Attention, check_gradients_of_call, refuse_gradient
from .mask_mod import MaskMod
from .mask_mod import compiled_part as compiled_mask
from .memory import LOWEST_ADDRESS, check_memory, check_no_overlap, is_suspect, refuse_address, refuse_tangent
from .ops import attention_op, is_seen_by_a_mode
from .refusals import refuse_unusual
from .runtime.compiler import check_triton_version
from .runtime.kernel import Launches, available
from .score_mod import ScoreMod, compiled_part
from .tensors import PACKED, TMA_ALIGNMENT_BYTES, empty_output, shape_of_lse
from .tuning import Table, active, rows_for

# What flash-attention and torch call it.
RENAMED = {
    "softmax_scale": "scale",
    "attn_bias": "bias, of four dimensions",
    "sm_scale": "scale",
    "is_causal": "causal (aligned to the bottom right, unlike torch's is_causal)",
    "layout": "nothing: packed sequences have one, (tokens, heads, head_dim)",
    "enable_gqa": "nothing: fewer KV heads than query heads just work",
    "window_size": "window (None for no limit, which is -1 there)",
    "sliding_window": "window: (sliding_window - 1, 0) sees that many keys, the query's own among them",
    "attention_chunk": "chunk",
    **dict.fromkeys(("s_aux", "learnable_sink"), "sinks"),
    **dict.fromkeys(
        ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k"),
        "attention_varlen, which packed sequences have for a call of their own",
    ),
    "seqused_q": "seqused_k of attention_varlen; queries count all",
    **dict.fromkeys(("document_ids", "doc_ids", "seq_ids", "q_segment_ids", "kv_segment_ids"), "segment_ids"),
    "return_softmax_lse": "return_lse",
    "return_attn_probs": "return_lse",
}

# Launches by everything they depend on. Shapes and strides only: no tensor is kept alive. None: nothing to launch.
_launches: dict[tuple[Any, ...], Launches | None] = {}


def attention(
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
    **unsupported: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale · Q Kᵀ + mask) V on a Hopper or Blackwell card, on the current stream of q's device.

    The method is FlashAttention's (Dao et al., 2022; Shah et al., 2024): online softmax over blocks of keys, warp
    specialised. A new length, batch or number of heads compiles nothing, unless the tuning table picks another config:
    there are a handful of kernels for each head dim. Nothing is copied, with one exception: Hopper
    multiplies fp8 only with V transposed, and at D > 128, or where many queries use each key, a kernel of its own does
    that before, into memory for as many elements as V's shape has, also of a V that is expanded.

    On Hopper, in 16 bits, q, k and v have gradients, through O and through LSE; see `gradients.attention_backward`.
    Those gradients have none. Under torch.compile and torch.export it is one operator, `gluon_attn::forward`, and takes
    no `config` and `out`. Under torch.autocast, q, k and v in fp32 are converted.

    Only q, k and v are positional. There is no `attn_mask`: masks are `causal`, `window`, `chunk`, `segment_ids` and
    `mask_mod`.

    Args:
        q: (B, H, Sq, D), or with layout "bshd" (B, Sq, H, D). float16, bfloat16, float8_e4m3fn or float8_e5m2. D: a
            multiple of 8 (fp8: of 16) up to 256.
        k, v: (B, Hkv, Sk, D) likewise, H a multiple of Hkv. V's head dim may be another one than D, as 128 with 192; O
            has V's. On Blackwell V's is at most 128. Any Sq, Sk. Any strides that TMA takes: the last 1, the others and
            the base address multiples of 16 bytes; a dimension of size 1 may have any. Stride 0 is fine.
        causal: query i sees keys j <= i + Sk - Sq, aligned to the BOTTOM RIGHT as in flash-attention. (`is_causal` of
            torch's scaled_dot_product_attention is aligned to the top left: they differ where Sq != Sk.)
        window: (left, right), how many keys a query sees before and after its own position, besides the one at it; None
            for no limit. Aligned as `causal` is, which is a right of 0 and may be given as well. Blocks of keys that no
            query of a block sees are left out, so that the time grows with the window. Each size is a kernel of its
            own, compiled at its first call.
        softcap: scores, scaled, become softcap · tanh(score / softcap).
        alibi_slopes: (H,) or (B, H) fp32, contiguous: the slope times the distance |i + Sk - Sq - j| is taken from each
            score. They have no gradient.
        sinks: (H,), contiguous, fp32, fp16 or bf16: of each query head a further score, without a value, that counts in
            the denominator alone and in LSE. It is not scaled.
        bias: (B or 1, H or 1, Sq or 1, Sk), in either layout, of q's dtype or fp32: is added to scores that are scaled,
            as torch's scaled_dot_product_attention adds a float `attn_mask`. Strides as of q: a row whose Sk is no
            multiple of 8 (fp32: of 4) numbers is part of a longer one. -inf hides a key; so does a number below -1e37.
            In 16 bits, with num_ctas=1. Not with softcap, alibi_slopes or score_mod.
        score_mod: a change of scores that you write, see `ScoreMod` and docs/masks_and_scores.md. A call has one of
            score_mod, softcap, alibi_slopes and bias.
        chunk: a query sees the keys of its own chunk only: position p those from p // chunk * chunk on, `chunk` many.
        segment_ids: (of queries (B, Sq), of keys (B, Sk)), int32, contiguous, or one tensor that is both: a query sees
            keys of its own id only, as of documents packed into one sequence. Blocks without such are left out, if ids
            are sorted or come in runs; otherwise they are masked alone, and the result is the same. `causal` and
            `window` still count positions in the whole sequence.
        mask_mod: which keys a query sees, as a function that you write, see `MaskMod` and docs/masks_and_scores.md. A
            call has one of mask_mod and segment_ids.
        scale: finite and positive; default 1/sqrt(D). Scores times scale are fp32: beyond 1e5 their differences, and
            with them O, lose digits, and beyond 1e9 there are NaN, as in other kernels of this method.
        layout: "bhsd" or "bshd".
        return_lse: also return the log-sum-exp of the scores of each row.
        deterministic: whether dQ is added up in a fixed order in the backward pass, so that its bits are the same in
            each run. None: as `torch.use_deterministic_algorithms` says. All else is always deterministic.
        out: where to put O: shape and dtype of q (of fp8 inputs: bfloat16), but for V's head dim, sharing no memory
            with q, k, v. Default: a new tensor like q.
        q_scale, k_scale, v_scale: for fp8 inputs, what they are multiplied with: (B, Hkv) fp32, contiguous. Default 1.
            q_scale too is by KV head: one for all query heads that share it. Those of q and k must not be negative:
            on the CPU that is refused, on a card, where nobody looks, such a head is NaN.
        num_ctas: 1, 2 or (Blackwell) 4 CTAs to a cluster; default: as the tuning table has it.
        config: a ForwardConfig instead of the tuning table's.
        device: a Device to choose for; default: q's own card. With CPU tensors, Device.hopper() or Device.blackwell()
            has gluon_cpu execute the kernel for such a card, slowly, and check it for races.

    Returns:
        O in q's shape, but with V's head dim, and in q's dtype (of fp8 inputs: bfloat16); with return_lse, (O, LSE),
        LSE (B, H, Sq) fp32, natural logarithm. A row that sees no key, or has scores of -inf alone, has O = 0 and
        LSE = -inf, or with sinks LSE = its sink: so with Sk = 0 all rows. With Sq = 0, O and LSE are empty. In fp8 on
        Hopper, whose tensor cores add with about 14 bits, O of many keys is too small if V has one sign: by 13 % at
        8192 (docs/fp8.md#how-exact, with a remedy).

        NaN and infinity come out as of `reference_attention`, which is plain PyTorch: a score of NaN makes O and LSE of
        its row NaN; one of +inf makes O NaN and LSE +inf. NaN and infinity in V reach O in each row that sees the key.
        Four things are left open. A row that does not see a key may have that key's NaN of V, or not: PyTorch has
        0 · NaN = NaN there, the kernels leave out most keys that no row sees. Where a probability is too small for V's
        dtype, its product with infinity is NaN or infinite. Where v_scale is infinite, so is O, or NaN. On Hopper LSE
        of a row with scores of both NaN and +inf is either.

    Raises:
        TypeError, ValueError: an argument is not as above; the message says which, what was expected and what to do.
        NotImplementedError: a feature that is not supported, by its name.
        gluon_cpu.Finding: on CPU tensors, a race or another misuse in the kernel.
        RuntimeError: no Hopper or Blackwell card; a version of Triton without kernels for it (docs/install.md); or its
            kernel cannot be compiled or loaded.
    """
    check_options(return_lse, deterministic, unsupported)
    function, read = compiled_part(score_mod)
    mask, read_by_mask = compiled_mask(mask_mod)
    options = Options(
        causal, hashable(window), chunk, softcap, function, scale, layout, deterministic, num_ctas, config, device, mask
    )
    extras = NO_EXTRAS
    alone = out is q_scale is k_scale is v_scale is sinks is alibi_slopes is segment_ids is bias is None
    if not alone or score_mod is not None or mask_mod is not None:
        q_ids, k_ids = both_segment_ids(segment_ids)
        extras = Extras(
            out, q_scale, k_scale, v_scale, sinks, alibi_slopes, q_segment_ids=q_ids, k_segment_ids=k_ids,
            bias=bias, of_score_mod=read, of_mask_mod=read_by_mask,
        )  # fmt: skip
    if is_compiling() or is_seen_by_a_mode(extras, options):
        both = attention_op(*autocast(q, k, v), extras, options)
        return both if return_lse else both[0]
    if torch.is_grad_enabled() and wants_gradient(q, k, v, sinks, bias):
        q, k, v = autocast(q, k, v)
        check_differentiable(q, k, v, extras, options)
        out, lse = Attention.apply(q, k, v, sinks, bias, extras, options, attend)
        return (out, lse) if return_lse else out
    return attend(q, k, v, extras, options, return_lse)


@torch.compiler.disable  # where torch.compile broke its graph, it would trace the launch
def attend(
    q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` itself, without gradients."""
    tables = active()
    try:
        key = key_of(q, k, v, extras, options), tables
        launch = _launches[key]
    except (AttributeError, KeyError, RuntimeError, TypeError):
        # New; or no dense tensor, or not hashable: prepare() says what is wrong.
        cast = autocast(q, k, v)
        if cast[0] is not q or cast[1] is not k or cast[2] is not v:
            return attend(*cast, extras, options, return_lse)
        launch = prepare(q, k, v, extras, options, tables)
        keep(_launches, key, launch)
    else:
        check_call(q, k, v, extras)

    out = extras.out
    if out is None:
        out = empty_output(q, v)
    lse = None
    if return_lse:
        lse = torch.empty(shape_of_lse(q.shape, options.layout), dtype=torch.float32, device=q.device)
    if options.layout == PACKED and q.device.type == "cpu":  # gluon_cpu has NaN for what is to be written: not all is
        for made in (lse, out if extras.out is None else None):
            if made is not None:
                made.zero_()
    if launch is None:
        if extras.cu_seqlens_q is not None:
            rows = torch.arange(len(out), device=out.device)[:, None, None]
            out.masked_fill_(rows < extras.cu_seqlens_q[-1], 0.0)
        else:
            out.zero_()
        if lse is not None and extras.sinks is not None:
            lse.copy_(extras.sinks[:, None])
        elif lse is not None:
            lse.fill_(float("-inf"))
    else:
        if not extras.is_empty:
            check_scales(extras.scales)
        given = extras.given()
        given["q"], given["k"], given["v"], given["out"], given["lse"] = q, k, v, out, lse  # update() takes longer
        launch(given)
    return out if lse is None else (out, lse)


def launch_of(q: Tensor, k: Tensor, v: Tensor, options: Options, tables: tuple[Table, ...]) -> Launches | None:
    """What `attend` keeps of a call without other tensors; None if it keeps nothing. tables: that were loaded."""
    return _launches.get((key_of(q, k, v, NO_EXTRAS, options), tables))


def attend_again(launch: Launches, q: Tensor, k: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """`attend` of a call that it has made before, in 16 bits and without other tensors. Who calls has checked what may
    differ: see `check_addresses`. launch: `launch_of` such a call."""
    out = empty_output(q, v)
    lse = torch.empty(shape_of_lse(q.shape, layout), dtype=torch.float32, device=q.device)
    launch({**NONE_GIVEN, "q": q, "k": k, "v": v, "out": out, "lse": lse})
    return out, lse


def check_options(
    return_lse: object, deterministic: object, unsupported: dict[str, Any], function: str = "attention"
) -> None:
    """What says nothing of the tensors. function: that is called, for messages."""
    if unsupported:
        refuse(unsupported, function)
    if return_lse is not False and return_lse is not True:
        check_bool("return_lse", return_lse)
    if deterministic is not None:
        check_bool("deterministic", deterministic)


def check_differentiable(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options) -> None:
    """What a call with gradients asks for beyond one without."""
    given = {"q": q, "k": k, "v": v, **extras.named()}
    refuse_unusual(**given)
    if forward_ad._current_level >= 0:
        for name, t in given.items():
            if isinstance(t, Tensor):
                refuse_tangent(name, t)
    check_device(options.device, q)
    check_gradients_of_call(q, extras, options)


def wants_gradient(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, bias: Tensor | None = None) -> bool:
    try:
        if (sinks is not None and sinks.requires_grad) or (bias is not None and bias.requires_grad):
            return True
        return q.requires_grad or k.requires_grad or v.requires_grad
    except AttributeError:  # no tensor, which is found later
        return False


def autocast(q: Any, k: Any, v: Any, convert: Callable[..., Tensor] = Tensor.to) -> tuple[Any, Any, Any]:
    """Those in fp32, where `torch.autocast` is on, in its dtype, as torch's own attention has them there.

    convert: is given a tensor and `dtype`.
    """

    def converted(t: Any) -> Any:
        if not isinstance(t, Tensor) or t.dtype != torch.float32:
            return t
        kind = t.device.type
        on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        return convert(t, dtype=torch.get_autocast_dtype(kind)) if on else t

    return converted(q), converted(k), converted(v)


def refuse(unsupported: dict[str, Any], function: str) -> None:
    """Raise for the first argument that a function does not know, or knows but does not support."""
    for name in unsupported:
        refuse_together({"cu_seqlens_q", name})  # what `attention` has and `attention_varlen` has not
        if name in NOT_THERE:
            instead = INSTEAD.get(NOT_THERE[name], "leave the argument out")
            raise NotImplementedError(f"{name}: {NOT_THERE[name]} is not supported so far; {instead}")
        else:
            hint = f"; use {RENAMED[name]}" if name in RENAMED else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def check_call(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> None:
    """What may differ from call to call with the same shapes: addresses, shared memory, gradients."""
    check_addresses(q, k, v, extras)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or not extras.is_empty):
        for t in (q, k, v, *extras.each()):
            if t is not None and t.requires_grad:
                named = {"q": q, "k": k, "v": v, **extras.named()}
                refuse_gradient(next(name for name, other in named.items() if other is t))


def check_addresses(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> None:
    """The same, but for gradients."""
    # A Parameter is fine, a FakeTensor has the address 0.
    if not type(q) is type(k) is type(v) is Tensor:
        refuse_unusual(q=q, k=k, v=v)
    try:
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
    except RuntimeError:  # there is none
        refuse_unusual(q=q, k=k, v=v)
        raise
    if (
        (at_q < LOWEST_ADDRESS or at_k < LOWEST_ADDRESS or at_v < LOWEST_ADDRESS)
        or (q.is_neg() or k.is_neg() or v.is_neg())
        or forward_ad._current_level >= 0
    ):
        check_memory(q=q, k=k, v=v)
    addresses = at_q | at_k | at_v
    if not extras.is_empty:
        out, bias = extras.out, extras.bias
        if any(map(is_suspect, [t for t in extras.each() if t is not None])):
            check_memory(**extras.named())
        extras.check_alignment()
        if bias is not None:
            addresses |= bias.data_ptr()
        if out is not None:
            addresses |= out.data_ptr()
            check_no_overlap(out, q=q, k=k, v=v, **({} if bias is None else {"bias": bias}))
    if addresses % TMA_ALIGNMENT_BYTES and q.numel() and k.numel():  # an empty tensor has no address
        for name, t in {"q": q, "k": k, "v": v, "bias": extras.bias, "out": extras.out}.items():
            if t is not None and t.data_ptr() % TMA_ALIGNMENT_BYTES:
                refuse_address(name, t)


def check_scales(scales: Sequence[Tensor | None]) -> None:
    """What may differ from call to call in fp8 scales besides: their sign, only on the CPU. On a card the numbers are
    there."""
    if any(scale is not None and scale.device.type == "cpu" for scale in scales):
        check_scale_signs(scales)


def prepare(
    q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options, tables: tuple[Table, ...]
) -> Launches | None:
    """Validate everything that depends on shapes, strides and options, and compile the kernel. tables: that are
    loaded."""
    plan = plan_of(q, k, v, extras, options, tables)
    if plan is None:
        return None
    like_out = empty_output(q, v, device="meta") if extras.out is None else extras.out
    launches: Callable[..., Launches] = launches_on_card
    if q.device.type == "cpu":
        from .cpu import launches_on_cpu as launches

    return available(partial(launches, plan, q, k, v, like_out, extras.seqused_k is not None, extras.bias))


def plan_of(
    q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options, tables: tuple[Table, ...] | None = None
) -> Plan | None:
    """What to launch; None if there is nothing to compute. All that can be refused is refused here, on the host."""
    check_triton_version()
    refuse_unusual(q=q, k=k, v=v, **extras.named())
    problem = problem_of(q, k, v, extras, options)
    num_ctas, config, device = options.num_ctas, options.config, options.device
    check_num_ctas(num_ctas)
    if config is not None and not isinstance(config, ForwardConfig):
        raise TypeError(f"config: expected a ForwardConfig or None, got {type_name(config)}; leave it out")
    if config is not None and num_ctas not in (None, config.num_ctas):
        raise ValueError(
            f"num_ctas: expected {config.num_ctas} (as config.cga_layout says), got {num_ctas}; leave one out"
        )
    check_device(device, q)
    if not is_compiling():  # where `supports` is traced, tensors have no memory
        check_memory(q=q, k=k, v=v, **extras.named())
        check_call(q, k, v, extras)
    chosen = Device.of(q.device) if device is None else device
    chosen.require_supported()
    if q.device.type != "cpu" and device is not None:
        own = Device.of(q.device)  # whatever device is planned for, it runs on this one
        if own.arch != device.arch:
            raise ValueError(
                f"device: expected one of compute capability {own.capability}, as {own.name}, where q is, got "
                f"{device.name} {device.capability}; leave it out, or move q, k and v to the CPU to execute it there"
            )
    check_triton_version(chosen.arch, on_cpu=q.device.type == "cpu")
    require_supported(problem, chosen)
    require_ctas(num_ctas, chosen)
    if config is not None:
        require_fits(config, problem, chosen)
    if problem.is_empty:  # TMA describes no empty tensor, and there is nothing to compute
        return None
    config = pick_config(problem, chosen, num_ctas, rows_for(chosen, tables)) if config is None else config
    return Plan.of(problem, config, chosen, card_is_shared=options.card_is_shared)
