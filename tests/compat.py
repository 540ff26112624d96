"""The names of Gluon that the kernels of these tests use. Experimental, they move with every release: imported here."""

from typing import TYPE_CHECKING, TypeVar, dataclass_transform

from triton.experimental.gluon import constexpr_function, jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.extra import libdevice
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor, TensorDescriptorIm2Col

if TYPE_CHECKING:
    T = TypeVar("T")

    @dataclass_transform()
    def aggregate(cls: type[T]) -> type[T]:
        """Triton's decorator as a type checker can understand it: the fields are the constructor's arguments."""
        return cls
else:
    from triton.experimental.gluon import aggregate

cluster = gl.nvidia.hopper.cluster
fence_async_shared = gl.nvidia.hopper.fence_async_shared
mbarrier = gl.nvidia.hopper.mbarrier
tma = gl.nvidia.hopper.tma
warpgroup_mma = gl.nvidia.hopper.warpgroup_mma
warpgroup_mma_wait = gl.nvidia.hopper.warpgroup_mma_wait

async_store = gl.nvidia.hopper.async_store
async_copy = gl.nvidia.ampere.async_copy
blackwell = gl.nvidia.blackwell
clc = gl.nvidia.blackwell.clc
tma_blackwell = gl.nvidia.blackwell.tma
allocate_tensor_memory = gl.nvidia.blackwell.allocate_tensor_memory
tcgen05_commit = gl.nvidia.blackwell.tcgen05_commit
tcgen05_copy = gl.nvidia.blackwell.tcgen05_copy
tcgen05_mma = gl.nvidia.blackwell.tcgen05_mma
tcgen05_mma_barrier_count = gl.nvidia.blackwell.tcgen05_mma_barrier_count
tcgen05_mma_scaled = gl.nvidia.blackwell.tcgen05_mma_scaled
TensorMemoryLayout = gl.nvidia.blackwell.TensorMemoryLayout

__all__ = [
    "TensorDescriptor",
    "TensorDescriptorIm2Col",
    "TensorMemoryLayout",
    "aggregate",
    "allocate_tensor_memory",
    "async_copy",
    "async_store",
    "blackwell",
    "clc",
    "cluster",
    "constexpr_function",
    "fence_async_shared",
    "gl",
    "jit",
    "libdevice",
    "mbarrier",
    "tcgen05_commit",
    "tcgen05_copy",
    "tcgen05_mma",
    "tcgen05_mma_barrier_count",
    "tcgen05_mma_scaled",
    "tma",
    "tma_blackwell",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
