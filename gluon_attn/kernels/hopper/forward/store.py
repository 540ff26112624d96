"""How a softmax role stores its rows of O. docs/epilogues.md compares the ways there are."""

from channels import tma
from gluon_attn.runtime.compat import gl, jit

from ...common.pieces import from_column
from ...common.sequence import query_coords


@jit
def store_output(out, wires, operands, rows, q_slot, share, ROLE: gl.constexpr):
    """Through shared memory and by TMA, which clips the rows past the last. out: [ROWS, D] in O's dtype, registers; a
    tuple of its pieces.

    Staged in the role's own tiles of memory, or in those of Q, part `share` of q_slot's, which is then freed.
    """
    PIECES: gl.constexpr = len(out)
    if not wires.CONFIG.stage_in_queries:
        tma.wait_stores_read()  # of the row block before
    coords = query_coords(rows.block, rows.first)
    for i in gl.static_range(PIECES):
        if wires.CONFIG.stage_in_queries:
            staged = q_slot.part(share * wires.QK + i)
        else:
            staged = wires.output.index(ROLE * PIECES + i)
        staged.reshape(out[i].shape).store(out[i])
        tma.store_own(operands.o, from_column(coords, i * operands.o.block_shape[-1]), staged)
    if wires.CONFIG.stage_in_queries:
        tma.wait_stores_read()
        q_slot.release()
