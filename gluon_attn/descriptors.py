"""Tensors and a tile configuration to TMA descriptors."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .compat import encode_tma, gl
from .problem import Problem, in_bhsd
from .tuning import TileConfig

DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def rank4_cga_layout(cga_layout: tuple[tuple[int, int], ...], *, sharded: bool) -> list[list[int]]:
    """The CGA layout of a (batch, head, row, column) tile from that of a (rows, columns) tile.

    sharded: Q and O, rows split over the CTAs. Otherwise K and V: every CTA has all of it, which a zero basis says.
    """
    return [[0, 0, *(basis if sharded else (0, 0))] for basis in cga_layout]


def tile_layout(dtype: torch.dtype, tile: TileConfig, *, sharded: bool) -> Any:
    """The shared memory layout of a tile: 128-byte swizzle, as wgmma and TMA both read it without bank conflicts."""
    return gl.NVMMASharedLayout(
        swizzle_byte_width=128,
        element_bitwidth=dtype.itemsize * 8,
        rank=4,
        cga_layout=rank4_cga_layout(tile.cga_layout, sharded=sharded),
    )


def descriptor_types(dtype: torch.dtype, padded_head_dim: int, tile: TileConfig) -> dict[str, str]:
    """Triton's type of each descriptor parameter of the kernel."""

    def describe(rows: int, sharded: bool) -> str:
        layout = tile_layout(dtype, tile, sharded=sharded)
        return f"tensordesc<{DTYPE_NAMES[dtype]}[1,1,{rows},{padded_head_dim}],{layout!r}>"

    rows, keys = describe(tile.rows_per_role, sharded=True), describe(tile.block_n, sharded=False)
    return {"q_desc": rows, "k_desc": keys, "v_desc": keys, "o_desc": rows}


@dataclass(frozen=True)
class View:
    """A tensor as TMA sees it: shape and strides (elements) in the order (batch, head, sequence, head_dim)."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(t: Tensor, problem: Problem) -> "View":
        t = in_bhsd(t, problem.layout)
        # A dimension of size 1 may come with any stride, also one that TMA would refuse; it is never used.
        strides = (
            stride if size > 1 else t.shape[-1] for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True)
        )
        return View(tuple(t.shape), (*strides, 1))

    def arguments(self, address: int, meta: dict[str, Any]) -> tuple[Any, ...]:
        """What the kernel is passed for the tensor at `address`."""
        return (encode_tma(address, meta, list(self.shape), list(self.strides)), *self.shape, *self.strides)
