"""The two roles that move tiles between global and shared memory: one warp each."""

from channels import tma
from gluon_attn.runtime.compat import gl, jit

from ...common.bias import bias_coords
from ...common.pieces import coords_of_pieces
from ...common.sequence import key_coords, query_coords
from .wires import QUERY_TILES, producer_of
from .work import first_work


@jit
def load_pieces(slot, desc, coords):
    """Fill a slot with a tile of Q or of K, of as many pieces as the slot has parts. coords: of the first."""
    PIECES: gl.constexpr = slot.PARTS
    tma.load(slot, (desc,) * PIECES, coords_of_pieces(coords, desc.block_shape[-1], PIECES))


@jit
def producers_of_bias(wires):
    ends = wires.biases[:0]
    for i in gl.static_range(len(wires.biases)):
        ends += (wires.biases[i].producer(),)
    return ends


@jit
def load_bias(ends, bias, row_block, key, ROWS: gl.constexpr):
    """Fill a slot for each query tile with the bias of the block of keys from `key` on; nothing, if there is none.
    Returns the next ends."""
    following = ends[:0]
    for i in gl.static_range(len(ends)):
        slot, end = ends[i].acquire()
        tma.load(slot, bias[0], bias_coords(bias[0], row_block, row_block.first_row + i * ROWS, key))
        following += (end,)
    return following


@jit
def load(wires, order, operands):
    """Fills queries, keys, values and biases, in the order in which the products ask for them; asks for work."""
    BLOCK_N: gl.constexpr = operands.k.block_shape[-2]
    ROWS: gl.constexpr = operands.q.block_shape[-2]
    queries, keys_values = wires.queries.producer(), producer_of(wires.keys_values)
    biases, asking = producers_of_bias(wires), wires.items.producer()

    work = first_work(wires, order)
    while work.is_left():
        if wires.CONFIG.dynamic:
            asking = asking.ask()
        rows = work.rows()
        row_block, key_range = rows.block, rows.key_range()
        kv_head = operands.kv_head(row_block)

        q, queries = queries.acquire()
        load_pieces(q, operands.q, query_coords(row_block, row_block.first_row))
        key = key_range.block(0) * BLOCK_N
        k, keys_values = keys_values.acquire_keys()
        load_pieces(k, operands.k, key_coords(row_block, kv_head, key))
        q, queries = queries.acquire()
        load_pieces(q, operands.q, query_coords(row_block, row_block.first_row + ROWS))
        biases = load_bias(biases, wires.bias, row_block, key, ROWS)
        for step in range(1, key_range.steps()):
            v, keys_values = keys_values.acquire_values()
            tma.load(v, operands.v, key_coords(row_block, kv_head, key))
            key = key_range.block(step) * BLOCK_N
            k, keys_values = keys_values.acquire_keys()
            load_pieces(k, operands.k, key_coords(row_block, kv_head, key))
            biases = load_bias(biases, wires.bias, row_block, key, ROWS)
        v, keys_values = keys_values.acquire_values()
        tma.load(v, operands.v, key_coords(row_block, kv_head, key))
        work = work.next()
    queries.drain()
    keys_values.drain()


@jit
def store(wires, order, operands):
    """Copies O from where the correction role has put it to global memory."""
    ROWS: gl.constexpr = operands.o.block_shape[-2]
    results = wires.results.consumer()

    work = first_work(wires, order)
    while work.is_left():
        row_block = work.rows().block
        for i in gl.static_range(QUERY_TILES):
            result, results = results.acquire()
            tma.store(operands.o, query_coords(row_block, row_block.first_row + i * ROWS), result.part(0))
            tma.wait_stores_read()
            result.release()
        work = work.next()
