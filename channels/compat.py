"""The names of Gluon that channels use. Experimental, they move with every Triton release: imported here only."""

from typing import TYPE_CHECKING, TypeVar, dataclass_transform

from triton.experimental.gluon import constexpr_function, jit
from triton.experimental.gluon import language as gl

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

__all__ = [
    "JITFunction",
    "MBarrierLayout",
    "TensorMemoryLayout",
    "aggregate",
    "allocate_tensor_memory",
    "blackwell",
    "clc",
    "cluster",
    "constexpr_function",
    "fence_async_shared",
    "gl",
    "jit",
    "mbarrier",
    "tensor_memory_descriptor",
    "tma",
]
