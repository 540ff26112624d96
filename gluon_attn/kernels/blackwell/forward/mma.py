"""The role that issues the products: one warp, and with more than one CTA that of a pair's lead, for both."""

from channels import SignalConsumer, TensorMemoryProducer, TensorMemorySlot
from gluon_attn.runtime.compat import aggregate, gl, jit, tcgen05_mma

from ...common.operands import probability_dtype
from .tmem import probabilities_of
from .wires import consumer_of
from .work import first_work


@jit
def piece_of(slot, i):
    """Piece i of the one tile that a slot has, [rows, columns]."""
    SHAPE: gl.constexpr = [slot.tiles[0].shape[-2], slot.tiles[0].shape[-1]]
    return slot.view(SHAPE, part=i)


@jit
def pieces_of_head_dim(desc):
    """How many pieces a tile of Q has, known at run time only."""
    COLUMNS: gl.constexpr = desc.block_shape[-1]
    return (desc.shape[len(desc.shape) - 1] + COLUMNS - 1) // COLUMNS


@aggregate
class Products:
    """The products of one query tile. Immutable: what moves an end on returns the next `Products`.

    The role holds the query tile's slot of the scores from when P is in it until it has issued the next QKᵀ into it.
    """

    held: TensorMemorySlot
    scores: TensorMemoryProducer
    outputs: TensorMemoryProducer
    tails: SignalConsumer
    statistics_read: SignalConsumer
    EARLY_P: gl.constexpr

    @jit
    def next_row_block(self):
        """Wait until nothing of the last row block is left in the scores."""
        return gl.aggregate_replace(self, statistics_read=self.statistics_read.acquire())

    @jit
    def issue_qk(self, q, k, q_desc):
        """S = Q Kᵀ, [ROWS, BLOCK_N] fp32, tensor memory: a sum over the pieces of the tiles in slots q and k."""
        if q.PARTS == 1:
            left, right = piece_of(q, 0), piece_of(k, 0).permute((1, 0))
            tcgen05_mma(left, right, self.held.memory, use_acc=False, mbarriers=[self.held.filled])
        else:
            # Not unrolled: of too few registers, the compiler would keep the addresses of all pieces of Q in some.
            pieces = pieces_of_head_dim(q_desc)
            for i in range(pieces):
                left, right = piece_of(q, i), piece_of(k, i).permute((1, 0))
                filled, preds = [self.held.filled], [i == pieces - 1]
                tcgen05_mma(left, right, self.held.memory, use_acc=i > 0, mbarriers=filled, mbarrier_preds=preds)

    @jit
    def issue_pv(self, v, first, LAST: gl.constexpr):
        """O += P V, [ROWS, D] fp32, tensor memory, once P is there and O is rescaled."""
        BLOCK_N: gl.constexpr = v.shape[0]
        held, scores = self.scores.acquire()
        output, outputs = self.outputs.acquire()
        p = probabilities_of(held.memory, probability_dtype(v.dtype))  # [ROWS, BLOCK_N]
        tails = self.tails
        if self.EARLY_P:
            # Three products, for the number of rows must be a power of two.
            HALF: gl.constexpr = BLOCK_N // 2
            QUARTER: gl.constexpr = BLOCK_N // 4
            tcgen05_mma(p.slice(0, HALF), v.slice(0, HALF), output.memory, use_acc=not first)
            tcgen05_mma(p.slice(HALF, QUARTER), v.slice(HALF, QUARTER), output.memory)
            tails = tails.acquire()
            p, v, first = p.slice(HALF + QUARTER, QUARTER), v.slice(HALF + QUARTER, QUARTER), False
        if LAST:
            tcgen05_mma(p, v, output.memory, use_acc=not first, mbarriers=[output.filled])
        else:
            # Whoever reads O next does so after the next scores, which are filled later.
            tcgen05_mma(p, v, output.memory, use_acc=not first, mbarriers=[])
        return gl.aggregate_replace(self, held=held, scores=scores, outputs=outputs, tails=tails)


@jit
def products_of(wires, QUERY_TILE: gl.constexpr):
    held, scores = wires.scores.producer(QUERY_TILE).acquire()
    outputs, tails = wires.outputs.producer(QUERY_TILE), wires.tails.consumer(QUERY_TILE)
    read = wires.statistics_read.consumer(QUERY_TILE, FIRST_IS_FREE=True)
    return Products(held, scores, outputs, tails, read, wires.CONFIG.early_p)


@jit
def mma(wires, order, operands):
    """Issues, for each key block, PV of the block before and QKᵀ of this one, for one query tile after the other."""
    BLOCK_N: gl.constexpr = operands.k.block_shape[-2]
    V_TILE: gl.constexpr = [BLOCK_N, operands.v.block_shape[-1]]
    queries, keys_values = wires.queries.consumer(), consumer_of(wires.keys_values)
    one, two = products_of(wires, 0), products_of(wires, 1)

    work = first_work(wires, order)
    while work.is_left():
        steps = work.rows().key_range().steps()

        q_one, queries = queries.acquire()
        k, keys_values = keys_values.acquire_keys()
        one = one.next_row_block()
        one.issue_qk(q_one, k, operands.q)
        q_two, queries = queries.acquire()
        two = two.next_row_block()
        two.issue_qk(q_two, k, operands.q)
        k.release_after_products()

        for step in range(1, steps):
            v_slot, keys_values = keys_values.acquire_values()
            v = v_slot.tile_of(operands.v).reshape(V_TILE)
            one = one.issue_pv(v, step == 1, LAST=False)
            k, keys_values = keys_values.acquire_keys()
            one.issue_qk(q_one, k, operands.q)
            two = two.issue_pv(v, step == 1, LAST=False)
            v_slot.release_after_products()
            two.issue_qk(q_two, k, operands.q)
            k.release_after_products()
        q_one.release_after_products()
        q_two.release_after_products()

        v_slot, keys_values = keys_values.acquire_values()
        v = v_slot.tile_of(operands.v).reshape(V_TILE)
        one = one.issue_pv(v, steps == 1, LAST=True)
        two = two.issue_pv(v, steps == 1, LAST=True)
        v_slot.release_after_products()
        work = work.next()
