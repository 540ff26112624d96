"""Attention forward on Blackwell: one persistent kernel of warp-specialised roles, on clusters of 1, 2 or 4 CTAs."""

from gluon_attn.runtime.compat import gl, jit

from ...common.operands import Operands
from ...common.schedule import tile_schedule
from .copies import load, store
from .correction import correction
from .mma import mma
from .softmax import softmax
from .wires import LANES, alloc_wires


@jit(do_not_specialize=["blocks_per_item", "heads_per_group"])  # 1 and 2 are one kernel
def attention_forward(
    q_desc,  # (B, H, Sq, D), blocks [1, 1, ROWS, D], rows sharded over the CTAs of a cluster
    k_desc,  # (B, Hkv, Sk, D), blocks [1, 1, BLOCK_N, D], rows sharded over the CTAs of a pair
    v_desc,  # as k_desc, but its columns sharded
    o_desc,  # as q_desc
    lse_ptr,  # (B, H, Sq) fp32, contiguous
    q_scale_ptr,  # (B, Hkv) fp32, contiguous, if q, k and v are in fp8; else None
    k_scale_ptr,
    v_scale_ptr,
    scale_log2,  # softmax scale times log2(e)
    blocks_per_item,  # 1, or 2 to pair heavy row blocks with light ones
    heads_per_group,  # heads whose row blocks are computed in turn, if TILE.longest_first
    CAUSAL: gl.constexpr,
    TILE: gl.constexpr,  # a BlackwellTile
):
    BLOCK_M: gl.constexpr = LANES * q_desc.block_shape[2]
    BLOCK_N: gl.constexpr = k_desc.block_shape[2]
    wires = alloc_wires(q_desc, k_desc, o_desc, TILE)
    schedule = tile_schedule(
        q_desc.shape, k_desc.shape, blocks_per_item, heads_per_group, BLOCK_M, BLOCK_N, CAUSAL, TILE.longest_first
    )
    operands = Operands(q=q_desc, k=k_desc, v=v_desc, o=o_desc, lse=lse_ptr, scale_log2=scale_log2)
    wires.init()

    gl.warp_specialize(
        [
            (correction, (wires, schedule, operands, q_scale_ptr, k_scale_ptr, v_scale_ptr, TILE)),
            (softmax, (wires, schedule, operands, q_scale_ptr, k_scale_ptr, 0, TILE)),
            (softmax, (wires, schedule, operands, q_scale_ptr, k_scale_ptr, 1, TILE)),
            (mma, (wires, schedule, operands, TILE)),
            (load, (wires, schedule, operands, TILE)),
            (store, (wires, schedule, operands, TILE)),
        ],
        [4, 4, 1, 1, 1],  # warps; the first role runs in the warps that the kernel was launched with
        [TILE.softmax_registers, TILE.softmax_registers] + [TILE.load_registers] * 3,
    )
    wires.close()
