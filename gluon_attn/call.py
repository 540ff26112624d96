"""What a call of attention is given besides q, k and v: as one thing that every function passes on."""

from typing import Any, NamedTuple

from torch import Tensor

from .device import Device
from .forward.configs import ForwardConfig
from .problem import Problem, Window


class Options(NamedTuple):
    """All of `attention`'s arguments that are no tensors, but for `return_lse`. Hashable."""

    causal: bool = False
    window: Window = (None, None)
    chunk: int | None = None
    scale: float | None = None
    layout: str = "bhsd"
    deterministic: bool | None = None
    num_ctas: int | None = None
    config: ForwardConfig | None = None
    device: Device | None = None


class Extras(NamedTuple):
    """The tensors that a call may have besides q, k and v."""

    out: Tensor | None = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def scales(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.q_scale, self.k_scale, self.v_scale


Key = tuple[Any, ...]


def identity(t: Tensor) -> Key:
    """What a launch may depend on of a tensor."""
    return t.shape, t.stride(), t.dtype, t.device


def key_of(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options) -> Key:
    """All that a launch depends on, but for what may differ from call to call. True, 1 and 1.0 are equal, their types
    not."""
    return (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, options, type(options.causal), type(options.scale), type(options.num_ctas),
        *[t if t is None else identity(t) for t in extras],
    )  # fmt: skip


def problem_of(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options) -> Problem:
    """What a call poses, checked; see `Problem.of`."""
    return Problem.of(
        q,
        k,
        v,
        causal=options.causal,
        window=options.window,
        chunk=options.chunk,
        scale=options.scale,
        layout=options.layout,
        out=extras.out,
        scales=extras.scales,
    )
