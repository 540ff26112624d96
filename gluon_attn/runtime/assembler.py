"""The assembler (ptxas): which one our kernels get, whether it did well, and what it made of them.

Hopper's kernels overlap a product with the softmax of another block, so they need products that run asynchronously.
An assembler of CUDA 12 gives up on that in many of them: it waits after each instruction of a product (*serialises*
it), and the kernel runs at half the speed, with the same numbers. Triton ships two assemblers, of CUDA 12.9 and 13, and
3.8 takes the older one for Hopper. People also point Triton at an older one, by an environment variable or a knob, for
reasons of their other kernels. So ours are assembled with the newest of those that Triton ships and of the one that it
is configured with, theirs as they say. There is no switch that gives ours an older one.
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

from .compat import MINOR, CompiledKernel, knobs, nvidia_compiler, triton

# What Triton assembles for Hopper with, and in releases that compile for Blackwell, for that too.
KNOB = MINOR.hopper_assembler
SHIPPED = ("ptxas", "ptxas_blackwell")
VARIABLE = f"TRITON_{KNOB.upper()}_PATH"
HOPPER_PRODUCT, HOPPER_WAIT = r"\b[HQ]GMMA\.", r"\bWARPGROUP\.DEPBAR\b"

_choosing = threading.RLock()


@contextlib.contextmanager
def newest_assembler() -> Iterator[None]:
    """Within, Triton assembles with the newest of the assemblers that it ships and the one that it is configured with.

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
    """Triton's own, the newest: `path` and `version`, as "13.4". None where a build of Triton comes without."""
    paths = [knobs.nvidia.knob_descriptors[name].default_path for name in SHIPPED]
    return max(filter(None, map(knobs.NvidiaTool.from_path, paths)), key=release, default=None)


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

    What Triton's own newest assembler makes is known from tests, and is not looked at. What another one made is
    disassembled, half a second. Of kernels that a checker instruments nobody wants to hear that they are slow.
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
        "kernel, which then runs at about half its speed; its results are right. Expected the assembler of CUDA 13 "
        f"that Triton's wheel brings, or one that does as well. Unset {VARIABLE}, or reinstall Triton from its wheel "
        f"(pip install --force-reinstall --no-deps triton=={triton.__version__.partition('+')[0]}).",
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
