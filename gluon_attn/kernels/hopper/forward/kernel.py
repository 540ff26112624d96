"""Attention forward on Hopper: one persistent kernel of warp-specialised roles, on clusters of 1 or 2 CTAs."""

from gluon_attn.runtime.compat import gl, jit

from ...common.operands import Operands
from ...common.schedule import tile_schedule
from .load import load
from .softmax import softmax
from .transpose import transpose
from .wires import alloc_wires


@jit(do_not_specialize=["blocks_per_item", "heads_per_group"])  # 1 and 2 are one kernel
def attention_forward(
    q_desc,  # (B, H, Sq, D), blocks [1, 1, ROWS, D], rows sharded over the CTAs of a cluster
    k_desc,  # (B, Hkv, Sk, D), blocks [1, 1, BLOCK_N, D], the same in every CTA
    v_desc,  # as k_desc; in fp8 without a role that transposes: (B, Hkv, D, Sk up to 16), blocks [1, 1, D, BLOCK_N]
    o_desc,  # as q_desc
    o_ptr,  # O's memory, if TILE.epilogue stores not by TMA; else None
    lse_ptr,  # (B, H, Sq) fp32, contiguous; or null
    q_scale_ptr,  # (B, Hkv) fp32, contiguous, or null for 1, if q, k and v are in fp8; else None
    k_scale_ptr,
    v_scale_ptr,
    scale_log2,  # softmax scale times log2(e)
    blocks_per_item,  # 1, or 2 to pair heavy row blocks with light ones
    heads_per_group,  # of the last heads, how many are computed in turn under a mask, if TILE.longest_first
    CAUSAL: gl.constexpr,
    TILE: gl.constexpr,  # a HopperTile
):
    BLOCK_M: gl.constexpr = TILE.softmax_roles * q_desc.block_shape[2]
    BLOCK_N: gl.constexpr = k_desc.block_shape[2]
    wires = alloc_wires(q_desc, k_desc, v_desc, o_desc, TILE)
    LONGEST_FIRST: gl.constexpr = CAUSAL and TILE.longest_first
    schedule = tile_schedule(
        q_desc.shape, k_desc.shape, blocks_per_item, heads_per_group, BLOCK_M, BLOCK_N, CAUSAL, LONGEST_FIRST
    )
    wires.init()

    # Divided here: in the role that needs it, the compiler would have it live in registers through every role.
    group = q_desc.shape[1] // k_desc.shape[1]
    operands = Operands(q=q_desc, k=k_desc, v=v_desc, o=o_desc, lse=lse_ptr, scale_log2=scale_log2)

    TRANSPOSERS: gl.constexpr = 1 if TILE.transpose_registers > 0 else 0
    gl.warp_specialize(
        [
            (softmax, (wires, schedule, operands, o_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, 0)),
            (softmax, (wires, schedule, operands, o_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, 1)),
            (softmax, (wires, schedule, operands, o_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, 2)),
            (softmax, (wires, schedule, operands, o_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, 3)),
        ][: TILE.softmax_roles]
        + [(transpose, (wires, schedule, operands))][:TRANSPOSERS]
        + [(load, (wires, schedule, operands, group))],
        # Warps; the first role runs in the warps that the kernel was launched with.
        [4] * (TILE.softmax_roles - 1 + TRANSPOSERS) + [1],
        [TILE.softmax_registers] * (TILE.softmax_roles - 1)
        + [TILE.transpose_registers][:TRANSPOSERS]
        + [TILE.load_registers],
    )
    wires.close()
