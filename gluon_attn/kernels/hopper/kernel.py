"""Attention forward on Hopper: one persistent kernel of warp-specialised roles, on clusters of 1 or 2 CTAs."""

import functools
from typing import Any

import torch
from torch import Tensor

from gluon_attn.compat import CompiledKernel, compile_gluon, current_stream, gl, jit, launch
from gluon_attn.descriptors import View, descriptor_types
from gluon_attn.plan import Plan
from gluon_attn.tuning import TileConfig

from ..common.schedule import tile_schedule
from .roles import Operands, load, softmax
from .wires import alloc_wires


@jit(do_not_specialize=["blocks_per_item"])  # 1 and 2 are one kernel
def attention_forward(
    q_desc,  # (B, H, Sq, D), blocks [1, 1, ROWS, D], rows sharded over the CTAs of a cluster
    k_desc,  # (B, Hkv, Sk, D), blocks [1, 1, BLOCK_N, D], the same in every CTA
    v_desc,  # as k_desc
    o_desc,  # as q_desc
    lse_ptr,  # (B, H, Sq) fp32, contiguous
    scale_log2,  # softmax scale times log2(e)
    blocks_per_item,  # 1, or 2 to pair heavy row blocks with light ones
    CAUSAL: gl.constexpr,
    SOFTMAX_ROLES: gl.constexpr,
    QUERY_SLOTS: gl.constexpr,
    KV_SLOTS: gl.constexpr,
    TAKE_TURNS: gl.constexpr,
    STAGE_IN_QUERIES: gl.constexpr,
    SOFTMAX_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):
    BLOCK_M: gl.constexpr = SOFTMAX_ROLES * q_desc.block_shape[2]
    BLOCK_N: gl.constexpr = k_desc.block_shape[2]
    wires = alloc_wires(
        q_desc, k_desc, v_desc, o_desc, SOFTMAX_ROLES, QUERY_SLOTS, KV_SLOTS, TAKE_TURNS, STAGE_IN_QUERIES
    )
    schedule = tile_schedule(q_desc.shape, k_desc.shape, blocks_per_item, BLOCK_M, BLOCK_N, CAUSAL)
    wires.init()

    operands = Operands(q=q_desc, k=k_desc, v=v_desc, o=o_desc, lse=lse_ptr, scale_log2=scale_log2)

    gl.warp_specialize(
        [
            (softmax, (wires, schedule, operands, 0)),
            (softmax, (wires, schedule, operands, 1)),
            (softmax, (wires, schedule, operands, 2)),
            (softmax, (wires, schedule, operands, 3)),
        ][:SOFTMAX_ROLES]
        + [(load, (wires, schedule, operands))],
        [4] * (SOFTMAX_ROLES - 1) + [1],  # warps; the first role runs in the warps that the kernel was launched with
        [SOFTMAX_REGISTERS] * (SOFTMAX_ROLES - 1) + [LOAD_REGISTERS],
    )
    wires.close()


def constants_of(tile: TileConfig, causal: bool) -> dict[str, Any]:
    """The kernel's compile-time parameters."""
    return {
        "CAUSAL": causal,
        "SOFTMAX_ROLES": tile.softmax_roles,
        "QUERY_SLOTS": tile.query_slots,
        "KV_SLOTS": tile.kv_slots,
        "TAKE_TURNS": tile.take_turns,
        "STAGE_IN_QUERIES": tile.stage_in_queries,
        "SOFTMAX_REGISTERS": tile.softmax_registers,
        "LOAD_REGISTERS": tile.load_registers,
    }


@functools.lru_cache(maxsize=256)
def compiled(
    dtype: torch.dtype, padded_head_dim: int, causal: bool, tile: TileConfig, *, device_index: int | None = None
) -> CompiledKernel:
    """The kernel for these compile-time choices; the lengths, batches, heads and strides are arguments of the launch.

    device_index: the card to launch it on, as a compiled kernel is loaded on one. None: to look at only.
    """
    types = descriptor_types(dtype, padded_head_dim, tile)
    types |= {"lse_ptr": "*fp32", "scale_log2": "fp32", "blocks_per_item": "i32"}
    constants = constants_of(tile, causal)
    return compile_gluon(attention_forward, types, constants, arch=90, num_warps=4, num_ctas=tile.num_ctas)


class Launch:
    """A launch on a card, but for the tensors: what depends on shapes, strides and options. Keeps no tensor alive."""

    def __init__(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """The tensors are looked at for their shapes, strides and device only; `out` may be on the meta device."""
        problem, tile = plan.problem, plan.tile
        self.device_index = q.device.index
        self.kernel = compiled(
            problem.dtype, problem.padded_head_dim, problem.causal, tile, device_index=self.device_index
        )
        self.views = [View.of(t, problem) for t in (q, k, v, out)]
        self.programs = plan.programs
        constants = [None] * len(constants_of(tile, problem.causal))  # a launch takes a place for each, and no value
        self.scalars = [plan.scale_log2, plan.blocks_per_item, *constants]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        """Enqueue on the current stream of the tensors' device."""
        if self.device_index != torch.cuda.current_device():
            with torch.cuda.device(self.device_index):
                return self(q, k, v, out, lse)
        arguments: list[Any] = []
        for view, t, meta in zip(self.views, (q, k, v, out), self.kernel.metadata.tensordesc_meta, strict=True):
            arguments += view.arguments(t.data_ptr(), meta)
        arguments += (lse, *self.scalars)
        launch(self.kernel, self.programs, current_stream(self.device_index), arguments)
