"""A bias that is added to scores: what kernels are compiled with of it, and how TMA sees it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .runtime.descriptors import Block, View

STRIDE_MULTIPLE = 16  # elements: of any dtype, a multiple of the 16 bytes that TMA counts strides in


@dataclass(frozen=True, kw_only=True)
class Bias:
    """A tensor (B or 1, H or 1, Sq or 1, Sk) that is added to scaled scores.

    each_row: every query has its own row. shared: several batches, heads or queries have one number in common, whose
    gradient is a sum.
    """

    dtype: torch.dtype
    each_row: bool
    shared: bool

    @property
    def sums_gradient(self) -> bool:
        """Whether blocks of scores add to its gradient, in fp32; else each stores its part, in this dtype."""
        return self.shared or not self.each_row

    @property
    def gradient_dtype(self) -> torch.dtype:
        """That kernels write it in."""
        return torch.float32 if self.sums_gradient else self.dtype

    def zero_gradient(self, shape: torch.Size, device: torch.device | str) -> Tensor:
        """Memory for its gradient, of zeros: of blocks that no query sees nobody stores it. Rows may be parts of longer
        ones, as TMA asks for; one that queries have in common is written without it."""
        rounded = row_stride(shape[-1]) if self.each_row else shape[-1]
        return torch.zeros((*shape[:-1], rounded), dtype=self.gradient_dtype, device=device)[..., : shape[-1]]

    def block(self, rows: int, keys: int) -> Block:
        """What one TMA copy moves, for a tile of scores of that many queries and keys."""
        return Block.of(self.dtype, rows if self.each_row else 1, keys)

    def tile_bytes(self, rows: int, keys: int) -> int:
        """Shared memory of such a block."""
        return (rows if self.each_row else 1) * keys * self.dtype.itemsize


def row_stride(keys: int) -> int:
    """Elements from one row to the next, as TMA takes them whatever the dtype, if a row has so many."""
    return -(-keys // STRIDE_MULTIPLE) * STRIDE_MULTIPLE


def view_of_bias(t: Tensor) -> View:
    """As TMA sees it. A dimension of size 1 may come with any stride, which is never used."""
    rounded = row_stride(t.shape[-1])
    strides = (stride if size > 1 else rounded for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True))
    return View(tuple(t.shape), (*strides, 1))


def bias_of(bias: Tensor, shape: Sequence[int]) -> Bias:
    """shape: (B, H, Sq)."""
    return Bias(dtype=bias.dtype, each_row=bias.shape[2] > 1, shared=tuple(bias.shape[:3]) != tuple(shape))
