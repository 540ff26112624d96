"""Stand-ins for torch's operators of attention on the CPU, and what tests of the overrides call."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library
from torch.nn.attention import (
    SDPBackend,
    sdpa_kernel,
)
from torch.nn.attention.varlen import varlen_attn

from gluon_attn import torch_sdpa
from gluon_attn.device import Device

HOPPER = Device.hopper()
FLASH = torch.ops.aten._flash_attention_forward
INPLACE = getattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace", None)  # from torch 2.12 on
SDPA = torch.ops.aten._scaled_dot_product_flash_attention
SDPA_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
FLASH_BACKWARD = torch.ops.aten._flash_attention_backward
CUDNN = torch.ops.aten._scaled_dot_product_cudnn_attention
CUDNN_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
RNG = (torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64))
SEED = torch.zeros((), dtype=torch.int64)


def q_of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape or (1, 2, 40, 64), generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


class Originals:
    """Stand-ins for torch's own kernels, which say what they were called with and return what tells them from ours."""

    def __init__(self, key: str) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.library = Library("aten", "IMPL", key)
        for name in filter(partial(hasattr, torch.ops.aten), torch_sdpa.FLASH | torch_sdpa.CUDNN):
            self.library.impl(name, self.stand_in(name))

    def stand_in(self, name: str) -> Any:
        def original(*args: Any, **kw: Any) -> Any:
            self.calls.append((name, args, kw))
            query = args[1] if "backward" in name or "inplace" in name else args[0]
            o, lse = torch.full_like(query, 7), torch.full(query.shape[:3], 7.0)
            if "backward" in name:
                return tuple(torch.full_like(t, 7) for t in args[1:4])
            if "inplace" in name:
                return lse
            if "cudnn" in name:
                o, lse = torch.full((*query.shape[:-1], args[2].shape[-1]), 7.0, dtype=query.dtype), lse[..., None]
                return o, lse, None, None, query.shape[2], args[1].shape[2], SEED, SEED, None
            if "scaled" in name:
                return o, lse, None, None, query.shape[2], args[1].shape[2], *RNG, torch.empty(0)
            return o, lse, *RNG, torch.empty(0)

        return original


def by_flash(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return SDPA(q, k, v, **options)


def by_cudnn(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return CUDNN(q, k, v, None, True, **options)


def check_varlen_attn(lengths: list[int], window: tuple[int, int], device: str) -> None:
    """torch's own function for packed sequences, and its gradients, against torch's SDPA of each in float64."""
    inputs = [t.to(device).requires_grad_() for t in q_of(3, sum(lengths), 2, 64)]
    starts = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
    q, k, v = inputs
    out = varlen_attn(q, k, v, starts, starts, max(lengths), max(lengths), window_size=window)
    assert isinstance(out, Tensor)
    dout = q_of(*out.shape).to(device)
    grads = torch.autograd.grad(out, inputs, dout)
    first = 0
    for length in lengths:
        rows = slice(first, first + length)
        wide = [t.detach()[rows].double().transpose(0, 1).requires_grad_() for t in inputs]
        mask = torch.ones(length, length, dtype=torch.bool, device=device)
        mask = mask if window[1] < 0 else mask.tril(window[1])
        mask = mask if window[0] < 0 else mask.triu(-window[0])
        q, k, v = wide
        with sdpa_kernel(SDPBackend.MATH):
            want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        want_grads = torch.autograd.grad(want, wide, dout[rows].double().transpose(0, 1))
        for one, other in zip((out, *grads), (want, *want_grads), strict=True):
            error = (one.detach()[rows].double() - other.transpose(0, 1)).norm()
            assert error < 0.02 * other.norm(), f"off by {error:.3e} of {other.norm():.3e}"
        first += length
