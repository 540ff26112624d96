"""What Hopper does with tiles in pieces, see ../common/pieces.py.

A product that sums over the head dim is a sum over pieces; one whose columns it is has an accumulator for each.
"""

from gluon_attn.runtime.compat import gl, jit, warpgroup_mma


@jit
def from_row(coords, row):
    """Coordinates of a tile of a transposed tensor, from that row on."""
    return [coords[0], coords[1], row, coords[3]]


@jit
def multiply_transposed(a, b, LAYOUT: gl.constexpr, added=None):
    """Issue A Bᵀ of two tiles in pieces, each in shared memory: [M, N] fp32, registers, to be waited for. added: what
    it starts with, of that shape; None: 0."""
    ADDS: gl.constexpr = added is not None
    product = added if ADDS else gl.zeros([a[0].shape[0], b[0].shape[0]], gl.float32, LAYOUT)
    for i in gl.static_range(len(a)):
        product = warpgroup_mma(a[i], b[i].permute((1, 0)), product, use_acc=ADDS or i > 0, is_async=True)
    return product


@jit
def zeros_in_pieces(PIECES: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """As many fp32 tensors, registers."""
    return (gl.zeros(SHAPE, gl.float32, LAYOUT),) * PIECES
