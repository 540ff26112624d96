"""Attention forward on Hopper: one persistent kernel of warp-specialised roles, on clusters of 1 or 2 CTAs."""

from channels import close_all, init_all
from gluon_attn.runtime.compat import gdc_wait, gl, jit

from ...common.mask_mod import found_before
from ...common.operands import Operands
from ...common.sizes import Lengths, counts_of
from .load import load
from .softmax import softmax
from .transpose import transpose
from .wires import alloc_wires
from .work import Order


@jit(do_not_specialize=["blocks_per_item", "last_heads"])  # 1 and 2 are one kernel
def attention_forward(
    q_desc,  # (B, H, Sq, D), blocks [1, 1, ROWS, D or a piece of it], rows sharded over the CTAs of a cluster
    k_desc,  # (B, Hkv, Sk, D), blocks [1, 1, BLOCK_N, as q_desc], the same in every CTA
    # As k_desc, of Dv; in fp8 without a role that transposes: (B, Hkv, Dv, Sk up to 16), blocks [1, 1, D, BLOCK_N].
    v_desc,
    o_desc,  # (B, H, Sq, Dv), as q_desc
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
    last_heads,  # of the last heads, how many are computed together, if CONFIG.last_heads_longest_first
    MASK: gl.constexpr,  # a Mask
    SCORE_MOD: gl.constexpr,  # a ScoreFunction, or None
    CONFIG: gl.constexpr,  # a HopperConfig
    PIECES: gl.constexpr,  # of how many blocks side by side are Q and K, and of how many V
):
    BLOCK_M: gl.constexpr = CONFIG.softmax_roles * q_desc.block_shape[-2]
    BLOCK_N: gl.constexpr = k_desc.block_shape[-2]
    wires = alloc_wires(q_desc, k_desc, v_desc, o_desc, (bias_desc,), CONFIG, PIECES)
    aux = (aux0_ptr, aux1_ptr, aux2_ptr, aux3_ptr)
    lengths = Lengths(q_desc.shape[2], k_desc.shape[2], BLOCK_M, BLOCK_N, MASK, SCORE_MOD, aux, (records_ptr,))
    order = Order(
        counts=counts_of(q_desc.shape, lengths),
        blocks_per_item=blocks_per_item,
        last_heads=last_heads,
        lengths=lengths,
        LONGEST_FIRST=CONFIG.last_heads_longest_first and MASK.hides_late_keys,
    )
    init_all(wires.channels())
    if found_before(MASK):  # what each role asks first: the kernel before made it
        gdc_wait()

    # Divided here: in the role that needs it, the compiler would have it live in registers through every role.
    heads_per_kv_head = q_desc.shape[1] // k_desc.shape[1]
    scales = (q_scale_ptr, k_scale_ptr, v_scale_ptr)
    operands = Operands(
        q=q_desc, k=k_desc, v=v_desc, o=o_desc, lse=lse_ptr, scale_log2=scale_log2, sinks=(sinks_ptr,), scales=scales
    )

    TRANSPOSERS: gl.constexpr = 1 if CONFIG.transpose_registers > 0 else 0
    gl.warp_specialize(
        [
            (softmax, (wires, order, operands, 0)),
            (softmax, (wires, order, operands, 1)),
            (softmax, (wires, order, operands, 2)),
            (softmax, (wires, order, operands, 3)),
        ][: CONFIG.softmax_roles]
        + [(transpose, (wires, order, operands))][:TRANSPOSERS]
        + [(load, (wires, order, operands, heads_per_kv_head))],
        # Warps; the first role runs in the warps that the kernel was launched with.
        [4] * (CONFIG.softmax_roles - 1 + TRANSPOSERS) + [1],
        [CONFIG.softmax_registers] * (CONFIG.softmax_roles - 1)
        + [CONFIG.transpose_registers][:TRANSPOSERS]
        + [CONFIG.load_registers],
    )
    close_all(wires.channels())
