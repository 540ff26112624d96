"""The names of Gluon that channels use. Experimental, they move with every Triton release: imported here only.

And the table of what differs between the minor releases of Triton that are supported.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, dataclass_transform

import triton
from triton.experimental.gluon import constexpr_function, jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

# As a module: a jitted function that has its builtin tcgen05_commit by name is not freed when Python ends, and
# Triton's bindings then print thirty lines about leaks.
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    clc,
    tensor_memory_descriptor,
)
from triton.experimental.gluon.language.nvidia.hopper import cluster, fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper.mbarrier import MBarrierLayout
from triton.runtime.jit import JITFunction

if TYPE_CHECKING:
    T = TypeVar("T")

    @dataclass_transform()
    def aggregate(cls: type[T]) -> type[T]:
        """Triton's decorator as a type checker can understand it: the fields are the constructor's arguments."""
        return cls
else:
    from triton.experimental.gluon import aggregate


@dataclass(frozen=True, kw_only=True)
class Minor:
    """What a minor release of Triton has of its own.

    archs: what our kernels are compiled for with it. gluon_cpu: whether that runs with it.
    reinterpret: the method of memory that views it with another dtype, shape and layout.
    hopper_assembler: the field of `triton.knobs.nvidia` that says what Triton assembles for Hopper with.
    """

    archs: tuple[int, ...]
    gluon_cpu: bool
    reinterpret: str
    hopper_assembler: str


MINORS = {
    "3.8": Minor(archs=(90,), gluon_cpu=False, reinterpret="_reinterpret", hopper_assembler="ptxas"),
    "3.9": Minor(archs=(90, 100, 103), gluon_cpu=True, reinterpret="reinterpret", hopper_assembler="ptxas_blackwell"),
}


def minor_of(version: str) -> str:
    return ".".join(version.split(".")[:2])


# Of another release, what the newest of these has: who launches a kernel with it is told.
MINOR = MINORS.get(minor_of(triton.__version__), MINORS["3.9"])


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """Shared or tensor memory with another dtype, shape and layout, of as many bytes."""
    return getattr(memory, MINOR.reinterpret)(dtype, shape, layout, _semantic=_semantic)


__all__ = [
    "MINOR",
    "MINORS",
    "JITFunction",
    "MBarrierLayout",
    "Minor",
    "TensorMemoryLayout",
    "aggregate",
    "allocate_tensor_memory",
    "blackwell",
    "builtin",
    "clc",
    "cluster",
    "constexpr_function",
    "fence_async_shared",
    "gl",
    "jit",
    "mbarrier",
    "minor_of",
    "reinterpret",
    "tensor_memory_descriptor",
    "tma",
]
