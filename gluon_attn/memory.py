"""Whether a kernel, which sees addresses only, may be given those of a tensor. What a check raises names the argument,
what it should be, what it is, and what to do."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .refusals import refuse_unusual
from .tensors import TMA_ALIGNMENT_BYTES

LOWEST_ADDRESS = 2**32  # of a tensor with memory, but for a few that are looked at more closely
PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def refuse_address(name: str, t: Tensor) -> NoReturn:
    """For a base that TMA cannot address."""
    raise ValueError(
        f"{name}: expected a base address that is a multiple of {TMA_ALIGNMENT_BYTES} bytes, got {t.data_ptr():#x}; "
        f"slice at a multiple of {TMA_ALIGNMENT_BYTES // t.element_size()} elements, or .clone() it: nothing is copied "
        "silently"
    )


def check_readable(name: str, t: Tensor) -> None:
    """That the memory holds what the tensor reads as, for a kernel that sees addresses only.

    Raises ValueError for memory that is not there, or is negated when it is read; NotImplementedError for a tangent of
    forward-mode differentiation, which would be dropped.
    """
    if t.is_neg():
        raise ValueError(
            f"{name}: expected a tensor that is stored as it reads, got a view that PyTorch negates when it reads it; "
            "call .resolve_neg() on it, nothing is copied silently"
        )
    check_stored(name, t)
    refuse_tangent(name, t)


def check_stored(name: str, t: Tensor) -> None:
    """ValueError for memory that was freed, NotImplementedError for a tensor that never had any."""
    if t.numel() and not t.is_meta and t.data_ptr() == 0 and t.untyped_storage().nbytes():
        raise NotImplementedError(
            f"{name}: expected a tensor with memory, got one that stands for another, or for zeros; call it outside "
            "torch.func.functionalize, or .clone() it"
        )
    extent = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1
    needed = (t.storage_offset() + extent) * t.element_size() if t.numel() else 0
    if (found := t.untyped_storage().nbytes()) < needed:
        raise ValueError(
            f"{name}: expected a storage of at least {needed} bytes, got one of {found}, freed or resized since the "
            "tensor was made; allocate it again"
        )


def refuse_tangent(name: str, t: Tensor) -> None:
    """NotImplementedError for one of forward-mode differentiation, which would be dropped."""
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:
        raise NotImplementedError(
            f"{name}: expected a tensor without a tangent, as forward-mode differentiation is not supported, got one "
            f"with one; give torch.autograd.forward_ad.unpack_dual({name}).primal"
        )


def is_suspect(t: Tensor) -> bool:
    """Whether `check_memory` may refuse what it took in a call before, found in a fraction of its time."""
    if type(t) not in PLAIN_TYPES or forward_ad._current_level >= 0:
        return True
    try:
        return t.data_ptr() < LOWEST_ADDRESS or t.is_neg()
    except RuntimeError:  # there is none
        return True


def check_memory(**tensors: Any) -> None:
    """That a kernel may be given these tensors' addresses, of those that are no None. Raises as `refuse_unusual` and
    `check_readable`."""
    refuse_unusual(**tensors)
    for name, t in tensors.items():
        if isinstance(t, Tensor):
            check_readable(name, t)


def check_no_overlap(out: Tensor, **inputs: Tensor) -> None:
    """ValueError if the memory that `out` spans is also spanned by an input, which the kernel may still be reading."""
    first, end = span(out)
    for name, t in inputs.items():
        other_first, other_end = span(t)
        if first < other_end and other_first < end:
            raise ValueError(
                f"out: expected memory of its own, got a range that overlaps that of {name}; allocate another"
            )


def span(t: Tensor) -> tuple[int, int]:
    """The addresses from the first byte of a tensor to the one after its last."""
    if t.is_contiguous():  # as most are; the rest takes ten times as long
        return t.data_ptr(), t.data_ptr() + t.nbytes
    extent = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (extent + 1) * t.element_size() * (t.numel() > 0)
