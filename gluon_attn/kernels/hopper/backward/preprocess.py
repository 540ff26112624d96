"""Before the gradients: the statistics of each row."""

from channels import SharedMemoryChannel, close_all, init_all, tma
from gluon_attn.runtime.compat import gdc_launch_dependents, gdc_wait, gl, jit

from ...common.score_mod import LOG2_E
from ...common.sequence import RowBlock, query_coords, whole_sequence
from .packed import queries_of_block, row_blocks_of

MOST_SHARED_PARTS = gl.constexpr(256)  # parts, at most, that shared key blocks are divided into


@jit(do_not_specialize=["sets_zero", "sequences"])
def prepare_backward(
    out_desc,  # (B, H, Sq, D): O, blocks [1, 1, BLOCK_M, D]
    do_desc,  # as out_desc: dO
    lse_ptr,  # (B, H, Sq) fp32, contiguous: natural logarithm
    dlse_ptr,  # as lse_ptr: the gradient of LSE; or null
    lse_log2_ptr,  # (B, H, 1, R) fp32, contiguous, to be written; R: Sq rounded up to blocks
    delta_ptr,  # as lse_log2_ptr
    dq_ptr,  # (B, H, R * D / 32, 32) fp32, contiguous: set to 0 if sets_zero
    added_ptr,  # (B, H, blocks) int32, contiguous, to be set to 0: nobody has added to a row block's dQ
    has_handed_in_ptr,  # (MOST_SHARED_PARTS) int32, to be set to 0; or None
    claimed_ptr,  # (2,) int32, to be set to 0
    done_ptr,  # (B, H) int32, of which B Hkv are used, to be set to 0; or None
    cu_q_ptr,  # of packed sequences, as `list_key_blocks` has it; else None
    sets_zero,  # 1 if there are row blocks that see no key, to whose dQ nobody will add
    sequences,  # that are packed
    DQ: gl.constexpr,  # of a row block's dQ: how many pieces of how many columns
):
    """One program for each row block of each head: delta = rowsum(dO * O) - dLSE; LSE in base 2.

    LSE is +inf, so that every P is 0, in a row that is beyond the last or sees no key. R of packed sequences: those of
    each, rounded up to blocks, and some more.
    """
    gdc_launch_dependents()  # the next kernel begins where this leaves room, and waits only before it needs this one's
    BLOCK_M: gl.constexpr = out_desc.block_shape[-2]
    D: gl.constexpr = out_desc.block_shape[-1]
    ROWS_AND_COLUMNS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, ROWS_AND_COLUMNS)
    loaded = SharedMemoryChannel.alloc((out_desc, do_desc), SLOTS=1, CONSUMERS=1)
    init_all((loaded,))

    q_rows = out_desc.shape[2]
    if cu_q_ptr is None:
        q_len = q_rows
        blocks = (q_len + BLOCK_M - 1) // BLOCK_M
        block, all_head = gl.program_id(0) % blocks, gl.program_id(0) // blocks
        batch, head = all_head // out_desc.shape[1], all_head % out_desc.shape[1]
        no_keys = gl.to_tensor(0)
        rows = RowBlock(batch, head, block * BLOCK_M, whole_sequence(q_len, no_keys))
        first_source = all_head.to(gl.int64) * q_len
    else:
        blocks = row_blocks_of(q_rows, sequences, BLOCK_M)
        block, head = gl.program_id(0) % blocks, gl.program_id(0) // blocks
        rows = queries_of_block(block, head, cu_q_ptr, sequences, q_rows, BLOCK_M)
        q_len = gl.where(rows.batch < sequences, rows.sequence.q_len, 0)  # LSE after the last one is nobody's
        first_source = head.to(gl.int64) * q_rows + rows.sequence.q_first
    coords = query_coords(rows, rows.first_row)
    slot, _ = loaded.producer().acquire()
    tma.load(slot, (out_desc, do_desc), (coords, coords))

    gl.store(added_ptr + gl.program_id(0), 0)
    if done_ptr is not None:  # noqa: SIM102 - known when the kernel is compiled, unlike the next
        if block == 0:
            gl.store(done_ptr + gl.program_id(0) // blocks, 0)
    if gl.program_id(0) == 0:
        gl.store(claimed_ptr, 0)
        gl.store(claimed_ptr + 1, 0)
    if has_handed_in_ptr is not None:  # noqa: SIM102 - known when the kernel is compiled, unlike the next
        if gl.program_id(0) == 0:
            each = gl.arange(0, MOST_SHARED_PARTS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
            gl.store(has_handed_in_ptr + each, gl.zeros_like(each))
    if sets_zero:
        PIECES: gl.constexpr = DQ[0]
        SIZE: gl.constexpr = BLOCK_M * DQ[1]
        zero_at = gl.program_id(0).to(gl.int64) * (SIZE * PIECES)
        ELEMENTS: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
        zeros = gl.zeros([SIZE], gl.float32, ELEMENTS)
        for i in gl.static_range(PIECES):
            gl.store(dq_ptr + zero_at + i * SIZE + gl.arange(0, SIZE, ELEMENTS), zeros)
    row = gl.arange(0, BLOCK_M, ROW)
    inside = rows.first_row + row < q_len
    source = first_source + rows.first_row + row
    lse = gl.load(lse_ptr + source, mask=inside, other=float("-inf"))
    asked = dlse_ptr.to(gl.int64) != 0
    dlse = gl.load(dlse_ptr + source, mask=inside & asked, other=0.0)
    seen = lse != float("-inf")

    slot, _ = loaded.consumer().acquire()  # filled once, and so never released
    out = slot.view([BLOCK_M, D], part=0).load(ROWS_AND_COLUMNS)
    do = slot.view([BLOCK_M, D], part=1).load(ROWS_AND_COLUMNS)
    delta = gl.sum(out.to(gl.float32) * do.to(gl.float32), axis=1) - dlse
    target = gl.program_id(0).to(gl.int64) * BLOCK_M + row
    gl.store(lse_log2_ptr + target, gl.where(seen, lse * LOG2_E, float("inf")))
    gl.store(delta_ptr + target, gl.where(seen, delta, 0.0))
    if cu_q_ptr is not None:
        gdc_wait()  # who waits for this kernel has waited for the list, too
    close_all((loaded,))
