"""How a softmax role stores its rows of O and LSE. There are three ways for O: docs/epilogues.md compares them."""

from channels import tma
from gluon_attn.runtime.compat import gl, jit

from ..layouts import rows_layout


@jit
def store_lse(lse, operands, tile, rows):
    """lse: [ROWS] fp32, in whatever layout. Nowhere, if nobody asked for it."""
    row = rows.first + gl.arange(0, rows.ROWS, lse.type.layout)
    head = (tile.batch * operands.q.shape[1] + tile.head).to(gl.int64)
    asked = operands.lse.to(gl.int64) != 0
    gl.store(operands.lse + head * rows.q_len + row, lse, mask=(row < rows.q_len) & asked)


@jit
def store_output(out, o_ptr, operands, wires, q_slot, part, tile, rows, ROLE: gl.constexpr):
    """out: [ROWS, D] in O's dtype, registers. Frees the tile of Q if O is staged there."""
    if wires.TILE.epilogue == "registers":
        store_rows(out, o_ptr, operands.o, tile, rows)
    else:
        if wires.TILE.stage_in_queries:
            staged = q_slot.part(part)
        else:
            staged = wires.output.index(ROLE)
        if wires.TILE.epilogue == "tma":
            if not wires.TILE.stage_in_queries:
                tma.wait_stores_read()  # of the tile before
            staged.reshape(out.shape).store(out)
            tma.store_own(operands.o, [tile.batch, tile.head, rows.first, 0], staged)
            if wires.TILE.stage_in_queries:
                tma.wait_stores_read()
                q_slot.release()
        else:
            staged.reshape(out.shape).store(out)
            in_rows = staged.reshape(out.shape).load(rows_layout(operands.o.layout, out.shape[1]))
            if wires.TILE.stage_in_queries:
                q_slot.release_accessed()
            store_rows(in_rows, o_ptr, operands.o, tile, rows)


@jit
def finish_stores(wires):
    """Before a role ends: what TMA stores of its own still read must not go away."""
    if wires.TILE.epilogue == "tma":
        tma.wait_stores_read()


@jit
def store_rows(out, o_ptr, desc, tile, rows):
    """From registers to global memory, in vectors as wide as `out` has neighbours in a thread. desc: O's, for its shape
    and strides."""
    layout: gl.constexpr = out.type.layout
    row = gl.arange(0, out.shape[0], gl.SliceLayout(1, layout))
    column = gl.arange(0, out.shape[1], gl.SliceLayout(0, layout))
    first = tile.batch * desc.strides[0] + tile.head * desc.strides[1] + rows.first * desc.strides[2]
    elements = first + row[:, None] * desc.strides[2] + column[None, :]
    # Strides and the head dim are multiples of 8, as TMA wants them: eight columns are stored together or not at all.
    elements = gl.max_contiguous(gl.multiple_of(elements, [1, 8]), [1, 8])
    inside = (row < rows.q_len - rows.first)[:, None] & (column // 8 < desc.shape[3] // 8)[None, :]
    gl.store(o_ptr + elements, out, mask=inside)
