"""The finish role: two warps that make dQ of its sums. They begin with a head when all of its sums are there, while the
other roles are at the next heads. Where there is no such role, `finish_backward` does that when all are done."""

from channels import SharedMemoryConsumer, SharedMemoryProducer, tma
from gluon_attn.runtime.compat import (
    aggregate,
    atomic_poll,
    constexpr_function,
    gdc_wait,
    gl,
    jit,
    tma_descriptor,
)

from ...common.pieces import from_column
from ...common.sequence import RowBlock, query_coords, whole_sequence
from .operands import dq_coords
from .packed import queries_of_block

WARPS = gl.constexpr(2)
ROWS, COLUMNS = gl.constexpr(16), gl.constexpr(64)  # of a piece, whose sums lie in one place: see `in_register_order`
SUM_ROWS = gl.constexpr(32)  # rows of 32 elements, which the sums of a piece take
# Pieces whose sums are on their way from memory, and of dQ on their way there: at D=128 there is memory for no more.
SUMS_SLOTS = gl.constexpr(3)
TILES = gl.constexpr(2)
FINISH_BYTES = gl.constexpr(ROWS.value * COLUMNS.value * (4 * SUMS_SLOTS.value + 2 * TILES.value))  # shared memory
# Bytes, of a tile of dQ. With 128 a thread has four addresses to write to and not two. The compiler takes the registers
# for these from all roles. So the gradient role would reload what it holds in each step.
SWIZZLE = gl.constexpr(64)
PARTS = gl.constexpr(4)  # of a piece, converted one after the other: for more at a time a thread has no registers


@constexpr_function
def can_finish(block_m, columns):
    """Whether a row block's dQ, with so many columns, is of pieces one after the other: so each warp that computes dQ
    must have 16 rows of 64 columns."""
    return (block_m, columns) in ((64, 128), (128, 64))


@aggregate
class Finished:
    """What the role has besides the others' operands."""

    dq: tma_descriptor  # (B, H, Sq, D), tiles [1, 1, ROWS, COLUMNS]
    sums: tma_descriptor  # as `Operands.dq`, tiles [1, 1, SUM_ROWS, 32]: a piece's
    done: gl.tensor  # pointer: (B, Hkv) int32: key blocks of a KV head, or shares of them, that have added all
    cu_q: gl.tuple  # of one, a pointer: where packed sequences begin; or None
    sequences: gl.tensor  # that are packed


@jit
def finished_of(dq, sums, done, cu_q, sequences):
    """Of one `Finished`; or of none, if there is no such role."""
    if dq is None:
        return ()
    else:
        return (Finished(dq, sums, done, cu_q, sequences),)


@aggregate
class SumsRing:
    """The role's two ends of its channel of sums, which it fills and reads itself."""

    next_sums: SharedMemoryProducer
    loaded_sums: SharedMemoryConsumer


@jit
def tell_done(operands, order, keys):
    """Of the reduce role, after the last addition of a key block, or of its shares: that all of them are in memory."""
    tma.wait_stores_done()
    head = keys.kv_head if keys.sequence.PACKED else keys.batch * order.kv_heads + keys.kv_head
    if order.SHARES:
        number = gl.where(keys.shares > 1, keys.share_end - keys.share_first, order.shared_parts)
    else:
        number = 1
    gl.atomic_add(operands.finished[0].done + head, number, sem="release")


@jit
def wait_until_done(kv_head, order, finished):
    """Until all key blocks of a KV head, counted in all batches, have added what they add. TMA loads those sums from
    L2, where the additions were done: as for additions that wait for each other, no fence of the async proxy follows.
    """
    if order.SHARES:  # as many shares to each
        number = order.key_blocks * order.shared_parts
    elif order.records[0] is None:
        number = order.key_blocks
    else:
        number = gl.load(order.records[0])
    atomic_poll(finished.done + kv_head, number, sem="acquire")


@jit
def row_block_of(block, head, order, finished):
    """The RowBlock of a head, counted in all batches."""
    if finished.cu_q[0] is None:
        heads = finished.dq.shape[1]
        sequence = whole_sequence(order.q_len, gl.to_tensor(0))
        return RowBlock(head // heads, head % heads, block * order.BLOCK_M, sequence)
    else:
        return queries_of_block(block, head, finished.cu_q[0], finished.sequences, order.q_len, order.BLOCK_M)


@jit
def start_piece(next_sums, desc, coords, piece):
    """Start the load of a piece's sums. Returns the next end."""
    slot, next_sums = next_sums.acquire()
    tma.load(slot, desc, [coords[0], coords[1], coords[2] + piece * SUM_ROWS, coords[3]])
    return next_sums


@jit
def convert(sums, tile, scale):
    """Write a piece of dQ [ROWS, COLUMNS] of its sums [SUM_ROWS, 32]."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    IN_PART: gl.constexpr = SUM_ROWS // PARTS
    WIDTH: gl.constexpr = COLUMNS // PARTS
    for part in gl.static_range(PARTS):
        dq = (sums.slice(part * IN_PART, IN_PART).load(LAYOUT) * scale).to(tile.dtype)
        dq = dq.reshape([WIDTH // 8, 8, 4, 2, 2]).permute((3, 1, 0, 2, 4))  # see `in_register_order`
        tile.slice(part * WIDTH, WIDTH, dim=1).store(dq.reshape([ROWS, WIDTH]))


@jit
def finish_rows(sums, rows, coords, wires, order, operands):
    """Store dQ of a row block piece by piece: of 64 rows the first half of the columns comes first. coords: of its
    sums. Returns the next SumsRing."""
    finished, tiles = operands.finished[0], wires.dq_tiles[0]
    BLOCK_M: gl.constexpr = order.BLOCK_M
    D: gl.constexpr = operands.q.block_shape[-1]
    PIECES: gl.constexpr = BLOCK_M * D // (ROWS * COLUMNS)
    gl.static_assert(can_finish(BLOCK_M, D))
    next_sums, loaded_sums = sums.next_sums, sums.loaded_sums
    for piece in gl.static_range(SUMS_SLOTS):
        next_sums = start_piece(next_sums, finished.sums, coords, piece)
    for piece in range(PIECES):
        slot, loaded_sums = loaded_sums.acquire()
        tma.wait_stores_but_newest_read()
        tile = tiles.index(piece % TILES)
        convert(slot.view([SUM_ROWS, 32]), tile, operands.scale)
        target = query_coords(rows, rows.first_row + ROWS * piece % BLOCK_M)
        target = from_column(target, ROWS * piece // BLOCK_M * COLUMNS)
        tma.store_own(finished.dq, target, tile.reshape(finished.dq.block_shape))
        slot.release()  # the fence of the store was one for what has been read of the slot, too
        if piece + SUMS_SLOTS < PIECES:
            next_sums = start_piece(next_sums, finished.sums, coords, piece + SUMS_SLOTS)
    return SumsRing(next_sums, loaded_sums)


@jit
def finish(wires, order, operands):
    """Stores dQ of every row block: scaled, in its rows and in its dtype; 0 where nobody has added. Programs have them
    in turn, in the order in which heads are computed. Whoever adds to them has begun: see `ClaimedWork`."""
    BLOCK_M: gl.constexpr = order.BLOCK_M
    D: gl.constexpr = operands.q.block_shape[-1]
    finished, channel = operands.finished[0], wires.sums[0]
    sums = SumsRing(channel.producer(), channel.consumer())
    heads, blocks = operands.lse.shape[1], operands.lse.shape[3] // BLOCK_M
    gdc_wait()  # until the kernel before has set `added` and `done` to zero
    for index in range(gl.program_id(0), operands.lse.shape[0] * heads * blocks, gl.num_programs(0)):
        head, block = index // blocks, index % blocks
        wait_until_done(head // order.group, order, finished)
        rows = row_block_of(block, head, order, finished)
        if rows.first_row < rows.sequence.q_len:
            coords = dq_coords(head // heads, head % heads, block, BLOCK_M * D // 32)
            if gl.load(operands.added + index) == 0:  # rows past the last, which are zeros
                coords = [coords[0], coords[1], finished.sums.shape[2], coords[3]]
            sums = finish_rows(sums, rows, coords, wires, order, operands)
    tma.wait_stores_read()
