"""The public call: validate, pick a tile, launch."""

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from .device import Device
from .forward.configs import TileConfig
from .forward.launch import Launch, TransposingLaunch, launch_of
from .forward.plan import Plan
from .forward.table import (
    pick_tile,
    require_ctas,
    require_fits,
    require_supported,
)
from .problem import (
    FP8_DTYPES,
    SCALES,
    TMA_ALIGNMENT_BYTES,
    Problem,
    check_no_overlap,
    output_dtype,
    refuse_address,
)
from .runtime.compiler import check_triton_version

if TYPE_CHECKING:
    from .cpu import CpuLaunch

    AnyLaunch = Launch | TransposingLaunch | CpuLaunch

# What users of flash-attention and of torch may ask for by name, and what to call it in the answer.
UNSUPPORTED = {
    **dict.fromkeys(("attn_bias", "bias", "score_mod"), "a bias or another change to the scores"),
    **dict.fromkeys(("attn_mask", "attention_mask", "block_mask", "mask_mod"), "a mask other than causal"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), "variable lengths"),
    **dict.fromkeys(("block_table", "page_table"), "a paged KV cache"),
    **dict.fromkeys(("cache_seqlens", "k_cache", "v_cache"), "a KV cache"),
    **dict.fromkeys(("window_size", "sliding_window", "attention_chunk"), "a sliding window"),
    **dict.fromkeys(("dropout", "dropout_p"), "dropout"),
    **dict.fromkeys(("sinks", "s_aux", "learnable_sink"), "attention sinks"),
    "alibi_slopes": "ALiBi",
    "softcap": "a soft cap on the scores",
    "qv": "a V head dim unlike Q's",
}
RENAMED = {
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "is_causal": "causal (aligned to the bottom right, unlike torch's is_causal)",
    "enable_gqa": "nothing: fewer KV heads than query heads just work",
    "return_softmax_lse": "return_lse",
    "return_attn_probs": "return_lse",
}

# Launches by everything they depend on. Shapes and strides only: no tensor is kept alive. None: nothing to launch.
_launches: dict[tuple[Any, ...], "AnyLaunch | None"] = {}
MAX_LAUNCHES = 4096

Scales = tuple[Tensor | None, Tensor | None, Tensor | None]  # of q, k and v


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    out: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    num_ctas: int | None = None,
    tile: TileConfig | None = None,
    device: Device | None = None,
    **unsupported: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale · Q Kᵀ + mask) V on a Hopper or Blackwell card, on the current stream of q's device.

    The method is FlashAttention's (Dao et al., 2022; Shah et al., 2024): online softmax over blocks of keys, warp
    specialised. A new length, batch or number of heads compiles nothing. Nothing is copied, with one exception: Hopper
    multiplies fp8 only with V transposed, and at D > 128, or where many queries use each key, a kernel of its own does
    that before, into memory for as many elements as V's shape has, also of a V that is expanded.

    Args:
        q: (B, H, Sq, D), or with layout "bshd" (B, Sq, H, D). float16, bfloat16, float8_e4m3fn or float8_e5m2. D: a
            multiple of 8 (fp8: of 16) up to 256 (Blackwell: up to 128).
        k, v: (B, Hkv, Sk, D) likewise, H a multiple of Hkv. Any Sq, Sk. Any strides that TMA takes: the last 1, the
            others and the base address multiples of 16 bytes; a dimension of size 1 may have any. Stride 0 is fine.
        causal: query i sees keys j <= i + Sk - Sq, aligned to the BOTTOM RIGHT as in flash-attention. (`is_causal` of
            torch's scaled_dot_product_attention is aligned to the top left: they differ where Sq != Sk.)
        scale: finite and positive; default 1/sqrt(D). Scores times scale are fp32: beyond 1e5 their differences, and
            with them O, lose digits, and beyond 1e9 there are NaN, as in other kernels of this method.
        layout: "bhsd" or "bshd".
        return_lse: also return the log-sum-exp of the scores of each row.
        out: where to put O: shape and dtype of q (of fp8 inputs: bfloat16), sharing no memory with q, k, v. Default: a
            new tensor like q.
        q_scale, k_scale, v_scale: for fp8 inputs, what they are multiplied with: (B, Hkv) fp32, contiguous. Default 1.
            q_scale too is by KV head: one for all query heads that share it. Those of q and k must not be negative,
            which is not checked: they are on the card.
        num_ctas: 1, 2 or (Blackwell) 4 CTAs to a cluster; default: as the tuning table has it.
        tile: a TileConfig instead of the tuning table's.
        device: a Device to choose for; default: q's own card. With CPU tensors, Device.hopper() or Device.blackwell()
            has gluon_cpu execute the kernel for such a card, slowly, and check it for races.

    Returns:
        O in q's shape and dtype (of fp8 inputs: bfloat16); with return_lse, (O, LSE), LSE (B, H, Sq) fp32, natural
        logarithm. A row that sees no key has O = 0 and LSE = -inf. In fp8 on Hopper, whose tensor cores add with about
        14 bits, O of many keys is too small if V has one sign: by 13 % at 8192 (docs/tuning.md, with a remedy).

    Raises:
        TypeError, ValueError: an argument is not as above; the message says which, what was expected and what to do.
        NotImplementedError: a feature that is not supported, by its name; gradients (inputs that require grad while
            grad mode is on).
        gluon_cpu.Finding: on CPU tensors, a race or another misuse in the kernel.
        RuntimeError: no Hopper or Blackwell card, or another version of Triton than 3.9.
    """
    if unsupported:
        refuse(**unsupported)
    scales = (q_scale, k_scale, v_scale)
    try:
        key = (
            q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype,
            q.device, k.device, v.device, causal, type(causal), scale, type(scale), layout, num_ctas, type(num_ctas),
            tile, device, out is None or identity(out), q_scale is None or identity(q_scale),
            k_scale is None or identity(k_scale), v_scale is None or identity(v_scale),
        )  # fmt: skip
        launch = _launches[key]
    except (AttributeError, KeyError, TypeError):  # new; or not a tensor, or not hashable: prepare() says what is wrong
        launch = prepare(q, k, v, out, scales, causal, scale, layout, num_ctas, tile, device)
        if len(_launches) >= MAX_LAUNCHES:
            _launches.clear()
        _launches[key] = launch
    check_call(q, k, v, out, scales)

    if out is None:
        out = torch.empty_like(q, dtype=output_dtype(q.dtype))
    needs_all = launch is not None and launch.needs_all_pointers
    lse = None
    if return_lse or needs_all:
        heads, q_len = q.shape[1:3] if layout == "bhsd" else (q.shape[2], q.shape[1])
        lse = torch.empty((q.shape[0], heads, q_len), dtype=torch.float32, device=q.device)
    if launch is None:
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
    elif q.dtype not in FP8_DTYPES:
        launch(q, k, v, out, lse)
    else:
        launch(q, k, v, out, lse, *(filled_scales(scales, k, layout) if needs_all else scales))
    return (out, lse) if return_lse and lse is not None else out


def refuse(**unsupported: Any) -> None:
    """Raise for the first argument that attention() does not know, or knows but does not support."""
    for name in unsupported:
        if name in UNSUPPORTED:
            raise NotImplementedError(f"{name}: {UNSUPPORTED[name]} is not supported; leave the argument out")
        else:
            hint = f"; use {RENAMED[name]}" if name in RENAMED else ""
            raise TypeError(f"attention() got an unexpected keyword argument {name!r}{hint}")


def filled_scales(scales: Scales, k: Tensor, layout: str) -> list[Tensor]:
    """The scales of fp8 inputs, ones where there are none."""
    shape = k.shape[0], k.shape[1 if layout == "bhsd" else 2]
    return [torch.ones(shape, dtype=torch.float32, device=k.device) if s is None else s for s in scales]


def identity(t: Tensor) -> tuple[Any, ...]:
    """What a launch may depend on of a tensor."""
    return t.shape, t.stride(), t.dtype, t.device


def check_call(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, scales: Scales) -> None:
    """What may differ from call to call with the same shapes: addresses, shared memory, gradients."""
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr()
    if out is not None:
        check_no_overlap(out, q=q, k=k, v=v)
        addresses |= out.data_ptr()
    if addresses % TMA_ALIGNMENT_BYTES and q.numel() and k.numel():  # an empty tensor has no address
        for name, t in {"q": q, "k": k, "v": v, "out": out}.items():
            if t is not None and t.data_ptr() % TMA_ALIGNMENT_BYTES:
                refuse_address(name, t)
    if torch.is_grad_enabled():
        for name, t in zip(("q", "k", "v", "out", *SCALES), (q, k, v, out, *scales), strict=True):
            if t is not None and t.requires_grad:
                refuse_gradient(name)


def refuse_gradient(name: str) -> NoReturn:
    raise NotImplementedError(
        f"{name}: expected a tensor that does not require grad, as only the forward pass is supported so far, got "
        "requires_grad=True in grad mode; call under torch.no_grad(), or .detach() it"
    )


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    scales: Scales,
    causal: bool,
    scale: float | None,
    layout: str,
    num_ctas: int | None,
    tile: TileConfig | None,
    device: Device | None,
) -> "AnyLaunch | None":
    """Validate everything that depends on shapes, strides and options, and choose the kernel."""
    check_triton_version()
    problem = Problem.of(q, k, v, causal=causal, scale=scale, layout=layout, out=out, scales=scales)
    if num_ctas not in (None, 1, 2, 4) or isinstance(num_ctas, bool):
        raise ValueError(f"num_ctas: expected 1, 2, 4 or None, got {num_ctas!r}")
    if tile is not None and not isinstance(tile, TileConfig):
        raise TypeError(f"tile: expected a TileConfig or None, got {type(tile).__name__}")
    if tile is not None and num_ctas not in (None, tile.num_ctas):
        raise ValueError(f"num_ctas: expected {tile.num_ctas} (as tile.cga_layout says), got {num_ctas}; leave one out")
    if device is not None and not isinstance(device, Device):
        raise TypeError(f"device: expected a gluon_attn Device or None, got {type(device).__name__}; leave it out")
    check_call(q, k, v, out, scales)
    chosen = Device.of(q.device) if device is None else device
    chosen.require_supported()
    if q.device.type != "cpu" and device is not None:
        own = Device.of(q.device)  # whatever device is planned for, it runs on this one
        if own.arch != device.arch:
            raise ValueError(
                f"device: expected one of compute capability {own.capability}, as {own.name}, where q is, got "
                f"{device.name} {device.capability}; leave it out, or move q, k and v to the CPU to execute it there"
            )
    require_supported(problem, chosen)
    require_ctas(num_ctas, chosen)
    if tile is not None:
        require_fits(tile, problem, chosen)
    if problem.is_empty:  # TMA describes no empty tensor, and there is nothing to compute
        return None
    plan = Plan.of(problem, pick_tile(problem, chosen, num_ctas) if tile is None else tile, chosen)
    if q.device.type == "cpu":
        from .cpu import CpuLaunch

        return CpuLaunch(plan)
    like_out = torch.empty_like(q, dtype=output_dtype(q.dtype), device="meta") if out is None else out
    return launch_of(plan, q, k, v, like_out)
