"""The two roles that move tiles between global and shared memory: one warp each."""

from channels import tma
from gluon_attn.compat import gl, jit

from .wires import LANES


@jit
def load(wires, schedule, operands):
    """Fills queries, keys and values, in the order in which the products ask for them."""
    BLOCK_N: gl.constexpr = operands.k.block_shape[2]
    ROWS: gl.constexpr = operands.q.block_shape[2]
    queries, keys_values = wires.queries.producer(), wires.keys_values.producer()

    for item in range(gl.program_id(0), schedule.items, gl.num_programs(0)):
        for i in range(schedule.tiles_in(item)):
            tile = schedule.tile(item, i)
            kv_head = operands.kv_head(tile)
            key = (schedule.rows(tile.first_row, schedule.BLOCK_M).blocks() - 1) * BLOCK_N

            q, queries = queries.acquire()
            tma.load(q, operands.q, [tile.batch, tile.head, tile.first_row, 0])
            k, keys_values = keys_values.acquire()
            tma.load(k, operands.k, [tile.batch, kv_head, key, 0])
            q, queries = queries.acquire()
            tma.load(q, operands.q, [tile.batch, tile.head, tile.first_row + ROWS, 0])
            while key >= 0:
                v, keys_values = keys_values.acquire()
                tma.load(v, operands.v, [tile.batch, kv_head, key, 0])
                key -= BLOCK_N
                if key >= 0:
                    k, keys_values = keys_values.acquire()
                    tma.load(k, operands.k, [tile.batch, kv_head, key, 0])
    queries.drain()
    keys_values.drain()


@jit
def store(wires, schedule, operands):
    """Copies O from where the correction role has put it to global memory."""
    ROWS: gl.constexpr = operands.o.block_shape[2]
    results = wires.results.consumer()

    for item in range(gl.program_id(0), schedule.items, gl.num_programs(0)):
        for i in range(schedule.tiles_in(item)):
            tile = schedule.tile(item, i)
            for lane in gl.static_range(LANES):
                result, results = results.acquire()
                tma.store(operands.o, [tile.batch, tile.head, tile.first_row + lane * ROWS, 0], result.part(0))
                tma.wait_stores_read()
                result.release()
