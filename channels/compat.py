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
    atomic_load: whether it has that.
    hopper_assembler: the field of `triton.knobs.nvidia` that says what Triton assembles for Hopper with.
    """

    archs: tuple[int, ...]
    gluon_cpu: bool
    reinterpret: str
    atomic_load: bool
    hopper_assembler: str


MINORS = {
    "3.8": Minor(archs=(90,), gluon_cpu=False, reinterpret="_reinterpret", atomic_load=False, hopper_assembler="ptxas"),
    "3.9": Minor(
        archs=(90, 100, 103),
        gluon_cpu=True,
        reinterpret="reinterpret",
        atomic_load=True,
        hopper_assembler="ptxas_blackwell",
    ),
}


def minor_of(version: str) -> str:
    return ".".join(version.split(".")[:2])


# Of another release, what the newest of these has: who launches a kernel with it is told.
MINOR = MINORS.get(minor_of(triton.__version__), MINORS["3.9"])


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """Shared or tensor memory with another dtype, shape and layout, of as many bytes."""
    return getattr(memory, MINOR.reinterpret)(dtype, shape, layout, _semantic=_semantic)


@jit
def load_by_adding(pointer, sem: gl.constexpr):
    """What is there, by an addition that changes nothing."""
    return gl.atomic_add(pointer, 0, sem=sem)


atomic_load = gl.atomic_load if MINOR.atomic_load else load_by_adding


@jit
def atomic_poll(pointer, expected_value, sem: gl.constexpr):
    """Waits until the expected value is there.

    Not Gluon's own: in that only one lane of a warp loops, so the assembler takes what the whole warp computes for
    different in each lane. It moves addresses and loop counters out of uniform registers, and then spills.
    """
    while atomic_load(pointer, sem=sem) != expected_value:
        pass


__all__ = [
    "MINOR",
    "MINORS",
    "JITFunction",
    "MBarrierLayout",
    "Minor",
    "TensorMemoryLayout",
    "aggregate",
    "allocate_tensor_memory",
    "atomic_load",
    "atomic_poll",
    "blackwell",
    "builtin",
    "clc",
    "cluster",
    "constexpr_function",
    "fence_async_shared",
    "gl",
    "jit",
    "load_by_adding",
    "mbarrier",
    "minor_of",
    "reinterpret",
    "tensor_memory_descriptor",
    "tma",
]
