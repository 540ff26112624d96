"""The names of Triton that attention uses and that are experimental, private or moving: imported here only."""

import triton
import triton.backends.nvidia.compiler as nvidia_compiler
import triton.knobs as knobs
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.compiler import CompiledKernel
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    add2,
    fma2,
    mul2,
    tcgen05_mma,
    tensor_memory_descriptor,
)
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.language.nvidia.hopper.tma import tensor_descriptor as tma_descriptor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import PropagateNan
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

from channels.compat import (
    MINOR,
    MINORS,
    Minor,
    aggregate,
    atomic_load,
    atomic_poll,
    builtin,
    constexpr_function,
    gl,
    jit,
    minor_of,
    reinterpret,
)

__all__ = [
    "MINOR",
    "MINORS",
    "TMA_DTYPE_DEVICE_TO_HOST",
    "CompiledKernel",
    "GPUTarget",
    "GluonASTSource",
    "Minor",
    "PropagateNan",
    "TensorDescriptor",
    "TensorMemoryLayout",
    "add2",
    "aggregate",
    "atomic_load",
    "atomic_poll",
    "builtin",
    "constexpr_function",
    "driver",
    "fence_async_shared",
    "fma2",
    "gdc_launch_dependents",
    "gdc_wait",
    "gl",
    "ir",
    "jit",
    "knobs",
    "make_backend",
    "minor_of",
    "mul2",
    "nvidia_compiler",
    "reinterpret",
    "tcgen05_mma",
    "tensor_memory_descriptor",
    "tma_descriptor",
    "triton",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
