"""The assembler (ptxas): which one our kernels get, whether it did well, and what it made of them.

Hopper's kernels overlap a product with the softmax of another block, so they need products that run asynchronously.
An assembler older than the one that Triton 3.9 ships (13.4) gives up on that in many of them: it waits after each
instruction of a product (*serialises* it), and the kernel runs at half the speed, with the same numbers. People point
Triton at an older one, by TRITON_PTXAS_BLACKWELL_PATH or `triton.knobs.nvidia.ptxas_blackwell`, for reasons of their
other kernels. So ours are assembled with the newer of the two, theirs as they say. There is no switch that gives ours
an older one.
"""

import contextlib
import functools
import re
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from .compat import CompiledKernel, knobs, nvidia_compiler

KNOB = "ptxas_blackwell"  # what Triton assembles for Hopper with too, whatever its name says
VARIABLE = "TRITON_PTXAS_BLACKWELL_PATH"
HOPPER_PRODUCT, HOPPER_WAIT = r"\b[HQ]GMMA\.", r"\bWARPGROUP\.DEPBAR\b"

_choosing = threading.RLock()


@contextlib.contextmanager
def newest_assembler() -> Iterator[None]:
    """Within, Triton assembles with the newer of the assembler that it ships and the one that it is configured with.

    Nothing is changed where that is the same one already. Otherwise it holds for the whole process, so that what
    another thread compiles meanwhile is assembled with it too; what another thread sets of Triton's knobs for NVIDIA
    meanwhile is lost. One thread at a time is within: another one would see a choice that may end before it is done.
    """
    with _choosing:
        shipped = shipped_assembler()
        if shipped is None or release(getattr(knobs.nvidia, KNOB)) >= release(shipped):
            yield
            return
        try:
            with knobs.nvidia.scope():
                setattr(knobs.nvidia, KNOB, shipped.path)
                forget_assembler()
                yield
        finally:
            forget_assembler()


def shipped_assembler() -> Any:
    """Triton's own: `path` and `version`, as "13.4". None where a build of Triton comes without."""
    knob = knobs.nvidia.knob_descriptors[KNOB]
    return knobs.NvidiaTool.from_path(knob.default_path)


def release(tool: Any) -> tuple[int, ...]:
    return tuple(map(int, tool.version.split(".")))


def forget_assembler() -> None:
    """Triton remembers the assembler's version, which is part of the name that a kernel is cached under, and the
    version of PTX that goes with it, by the architecture alone."""
    nvidia_compiler.get_ptxas_version.cache_clear()
    nvidia_compiler.get_features.cache_clear()


def assembler() -> Any:
    """What our kernels are assembled with: `path` and `version`."""
    with newest_assembler():
        return getattr(knobs.nvidia, KNOB)


def assembler_version() -> str:
    """The release of the assembler that our kernels are assembled with, as "13.4"."""
    return assembler().version


def warn_if_serialised(kernel: CompiledKernel) -> None:
    """Warn, once in a process for each assembler, if it has serialised the products of a kernel for Hopper.

    What Triton's own assembler makes is known from tests, and is not looked at. What another one made is disassembled,
    half a second. Of kernels that a checker instruments nobody wants to hear that they are slow.
    """
    if kernel.metadata.target.arch != 90 or knobs.compilation.instrumentation_mode:
        return
    shipped = shipped_assembler()
    # It leaves its release in what it makes, and so in what comes out of Triton's cache too.
    if shipped is not None and f"release {shipped.version}".encode() in kernel.asm["cubin"]:
        return
    try:
        sass = disassemble(kernel)
    except (OSError, RuntimeError, subprocess.SubprocessError):  # of a release that our disassembler does not know
        return
    if is_serialised(sass):
        used = assembler()
        warn_once(used.path, used.version)


def is_serialised(sass: str) -> bool:
    """Whether a Hopper kernel waits as often as it has instructions for products. Otherwise several share a wait."""
    products = len(re.findall(HOPPER_PRODUCT, sass))
    return 0 < products <= len(re.findall(HOPPER_WAIT, sass))


@functools.cache
def warn_once(path: str, version: str) -> None:
    warnings.warn(
        f"gluon-attn: the assembler {path} (release {version}) has serialised the matrix products of an attention "
        "kernel, which then runs at about half its speed; its results are right. Expected the assembler that Triton "
        f"3.9 ships, of CUDA 13.4, or one that does as well. Unset {VARIABLE}, or reinstall Triton from its wheel "
        "(pip install --force-reinstall --no-deps 'triton>=3.9,<3.10').",
        RuntimeWarning,
        stacklevel=5,  # who called attention()
    )


def disassemble(kernel: CompiledKernel) -> str:
    """The machine code of a kernel (SASS) as text, by the disassembler that comes with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
