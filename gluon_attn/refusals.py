"""Tensors that are not what they seem: traced, batched, differentiated or fake ones, which a kernel cannot be given."""

from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.compiler import is_compiling

INSTEAD = "call it outside, on plain tensors"


def refuse_tracing() -> None:
    """NotImplementedError: attention() is being traced by torch.jit."""
    raise NotImplementedError(
        "attention: torch.jit.trace is not supported, as it would keep one kernel for all shapes; use torch.compile or "
        "torch.export"
    )


def refuse_unusual(**tensors: Any) -> None:
    """NotImplementedError, by name, for the first tensor that has no memory of its own to launch a kernel on.

    While torch.compile traces a call no tensor has any, and what is traced is an operator: then all are taken.
    """
    if is_compiling():
        return
    if torch.jit.is_tracing():
        refuse_tracing()
    for name, t in tensors.items():
        if isinstance(t, Tensor) and (kind := unusual(t)):
            raise NotImplementedError(f"{name}: expected a plain tensor, got {kind}; {INSTEAD}")


def unusual(t: Tensor) -> str | None:
    """What it is, if it is not plain."""
    if t.is_nested and t.layout == torch.jagged:
        return "a jagged nested one (give its .values() and .offsets() to attention_varlen)"
    if type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"a {type(t).__name__}, a tensor subclass that stands for other tensors or for none"
    return transformed(t)


def refuse_transformed(**tensors: Any) -> None:
    """`refuse_unusual` of what an operator is given, whose tensors may stand for none. torch.compile knows nothing of
    those that torch.func differentiates."""
    for name, t in tensors.items():
        kind = transformed(t, batched_alone=is_compiling())
        if kind is not None:
            raise NotImplementedError(f"{name}: expected a plain tensor, got {kind}; {INSTEAD}")


def transformed(t: Tensor, *, batched_alone: bool = False) -> str | None:
    """By which of torch's functions, if it is. batched_alone: look for one of them."""
    if _functorch.is_batchedtensor(t):
        return "one that torch.vmap has batched (put its dimension into the batch of q, k and v instead)"
    if batched_alone:
        return None
    if _functorch.is_legacy_batchedtensor(t):
        return "several in one, as is_grads_batched=True or vectorize=True make of gradients (leave that out)"
    if _functorch.is_gradtrackingtensor(t):
        return "one that torch.func differentiates, which is not supported: call backward() or torch.autograd.grad"
    return None
