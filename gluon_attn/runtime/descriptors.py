"""Tensors and the blocks they are copied in, as TMA descriptors."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .compat import TMA_DTYPE_DEVICE_TO_HOST, TensorDescriptor, driver, gl

DTYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
MAX_SWIZZLE_BYTES = 128

Bases = tuple[
    tuple[int, int], ...
]  # a CGA layout: for each doubling of the CTAs, the step in (rows, columns) of a tile


@dataclass(frozen=True)
class Block:
    """What one TMA copy moves: a tile of a (batch, head, sequence, head_dim) tensor, and its shared memory layout."""

    dtype: torch.dtype
    shape: tuple[int, int, int, int]
    layout: Any  # Gluon's

    @staticmethod
    def of(dtype: torch.dtype, rows: int, columns: int, cga_layout: Bases = ()) -> "Block":
        """A tile of [rows, columns] of one head. Its shared memory layout has as wide a swizzle as a CTA's rows of it
        allow, at most the 128 bytes at which tensor cores and TMA read it without bank conflicts; but none if it has
        fewer than the eight rows over which a swizzle goes."""
        splits = 2 ** sum(column != 0 for _, column in cga_layout)
        layout = gl.NVMMASharedLayout(
            swizzle_byte_width=min(MAX_SWIZZLE_BYTES, columns * dtype.itemsize // splits) if rows >= 8 else 0,
            element_bitwidth=dtype.itemsize * 8,
            rank=4,
            cga_layout=[[0, 0, *basis] for basis in cga_layout],
        )
        return Block(dtype, (1, 1, rows, columns), layout)

    @property
    def type_name(self) -> str:
        """Triton's type of a descriptor of such tiles."""
        return f"tensordesc<{DTYPE_NAMES[self.dtype]}[{','.join(map(str, self.shape))}],{self.layout!r}>"


@dataclass(frozen=True)
class ShiftedBase:
    """What a descriptor has for a base, if its first element lies before that of the tensor."""

    tensor: Tensor
    elements_before: int

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def data_ptr(self) -> int:
        return self.tensor.data_ptr() - self.elements_before * self.tensor.element_size()


@dataclass(frozen=True)
class View:
    """A tensor as TMA sees it: shape and strides (elements) in the order (batch, head, sequence, head_dim).

    elements_before: how many of them the first one lies before that of the tensor.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    elements_before: int = 0

    @staticmethod
    def of(t: Tensor) -> "View":
        """t: four dimensions in that order; it may be on the meta device."""
        # A dimension of size 1 may come with any stride, also one that TMA would refuse; it is never used.
        strides = (
            stride if size > 1 else t.shape[-1] for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True)
        )
        return View(tuple(t.shape), (*strides, 1))

    @staticmethod
    def packed(t: Tensor) -> "View":
        """t: (1, head, rows, head_dim), sequences one after the other. A tile's rows can end where a sequence does.

        Its first dimension steps from row to row as the third one does, and the first element lies as many rows before
        the tensor as it has. Row r of a sequence whose rows end before row `end` is [end, head, rows - length + r, 0]:
        past the sequence that leaves the third dimension, so that a load has zeros there and a store leaves what is
        there.
        """
        whole = View.of(t)
        (_, heads, rows, head_dim), (_, of_head, of_row, _) = whole.shape, whole.strides
        return View((rows + 1, heads, rows, head_dim), (of_row, of_head, of_row, 1), rows * of_row)

    def arguments(self, address: int, meta: dict[str, Any]) -> tuple[Any, ...]:
        """What a compiled kernel is passed for the tensor at `address`; meta: the kernel's, of that parameter."""
        if self.elements_before:
            address -= self.elements_before * meta["elem_size"]
        return (encode_tma(address, meta, list(self.shape), list(self.strides)), *self.shape, *self.strides)

    def descriptor(self, t: Tensor, block: Block) -> TensorDescriptor:
        """What an ordinary launch through Triton is passed for `t`."""
        base = ShiftedBase(t, self.elements_before) if self.elements_before else t
        return TensorDescriptor(base, list(self.shape), list(self.strides), list(block.shape), block.layout)


def encode_tma(address: int, meta: dict[str, Any], shape: list[int], strides: list[int]) -> Any:
    """The 128-byte TMA descriptor (a CUtensorMap) of a tensor; `meta` is the compiled kernel's for that parameter."""
    element_type = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    return driver.active.utils.fill_tma_descriptor_tiled(
        address, meta["swizzle"], meta["elem_size"], element_type, meta["block_size"], shape, strides, 0
    )
