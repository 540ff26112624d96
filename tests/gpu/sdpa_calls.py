"""Calls of torch's SDPA on a card: inputs, which operators ran, and how many of them were ours."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from gluon_attn import torch_sdpa
from gluon_attn.apart import Skipped


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]


def qkv(head_dim: int = 128, q_len: int = 1000, kv_len: int | None = None, kv_heads: int = 4) -> list[Tensor]:
    keys = (2, kv_heads, kv_len or q_len, head_dim)
    return tensors((2, 4, q_len, head_dim), keys, keys)


@contextlib.contextmanager
def ours(calls: int) -> Iterator[None]:
    """With our kernels, which must compute just so many calls, forward and backward together."""
    made: list[str] = []

    def counted(fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kw: Any) -> Any:
            computed = fn(*args, **kw)
            if computed is not None:
                made.append(fn.__name__)
            return computed

        return run

    with pytest.MonkeyPatch.context() as patch, torch_sdpa.enabled():
        for name in ("forward_pass", "backward_pass"):
            patch.setattr(torch_sdpa, name, counted(getattr(torch_sdpa, name)))
        yield
    assert len(made) == calls, f"expected {calls} calls of ours, got {made}"


class Seen(TorchDispatchMode):
    """The operators of attention that are called within it, in backward passes too."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in func.name():
            self.names.append(func.name().removeprefix("aten::_scaled_dot_product_"))
        return func(*args, **(kwargs or {}))


FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION


def only(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, **options: bool) -> Any:
    """Of torch's backends. What cuDNN takes differs between releases."""
    params = SDPAParams(q, k, v, None, 0.0, options.get("is_causal", False), options.get("enable_gqa", False))
    if backend == CUDNN and not can_use_cudnn_attention(params):
        raise Skipped("this torch has no cuDNN that takes the call")
    return sdpa_kernel(backend)


def gradients_of_inputs(out: Tensor) -> list[Tensor]:
    """Of the leaves that `out` was computed from."""
    leaves: list[Tensor] = []
    nodes, seen = [out.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        nodes += [parent for parent, _ in node.next_functions]
    return list(torch.autograd.grad(out, leaves, torch.ones_like(out)))
