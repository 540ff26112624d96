"""The gradients of attention on Hopper: the main one of two or three kernels, of warp-specialised roles. What one
launch of it computes, all or a part, says its config."""

from channels import close_all, init_all
from gluon_attn.runtime.compat import gdc_launch_dependents, gl, jit

from .finish import WARPS as FINISH_WARPS
from .finish import finish, finished_of
from .gradient import gradient
from .load import load
from .operands import Operands
from .reduce import reduce
from .wires import alloc_wires
from .work import order_of


@jit(do_not_specialize=["blocks_per_item", "last_heads", "heads_at_once", "shared", "shared_parts", "sequences"])
def attention_backward(
    q_desc,  # (B, H, Sq, D), blocks [1, 1, BLOCK_M, D]
    k_desc,  # (B, Hkv, Sk, D), blocks [1, 1, KEYS, D]
    v_desc,  # as k_desc
    do_desc,  # as q_desc
    dk_desc,  # as k_desc
    dv_desc,  # as k_desc
    lse_desc,  # (B, H, 1, R) fp32, blocks [1, 1, 1, BLOCK_M]; R: Sq rounded up to blocks
    delta_desc,  # as lse_desc
    dq_desc,  # (B, H, R * D / 32, 32) fp32, blocks [1, 1, BLOCK_M * D / 32, 32]
    # (B or 1, H or 1, Sq or 1, Sk): the bias of scores, blocks [1, 1, BLOCK_M or 1, KEYS]; or None.
    bias_desc,
    # As bias_desc, if that is of each row, blocks of rows that a slot of dQ has room for: its gradient; or None. If
    # SUMS_DBIAS fp32, 0 before, to be added to.
    dbias_desc,
    dq_pieces_desc,  # as q_desc, blocks [1, 1, ROWS, COLUMNS]: dQ, if this kernel makes it of its sums; or None
    sum_pieces_desc,  # as dq_desc, blocks [1, 1, SUM_ROWS, 32], likewise
    added_ptr,  # (B, H, blocks) int32: how many key blocks have added to a row block's dQ, or at least one
    handed_in_ptr,  # (shared_parts, 2, KEYS, D) fp32: dK and dV of key blocks that another part ends; None: shared is 0
    has_handed_in_ptr,  # (shared_parts) int32, or more: 1 once they are there; None: shared is 0
    dbias_ptr,  # (B or 1, H or 1, 1, Sk) fp32, contiguous, likewise of a bias that queries have in common; or None
    aux0_ptr,  # what SCORE_MOD reads; None where it reads less
    aux1_ptr,
    aux2_ptr,
    aux3_ptr,
    records_ptr,  # of packed sequences the key blocks, see packed.py; None: all have the descriptors' lengths
    done_ptr,  # (B, Hkv) int32, 0 before, likewise: of how many key blocks of a KV head all has been added
    cu_q_ptr,  # likewise, as `prepare_backward` has it
    claimed_ptr,  # (2,) int32, 0 before: how many items programs have claimed, by launch
    scale_log2,  # softmax scale times log2(e)
    scale,
    blocks_per_item,  # 1, or 2 for a key block that many queries see with one that few do
    last_heads,  # KV heads of which an item is one key block
    heads_at_once,  # of how many of these one key block follows the other
    shared,  # key blocks, the last ones, that are in parts
    shared_parts,  # parts that these are divided into
    sequences,  # that are packed
    MASK: gl.constexpr,  # a Mask
    SCORE_MOD: gl.constexpr,  # a ScoreFunction, or None
    CONFIG: gl.constexpr,  # a HopperBackward
    DETERMINISTIC: gl.constexpr,  # add up dQ in the order of the keys
    PIECES: gl.constexpr,  # of how many blocks side by side are Q, K and dK
    SUMS_DBIAS: gl.constexpr,  # several batches, heads or queries have one number of the bias in common
):
    gdc_launch_dependents()
    operands = Operands(
        q=q_desc,
        k=k_desc,
        v=v_desc,
        do=do_desc,
        dk=dk_desc,
        dv=dv_desc,
        lse=lse_desc,
        delta=delta_desc,
        dq=dq_desc,
        added=added_ptr,
        handed_in=(handed_in_ptr, has_handed_in_ptr),
        bias=(bias_desc, dbias_desc, dbias_ptr),
        finished=finished_of(dq_pieces_desc, sum_pieces_desc, done_ptr, (cu_q_ptr,), sequences),
        scale_log2=scale_log2,
        scale=scale,
        PIECES=PIECES,
        HAS_DK=CONFIG.has_dk,
        SUMS_DBIAS=SUMS_DBIAS,
    )
    order = order_of(
        q_desc,
        k_desc,
        blocks_per_item,
        last_heads,
        heads_at_once,
        shared,
        shared_parts,
        (aux0_ptr, aux1_ptr, aux2_ptr, aux3_ptr),
        (records_ptr,),
        claimed_ptr + (0 if CONFIG.has_dv else 1),
        MASK,
        SHARES=handed_in_ptr is not None,
        ROTATED=not DETERMINISTIC,
        SCORE_MOD=SCORE_MOD,
    )
    wires = alloc_wires(operands, order, CONFIG)
    init_all(wires.channels())
    FINISHES: gl.constexpr = len(operands.finished)
    gl.warp_specialize(
        [
            (gradient, (wires, order, operands)),
            (load, (wires, order, operands)),
            (reduce, (wires, order, operands, DETERMINISTIC)),
        ]
        + [(finish, (wires, order, operands))][:FINISHES],
        # Warps; the first role runs in the eight that the kernel was launched with. The others have one more warpgroup,
        # of which without finish two warps are idle.
        [1, 1] + [FINISH_WARPS][:FINISHES],
        [CONFIG.load_registers] * (2 + FINISHES),
    )
    close_all(wires.channels())
