"""What of a card decides which kernel runs and how."""

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Device:
    """A card, real (`Device.of`) or described (`Device.hopper`), so that every choice can be tested without one.

    capability: CUDA compute capability. sm_count: streaming multiprocessors. smem_bytes: shared memory a CTA can have.
    """

    name: str
    capability: tuple[int, int]
    sm_count: int
    smem_bytes: int

    @staticmethod
    def hopper() -> "Device":
        """An NVIDIA H200."""
        return Device(name="NVIDIA H200", capability=(9, 0), sm_count=132, smem_bytes=232448)

    @staticmethod
    @functools.cache
    def of(device: torch.device) -> "Device":
        """The CUDA card behind `device`. Raises RuntimeError if `device` is no CUDA device."""
        if device.type != "cuda":
            raise RuntimeError(
                f"q: expected a tensor on a Hopper card (compute capability 9.0), got one on {device.type!r}; "
                "move q, k and v with .cuda(), or execute the kernel on the CPU with device=Device.hopper()"
            )
        card = torch.cuda.get_device_properties(device)
        return Device(
            name=card.name,
            capability=(card.major, card.minor),
            sm_count=card.multi_processor_count,
            smem_bytes=card.shared_memory_per_block_optin,  # type: ignore[attr-defined]  # torch's stubs lack it
        )

    def require_supported(self) -> None:
        """RuntimeError unless there is a kernel for this card."""
        if self.capability == (9, 0):
            return
        major, minor = self.capability
        why = {
            8: "Ampere and Ada have neither TMA nor warpgroup products",
            10: "the kernel for Blackwell's tensor memory is not part of this release",
            12: "this Blackwell has no tensor memory, and its tensor cores no warpgroup products",
        }.get(major, "the kernels are built on TMA, clusters and warpgroup products as Hopper has them")
        raise RuntimeError(
            f"device: expected a Hopper card (compute capability 9.0), got {self.name} ({major}.{minor}): {why}; "
            "use torch.nn.functional.scaled_dot_product_attention there"
        )
