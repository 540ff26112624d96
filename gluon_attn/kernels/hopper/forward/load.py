"""The load role: one warp that fills the channels of Q, K and V."""

from channels import tma
from gluon_attn.runtime.compat import gdc_wait, gl, jit

from ...common.bias import bias_coords
from ...common.pieces import coords_of_pieces, from_column
from ...common.sequence import key_coords, query_coords, transposed_value_coords
from ..pieces import from_row
from .wires import tiles_of_bias
from .work import first_work


@jit
def load(wires, order, operands, heads_per_kv_head):
    """Fills queries, keys and values, in the order in which the softmax roles ask for them."""
    BLOCK_N: gl.constexpr = operands.k.block_shape[-2]
    ROWS: gl.constexpr = operands.q.block_shape[-2]
    QUERIES: gl.constexpr = wires.queries.PARTS  # pieces of every role's tile
    PIECES: gl.constexpr = wires.QK
    COLUMNS: gl.constexpr = operands.k.block_shape[-1]
    queries, keys, values = wires.queries.producer(), wires.keys.producer(), wires.loaded_values.producer()

    work = first_work(order)
    while work.is_left():
        rows = work.rows()
        row_block = rows.block
        kv_head = row_block.head // heads_per_kv_head

        q, queries = queries.acquire()
        coords = ()
        for i in gl.static_range(QUERIES):
            row = row_block.first_row + i // PIECES * ROWS
            coords = coords + (from_column(query_coords(row_block, row), i % PIECES * COLUMNS),)
        tma.load(q, (operands.q,) * QUERIES, coords)

        # In one step a softmax role multiplies with the keys of a block and the values of the block before it.
        key_range = rows.key_range()
        key = key_range.block(0) * BLOCK_N
        k, keys = keys.acquire()
        load_keys(k, wires, operands, row_block, kv_head, key)
        for step in range(1, key_range.steps()):
            following = key_range.block(step) * BLOCK_N
            k, keys = keys.acquire()
            load_keys(k, wires, operands, row_block, kv_head, following)
            v, values = values.acquire()
            load_values(v, wires, operands, row_block, kv_head, key)
            key = following
        v, values = values.acquire()
        load_values(v, wires, operands, row_block, kv_head, key)
        work = work.next()


@jit
def load_keys(slot, wires, operands, row_block, kv_head, key):
    """Fill a slot with the block of K from `key` on, and with the bias of its scores."""
    PIECES: gl.constexpr = wires.QK
    descs = (operands.k,) * PIECES
    coords = coords_of_pieces(key_coords(row_block, kv_head, key), operands.k.block_shape[-1], PIECES)
    if wires.bias[0] is not None:
        descs += tiles_of_bias(wires.bias, wires.CONFIG.softmax_roles)
        for role in gl.static_range(slot.PARTS - PIECES):
            row = row_block.first_row + role * operands.q.block_shape[-2]
            coords += (bias_coords(wires.bias[0], row_block, row, key),)
    tma.load(slot, descs, coords)


@jit
def load_values(slot, wires, operands, row_block, kv_head, key):
    """Fill a slot with the block of V from `key` on, as users have it or as it was transposed before."""
    PIECES: gl.constexpr = slot.PARTS
    if operands.v.dtype.primitive_bitwidth == 16 or wires.CONFIG.transpose_registers > 0:
        coords = coords_of_pieces(key_coords(row_block, kv_head, key), operands.v.block_shape[-1], PIECES)
    else:
        gdc_wait()  # for the kernel that transposes, beside whose end Q and K are loaded; passes at once ever after
        coords = (transposed_value_coords(row_block, kv_head, key),)
        for i in gl.static_range(1, PIECES):
            coords += (from_row(transposed_value_coords(row_block, kv_head, key), i * operands.v.block_shape[-2]),)
    tma.load(slot, (operands.v,) * PIECES, coords)
