"""Register layouts of the Hopper kernel, derived from the descriptors."""

from gluon_attn.runtime.compat import constexpr_function, gl


@constexpr_function
def accumulator_layout(desc_layout, columns, element_bits):
    """Layout of a wgmma accumulator [rows, columns], a warpgroup per CTA, rows sharded over CTAs as in `desc_layout`.

    An accumulator has the last two of the descriptor's dimensions, row and column.
    """
    cga_layout = [list(basis[-2:]) for basis in desc_layout.cga_layout]
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // element_bits], cga_layout)


@constexpr_function
def left_operand_layout(accumulator, element_bits):
    """Layout in which a tensor of `accumulator`'s family feeds wgmma from registers as its left operand."""
    return gl.DotOperandLayout(operand_index=0, parent=accumulator, k_width=32 // element_bits)


@constexpr_function
def key_major_layout(block_n, cga_layout):
    """Shared memory layout of V transposed, [D, BLOCK_N] in 8 bits, the same in every CTA."""
    return gl.NVMMASharedLayout(min(128, block_n), 8, 2, cga_layout=[[0, 0] for _ in cga_layout])


@constexpr_function
def scores_layout(accumulator, columns):
    """`accumulator`, of O, with as many columns as a block of keys."""
    instr_shape = [accumulator.instr_shape[0], columns, accumulator.instr_shape[2]]
    return gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape, accumulator.cga_layout)
