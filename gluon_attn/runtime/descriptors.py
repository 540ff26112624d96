"""Tensors and a tile configuration to TMA descriptors."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..forward.configs import Bases, TileConfig
from ..forward.plan import TRANSPOSE_BLOCK_N
from ..problem import in_bhsd, output_dtype
from .compat import gl
from .launcher import encode_tma

DTYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
OPERANDS: tuple[Literal["q", "k", "v", "o"], ...] = ("q", "k", "v", "o")
MAX_SWIZZLE_BYTES = 128
KEYS_MULTIPLE = 16  # of V transposed: a row of it is a multiple of 16 bytes, and keys change places among 16


def rank4_cga_layout(cga_layout: Bases) -> list[list[int]]:
    """The CGA layout of a (batch, head, row, column) tile from that of a (rows, columns) tile."""
    return [[0, 0, *basis] for basis in cga_layout]


def tile_layout(element_bytes: int, padded_head_dim: int, cga_layout: Bases) -> Any:
    """The shared memory layout of a tile: as wide a swizzle as a CTA's rows of it allow, at most the 128 bytes at which
    tensor cores and TMA read it without bank conflicts."""
    splits = 2 ** sum(columns != 0 for _, columns in cga_layout)
    return gl.NVMMASharedLayout(
        swizzle_byte_width=min(MAX_SWIZZLE_BYTES, padded_head_dim * element_bytes // splits),
        element_bitwidth=element_bytes * 8,
        rank=4,
        cga_layout=rank4_cga_layout(cga_layout),
    )


def block_and_layout(
    name: Literal["q", "k", "v", "o"], dtype: torch.dtype, padded_head_dim: int, tile: TileConfig
) -> tuple[torch.dtype, list[int], Any]:
    """(dtype, block shape, shared memory layout) of the descriptor of that tensor; `dtype` is that of q, k and v."""
    rows, cga_layout = tile.operand(name)
    own = output_dtype(dtype) if name == "o" else dtype
    shape = [rows, padded_head_dim]
    if name == "v" and tile.transposes_before(dtype.itemsize):
        shape.reverse()
    return own, [1, 1, *shape], tile_layout(own.itemsize, shape[1], cga_layout)


def descriptor_types(dtype: torch.dtype, padded_head_dim: int, tile: TileConfig) -> dict[str, str]:
    """Triton's type of each descriptor parameter of the kernel."""
    return {f"{name}_desc": type_name(*block_and_layout(name, dtype, padded_head_dim, tile)) for name in OPERANDS}


def type_name(dtype: torch.dtype, block: list[int], layout: Any) -> str:
    return f"tensordesc<{DTYPE_NAMES[dtype]}[{','.join(map(str, block))}],{layout!r}>"


def transposition_blocks(dtype: torch.dtype, padded_head_dim: int) -> dict[str, Any]:
    """As `block_and_layout`, of both descriptors of the kernel that transposes V."""
    blocks = {"v_desc": [TRANSPOSE_BLOCK_N, padded_head_dim], "out_desc": [padded_head_dim, TRANSPOSE_BLOCK_N]}
    return {name: (dtype, [1, 1, *b], tile_layout(dtype.itemsize, b[1], ())) for name, b in blocks.items()}


def empty_transposed(v: Tensor, layout: str) -> Tensor:
    """Memory for V transposed: (B, Hkv, D, Sk rounded up)."""
    batch, heads, keys, head_dim = in_bhsd(v, layout).shape
    return torch.empty(
        (batch, heads, head_dim, -(-keys // KEYS_MULTIPLE) * KEYS_MULTIPLE), dtype=v.dtype, device=v.device
    )


@dataclass(frozen=True)
class View:
    """A tensor as TMA sees it: shape and strides (elements) in the order (batch, head, sequence, head_dim)."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(t: Tensor, layout: str = "bhsd") -> "View":
        t = in_bhsd(t, layout)
        # A dimension of size 1 may come with any stride, also one that TMA would refuse; it is never used.
        strides = (
            stride if size > 1 else t.shape[-1] for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True)
        )
        return View(tuple(t.shape), (*strides, 1))

    def arguments(self, address: int, meta: dict[str, Any]) -> tuple[Any, ...]:
        """What the kernel is passed for the tensor at `address`."""
        return (encode_tma(address, meta, list(self.shape), list(self.strides)), *self.shape, *self.strides)
