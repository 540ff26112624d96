"""The layouts that the kernels of these tests share."""

from tests.compat import gl

# Layouts for four warps: 128 elements in a row; a matrix by rows.
ROW = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
MATRIX = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
# For one warp.
ROW_1 = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
# For two CTAs, each with half of the elements (rows), or both with all.
ROW_HALVES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0], [[1]]))
ROW_COPIES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0], [[0]]))
MATRIX_HALVES = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], [[1, 0]]))
MATRIX_COLUMN_HALVES = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], [[0, 1]]))
MATRIX_COPIES = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], [[0, 0]]))
# Shared memory without and with the swizzle that TMA and the tensor cores use.
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLAIN_2D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
# Of which each of two CTAs has a half, or all.
PLAIN_HALVES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0], [[1]]))
PLAIN_COPIES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0], [[0]]))
