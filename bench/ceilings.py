"""What the card can do at most: products of matrices, and copies of memory, timed as everything else."""

from dataclasses import dataclass

import torch

from bench.timing import time_interleaved

MATRIX = 8192  # of the bf16 product
COPY_BYTES = 2**30


@dataclass(frozen=True)
class Ceilings:
    """matrix_tflops: cuBLAS's bf16 product, in bursts. copy_tbps: bytes read and written by a copy, in TB/s."""

    matrix_tflops: float
    copy_tbps: float

    def tflops(self, intensity: float) -> float:
        """What work of so many operations to a byte can reach (the roofline of Williams, Waterman and Patterson)."""
        return min(self.matrix_tflops, intensity * self.copy_tbps)


def measure() -> Ceilings:
    a, b = (torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = torch.empty_like(a)
    source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    timings = time_interleaved(
        {"product": lambda: torch.mm(a, b, out=product), "copy": lambda: target.copy_(source)}, rounds=3, runs=5
    )
    return Ceilings(
        matrix_tflops=2 * MATRIX**3 / timings["product"].median / 1e12,
        copy_tbps=2 * COPY_BYTES / timings["copy"].median / 1e12,
    )
