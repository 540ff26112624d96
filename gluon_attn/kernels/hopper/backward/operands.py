"""The tensors of the backward's main kernel, and where their tiles lie."""

from gluon_attn.runtime.compat import aggregate, gl, jit, tma_descriptor


@aggregate
class Operands:
    """Each in global memory behind its TMA descriptor. R: queries, rounded up to whole blocks."""

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
    scale_log2: gl.tensor  # softmax scale times log2(e)
    scale: gl.tensor

    @jit
    def of_queries(self):
        return (self.q, self.lse)

    @jit
    def of_douts(self):
        return (self.do, self.delta)


@jit
def dq_coords(batch, head, row_block, ROWS: gl.constexpr):
    """Of a row block's dQ; ROWS: of 32 elements, that it has there."""
    return [batch, head, row_block * ROWS, 0]


@jit
def stats_coords(row_block):
    """Of the statistics of a row block."""
    return [row_block.batch, row_block.head, 0, row_block.first_row]
