"""What the steps run on: the card of this machine or, without one, gluon_cpu as a B200."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gluon_attn import ForwardConfig, attention
from gluon_attn.device import Device
from gluon_attn.forward.table import TABLE

from .runner import Skip

CPU_SMS = 4  # few, so that a small problem already has several row blocks for each program
CPU_SCHEDULES = 5  # one of each of gluon_cpu's policies


@functools.cache
def why_no_card() -> str | None:
    """None if there is a card that the kernels are for."""
    if not torch.cuda.is_available():
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        return f"torch {torch.__version__} ({build} in this build) finds no CUDA device"
    try:
        Device.of(torch.device("cuda", 0)).require_supported()
    except RuntimeError as error:
        return str(error)
    return None


def on_card() -> bool:
    return why_no_card() is None


def device() -> Device:
    return (
        Device.of(torch.device("cuda", 0)) if on_card() else dataclasses.replace(Device.blackwell(), sm_count=CPU_SMS)
    )


def require_card() -> None:
    if not on_card():
        raise Skip(f"needs a card: {why_no_card()}")


def cta_counts() -> tuple[int, ...]:
    return tuple(sorted({row.config.num_ctas for row in TABLE if device().arch in row.config.archs}))


def require_ctas(num_ctas: int) -> None:
    if num_ctas not in cta_counts():
        raise Skip(f"no kernel for {device().name} has {num_ctas} CTAs to a cluster")


def call(*tensors: Tensor, config: ForwardConfig | None = None, out: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """attention() here, of q, k, v and, in fp8, their scales; on gluon_cpu under several schedules."""
    q, k, v, *scales = tensors
    options |= dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=False))
    if on_card():
        result = attention(q, k, v, config=config, out=out, return_lse=True, **options)
        torch.cuda.synchronize()
        return result  # type: ignore[return-value]  # a pair, with return_lse
    import gluon_cpu  # hosts with a card need not have what it is built on

    results: list[Any] = []
    run: Callable[[], None] = lambda: results.append(  # noqa: E731
        attention(q, k, v, config=config, out=out, return_lse=True, device=device(), **options)
    )
    gluon_cpu.check(run, schedules=CPU_SCHEDULES, quiet=True)
    return results[-1]


def fields_of(config: ForwardConfig) -> dict[str, Any]:
    """A config as data for the report."""
    return {"class": type(config).__name__, **dataclasses.asdict(config)}
