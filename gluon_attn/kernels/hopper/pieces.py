"""Tiles as wide as a head dim that is no power of two, as Gluon's tensors are: pieces of its columns, side by side.

A product that sums over the head dim is a sum over pieces; one whose columns it is has an accumulator for each.
"""

from gluon_attn.runtime.compat import gl, jit, warpgroup_mma


@jit
def pieces_of(slot, SHAPE, first, PIECES):
    """The pieces of one tile in a slot, its parts from `first` on: a tuple of views, each of that shape."""
    pieces = (slot.view(SHAPE, part=first),)
    for i in gl.static_range(1, PIECES):
        pieces += (slot.view(SHAPE, part=first + i),)
    return pieces


@jit
def from_column(coords, column):
    """Coordinates of a tile, from that column on."""
    if len(coords) == 5:  # of packed sequences
        return [coords[0], coords[1], coords[2], coords[3], column]
    else:
        return [coords[0], coords[1], coords[2], column]


@jit
def from_row(coords, row):
    """The same of a transposed tensor."""
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
