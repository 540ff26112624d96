"""Where the tiles of a bias lie that is added to scores."""

from gluon_attn.runtime.compat import gl, jit


@jit
def bias_coords(desc, row_block, row, key):
    """Of the tile of a bias that is added to the scores of queries from `row` on and keys from `key` on."""
    if desc.block_shape[2] == 1:
        row = gl.to_tensor(0)
    # A dimension of size 1 is the same for all.
    batch, head = gl.minimum(row_block.batch, desc.shape[0] - 1), gl.minimum(row_block.head, desc.shape[1] - 1)
    return [batch, head, row, key]
