"""What all hooks do: leave a call to what was there before, where these kernels do not serve it."""

import contextlib
import warnings
from types import TracebackType
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from .device import Device
from .runtime.kernel import KernelUnavailable
from .support import supports

_warned: set[str] = set()


def refusal(q: Tensor, k: Tensor, v: Tensor, *, device: Device | None, **options: Any) -> str | None:
    """Why a hook leaves a call alone; None if it makes it. options: as for `supports`.

    A hook leaves what `supports` refuses, and on Blackwell all calls: these kernels were never run there. Who wants to
    try them gives `device`.
    """
    why = supports(q, k, v, device=device, **options)
    if why is None and device is None and (own := Device.of(q.device)).arch != 90:
        why = f"device: on {own.name} these kernels were never run; to try them, give the hook device=Device.of(...)"
    return why


class LeftAlone:
    """A context that swallows `KernelUnavailable`, so that a hook goes on to what was there before. It warns once for
    each cause: no compiler, say, no room for a cache, or a CUDA graph that is captured."""

    def __init__(self, instead: str) -> None:
        self.instead = instead  # what was there before

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, KernelUnavailable):
            return False
        if str(error) not in _warned:
            _warned.add(str(error))
            warnings.warn(f"gluon_attn leaves attention to {self.instead}: {error}", stacklevel=3)
        return True


TORCH, SDPA, IN_A_GRAPH = LeftAlone("torch"), LeftAlone("transformers' SDPA"), contextlib.nullcontext()


def to_transformers() -> contextlib.AbstractContextManager[None]:
    """That context for transformers; not in a graph, where nothing is compiled or loaded while it is traced."""
    return IN_A_GRAPH if is_compiling() else SDPA
