"""The wires of the Blackwell kernel: its channels, by what flows through them."""

from channels import SharedMemoryChannel, SignalChannel, TensorMemoryChannel, WorkChannel, cluster_fence
from gluon_attn.runtime.compat import aggregate, gl, jit

from .tmem import accumulator_layout

LANES = gl.constexpr(2)  # query tiles that a CTA computes at the same time
ROLES = gl.constexpr(6)
ITEM_SLOTS = gl.constexpr(2)  # with one, the load role could not begin an item before all have ended the last


@aggregate
class Wires:
    """Each channel's contract: who fills it -> who reads it, its slots, who frees them.

    A CTA has two query tiles at a time, one to a lane, so that the softmax of one runs beside the products of the
    other. With more than one CTA, pairs: the lead's mma role issues the products of both, and waits for both.

    queries:    load -> mma; 2 slots, the tiles of lanes 0 and 1 in turn; freed by the last QKᵀ with them.
    keys_values: load -> mma; KV_SLOTS slots for tiles of K and V in turn; freed by the last product with them. The CTAs
                of a pair hold half of each: of K its rows, of V its columns, as the products want their right operand.
                With four CTAs one load fills a slot in both pairs (multicast).
    scores:     mma -> softmax, one lane each; filled by QKᵀ; freed by softmax when P is in its place (see tmem.py).
    tails:      softmax -> mma, one lane each: the last quarter of P is there too (if early_p).
    alphas:     softmax -> correction, one lane each, for every block but the first of a tile: the factor by which O is
                to be rescaled is in tensor memory. The next one waits for the next scores, so for this one's use.
    outputs:    mma -> correction, one lane each; filled by the last PV of a tile; freed each time correction is done
                with it: after rescaling it, for every block but the first, and after taking it out.
    statistics: softmax -> correction, one lane each: max and sum of a tile's rows are in tensor memory.
    statistics_read: correction -> mma, one lane each: they have been read, and the scores may be overwritten.
    results:    correction -> store; 2 slots of O in the tensors' dtype, for lanes 0 and 1 in turn; freed by store.
    turns:      softmax lane 0 <-> lane 1: who may use the exponential unit (if exp_turns).
    items:      load of CTA 0 -> every role of every CTA; 2 slots; freed by each (if dynamic).
    """

    queries: SharedMemoryChannel
    keys_values: SharedMemoryChannel
    scores: TensorMemoryChannel
    tails: SignalChannel
    alphas: SignalChannel
    outputs: TensorMemoryChannel
    statistics: SignalChannel
    statistics_read: SignalChannel
    results: SharedMemoryChannel
    turns: SignalChannel
    items: WorkChannel
    TILE: gl.constexpr

    @jit
    def init(self):
        self.queries.init()
        self.keys_values.init()
        self.scores.init()
        if self.TILE.early_p:
            self.tails.init()
        self.alphas.init()
        self.outputs.init()
        self.statistics.init()
        self.statistics_read.init()
        self.results.init()
        if self.TILE.exp_turns:
            self.turns.init()
        if self.TILE.dynamic:
            self.items.init()
        cluster_fence()

    @jit
    def close(self):
        """The roles of this CTA are done; a peer may arrive on, load into, or accumulate in, what is ours until its
        roles are too: the barriers and both memories are kept to the end of the whole cluster."""
        cluster_fence()
        self.queries.close()
        self.keys_values.close()
        self.scores.close()
        if self.TILE.early_p:
            self.tails.close()
        self.alphas.close()
        self.outputs.close()
        self.statistics.close()
        self.statistics_read.close()
        self.results.close()
        if self.TILE.exp_turns:
            self.turns.close()
        if self.TILE.dynamic:
            self.items.close()


@jit
def alloc_wires(q_desc, k_desc, o_desc, TILE: gl.constexpr):
    BLOCK_N: gl.constexpr = k_desc.block_shape[2]
    ROWS: gl.constexpr = q_desc.block_shape[2]
    D: gl.constexpr = q_desc.block_shape[3]
    SCORES: gl.constexpr = accumulator_layout(q_desc.layout, BLOCK_N)
    OUTPUT: gl.constexpr = accumulator_layout(q_desc.layout, D)
    PAIR: gl.constexpr = SCORES.two_ctas
    return Wires(
        queries=SharedMemoryChannel.alloc(q_desc, SLOTS=LANES, CONSUMERS=0, TWO_CTAS=PAIR),
        keys_values=SharedMemoryChannel.alloc(
            k_desc, SLOTS=TILE.kv_slots, CONSUMERS=0, TWO_CTAS=PAIR, MULTICAST=gl.num_ctas() > 2
        ),
        scores=TensorMemoryChannel.alloc(gl.float32, LANES, [ROWS, BLOCK_N], SCORES),
        tails=SignalChannel.alloc(LANES, TWO_CTAS=PAIR),
        alphas=SignalChannel.alloc(LANES),
        outputs=TensorMemoryChannel.alloc(gl.float32, LANES, [ROWS, D], OUTPUT),
        statistics=SignalChannel.alloc(LANES),
        statistics_read=SignalChannel.alloc(LANES, TWO_CTAS=PAIR),
        results=SharedMemoryChannel.alloc(o_desc, SLOTS=LANES, CONSUMERS=1),
        turns=SignalChannel.alloc(LANES),
        items=WorkChannel.alloc(ITEM_SLOTS, ROLES),
        TILE=TILE,
    )
