"""The two roles that move tiles between global and shared memory: one warp each."""

from channels import tma
from gluon_attn.runtime.compat import gl, jit

from .wires import LANES
from .work import first_work


@jit
def load(wires, schedule, operands, TILE: gl.constexpr):
    """Fills queries, keys and values, in the order in which the products ask for them; asks for work."""
    BLOCK_N: gl.constexpr = operands.k.block_shape[2]
    ROWS: gl.constexpr = operands.q.block_shape[2]
    queries, keys_values = wires.queries.producer(), wires.keys_values.producer()
    asking = wires.items.producer()

    work = first_work(wires, schedule, TILE)
    while work.number < schedule.tiles:
        if TILE.dynamic:
            asking = asking.ask()
        tile = schedule.tile(work.number)
        kv_head = operands.kv_head(tile)
        key = (schedule.rows(tile).blocks() - 1) * BLOCK_N

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
        work = work.next()
    queries.drain()
    keys_values.drain()


@jit
def store(wires, schedule, operands, TILE: gl.constexpr):
    """Copies O from where the correction role has put it to global memory."""
    ROWS: gl.constexpr = operands.o.block_shape[2]
    results = wires.results.consumer()

    work = first_work(wires, schedule, TILE)
    while work.number < schedule.tiles:
        tile = schedule.tile(work.number)
        for lane in gl.static_range(LANES):
            result, results = results.acquire()
            tma.store(operands.o, [tile.batch, tile.head, tile.first_row + lane * ROWS, 0], result.part(0))
            tma.wait_stores_read()
            result.release()
        work = work.next()
