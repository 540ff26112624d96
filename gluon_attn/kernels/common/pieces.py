"""Tiles as wide as a head dim that is no power of two, as Gluon's tensors are: pieces of its columns, side by side."""

from gluon_attn.runtime.compat import gl, jit


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
def coords_of_pieces(coords, COLUMNS, PIECES):
    """Coordinates of the pieces of a tile, each of COLUMNS columns: a tuple. coords: of the first."""
    pieces = (coords,)
    for i in gl.static_range(1, PIECES):
        pieces += (from_column(coords, i * COLUMNS),)
    return pieces
