"""The tensors of the backward's main kernel, and where their tiles lie."""

import math

from gluon_attn.runtime.compat import aggregate, constexpr_function, gl, jit, reinterpret, tma_descriptor

from .packed import padded_block


@aggregate
class Operands:
    """Each in global memory behind its TMA descriptor. R: queries, rounded up to whole blocks; of packed sequences,
    those of each, and B is 1."""

    q: tma_descriptor  # (B, H, Sq, D), tiles [1, 1, BLOCK_M, D]
    k: tma_descriptor  # (B, Hkv, Sk, D), tiles [1, 1, KEYS, D]
    v: tma_descriptor  # as k
    do: tma_descriptor  # as q: dO
    dk: tma_descriptor  # as k
    dv: tma_descriptor  # as k
    lse: (
        tma_descriptor  # (B, H, 1, R) fp32, tiles [1, 1, 1, BLOCK_M]: LSE in base 2; +inf for a row that counts nowhere
    )
    delta: tma_descriptor  # as lse: rowsum(dO * O) - dLSE
    dq: tma_descriptor  # (B, H, R * D / 32, 32) fp32, tiles of one row block each, see `in_register_order`
    added: gl.tensor  # (B, H, blocks) int32: see `reduce`
    handed_in: gl.tuple  # of two: dK and dV that programs hand in, and who has, see shares.py; or None, None
    bias: (
        gl.tuple
    )  # of three: the bias of scores and, if it is of each row, its gradient; else a pointer to that. None: not there
    finished: gl.tuple  # of one, a `Finished`, if this kernel makes dQ of its sums; else of none
    scale_log2: gl.tensor  # softmax scale times log2(e)
    scale: gl.tensor
    PIECES: gl.constexpr  # of how many tiles side by side are Q and K
    HAS_DK: gl.constexpr  # dK and dQ are computed, for which V and delta are needed
    SUMS_DBIAS: gl.constexpr  # the gradient of the bias is a sum

    @jit
    def of_keys_values(self):
        if self.HAS_DK:
            return (self.k,) * self.PIECES + (self.v,)
        else:
            return (self.k,) * self.PIECES

    @jit
    def of_queries(self):
        if self.bias[0] is None:
            return (self.q,) * self.PIECES + (self.lse,)
        else:
            return (self.q,) * self.PIECES + (self.bias[0], self.lse)

    @jit
    def of_douts(self):
        if self.HAS_DK:
            return (self.do, self.delta)
        else:
            return (self.do,)


@jit
def in_workspaces(keys, block):
    """(batch, block) that row block `block` of the sequence of some keys has there."""
    if keys.sequence.PACKED:
        return 0, padded_block(keys.sequence.q_first, keys.batch, keys.BLOCK_M) + block
    else:
        return keys.batch, block


@jit
def bias_coords(desc, batch, head, row, key):
    """Of the tile of a bias for queries from `row` on and keys from `key` on. A dimension of size 1 is for all."""
    if desc.block_shape[2] == 1:
        row = gl.to_tensor(0)
    return [gl.minimum(batch, desc.shape[0] - 1), gl.minimum(head, desc.shape[1] - 1), row, key]


@constexpr_function
def tiles_in(shape, dtype, tile_shape, tile_dtype):
    """Shape of memory [*shape] as a row of tiles, which it is a multiple of: Triton 3.8 reinterprets all of it only."""
    bits = math.prod(shape) * dtype.primitive_bitwidth
    return [bits // (math.prod(tile_shape) * tile_dtype.primitive_bitwidth), *tile_shape]


@jit
def first_tile(memory, desc):
    """The first tile of `desc` in memory that may be larger."""
    TILES: gl.constexpr = tiles_in(memory.shape, memory.dtype, desc.block_shape, desc.dtype)
    return reinterpret(memory, desc.dtype, TILES, desc.layout).index(0)


@jit
def dq_coords(batch, head, block, ROWS: gl.constexpr):
    """Of a row block's dQ; ROWS: of 32 elements, that it has there."""
    return [batch, head, block * ROWS, 0]


@jit
def stats_coords(batch, head, block, BLOCK_M: gl.constexpr):
    """Of the statistics of a row block."""
    return [batch, head, 0, block * BLOCK_M]
