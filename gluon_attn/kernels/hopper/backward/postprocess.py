"""After the gradients: dQ from the fp32 sums, scaled, in its rows and in its dtype."""

from channels import tma
from gluon_attn.runtime.compat import gdc_wait, gl, jit

from ...common.pieces import from_column
from ...common.sequence import RowBlock, query_coords, whole_sequence
from .layouts import in_row_order
from .packed import queries_of_block, row_blocks_of


@jit(do_not_specialize=["sequences"])
def finish_backward(
    out_desc,  # (B, H, Sq, D): dQ, blocks [1, 1, BLOCK_M, D]
    dq_ptr,  # (B, H, R * D / 32, 32) fp32, contiguous; R: Sq rounded up to blocks
    added_ptr,  # of packed sequences, (1, H, blocks) int32: 0 where nobody has added, whose dQ is 0; else None
    cu_q_ptr,  # as `prepare_backward` has it
    scale,
    sequences,
    PARTS: gl.constexpr,  # of dQ's columns, which lie one after the other
    PIECES: gl.constexpr,  # of how many blocks side by side is dQ: of one, or of as many as PARTS
):
    """One program for each row block of each head."""
    BLOCK_M: gl.constexpr = out_desc.block_shape[-2]
    D: gl.constexpr = out_desc.block_shape[-1] * PIECES
    ELEMENTS: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    q_rows = out_desc.shape[2]
    no_keys = gl.to_tensor(0)
    if cu_q_ptr is None:
        blocks = (q_rows + BLOCK_M - 1) // BLOCK_M
        block, all_head = gl.program_id(0) % blocks, gl.program_id(0) // blocks
        batch, head = all_head // out_desc.shape[1], all_head % out_desc.shape[1]
        rows = RowBlock(batch, head, block * BLOCK_M, whole_sequence(q_rows, no_keys))
    else:
        blocks = row_blocks_of(q_rows, sequences, BLOCK_M)
        block, head = gl.program_id(0) % blocks, gl.program_id(0) // blocks
        rows = queries_of_block(block, head, cu_q_ptr, sequences, q_rows, BLOCK_M)
    gdc_wait()
    first = gl.program_id(0).to(gl.int64) * (BLOCK_M * D)
    COLUMNS: gl.constexpr = D // PARTS
    tiles = gl.allocate_shared_memory(out_desc.dtype, [PIECES] + out_desc.block_shape, out_desc.layout)
    for part in gl.static_range(PARTS):
        element = part * (BLOCK_M * COLUMNS) + gl.arange(0, BLOCK_M * COLUMNS, ELEMENTS)
        dq = gl.load(dq_ptr + first + element)
        if added_ptr is not None:
            dq = gl.where(gl.load(added_ptr + gl.program_id(0)) == 0, 0.0, dq)
        dq = in_row_order(dq.reshape([BLOCK_M * COLUMNS // 32, 32]), BLOCK_M, COLUMNS) * scale
        tile = tiles.index(part * PIECES // PARTS).reshape([BLOCK_M, D // PIECES])
        tile.slice(part * COLUMNS % (D // PIECES), COLUMNS, dim=1).store(dq.to(out_desc.dtype))
    coords = query_coords(rows, rows.first_row)
    for i in gl.static_range(PIECES):
        tma.store_own(out_desc, from_column(coords, i * (D // PIECES)), tiles.index(i))
    tma.wait_stores_read()
