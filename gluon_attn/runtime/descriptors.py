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
PACKED_WRAP = 2**30  # see `View.packed`; a coordinate of TMA is an int32, a stride less than 2^40 bytes

Bases = tuple[
    tuple[int, int], ...
]  # a CGA layout: for each doubling of the CTAs, the step in (rows, columns) of a tile


@dataclass(frozen=True)
class Block:
    """What one TMA copy moves: a tile of a (batch, head, sequence, head_dim) tensor, or of a `View.packed`, and its
    shared memory layout."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: Any  # Gluon's

    @staticmethod
    def of(
        dtype: torch.dtype,
        rows: int,
        columns: int,
        cga_layout: Bases = (),
        packed: bool = False,
        most_swizzle: int = MAX_SWIZZLE_BYTES,
    ) -> "Block":
        """A tile of [rows, columns] of one head. Its shared memory layout has as wide a swizzle as a CTA's rows of it
        allow, at most the 128 bytes at which tensor cores and TMA read it without bank conflicts, or `most_swizzle`;
        but none if it has fewer than the eight rows over which a swizzle goes."""
        before = (0,) * (3 if packed else 2)
        splits = 2 ** sum(column != 0 for _, column in cga_layout)
        layout = gl.NVMMASharedLayout(
            swizzle_byte_width=min(most_swizzle, columns * dtype.itemsize // splits) if rows >= 8 else 0,
            element_bitwidth=dtype.itemsize * 8,
            rank=len(before) + 2,
            cga_layout=[[*before, *basis] for basis in cga_layout],
        )
        return Block(dtype, (*(1 for _ in before), rows, columns), layout)

    @property
    def type_name(self) -> str:
        """Triton's type of a descriptor of such tiles."""
        return f"tensordesc<{DTYPE_NAMES[self.dtype]}[{','.join(map(str, self.shape))}],{self.layout!r}>"


@dataclass(frozen=True)
class View:
    """A tensor as TMA sees it: shape and strides (elements) in the order (batch, head, sequence, head_dim)."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

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

        (wrap, head, end, row, head_dim): two dimensions step from row to row. Row r of a sequence of `length` rows, the
        last of which is row `end` of the tensor, is [W, head, end, W + 1 - length + r, 0], with W = PACKED_WRAP: past
        the sequence that leaves the fourth dimension, so that a load has zeros there and a store leaves what is there.
        That is W rows too far on, and W steps along the first dimension lead back by as many: they are 2^64 elements
        less W rows, and addresses have 64 bits.

        The descriptor could begin W rows before the tensor instead; but a load that lies wholly outside touches its
        base on a card, which has to be memory.
        """
        whole = View.of(t)
        (_, heads, rows, head_dim), (_, of_head, of_row, _) = whole.shape, whole.strides
        turns = PACKED_WRAP + 1
        back = 2**64 // PACKED_WRAP - of_row
        return View((turns, heads, rows, turns, head_dim), (back, of_head, of_row, of_row, 1))

    def arguments(self, address: int, meta: dict[str, Any]) -> tuple[Any, ...]:
        """What a compiled kernel is passed for the tensor at `address`; meta: the kernel's, of that parameter."""
        return (encode_tma(address, meta, list(self.shape), list(self.strides)), *self.shape, *self.strides)

    def descriptor(self, t: Tensor, block: Block) -> TensorDescriptor:
        """What an ordinary launch through Triton is passed for `t`."""
        return TensorDescriptor(t, list(self.shape), list(self.strides), list(block.shape), block.layout)


def encode_tma(address: int, meta: dict[str, Any], shape: list[int], strides: list[int]) -> Any:
    """The 128-byte TMA descriptor (a CUtensorMap) of a tensor; `meta` is the compiled kernel's for that parameter."""
    element_type = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    return driver.active.utils.fill_tma_descriptor_tiled(
        address, meta["swizzle"], meta["elem_size"], element_type, meta["block_size"], shape, strides, 0
    )
