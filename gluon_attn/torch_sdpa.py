"""torch's scaled_dot_product_attention by these kernels: what they take runs here, all else where it ran before.

Importing this registers "GLUON" with torch and changes nothing; `enabled()`, or torch's own
`activate_flash_attention_impl("GLUON")`, turns it on. It is on for the whole process, all threads included.

Torch's operators for FlashAttention and for cuDNN are given other kernels. Each hands to the kernel it replaces what
`supports` refuses, and what has no kernel that can be compiled and loaded. So does cuDNN's with gradients that it
computes faster. So no call fails, means another thing, or goes to another backend, for having this turned on. Which
operator a call goes to is left to torch. One pass may run here and the other there: O and LSE, in natural logarithms,
are the same function in all three.
"""

import contextlib
import functools
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel
from torch.nn.attention import register_flash_attention_impl

from .device import Device
from .sdpa_calls import backward_pass, forward_pass

NAME = "GLUON"
WINDOW = ("window_size_left", "window_size_right")  # -1, or None: no limit

Original = Callable[..., Any]

GONE = (
    "gluon_attn.torch_sdpa: another implementation of attention was active when this was imported, and is removed now; "
    "import it before that one is activated, or leave every enabled() and enter it again"
)

_lock = threading.Lock()  # for the list below, and what torch is told when it changes
_registered: list["Overrides"] = []
# Kernels that are registered no longer. Another thread may be in one, so they are not destroyed at once.
_removed: deque[Any] = deque(maxlen=1000)
# Torch's own kernels, by dispatch key and operator. The one before ours may be another implementation's, and be removed
# while ours is on.
_own: dict[tuple[str, str], Any] = {}


class Overrides:
    """What is registered with torch, until `remove`."""

    def __init__(self, key: str) -> None:
        self.key, self.library = key, Library("aten", "IMPL", key)
        self.originals: dict[str, Any] = {}  # by operator, the kernel that was there before ours
        self.ours: list[Any] = []

    def remove(self) -> None:
        """The kernels that were there before are there again, or those of others that are registered still."""
        with _lock:
            if self in _registered:
                _registered.remove(self)
                _removed.extend(self.ours)
                self.library._destroy()


def override(
    key: str = "CUDA", device: Device | None = None, replacements: Mapping[str, Callable[..., Any]] | None = None
) -> Overrides:
    """Put functions in place of the kernels that torch has for a dispatch key. Of operators that this torch has no such
    kernel for, as one built without CUDA has none, nothing is replaced.

    device: as for `attention`. replacements: by operator; default: all that there are, but for cuDNN's if those have
    another LSE.
    """
    if replacements is None:
        replacements = FLASH if cudnn_has_other_strides() else FLASH | CUDNN
    with _lock:
        overrides = Overrides(key)
        for name, replacement in replacements.items():
            try:
                kernel = original_of(name, key)
            except RuntimeError:
                continue
            overrides.originals[name] = kernel
            own = _own.get((key, name))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Warning only once for all operators")  # that one is replaced
                # Of ours there may be several at a time. Torch 2.11 takes a second one only if asked to, later ones do.
                ours = functools.partial(call, replacement, kernel, own, device)
                overrides.library.impl(name, ours, with_keyset=True, allow_override=True)
            overrides.ours.append(get_kernel(f"aten::{name}", key))
        _registered.append(overrides)
    return overrides


def original_of(name: str, key: str) -> Any:
    """The kernel that is there; of ours, the one before it, so that ours can be removed in any order."""
    kernel = get_kernel(f"aten::{name}", key)
    if f"registered at {__file__}:" in repr(kernel):
        return next(
            overrides.originals[name]
            for overrides in reversed(_registered)
            if overrides.key == key and name in overrides.originals
        )
    return kernel


def call(
    replacement: Callable[..., Any], kernel: Any, own: Any, device: Device | None, keys: Any, /, *args: Any, **kw: Any
) -> Any:
    return replacement(functools.partial(hand_on, kernel, own, keys), device, *args, **kw)


def hand_on(kernel: Any, own: Any, keys: Any, /, *args: Any, **kw: Any) -> Any:
    """To the kernel that was there before ours; once that is removed, to torch's own."""
    try:
        return kernel.call_boxed(keys, *args, **kw)
    except RuntimeError as error:
        if "SafeKernelFunction has been invalidated" not in str(error):  # torch's words for a kernel that is removed
            raise
        if own is None:
            error.add_note(GONE)
            raise
    return own.call_boxed(keys, *args, **kw)


@contextlib.contextmanager
def enabled(device: Device | None = None) -> Iterator[None]:
    """Within it, torch's operators for FlashAttention and cuDNN are ours. Which of them torch calls, and which backends
    are turned off, stays as it is. Several threads may be within, and leave in any order: it is on, for all threads,
    until the last has left.

    device: as for `attention`. None: calls on Hopper are ours. On Blackwell, where these kernels were never run, give
    `Device.of("cuda")` to try them.
    """
    handle = override(device=device)
    try:
        yield
    finally:
        handle.remove()


def keep_own(key: str) -> None:
    """Of those that are there now, as implementations in Python come and go."""
    for name in FLASH | CUDNN:
        with contextlib.suppress(RuntimeError):  # there is none, as in a torch without CUDA
            if ".cpp:" in repr(kernel := get_kernel(f"aten::{name}", key)):
                _own[key, name] = kernel


def cudnn_has_other_strides() -> bool:
    """Whether torch has been told to give cuDNN an LSE in (B, S, H, 1): with ours its gradients would be wrong. Set it
    before torch is imported, as torch may look once only."""
    return os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") == "1"


def without_dropout(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the operators return besides: the state of random numbers, of which there are none, and no mask."""
    state = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty((), dtype=torch.uint64, device=q.device)
    return *state, torch.empty(0, dtype=q.dtype, device=q.device)


def scaled_dot_product_forward(
    original: Original,
    device: Device | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """(B, H, S, D). What F.scaled_dot_product_attention calls, and its relatives."""
    options = options_of(device, is_causal, scale)
    if not dropout_p and not return_debug_mask and (both := forward_pass(query, key, value, **options)):
        return *both, None, None, query.shape[2], key.shape[2], *without_dropout(query)
    return original(query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale)


def scaled_dot_product_backward(
    original: Original,
    device: Device | None,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Any:
    tensors = (grad_out, query, key, value, out, logsumexp)
    options = options_of(device, is_causal, scale)
    packed = cum_seq_q is not None or cum_seq_k is not None
    if not dropout_p and not packed and (grads := backward_pass(*tensors, **options)):
        return grads
    return original(
        *tensors, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset, scale=scale
    )


def cudnn_forward(
    original: Original,
    device: Device | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """(B, H, S, D). What F.scaled_dot_product_attention calls where torch prefers cuDNN, as on Hopper.

    A bias is left to torch, and so are masks, which have become one: whether it hides a whole row is known on the card
    alone, and what cuDNN makes of such a row is its own.
    """
    options = options_of(device, is_causal, scale)
    others = attn_bias is not None or dropout_p or return_debug_mask
    if not others and (both := forward_pass(query, key, value, of_cudnn=True, **options)):
        out, lse = both
        seed = torch.empty((), dtype=torch.int64, device=query.device)
        return out, lse.unsqueeze(-1), None, None, query.shape[2], key.shape[2], seed, torch.empty_like(seed), None
    return original(
        query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask, scale=scale
    )


def cudnn_backward(
    original: Original,
    device: Device | None,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor | None,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> Any:
    """max_q, max_k: context_parallel gives those of other parts, so lengths are read from the tensors."""
    options = options_of(device, is_causal, scale)
    packed = cum_seq_q is not None or cum_seq_k is not None
    if logsumexp is not None and attn_bias is None and not dropout_p and not packed:
        lse = logsumexp.squeeze(-1) if logsumexp.dim() == 4 else logsumexp
        if grads := backward_pass(grad_out, query, key, value, out, lse, of_cudnn=True, **options):
            return grads
    return original(
        grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k,
        max_q, max_k, dropout_p, is_causal, scale=scale,
    )  # fmt: skip


def flash_forward(
    original: Original,
    device: Device | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    out: Tensor | None = None,
    **others: Any,
) -> Any:
    """(B, S, H, D); or packed sequences, of which `cum_seq_q` says where they begin, (T, H, D).

    out: where to put O, for the operator that has it as its first argument. others: windows, and options that differ
    from release to release: each may be None.
    """
    options = flash_options_of(device, is_causal, scale, others) | {"out": out}
    lengths = lengths_of(cum_seq_q, cum_seq_k, max_q, max_k)
    if lengths:
        del options["layout"]
    asked = dropout_p or return_debug_mask or asks_more(others)
    if not asked and (both := forward_pass(query, key, value, **lengths, **options)):
        return (*both, *without_dropout(query)) if out is None else both[1]
    return original(
        *(() if out is None else (out,)), query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
        is_causal, return_debug_mask, scale=scale, **others,
    )  # fmt: skip


def flash_forward_into(original: Original, device: Device | None, out: Tensor, *args: Any, **kw: Any) -> Any:
    return flash_forward(original, device, *args, out=out, **kw)


def flash_backward(
    original: Original,
    device: Device | None,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    **others: Any,
) -> Any:
    tensors = (grad_out, query, key, value, out, logsumexp)
    options = flash_options_of(device, is_causal, scale, others)
    lengths = lengths_of(cum_seq_q, cum_seq_k, max_q, max_k)
    if lengths:
        del options["layout"]
    if not dropout_p and not asks_more(others) and (grads := backward_pass(*tensors, **(lengths | options))):
        return grads
    return original(
        *tensors, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, scale=scale, **others
    )


def lengths_of(cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int) -> dict[str, Any]:
    """For `attention_varlen`; nothing if no sequences are packed."""
    if cum_seq_q is None and cum_seq_k is None:
        return {}
    return {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}


def options_of(device: Device | None, causal: bool, scale: float | None) -> dict[str, Any]:
    """For `attention`, of (B, H, S, D)."""
    return {"causal": causal, "scale": scale, "layout": "bhsd", "device": device}


def flash_options_of(
    device: Device | None, causal: bool, scale: float | None, others: dict[str, Any]
) -> dict[str, Any]:
    """The same of (B, S, H, D), with windows."""
    left, right = (limit if limit is not None and limit >= 0 else None for limit in map(others.get, WINDOW))
    return options_of(device, causal, scale) | {"window": (left, right), "layout": "bshd"}


def asks_more(others: dict[str, Any]) -> bool:
    """Whether options are given that are not ours: slopes, pages, splits."""
    return any(value is not None for name, value in others.items() if name not in WINDOW)


# By operator of aten. The last one is there from torch 2.12 on.
FLASH: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": scaled_dot_product_forward,
    "_scaled_dot_product_flash_attention_backward": scaled_dot_product_backward,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_into,
}
CUDNN: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_cudnn_attention": cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
}

keep_own("CUDA")

# Who activates an implementation of FlashAttention by torch's own switch means its operators, and not cuDNN's.
register_flash_attention_impl(NAME, register_fn=functools.partial(override, replacements=FLASH))
