"""The public call: validate, pick a tile, launch."""

from typing import Any

import torch
from torch import Tensor

from .compat import check_triton_version
from .device import Device
from .kernels.hopper.kernel import Launch
from .problem import Problem, check_addresses
from .tuning import TileConfig, pick_tile, require_fits

# What users of flash-attention and of torch may ask for by name, and what to call it in the answer.
UNSUPPORTED = {
    "alibi_slopes": "ALiBi",
    "attn_bias": "an attention bias",
    "attn_mask": "an attention mask other than causal",
    "bias": "an attention bias",
    "block_table": "a paged KV cache",
    "cache_seqlens": "a KV cache",
    "cu_seqlens_k": "variable lengths",
    "cu_seqlens_q": "variable lengths",
    "dropout_p": "dropout",
    "max_seqlen_k": "variable lengths",
    "max_seqlen_q": "variable lengths",
    "page_table": "a paged KV cache",
    "softcap": "a soft cap on the scores",
    "window_size": "a sliding window",
}

# Launches by everything they depend on. Shapes and strides only: no tensor is kept alive.
_launches: dict[tuple[Any, ...], Launch] = {}
MAX_LAUNCHES = 4096


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
    """softmax(scale · Q Kᵀ + mask) V on a Hopper card, on the current stream of q's device.

    The method is FlashAttention's (Dao et al., 2022; Shah et al., 2024): online softmax over blocks of keys, warp
    specialised. Nothing is copied, and a new length, batch or number of heads compiles nothing.

    Args:
        q: (B, H, Sq, D), or with layout "bshd" (B, Sq, H, D). float16 or bfloat16. D: a multiple of 8 up to 256.
        k, v: (B, Hkv, Sk, D) likewise, H a multiple of Hkv. Any Sq, Sk. Any strides that TMA takes: the last 1, the
            others and the base address multiples of 16 bytes; a dimension of size 1 may have any. Stride 0 is fine.
        causal: query i sees keys j <= i + Sk - Sq, aligned to the BOTTOM RIGHT as in flash-attention. (`is_causal` of
            torch's scaled_dot_product_attention is aligned to the top left: they differ where Sq != Sk.)
        scale: finite and positive; default 1/sqrt(D).
        layout: "bhsd" or "bshd".
        return_lse: also return the log-sum-exp of the scores of each row.
        out: where to put O: shape and dtype of q, sharing no memory with q, k, v. Default: a new tensor like q.
        q_scale, k_scale, v_scale: for fp8 inputs, not supported yet.
        num_ctas: 1 or 2 CTAs to a cluster; default: what was measured to be faster.
        tile: a TileConfig instead of the tuning table's.
        device: a Device to choose for; default: q's own card.

    Returns:
        O in q's shape and dtype; with return_lse, (O, LSE), LSE (B, H, Sq) fp32, natural logarithm. A row that sees no
        key has O = 0 and LSE = -inf.

    Raises:
        TypeError, ValueError: an argument is not as above; the message says which, what was expected and what to do.
        NotImplementedError: a feature that is not supported, by its name; gradients (inputs that require grad while
            grad mode is on).
        RuntimeError: no Hopper card, or another version of Triton than 3.9.
    """
    if unsupported or q_scale is not None or k_scale is not None or v_scale is not None:
        refuse(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, **unsupported)
    try:
        key = (
            q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype,
            q.device, k.device, v.device, causal, type(causal), scale, layout, num_ctas, type(num_ctas), tile, device,
            out if out is None else (out.shape, out.stride(), out.dtype, out.device),
        )  # fmt: skip
        launch = _launches[key]
    except (AttributeError, KeyError, TypeError):  # new; or not a tensor, or not hashable: prepare() says what is wrong
        launch = prepare(q, k, v, out, causal, scale, layout, num_ctas, tile, device)
        if len(_launches) >= MAX_LAUNCHES:
            _launches.clear()
        _launches[key] = launch
    check_no_gradients(q, k, v)

    out = torch.empty_like(q) if out is None else out
    lse = torch.empty(launch.lse_shape, dtype=torch.float32, device=q.device)
    if launch.is_empty:  # TMA describes no empty tensor, and there is nothing to compute
        out.zero_()
        lse.fill_(float("-inf"))
    else:
        check_addresses(q=q, k=k, v=v, out=out)
        if q.device.index == torch.cuda.current_device():
            launch(q, k, v, out, lse)
        else:
            with torch.cuda.device(q.device):
                launch(q, k, v, out, lse)
    return (out, lse) if return_lse else out


def check_no_gradients(q: Tensor, k: Tensor, v: Tensor) -> None:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise NotImplementedError(
            "q, k, v: expected tensors that do not require grad, as only the forward pass is supported so far, got "
            "requires_grad=True in grad mode; call under torch.no_grad(), or .detach() them"
        )


def refuse(**unsupported: Any) -> None:
    """Raise for the first argument that attention() does not know, or knows but does not support."""
    for name, value in unsupported.items():
        if name in ("q_scale", "k_scale", "v_scale"):
            if value is not None:
                raise NotImplementedError(f"{name}: fp8 inputs are not supported yet; use float16 or bfloat16")
        elif name in UNSUPPORTED:
            raise NotImplementedError(f"{name}: {UNSUPPORTED[name]} is not supported; see the README for what is")
        else:
            raise TypeError(f"attention() got an unexpected keyword argument {name!r}")


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    causal: bool,
    scale: float | None,
    layout: str,
    num_ctas: int | None,
    tile: TileConfig | None,
    device: Device | None,
) -> Launch:
    """Validate everything that depends on shapes, strides and options, and choose the kernel."""
    check_triton_version()
    problem = Problem.of(q, k, v, causal=causal, scale=scale, layout=layout, out=out)
    if num_ctas not in (None, 1, 2):
        raise ValueError(f"num_ctas: expected 1, 2 or None, got {num_ctas!r}")
    if tile is not None and not isinstance(tile, TileConfig):
        raise TypeError(f"tile: expected a TileConfig or None, got {type(tile).__name__}")
    if tile is not None and num_ctas not in (None, tile.num_ctas):
        raise ValueError(f"num_ctas: expected {tile.num_ctas} (as tile.cga_layout says), got {num_ctas}; leave one out")
    check_no_gradients(q, k, v)
    if not problem.is_empty:
        check_addresses(q=q, k=k, v=v, **({} if out is None else {"out": out}))
    chosen = Device.of(q.device) if device is None else device
    chosen.require_supported()
    if q.device.type != "cuda":
        raise NotImplementedError(
            f"device: running {chosen.name} kernels on {q.device.type!r} tensors is not supported yet; "
            "move q, k and v to a Hopper card"
        )
    chosen_tile = pick_tile(problem, chosen, num_ctas) if tile is None else tile
    require_fits(chosen_tile, problem, chosen)
    return Launch(problem, chosen_tile, chosen, q=q, k=k, v=v, out=torch.empty_like(q) if out is None else out)
