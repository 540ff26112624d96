"""Calls of torch's SDPA that are not ours: by the operators and with the numbers that torch has without us."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from tests.gpu.sdpa_calls import FLASH, Seen, gradients_of_inputs, ours, qkv, tensors


def plain_call(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, **options: Any) -> Callable[[], Any]:
    def call() -> Tensor:
        q, k, v = tensors(*shapes, dtype=dtype)
        return F.scaled_dot_product_attention(q, k, v, **options)

    return call


def masked() -> Tensor:
    q, k, v = qkv()
    mask = torch.ones(1000, 1000, dtype=torch.bool, device="cuda").tril(3)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


LOWER_RIGHT = causal_lower_right(300, 500)  # made here, as torch 2.11 cannot make one where `Seen` looks on


def lower_right() -> Tensor:
    q, k, v = qkv(q_len=300, kv_len=500)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=LOWER_RIGHT)


def starts_elsewhere() -> Tensor:
    """Packed sequences whose keys may begin elsewhere: nobody looks at the numbers."""
    q, k, v = tensors(*((500, 4, 64),) * 3)
    starts = torch.tensor([0, 200, 500], dtype=torch.int32, device="cuda")
    return torch.ops.aten._flash_attention_forward(q, k, v, starts, starts.clone(), 300, 300, 0.0, True, False)[0]


def nested() -> Tensor:
    [x] = tensors((500, 4, 64))
    lengths = torch.tensor([0, 200, 500], device="cuda")
    q = torch.nested.nested_tensor_from_jagged(x, lengths).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).values()


Q = ((2, 4, 500, 64),) * 3
FALLS_THROUGH: dict[str, Callable[[], Any]] = {
    "dropout": plain_call(*Q, dropout_p=0.3),
    "fp32": plain_call(*Q, dtype=torch.float32),
    "causal, unequal lengths": plain_call((2, 4, 300, 64), *Q[1:], is_causal=True),
    "attn_mask": masked,
    "causal_lower_right": lower_right,
    "packed, starts of their own": starts_elsewhere,
    "nested": nested,
}


def check_falls_through(name: str) -> None:
    """With the same bits, forward and backward: the backend that is chosen is the same, and its gradients are in a
    fixed order."""
    torch.use_deterministic_algorithms(True)
    results = []
    for switch in (contextlib.nullcontext(), ours(0)):
        with sdpa_kernel([FLASH, SDPBackend.EFFICIENT_ATTENTION]), switch:
            torch.manual_seed(1)
            out = FALLS_THROUGH[name]()
            torch.manual_seed(2)
            results.append([out.detach(), *gradients_of_inputs(out)])
    off, on = results
    assert len(off) > 1
    assert all(torch.equal(one, other) for one, other in zip(off, on, strict=True))


HALF = ((2, 4, 500, 64), (2, 4, 500, 64), (2, 4, 500, 32))
STAYS: dict[str, Callable[[], Any]] = {
    "dropout": plain_call(*Q, dropout_p=0.25),
    "dropout, causal": plain_call(*Q, dropout_p=0.5, is_causal=True),
    "dropout that cuDNN has no bits for": plain_call(*Q, dropout_p=0.3),
    "fp32": plain_call(*Q, dtype=torch.float32),
    "causal, unequal lengths": plain_call((2, 4, 300, 64), *Q[1:], is_causal=True),
    "attn_mask": masked,
    "causal_lower_right": lower_right,
    "V's head dim": plain_call(*HALF),
    "a head dim that is padded to 192": plain_call(*((2, 4, 500, 160),) * 3),
}


def check_stays(name: str) -> None:
    """By the operators that torch calls by default, and with the same bits. Those of cuDNN's gradients may differ from
    run to run."""
    results = []
    for switch in (contextlib.nullcontext(), ours(0)):
        with switch, Seen() as seen:
            torch.manual_seed(1)
            out = STAYS[name]()
            grads = gradients_of_inputs(out)
        results.append((seen.names, out.detach(), grads))
    (off, want, want_grads), (on, got, grads) = results
    assert off == on
    assert off
    assert torch.equal(got, want)
    for one, other in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)
