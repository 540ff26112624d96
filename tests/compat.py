"""The names of Gluon that the kernels of these tests use. Experimental, they move with every release: imported here."""

from typing import Any

from triton.compiler.errors import CompilationError
from triton.experimental.gluon.language.extra import libdevice
from triton.experimental.gluon.language.nvidia.blackwell import tcgen05_commit
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor, TensorDescriptorIm2Col
from triton.runtime.jit import ConstexprFunction, JITFunction

from channels.compat import (
    TensorMemoryLayout,
    aggregate,
    allocate_tensor_memory,
    clc,
    cluster,
    constexpr_function,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tma,
)

ampere_mbarrier = gl.nvidia.ampere.mbarrier
fpsan = gl.fpsan
MBarrierLayout = gl.nvidia.hopper.mbarrier.MBarrierLayout
warpgroup_mma_init = gl.nvidia.hopper.warpgroup_mma_init
warpgroup_mma = gl.nvidia.hopper.warpgroup_mma
warpgroup_mma_wait = gl.nvidia.hopper.warpgroup_mma_wait

async_store = gl.nvidia.hopper.async_store
async_copy = gl.nvidia.ampere.async_copy
blackwell = gl.nvidia.blackwell
tma_blackwell = gl.nvidia.blackwell.tma
rubin = gl.nvidia.rubin
tcgen05_copy = gl.nvidia.blackwell.tcgen05_copy
tcgen05_mma = gl.nvidia.blackwell.tcgen05_mma
tcgen05_mma_barrier_count = gl.nvidia.blackwell.tcgen05_mma_barrier_count
tcgen05_mma_scaled = gl.nvidia.blackwell.tcgen05_mma_scaled


def triton_testing() -> Any:
    """What Triton's own tests share. Its import asks for the card."""
    from triton import _internal_testing

    return _internal_testing


__all__ = [
    "CompilationError",
    "ConstexprFunction",
    "JITFunction",
    "MBarrierLayout",
    "TensorDescriptor",
    "TensorDescriptorIm2Col",
    "TensorMemoryLayout",
    "aggregate",
    "allocate_tensor_memory",
    "ampere_mbarrier",
    "async_copy",
    "async_store",
    "blackwell",
    "clc",
    "cluster",
    "constexpr_function",
    "fence_async_shared",
    "fpsan",
    "gl",
    "jit",
    "libdevice",
    "mbarrier",
    "rubin",
    "tcgen05_commit",
    "tcgen05_copy",
    "tcgen05_mma",
    "tcgen05_mma_barrier_count",
    "tcgen05_mma_scaled",
    "tma",
    "tma_blackwell",
    "triton_testing",
    "warpgroup_mma",
    "warpgroup_mma_init",
    "warpgroup_mma_wait",
]
