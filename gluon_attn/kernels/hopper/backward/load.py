"""The load role: one warp that fills the channels of K and V, of Q, and of dO."""

from channels import tma
from gluon_attn.runtime.compat import gdc_wait, gl, jit

from ...common.pieces import from_column
from ...common.sequence import RowBlock, key_coords, query_coords
from .operands import bias_coords, in_workspaces, stats_coords
from .work import first_work


@jit
def in_pieces(coords, desc, PIECES):
    """Coordinates of the pieces of a tile."""
    pieces = (coords,)
    for i in gl.static_range(1, PIECES):
        pieces += (from_column(coords, i * desc.block_shape[-1]),)
    return pieces


@jit
def load(wires, order, operands):
    """Fills keys_values, queries and douts, in the order in which the gradient role asks for them. If it computes dV
    alone, that is dO of a row block after Q of the next."""
    keys_values, queries, douts = wires.keys_values.producer(), wires.queries.producer(), wires.douts.producer()
    work = first_work(order, wires.claims, CLAIMS=True)
    while work.is_left():
        keys = work.keys()
        coords = key_coords(keys, keys.kv_head, keys.first)
        kv, keys_values = keys_values.acquire()
        of_keys = in_pieces(coords, operands.k, operands.PIECES)
        tma.load(kv, operands.of_keys_values(), of_keys + (coords,) * operands.HAS_DK)
        gdc_wait()  # for the statistics, which the kernel before computes; passes at once after the first wait
        if not operands.HAS_DK:  # rows of zeros, past the last: what the role multiplies with P before there is one
            past = RowBlock(keys.batch, keys.head(0), keys.row_blocks() * keys.BLOCK_M, keys.sequence)
            zeros, douts = douts.acquire()
            tma.load(zeros, operands.of_douts(), (query_coords(past, past.first_row),))
        walked = keys.query_range()
        for step in range(walked.steps()):
            member, block = walked.visit(step)
            row_block = RowBlock(keys.batch, keys.head(member), block * keys.BLOCK_M, keys.sequence)
            batch, line_block = in_workspaces(keys, block)
            tile = query_coords(row_block, row_block.first_row)
            line = stats_coords(batch, row_block.head, line_block, keys.BLOCK_M)
            lines = (line,)
            if operands.bias[0] is not None:
                first_row = row_block.first_row
                lines = (bias_coords(operands.bias[0], batch, row_block.head, first_row, keys.first), line)
            query, queries = queries.acquire()
            tma.load(query, operands.of_queries(), in_pieces(tile, operands.q, operands.PIECES) + lines)
            dout, douts = douts.acquire()
            tma.load(dout, operands.of_douts(), (tile,) + (line,) * operands.HAS_DK)
        work = work.next()
