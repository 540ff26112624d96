"""The calls that are timed against each other at a point."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.candidates import label
from bench.points import DTYPES, Point
from gluon_attn import ForwardConfig, attention

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}


def enabled_sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """By whichever backend of torch is enabled."""
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )


def sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(backend):
        return enabled_sdpa(q, k, v, causal)


@contextmanager
def backend_chosen(call: Callable[[], object]) -> Iterator[Callable[[], object]]:
    """The call as it is to be timed on the host: torch's backend is chosen outside, which takes as long as the call."""
    if isinstance(call, partial) and call.func is sdpa:
        with sdpa_kernel(call.args[0]):
            yield partial(enabled_sdpa, *call.args[1:])
    else:
        yield call


def flex(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Callable[[], object]:
    """FlexAttention, compiled for these shapes; its block mask is made beforehand and not timed."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # or, after some shapes, torch would compile no more and compute it without fusion
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2], device="cuda")
    return partial(compiled, q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def ours(point: Point, tensors: list[Tensor], **options: Any) -> Callable[[], object]:
    q, k, v = point.arguments(tensors)
    return partial(attention, q, k, v, causal=point.causal, layout=point.layout, **options)


def calls_of(
    point: Point, configs: Sequence[ForwardConfig], peers: Sequence[str], ctas: Sequence[int]
) -> dict[str, Callable[[], object]]:
    """cuDNN (in bf16 where the point is fp8) and, in 16 bits, `peers`; and ours: as the table picks it, and with each
    number of `ctas`, or on the plainer problem if there is one; or with each of `configs` instead."""
    tensors = point.tensors()
    q, k, v = tensors
    calls: dict[str, Callable[[], object]] = {}
    for name in ("cudnn", *(peers if DTYPES[point.dtype].itemsize == 2 else ())):  # none of the latter knows fp8
        calls[name] = (
            flex(q, k, v, point.causal) if name == "flex" else partial(sdpa, BACKENDS[name], q, k, v, point.causal)
        )
    if configs:
        return calls | {label(t): ours(point, tensors, config=t) for t in configs}
    calls["ours"] = ours(point, tensors)
    plainer = point.plainer()
    if plainer:
        return calls | {"ours, plainer": ours(plainer, plainer.tensors())}
    return calls | {f"ours {n}cta": ours(point, tensors, num_ctas=n) for n in ctas}
