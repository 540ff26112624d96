"""The names of Triton that attention uses and that are experimental, private or moving: imported here only."""

import subprocess
import tempfile
from typing import Any

import torch
import triton
import triton.knobs as knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.compiler import CompiledKernel
from triton.experimental.gluon import GluonASTSource
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    add2,
    fma2,
    mul2,
    tcgen05_mma,
    tensor_memory_descriptor,
)
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.language.nvidia.hopper.tma import tensor_descriptor as tma_descriptor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import PropagateNan
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

from channels.compat import aggregate, constexpr_function, gl, jit

__all__ = [
    "CompiledKernel",
    "Launcher",
    "PropagateNan",
    "TensorDescriptor",
    "TensorMemoryLayout",
    "add2",
    "aggregate",
    "assembler_version",
    "check_triton_version",
    "compile_gluon",
    "constexpr_function",
    "disassemble",
    "encode_tma",
    "fma2",
    "gdc_launch_dependents",
    "gdc_wait",
    "gl",
    "jit",
    "mul2",
    "tcgen05_mma",
    "tensor_memory_descriptor",
    "tma_descriptor",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]


def check_triton_version() -> None:
    """RuntimeError unless Triton is 3.9: Gluon changes with every minor release."""
    if triton.__version__.split(".")[:2] != ["3", "9"]:
        raise RuntimeError(
            f"triton: expected version 3.9, got {triton.__version__}; install it with pip install 'triton>=3.9,<3.10' "
            "(add --no-deps beside a torch that pins another)"
        )


def compile_gluon(
    fn: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    *,
    arch: int,
    num_warps: int,
    num_ctas: int,
    starts_early: bool = False,
) -> CompiledKernel:
    """Compile a Gluon kernel for an architecture (90 for sm_90a), with or without the card. Triton caches it on disk.

    signature: Triton's type of each parameter that is not in `constants`. Pointers are taken to be 16-byte aligned.
    Nothing else about arguments is specialised on, so that a new length never needs a new kernel.
    starts_early: a launch may begin before the kernel launched before it ends, if that one says so; `gdc_wait` waits
    for the end (CUDA's programmatic dependent launch).
    """
    names = fn.arg_names
    types = {name: "constexpr" if name in constants else signature[name] for name in names}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, t in types.items() if t.startswith("*")}
    source = GluonASTSource(fn, types, {(names.index(n),): value for n, value in constants.items()}, aligned)
    options = {
        "num_warps": num_warps,
        "num_ctas": num_ctas,
        "launch_pdl": starts_early,
        "enable_fp_fusion": True,
        "instrumentation_mode": knobs.compilation.instrumentation_mode,
    }
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def disassemble(kernel: CompiledKernel) -> str:
    """The machine code of a kernel (SASS) as text, by the disassembler that comes with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def assembler_version() -> str:
    """The release of the assembler (ptxas) that Triton assembles kernels with."""
    version = subprocess.run(
        [knobs.nvidia.ptxas_blackwell.path, "--version"], capture_output=True, text=True, check=True
    )
    return version.stdout.split("release ")[1].split(",")[0]


def encode_tma(address: int, meta: dict[str, Any], shape: list[int], strides: list[int]) -> Any:
    """The 128-byte TMA descriptor (a CUtensorMap) of a tensor; `meta` is the compiled kernel's for that parameter."""
    element_type = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    return driver.active.utils.fill_tma_descriptor_tiled(
        address, meta["swizzle"], meta["elem_size"], element_type, meta["block_size"], shape, strides, 0
    )


class Launcher:
    """Launches a compiled kernel on a device, on the stream of it that is current for torch.

    Arguments are already flat and encoded: for a descriptor its map, shape and strides. Triton's own launch would build
    and check its descriptor objects anew each time, 60 µs of a call; and where nobody has hooked on to launches and
    the kernel needs no scratch memory (checkers do), Triton's launcher is passed by too, some more.
    """

    def __init__(self, kernel: CompiledKernel, programs: int, device_index: int) -> None:
        self.kernel, self.programs, self.device_index = kernel, programs, device_index
        with torch.cuda.device(device_index):
            self.triton = kernel.run  # loads the kernel on the current device
        self.triton.launch = driver.active.utils.launch
        scratch = self.triton.global_scratch_size + self.triton.profile_scratch_size
        self.direct = None if scratch or self.triton.gsan_enabled else driver.active.utils.launch
        self.fixed = (
            kernel.function,
            self.triton.launch_cooperative_grid,
            self.triton.launch_pdl,
            kernel.packed_metadata,
            *(None,) * 5,  # launch metadata, two hooks, two kinds of scratch memory
            self.triton.arg_annotations,
            self.triton.kernel_signature,
        )

    def __call__(self, arguments: tuple[Any, ...]) -> None:
        if self.device_index != torch.cuda.current_device():
            with torch.cuda.device(self.device_index):
                return self(arguments)
        stream = driver.active.get_current_stream(self.device_index)
        runtime = knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if self.direct is None or enter is None or leave is None or enter.calls or leave.calls:
            kernel, grid = self.kernel, (self.programs, 1, 1)
            metadata = kernel.launch_metadata(grid, stream)
            self.triton(*grid, stream, kernel.function, kernel.packed_metadata, metadata, enter, leave, *arguments)
        else:
            self.direct(self.programs, 1, 1, stream, *self.fixed, arguments)
