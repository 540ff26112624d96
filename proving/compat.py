"""The names of Triton that proving uses and that are experimental, private or moving: imported here only."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.compiler import CompiledKernel
from triton.compiler.compiler import make_backend
from triton.experimental.gluon import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import create_function_from_signature

__all__ = ["TMA_DTYPE_DEVICE_TO_HOST", "CompiledKernel", "TensorDescriptor", "compile_launch"]


def compile_launch(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any], *, arch: int) -> CompiledKernel:
    """Compile what `kernel[grid](*arguments, **options)` would run, specialised on its arguments as a launch is.

    arch: 100 for sm_100a. Needs no card. Triton caches the result on disk.
    """
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    options = {"enable_fp_fusion": True} | options
    bound, specialization, options_left = bind(*arguments, **options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, options_left)
    source = GluonASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=parsed.__dict__)
