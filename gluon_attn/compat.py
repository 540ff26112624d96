"""The names of Triton that attention uses and that are experimental, private or moving: imported here only."""

from channels.compat import aggregate, constexpr_function, gl, jit
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.language.nvidia.hopper.tma import tensor_descriptor as tma_descriptor

__all__ = ["aggregate", "constexpr_function", "gl", "jit", "tma_descriptor", "warpgroup_mma", "warpgroup_mma_wait"]
