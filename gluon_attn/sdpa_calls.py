"""Which calls of torch's operators for attention these kernels compute, and the passes of those.

A call whose shapes, strides and options came before takes one look-up, as its launch is kept, or that it is torch's:
every layer of every step makes the same one, and the host's time counts where the card has little to do.
"""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .api import attend_again, attention, check_addresses, launch_of
from .call import NO_EXTRAS, Key, Options, identity, keep
from .checks import Window
from .cudnn import cudnn_is_faster
from .device import Device
from .gradients import (
    attention_backward,
    check_outputs,
    differentiate_again,
    gradients_launch_of,
    readable_by_tma,
)
from .hooks import TORCH, refusal
from .memory import is_suspect
from .runtime.kernel import Launches
from .support import REFUSALS
from .tensors import PACKED, TMA_ALIGNMENT_BYTES, in_bhsd
from .tuning import active
from .varlen import attention_varlen, attention_varlen_backward

DTYPES = (torch.float16, torch.bfloat16)  # of the operators; fp8 has others

# Launches of calls that were ours, by all that this and the launch depend on. Shapes and strides only.
_forward: dict[Key, Launches] = {}
_backward: dict[Key, Launches] = {}
_left: dict[Key, bool] = {}  # those of both passes that are torch's to compute: all True


def takes(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, layout: str, window: Window = (None, None), **options: Any
) -> bool:
    """Whether it is ours to compute. Left to torch, besides what `supports` refuses: a mask over unequal lengths, whose
    rows without keys have another LSE there; a single query, as torch's kernels split its keys among processors; and
    what has no numbers."""
    if q.dtype not in DTYPES or q.numel() == 0 or k.numel() == 0:
        return False
    q_len, kv_len = in_bhsd(q, layout).shape[2], in_bhsd(k, layout).shape[2]
    if q_len == 1 or ((causal or window != (None, None)) and q_len != kv_len):
        return False
    return refusal(q, k, v, causal=causal, layout=layout, window=window, **options) is None


def takes_packed(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, **options: Any
) -> bool:
    """Whether packed sequences are ours to compute. Left to torch, besides what `supports` refuses: keys that may begin
    elsewhere than queries. Where, is known on the card alone, and a row that sees no key has another LSE there."""
    if q.dtype not in DTYPES or q.numel() == 0 or k.numel() == 0 or cu_seqlens_q is None or cu_seqlens_k is None:
        return False
    if q.shape[0] != k.shape[0] or cu_seqlens_q.data_ptr() != cu_seqlens_k.data_ptr():
        return False
    return refusal(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options) is None


def takes_gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **options: Any) -> bool:
    """Of packed sequences, options say where they begin, and have no layout."""
    if not (takes_packed if "cu_seqlens_q" in options else takes)(q, k, v, needs_grad=True, **options):
        return False
    try:
        check_outputs(q, v, options.get("layout", PACKED), dout=dout, out=out, lse=lse.contiguous())
    except (TypeError, ValueError):
        return False
    return True


def timed(q: Tensor, v: Tensor) -> bool:
    """Whether head dims are equal, but not between 128 and 192, which are padded to 192; or a pair that was measured
    beside cuDNN. Others are slower, or could be, and stay there. Where they differ, O of a Q that is expanded has other
    strides there as well."""
    of_q, of_v = q.shape[-1], v.shape[-1]
    if of_q == of_v:
        return not 128 < of_q < 192
    return (of_q, of_v) == (192, 128) and 0 not in q.stride()


def forward_pass(
    q: Tensor, k: Tensor, v: Tensor, *, of_cudnn: bool = False, **options: Any
) -> tuple[Tensor, Tensor] | None:
    """O and LSE; None if it is torch's to compute.

    of_cudnn: torch has chosen cuDNN. options: for `attention`; of packed sequences for `attention_varlen`, without a
    layout.
    """
    packed, tables = "cu_seqlens_q" in options, active()
    # Where torch.compile has broken its graph, it traces what the dispatcher calls: `attention` knows that.
    again = not packed and options.get("out") is None and not is_compiling()
    key = (tables, key_of_call(q, k, v, of_cudnn, options)) if again else None
    if key is not None and (launch := _forward.get(key)) is not None:
        try:
            check_addresses(q, k, v, NO_EXTRAS)
        except REFUSALS:
            return None
        with TORCH:
            return attend_again(launch, q, k, v, options["layout"])
        return None  # TORCH has swallowed that there is no kernel
    if key in _left:
        return None
    if (of_cudnn and not timed(q, v)) or not (takes_packed if packed else takes)(q, k, v, needs_grad=False, **options):
        leave(key, q, k, v)
        return None
    with TORCH, torch.no_grad():  # who records gradients is torch's operator
        out, lse = (attention_varlen if packed else attention)(q, k, v, return_lse=True, **options)
        launch = None if key is None else launch_of(q, k, v, as_of_attention(**options), tables)
        if key is not None and launch is not None:  # None: there was nothing to launch, which is asked again
            keep(_forward, key, launch)
        return out, lse
    return None


def backward_pass(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, of_cudnn: bool = False, **options: Any
) -> tuple[Tensor, Tensor, Tensor] | None:
    """dQ, dK and dV, with sums in a fixed order where `torch.use_deterministic_algorithms` asks for it; None if they
    are torch's to compute. of_cudnn, options: as for `forward_pass`."""
    packed, tables = "cu_seqlens_q" in options, active()
    again = not packed and not is_compiling()
    key = (tables, key_of_call(q, k, v, of_cudnn, options, dout, out, lse)) if again else None
    if key is not None and (launch := _backward.get(key)) is not None and are_as_before(dout, out, lse):
        try:
            check_addresses(q, k, v, NO_EXTRAS)
        except REFUSALS:
            return None
        with TORCH:
            return differentiate_again(launch, dout, q, k, v, out, lse)
        return None  # as above
    if key in _left:
        return None
    if (
        (of_cudnn and not timed(q, v))
        or not takes_gradients(dout, q, k, v, out, lse, **options)
        or (of_cudnn and cudnn_is_faster(q, k, v, causal=options["causal"], device=options["device"]))
    ):
        leave(key, dout, q, k, v, out, lse)
        return None
    with TORCH, torch.no_grad():
        tensors = (dout, None, q, k, v, readable_by_tma(out), lse.contiguous())
        dq, dk, dv = (attention_varlen_backward if packed else attention_backward)(*tensors, **options)
        if key is not None and readable_by_tma(dout) is dout and tensors[-2] is out and tensors[-1] is lse:
            launch = gradients_launch_of(dout, q, k, v, out, lse, as_of_attention(**options), tables)
            if launch is not None:
                keep(_backward, key, launch)
        return dq, dk, dv
    return None


def leave(key: Key | None, *tensors: Tensor) -> None:
    """Such calls to torch from now on. What was refused may be an address or a kind of tensor: those no key has."""
    if key is not None and are_as_before(*tensors):
        keep(_left, key, True)


def key_of_call(q: Tensor, k: Tensor, v: Tensor, of_cudnn: bool, options: dict[str, Any], *others: Tensor) -> Key:
    """All that decides whether a call is ours, and its launch, but for the tables, and for what `check_addresses` looks
    at."""
    return (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, of_cudnn, *options.values(),
        others and (torch.are_deterministic_algorithms_enabled(), *map(identity, others)),
    )  # fmt: skip


def are_as_before(*tensors: Tensor) -> bool:
    """Whether of tensors that had such shapes and strides before, which TMA could read, nothing else is unlike."""
    return not any(is_suspect(t) or t.data_ptr() % TMA_ALIGNMENT_BYTES for t in tensors)


def as_of_attention(
    *,
    causal: bool,
    scale: float | None,
    layout: str,
    device: Device | None,
    window: Window = (None, None),
    out: None = None,
) -> Options:
    """As `attention` has them of these arguments."""
    return Options(causal=causal, scale=scale, layout=layout, device=device, window=window)
