"""Attention forward on Blackwell: one persistent kernel of warp-specialised roles, on clusters of 1, 2 or 4 CTAs."""

from channels import close_all, init_all
from gluon_attn.runtime.compat import gdc_wait, gl, jit

from ...common.mask_mod import found_before
from ...common.operands import Operands
from ...common.sizes import Lengths, counts_of
from .copies import load, store
from .correction import correction
from .mma import mma
from .softmax import softmax
from .wires import QUERY_TILES, alloc_wires
from .work import Order


@jit(do_not_specialize=["blocks_per_item", "l2_heads"])  # 1 and 2 are one kernel
def attention_forward(
    q_desc,  # (B, H, Sq, D), blocks [1, 1, ROWS, D or a piece of it], rows sharded over the CTAs of a cluster
    k_desc,  # (B, Hkv, Sk, D), blocks [1, 1, BLOCK_N, as q_desc], rows sharded over the CTAs of a pair
    v_desc,  # (B, Hkv, Sk, Dv), blocks [1, 1, BLOCK_N, Dv], columns sharded
    o_desc,  # (B, H, Sq, Dv), blocks [1, 1, ROWS, Dv], as q_desc
    # (B or 1, H or 1, Sq or 1, Sk), what is added to scores, blocks [1, 1, ROWS or 1, BLOCK_N]; or None.
    bias_desc,
    lse_ptr,  # (B, H, Sq) fp32, contiguous; or null
    q_scale_ptr,  # (B, Hkv) fp32, contiguous, or null for 1, if q, k and v are in fp8; else None
    k_scale_ptr,
    v_scale_ptr,
    sinks_ptr,  # (H,), contiguous: of each head a score without a value; None: there are none
    aux0_ptr,  # what SCORE_MOD reads; None where it reads less
    aux1_ptr,
    aux2_ptr,
    aux3_ptr,
    records_ptr,  # of packed sequences the row blocks, see packed.py; None: all sequences have the descriptors' lengths
    scale_log2,  # softmax scale times log2(e)
    blocks_per_item,  # 1, or 2 for a heavy row block with a light one
    l2_heads,  # heads whose K and V have room in L2 together; those with most keys come first, if CONFIG.longest_first
    MASK: gl.constexpr,  # a Mask
    SCORE_MOD: gl.constexpr,  # a ScoreFunction, or None
    CONFIG: gl.constexpr,  # a BlackwellConfig
    PIECES: gl.constexpr,  # of how many blocks side by side are Q and K, and of how many V: of one
):
    BLOCK_M: gl.constexpr = QUERY_TILES * q_desc.block_shape[-2]
    BLOCK_N: gl.constexpr = k_desc.block_shape[-2]
    wires = alloc_wires(q_desc, k_desc, v_desc, o_desc, (bias_desc,), CONFIG, PIECES[0])
    aux = (aux0_ptr, aux1_ptr, aux2_ptr, aux3_ptr)
    lengths = Lengths(q_desc.shape[2], k_desc.shape[2], BLOCK_M, BLOCK_N, MASK, SCORE_MOD, aux, (records_ptr,))
    counts = counts_of(q_desc.shape, lengths)
    order = Order(
        counts=counts,
        all_row_blocks=counts.all_heads * counts.row_blocks,
        blocks_per_item=blocks_per_item,
        l2_heads=l2_heads,
        lengths=lengths,
        LONGEST_FIRST=CONFIG.longest_first,
    )
    scales = (q_scale_ptr, k_scale_ptr, v_scale_ptr)
    operands = Operands(
        q=q_desc, k=k_desc, v=v_desc, o=o_desc, lse=lse_ptr, scale_log2=scale_log2, sinks=(sinks_ptr,), scales=scales
    )
    init_all(wires.channels())
    if found_before(MASK):  # by the kernel before, what each role asks first
        gdc_wait()

    gl.warp_specialize(
        [
            (correction, (wires, order, operands)),
            (softmax, (wires, order, operands, 0)),
            (softmax, (wires, order, operands, 1)),
            (mma, (wires, order, operands)),
            (load, (wires, order, operands)),
            (store, (wires, order, operands)),
        ],
        [4, 4, 1, 1, 1],  # warps; the first role runs in the warps that the kernel was launched with
        [CONFIG.softmax_registers, CONFIG.softmax_registers] + [CONFIG.load_registers] * 3,
    )
    # Both memories too are kept to the end of the whole cluster: a peer may load into, or accumulate in, what is ours.
    close_all(wires.channels())
