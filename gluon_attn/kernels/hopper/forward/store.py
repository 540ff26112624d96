"""How a softmax role stores its rows of O. docs/epilogues.md compares the ways there are."""

from channels import tma
from gluon_attn.runtime.compat import gl, jit

from ...common.sequence import query_coords


@jit
def store_output(out, wires, operands, rows, q_slot, share, ROLE: gl.constexpr):
    """Through shared memory and by TMA, which clips the rows past the last. out: [ROWS, D] in O's dtype, registers.

    Staged in the role's own tile of memory, or in its tile of Q, part `share` of q_slot, which is then freed.
    """
    if wires.CONFIG.stage_in_queries:
        staged = q_slot.part(share)
    else:
        staged = wires.output.index(ROLE)
        tma.wait_stores_read()  # of the row block before
    staged.reshape(out.shape).store(out)
    tma.store_own(operands.o, query_coords(rows.block, rows.first), staged)
    if wires.CONFIG.stage_in_queries:
        tma.wait_stores_read()
        q_slot.release()
