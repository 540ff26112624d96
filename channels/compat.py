"""The names of Gluon that channels use: experimental ones move with every Triton release, so they are imported here only."""

from triton.experimental.gluon import aggregate, constexpr_function, jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import cluster, fence_async_shared, mbarrier, tma

__all__ = ["aggregate", "cluster", "constexpr_function", "fence_async_shared", "gl", "jit", "mbarrier", "tma"]
