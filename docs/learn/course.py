"""What the lessons need on the host: TMA descriptors, and gluon_cpu, which runs kernels and finds their faults."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import gluon_cpu

KINDS = {torch.float32: gl.float32, torch.bfloat16: gl.bfloat16}


def descriptor(tensor: Tensor, block: list[int], cga_layout: Any = None) -> TensorDescriptor:
    """What TMA needs of a tensor, to copy tiles of shape `block`, in the swizzled layout that tensor cores read.

    cga_layout: how a tile is divided over the CTAs of a cluster (lesson 6); None: one CTA has all of it.
    """
    layout = gl.NVMMASharedLayout.get_default_for(block, KINDS[tensor.dtype], cga_layout=cga_layout)
    return TensorDescriptor.from_tensor(tensor, block, layout)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def told(error: Exception) -> str:
    return f"{type(error).__name__}\n{str(error) or 'The output is not what it should be.'}"


def check(run: Callable[[], object], what: str, *, target: str = "sm_90a", schedules: int = 4) -> None:
    """Run a kernel in several interleavings of its roles and engines. A finding is printed, and ends the lesson."""
    try:
        gluon_cpu.check(run, schedules=schedules, target=target, quiet=True)
    except (gluon_cpu.Finding, AssertionError) as error:
        sys.exit(f"{what}: {told(error)}")
    print(f"{what}: right in {schedules} interleavings")


def broken(run: Callable[[], object], what: str, *, target: str = "sm_90a", schedules: int = 20) -> None:
    """Run a kernel that is broken on purpose, and print what is found."""
    try:
        gluon_cpu.check(run, schedules=schedules, target=target, quiet=True)
    except gluon_cpu.Finding as finding:
        print(f"\n{what}: {type(finding).__name__}\n{finding}")
    else:
        raise AssertionError(f"{what}: expected a finding, got none in {schedules} interleavings")


def lesson(name: str) -> ModuleType:
    """Another lesson's file, to build on; its name begins with a digit, which `import` does not take."""
    here = str(Path(__file__).parent)
    if here not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(name)


def exercise(run: Callable[[], object], *, target: str = "sm_90a", schedules: int = 20) -> None:
    """Say whether a kernel is right; if not, what is found, and exit with status 1."""
    try:
        gluon_cpu.check(run, schedules=schedules, target=target, quiet=True)
    except (gluon_cpu.Finding, AssertionError) as error:
        sys.exit(told(error))
    print(f"right in {schedules} interleavings")
