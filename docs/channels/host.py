"""What the five kernels of this folder need on the host: TMA descriptors, and where to run."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import gluon_cpu

CAPABILITY = {"sm_90a": (9, 0), "sm_100a": (10, 0)}  # Hopper, Blackwell
KINDS = {torch.float32: gl.float32, torch.bfloat16: gl.bfloat16}


def device(target: str) -> str:
    """Where tensors for a kernel of this target belong: on the card, if it is of that kind, else on the CPU."""
    on_card = torch.cuda.is_available() and torch.cuda.get_device_capability() == CAPABILITY[target]
    return "cuda" if on_card else "cpu"


@contextlib.contextmanager
def machine(target: str) -> Iterator[None]:
    """Within it `kernel[grid](...)` runs: on the card; without one on gluon_cpu, checked for races."""
    if device(target) == "cuda" or gluon_cpu.running():  # running: within gluon_cpu.check, which has a machine
        yield
    else:
        with gluon_cpu.machine(target=target):
            yield


def descriptor(tensor: Tensor, block: list[int], cga_layout: list[list[int]] | None = None) -> TensorDescriptor:
    """A TMA descriptor for tiles of shape `block`, in the swizzled layout that the tensor cores want.

    cga_layout: how a tile is spread over the CTAs of a cluster. [[1, 0]]: two CTAs, each half of the rows.
    """
    layout = gl.NVMMASharedLayout.get_default_for(block, KINDS[tensor.dtype], cga_layout=cga_layout)
    return TensorDescriptor.from_tensor(tensor, block, layout)


def compare(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.cpu().float(), want.cpu().float(), rtol=1e-2, atol=1e-2)
    print("right:", tuple(got.shape), got.dtype, "on", got.device)


def integers(*shape: int, target: str) -> Tensor:
    """Small integers in bfloat16, of which products and sums are exact."""
    return (
        torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16().to(device(target))
    )
