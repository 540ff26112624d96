"""What of a card decides which kernel runs and how."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_compiling


@dataclass(frozen=True, kw_only=True)
class Device:
    """A card, real (`Device.of`) or described (as by `Device.hopper`), so that every choice can be tested without one.

    capability: CUDA compute capability. sm_count: streaming multiprocessors. smem_bytes: shared memory a CTA can have.
    l2_bytes: the cache that all of them share.
    """

    name: str
    capability: tuple[int, int]
    sm_count: int
    smem_bytes: int
    l2_bytes: int = 50 * 2**20

    @staticmethod
    def hopper() -> "Device":
        """An NVIDIA H200."""
        return Device(name="NVIDIA H200", capability=(9, 0), sm_count=132, smem_bytes=232448)

    @staticmethod
    def blackwell() -> "Device":
        """An NVIDIA B200."""
        return Device(name="NVIDIA B200", capability=(10, 0), sm_count=148, smem_bytes=232448, l2_bytes=126 * 2**20)

    @staticmethod
    def blackwell_ultra() -> "Device":
        """An NVIDIA B300."""
        return Device(name="NVIDIA B300", capability=(10, 3), sm_count=148, smem_bytes=232448, l2_bytes=126 * 2**20)

    @property
    def model(self) -> str:
        """What its name has of letters and a number, as H100; the whole name if there is no such word."""
        words = [word for word in self.name.split() if word[:1].isalpha() and word[-1:].isdigit() and word.isalnum()]
        return words[0] if words else self.name

    @property
    def title(self) -> str:
        """What tells it from others for which table files are."""
        return f"{self.name} with {self.sm_count} processors"

    @property
    def arch(self) -> int:
        """What kernels for it are compiled for: 90, 100 or 103."""
        major, minor = self.capability
        return 10 * major + minor

    @staticmethod
    def of(device: torch.device) -> "Device":
        """The CUDA card behind `device`. Raises RuntimeError if `device` is no CUDA device."""
        if device.type != "cuda":
            todo = {
                "cpu": "move q, k and v with .cuda(), or execute the kernel on the CPU with device=Device.hopper() or "
                "Device.blackwell()",
                "meta": "it has a shape but no numbers; make q, k and v on the card",
            }.get(device.type, "move q, k and v with .cuda()")
            raise RuntimeError(
                f"q: expected a tensor on a Hopper or Blackwell card, got one on {device.type!r}; {todo}"
            )
        # torch.compile warns of a cache, which it traces past anyway.
        return described(device) if is_compiling() else described_once(device)

    def require_supported(self) -> None:
        """RuntimeError unless there is a kernel for this card."""
        if self.capability in ((9, 0), (10, 0), (10, 3)):
            return
        major, minor = self.capability
        why = {
            8: "Ampere and Ada have neither TMA nor clusters",
            11: "the kernels have not been tried on this Blackwell",
            12: "this Blackwell has no tensor memory, and its tensor cores no warpgroup products",
        }.get(major, "the kernels are built on TMA, clusters and the tensor cores of Hopper (9.0) and Blackwell")
        raise RuntimeError(
            "device: expected a Hopper (compute capability 9.0) or Blackwell card (10.0 or 10.3), got "
            f"{self.name} ({major}.{minor}): {why}; use torch.nn.functional.scaled_dot_product_attention there"
        )


def described(device: torch.device) -> Device:
    card: Any = torch.cuda.get_device_properties(device)  # not every release's stubs have all of its fields
    return Device(
        name=card.name,
        capability=(card.major, card.minor),
        sm_count=card.multi_processor_count,
        smem_bytes=card.shared_memory_per_block_optin,
        l2_bytes=card.L2_cache_size,
    )


described_once = functools.cache(described)
