"""The names of Triton that the machine uses and that are experimental, private or moving: imported here only."""

from triton._C.libtriton import gluon_ir, ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.compiler.code_generator import CodeGenerator
from triton.compiler.compiler import make_backend
from triton.experimental.gluon import GluonASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language import _semantic as semantic
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, TensorMemoryScalesLayout
from triton.runtime import driver
from triton.runtime.jit import JITFunction, create_function_from_signature, native_specialize_impl

__all__ = [
    "CodeGenerator",
    "GPUTarget",
    "GluonASTSource",
    "GluonJITFunction",
    "JITFunction",
    "TensorMemoryLayout",
    "TensorMemoryScalesLayout",
    "builtin",
    "create_function_from_signature",
    "driver",
    "gl",
    "gluon_ir",
    "ir",
    "make_backend",
    "native_specialize_impl",
    "nvidia",
    "passes",
    "semantic",
]
