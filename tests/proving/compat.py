"""The names of Gluon that the kernels of these tests use. Experimental, they move with every release: imported here."""

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

cluster = gl.nvidia.hopper.cluster
mbarrier = gl.nvidia.hopper.mbarrier
tma = gl.nvidia.hopper.tma
allocate_tensor_memory = gl.nvidia.blackwell.allocate_tensor_memory
tcgen05_commit = gl.nvidia.blackwell.tcgen05_commit
tcgen05_mma = gl.nvidia.blackwell.tcgen05_mma
TensorMemoryLayout = gl.nvidia.blackwell.TensorMemoryLayout

__all__ = [
    "TensorDescriptor",
    "TensorMemoryLayout",
    "allocate_tensor_memory",
    "cluster",
    "gl",
    "jit",
    "mbarrier",
    "tcgen05_commit",
    "tcgen05_mma",
    "tma",
]
