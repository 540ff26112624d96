"""The names of Triton that benchmarks use and that are private or moving: imported here only."""

from triton.experimental.gluon.language._core import builtin
from triton.runtime._allocation import set_profile_allocator

__all__ = ["builtin", "set_profile_allocator"]
