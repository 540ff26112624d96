"""Register layouts of the Hopper backward, whose compute role is two warpgroups, and the order of dQ in memory."""

from gluon_attn.runtime.compat import constexpr_function, gl, jit

WARPS = gl.constexpr(8)


@constexpr_function
def accumulator_layout(rows, columns):
    """Of a product [rows, columns]: each warpgroup has 64 of 128 rows, or of 64 rows half of the columns."""
    if rows == 64:
        return gl.NVMMADistributedLayout([3, 0], [4, 2], [16, columns // 2, 16])
    return gl.NVMMADistributedLayout([3, 0], [8, 1], [16, columns, 16])


@constexpr_function
def left_operand_layout(accumulator):
    """In which 16-bit values, computed in that accumulator's layout, are a left operand in registers."""
    return gl.DotOperandLayout(operand_index=0, parent=accumulator, k_width=2)


@jit
def in_register_order(dq):
    """dQ [BLOCK_M, D] fp32, an accumulator, as [BLOCK_M * D / 32, 32]: a thread's neighbouring registers side by side.

    So it is written to shared memory 16 bytes at a time and without bank conflicts, unlike rows of D elements.
    Element (m, n) of a warp's 16 rows: m = 8 i + r, n = 8 g + 2 t + e, for thread 4 r + t. In memory: (g, r, t, i, e),
    and before these the warp; of 64 rows, first of all the half of the columns.
    """
    BLOCK_M: gl.constexpr = dq.shape[0]
    D: gl.constexpr = dq.shape[1]
    if BLOCK_M == 64:
        view = dq.reshape([4, 2, 8, 2, D // 16, 4, 2]).permute((3, 0, 4, 2, 5, 1, 6))
    else:
        view = dq.reshape([BLOCK_M // 16, 2, 8, D // 8, 4, 2]).permute((0, 3, 2, 4, 1, 5))
    return view.reshape([BLOCK_M * D // 32, 32])


@jit
def in_row_order(x, BLOCK_M: gl.constexpr, D: gl.constexpr):
    """What `in_register_order` made, as [BLOCK_M, D] again."""
    if BLOCK_M == 64:
        view = x.reshape([2, 4, D // 16, 8, 4, 2, 2]).permute((1, 5, 3, 0, 2, 4, 6))
    else:
        view = x.reshape([BLOCK_M // 16, D // 8, 8, 4, 2, 2]).permute((0, 4, 2, 1, 3, 5))
    return view.reshape([BLOCK_M, D])
