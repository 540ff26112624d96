"""Tensor memory: what is in which columns. All aliasing of the kernel is in this file.

A CTA has 128 lanes of 512 columns of 32 bits. A lane is a row of a query tile: each of the CTA's two has its
128 rows in all of them. With BLOCK_N = D = 128 every column is taken:

    0                     128                   256         384         512
    | scores of query     | scores of query     | output 0  | output 1  |
    | tile 0              | tile 1              |           |           |

and over the scores of a query tile, once the softmax role has them in registers, it writes what it makes of them:

    0               BLOCK_N / 2                                         BLOCK_N
    | S: BLOCK_N scores, fp32                                           |
    | P, 16 bits    | alpha | max | sum |  free                         |
    | P, 8 |  free  | alpha | max | sum |  free                         |

Why that is safe:
  P over S       the products' role multiplies with P when the softmax role has freed the slot, and writes the next S
                 into it with the next product it issues: the tensor cores take products in order.
  alpha over S   the correction role reads it before it frees the output for the product with P: as above.
  max, sum       are written after the last block; the products' role waits for `statistics_read` before the next row
                 block.
"""

from gluon_attn.runtime.compat import TensorMemoryLayout, constexpr_function, gl, jit

ROWS_PER_CTA = gl.constexpr(128)  # lanes of tensor memory

# Columns of the row statistics, after P.
ALPHA = gl.constexpr(0)
MAX = gl.constexpr(1)
SUM = gl.constexpr(2)


@constexpr_function
def accumulator_layout(desc_layout, columns):
    """Of an accumulator [rows, columns], its rows sharded over CTAs as in `desc_layout`, that of the queries.

    The last two dimensions of the descriptor are row and column. More than one CTA: pairs, whose lead issues for both.
    """
    cga_layout = [list(basis[-2:]) for basis in desc_layout.cga_layout]
    return TensorMemoryLayout(
        (ROWS_PER_CTA.value, columns), col_stride=1, cga_layout=cga_layout, two_ctas=len(cga_layout) > 0
    )


@constexpr_function
def packed_columns(columns, bits):
    """How many columns of 32 bits hold `columns` values of `bits` bits."""
    return columns * bits // 32


@constexpr_function
def with_columns(layout, columns):
    return TensorMemoryLayout(
        (layout.block[0], columns), col_stride=1, cga_layout=layout.cga_layout, two_ctas=layout.two_ctas
    )


@constexpr_function
def own_rows_only(layout):
    """The layout of one column of the rows of this CTA alone, as if every CTA had the same."""
    cga_layout = [[0, 0] for _ in layout.cga_layout]
    return TensorMemoryLayout((layout.block[0], 1), col_stride=1, cga_layout=cga_layout)


@jit
def probabilities_of(scores, dtype: gl.constexpr):
    """P [ROWS, BLOCK_N] of `dtype`, over the first columns of S."""
    BLOCK_N: gl.constexpr = scores.shape[1]
    COLUMNS: gl.constexpr = packed_columns(BLOCK_N, dtype.primitive_bitwidth)
    return scores.slice(0, COLUMNS).reinterpret(dtype, scores.shape, with_columns(scores.layout, BLOCK_N))


@jit
def statistic_of(scores, STATISTIC: gl.constexpr):
    """One value of every row, [ROWS, 1] fp32: ALPHA, MAX or SUM, in a column of S that P leaves free."""
    column = scores.slice(scores.shape[1] // 2 + STATISTIC, 1)
    return column.reinterpret(gl.float32, [scores.shape[0], 1], with_columns(scores.layout, 1))


@jit
def own_statistic_of(scores, STATISTIC: gl.constexpr):
    """As `statistic_of`, but of the rows of this CTA: [128, 1] fp32, another one in each CTA.

    A reduction of it stays within the CTA, where one of rows that are sharded over the cluster would not.
    """
    column = scores.slice(scores.shape[1] // 2 + STATISTIC, 1)
    return column.reinterpret(gl.float32, [ROWS_PER_CTA, 1], own_rows_only(scores.layout))


@jit
def load_statistic(scores, STATISTIC: gl.constexpr):
    """[ROWS] fp32, a row to a thread."""
    column = statistic_of(scores, STATISTIC).load()
    return gl.max(column, axis=1)  # of one column: a change of shape


@jit
def store_statistic(scores, STATISTIC: gl.constexpr, value):
    column = statistic_of(scores, STATISTIC)
    LAYOUT: gl.constexpr = column.get_reg_layout()
    column.store(gl.convert_layout(value[:, None], LAYOUT, assert_trivial=True))
