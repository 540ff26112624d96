"""The project's Hopper kernel on the machine, as gluon_attn launches it on a card."""

import math
from typing import Any

import torch
from torch import Tensor

import gluon_cpu
from gluon_attn.descriptors import View, tile_layout
from gluon_attn.device import Device
from gluon_attn.kernels.common.inline_asm import round_pair_asm, round_pair_twin
from gluon_attn.kernels.hopper.kernel import attention_forward, constants_of
from gluon_attn.problem import Problem
from gluon_attn.tuning import TileConfig, pick_tile
from tests.gluon_cpu.compat import TensorDescriptor, gl, jit

# gluon_attn gives the compiler the types of all arguments; a launch would make a constant of a 1.
kernel = jit(attention_forward.fn, do_not_specialize=["blocks_per_item"])


def register_assembly() -> None:
    """The kernel's one piece of inline assembly, for both element types."""
    import ml_dtypes
    import numpy as np

    def bf16(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return round_pair_twin(low, high, np.dtype(ml_dtypes.bfloat16))

    def fp16(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return round_pair_twin(low, high, np.dtype(np.float16))

    gluon_cpu.register_asm(round_pair_asm(gl.bfloat16), bf16)
    gluon_cpu.register_asm(round_pair_asm(gl.float16), fp16)


register_assembly()


class Run:
    """A launch of attention, ready to be repeated: outputs are poisoned before each."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        num_ctas: int = 1,
        tile: TileConfig | None = None,
        programs: int | None = None,
    ) -> None:
        """programs: of the persistent grid, at most one for each item; default: as many as an H200 would have."""
        self.q, self.k, self.v, self.causal = q, k, v, causal
        problem = Problem.of(q, k, v, causal=causal)
        device = Device.hopper()
        tile = pick_tile(problem, device, num_ctas) if tile is None else tile
        self.out = torch.empty_like(q)
        self.lse = torch.empty(problem.batch, problem.heads, problem.q_len, dtype=torch.float32)

        available = device.sm_count // tile.num_ctas if programs is None else programs
        row_blocks = -(-problem.q_len // tile.block_m)
        blocks_per_item = 2 if causal and problem.batch * problem.heads * row_blocks > available else 1
        self.grid = (min(available, problem.batch * problem.heads * -(-row_blocks // blocks_per_item)),)

        def describe(t: Tensor, rows: int, sharded: bool) -> TensorDescriptor:
            view = View.of(t, problem)
            block = [1, 1, rows, problem.padded_head_dim]
            layout = tile_layout(problem.dtype, tile, sharded=sharded)
            return TensorDescriptor(t, list(view.shape), list(view.strides), block, layout)

        self.arguments: list[Any] = [
            describe(q, tile.rows_per_role, True),
            describe(k, tile.block_n, False),
            describe(v, tile.block_n, False),
            describe(self.out, tile.rows_per_role, True),
            self.lse,
            problem.scale * math.log2(math.e),
            blocks_per_item,
        ]
        self.options = constants_of(tile, causal) | {"num_warps": 4, "num_ctas": tile.num_ctas}

    def __call__(self, **options: Any) -> Any:
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))
        return gluon_cpu.launch(kernel, self.grid, *self.arguments, target="sm_90a", **self.options, **options)


def normal_qkv(
    *,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int | None = None,
    q_len: int,
    kv_len: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(h: int, s: int) -> Tensor:
        return torch.randn(batch, h, s, head_dim, generator=generator).to(dtype)

    kv_heads = heads if kv_heads is None else kv_heads
    kv_len = q_len if kv_len is None else kv_len
    return normal(heads, q_len), normal(kv_heads, kv_len), normal(kv_heads, kv_len)
