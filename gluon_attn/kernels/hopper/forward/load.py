"""The load role: one warp that fills the channels of Q, K and V."""

from channels import tma
from gluon_attn.runtime.compat import gdc_wait, gl, jit

from .work import first_work


@jit
def load(wires, schedule, operands, group):
    """Fills queries, keys and values, in the order in which the softmax roles ask for them. group: query heads to a KV
    head."""
    BLOCK_N: gl.constexpr = operands.k.block_shape[2]
    ROWS: gl.constexpr = operands.q.block_shape[2]
    queries, keys, values = wires.queries.producer(), wires.keys.producer(), wires.loaded_values.producer()

    work = first_work(schedule)
    while work.is_left():
        tile = work.tile()
        rows = schedule.rows(tile)
        kv_head = tile.head // group

        q, queries = queries.acquire()
        tma.expect(q, PARTS=wires.queries.PARTS)
        for part in gl.static_range(wires.queries.PARTS):
            tma.copy(q, operands.q, [tile.batch, tile.head, tile.first_row + part * ROWS, 0], part)

        # In one step a softmax role multiplies with the keys of a block and the values of the block before it.
        key = (rows.blocks() - 1) * BLOCK_N
        k, keys = keys.acquire()
        tma.load(k, operands.k, [tile.batch, kv_head, key, 0])
        for _ in range(1, rows.blocks()):
            k, keys = keys.acquire()
            tma.load(k, operands.k, [tile.batch, kv_head, key - BLOCK_N, 0])
            v, values = values.acquire()
            load_values(v, wires, operands, tile.batch, kv_head, key)
            key -= BLOCK_N
        v, values = values.acquire()
        load_values(v, wires, operands, tile.batch, kv_head, key)
        work = work.next()


@jit
def load_values(slot, wires, operands, batch, kv_head, key):
    """Fill a slot with the block of V from `key` on, as users have it or as it was transposed before."""
    if operands.v.dtype.primitive_bitwidth == 16 or wires.TILE.transpose_registers > 0:
        tma.load(slot, operands.v, [batch, kv_head, key, 0])
    else:
        gdc_wait()  # for the kernel that transposes, beside whose end Q and K are loaded; passes at once ever after
        tma.load(slot, operands.v, [batch, kv_head, 0, key])
