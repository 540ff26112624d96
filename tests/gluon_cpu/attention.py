"""The project's Hopper kernel on the machine, as gluon_attn launches it on a card."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

import gluon_cpu
from gluon_attn.cpu import launch_arguments
from gluon_attn.device import Device
from gluon_attn.kernels.common.inline_asm import round_pair_asm, round_pair_twin
from gluon_attn.kernels.hopper.kernel import attention_forward
from gluon_attn.plan import Plan
from gluon_attn.problem import Problem
from gluon_attn.tuning import TileConfig, pick_tile
from tests.gluon_cpu.compat import gl


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
        if programs is not None:
            device = dataclasses.replace(device, sm_count=programs * tile.num_ctas)
        plan = Plan.of(problem, tile, device)
        self.out = torch.empty_like(q)
        self.lse = torch.empty(problem.batch, problem.heads, problem.q_len, dtype=torch.float32)
        self.grid = (plan.programs,)
        self.arguments, self.options = launch_arguments(plan, q, k, v, self.out, self.lse)

    def __call__(self, **options: Any) -> Any:
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))
        return gluon_cpu.launch(
            attention_forward, self.grid, *self.arguments, target="sm_90a", **self.options, **options
        )


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
