"""Launching a compiled kernel on a card."""

import threading
from typing import Any

import torch

from .compat import CompiledKernel, driver, knobs

THREAD = threading.local()


def enter_context(device_index: int) -> None:
    """Give the calling thread a CUDA context, which TMA descriptors and launches need: both are calls of the driver.

    A thread has one after its first call of CUDA's runtime. In autograd's threads, and in one that a server starts,
    that call may be ours.
    """
    if not hasattr(THREAD, "has_context"):
        if not torch.cuda.is_current_stream_capturing():  # also a call of the runtime, and allowed in a capture
            torch.cuda.mem_get_info(device_index)
        THREAD.has_context = True


class Launcher:
    """Launches a compiled kernel on a device.

    Arguments are already flat and encoded: for a descriptor its map, shape and strides. Triton's own launch would build
    and check its descriptor objects anew each time, 60 µs of a call; and where nobody has hooked on to launches and
    the kernel needs no scratch memory (checkers do), Triton's launcher is passed by too, some more.
    """

    def __init__(self, kernel: CompiledKernel, programs: int, device_index: int) -> None:
        self.kernel, self.programs = kernel, programs
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

    def __call__(self, arguments: tuple[Any, ...], stream: int) -> None:
        """With the kernel's device current. stream: of it, as `current_stream` gives it."""
        runtime = knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if self.direct is None or enter is None or leave is None or enter.calls or leave.calls:
            kernel, grid = self.kernel, (self.programs, 1, 1)
            metadata = kernel.launch_metadata(grid, stream)
            self.triton(*grid, stream, kernel.function, kernel.packed_metadata, metadata, enter, leave, *arguments)
        else:
            self.direct(self.programs, 1, 1, stream, *self.fixed, arguments)


def current_stream(device_index: int) -> int:
    """Of a device, that which is current for torch."""
    stream: int = driver.active.get_current_stream(device_index)
    return stream
