"""The wires of the Blackwell kernel: its channels, by what flows through them."""

from channels import SharedMemoryChannel, SignalChannel, TensorMemoryChannel, WorkChannel
from gluon_attn.runtime.compat import aggregate, gl, jit

from .tmem import accumulator_layout

QUERY_TILES = gl.constexpr(2)  # that a CTA computes at the same time
ROLES = gl.constexpr(6)
ITEM_SLOTS = gl.constexpr(2)  # with one, the load role could not begin an item before all have ended the last


@aggregate
class Wires:
    """Each channel's contract: who fills it -> who reads it, its slots, who frees them.

    A CTA has two query tiles at a time, so that the softmax of one runs beside the products of the other. With more
    than one CTA, pairs: the lead's mma role issues the products of both, and waits for both.

    queries:    load -> mma; 2 slots, query tiles 0, 1, 0 and so on; freed by the last QKᵀ with them. A tile may be in
                pieces: as many parts of the slot (see pieces.py). So may one of K.
    keys_values: load -> mma; KV_SLOTS slots, for a tile of K or of V each; freed by the last product with it. One
                channel; or, where tiles of K and of V are not equally large, one for K and one for V, which have the
                slots between them. The CTAs of a pair hold half of each: of K its rows, of V its columns, as the
                products want their right operand. With four CTAs one load fills a slot in both pairs (multicast).
    biases:     load -> softmax; what is added to the scores of a key block, a tile [ROWS, BLOCK_N] or a row for all;
                freed by softmax, which has added it. A channel of one slot for each query tile; none without a bias.
    scores:     mma -> softmax; filled by QKᵀ; freed by softmax when P is in its place (see tmem.py). As all that
                follows but `results` and `items`: one ring or signal of the channel for each query tile.
    tails:      softmax -> mma: the last quarter of P is there too (if early_p).
    alphas:     softmax -> correction, for every key block of a row block but the first: the factor by which O is to be
                rescaled is in tensor memory. The next one waits for the next scores, so for this one's use.
    outputs:    mma -> correction; filled by the last PV of a row block; freed each time correction is done with it:
                after rescaling it, for every key block but the first, and after taking it out.
    statistics: softmax -> correction: max and sum of a query tile's rows are in tensor memory.
    statistics_read: correction -> mma: they have been read, and the scores may be overwritten.
    results:    correction -> store; RESULT_SLOTS slots of O in the tensors' dtype, query tiles 0, 1, 0 and so on; freed
                by store.
    turns:      softmax of query tile 0 <-> that of 1: who may use the exponential unit (if exp_turns).
    items:      load of CTA 0 -> every role of every CTA; 2 slots; freed by each (if dynamic).
    """

    queries: SharedMemoryChannel
    keys_values: gl.tuple  # of one channel, or of two
    biases: gl.tuple  # of one channel for each query tile, or of none
    scores: TensorMemoryChannel
    tails: SignalChannel
    alphas: SignalChannel
    outputs: TensorMemoryChannel
    statistics: SignalChannel
    statistics_read: SignalChannel
    results: SharedMemoryChannel
    turns: SignalChannel
    items: WorkChannel
    CONFIG: gl.constexpr
    bias: gl.tuple  # of one: the descriptor of a bias; or None

    @jit
    def channels(self):
        tails = (self.tails,) if self.CONFIG.early_p else ()
        turns = (self.turns,) if self.CONFIG.exp_turns else ()
        items = (self.items,) if self.CONFIG.dynamic else ()
        always = (self.alphas, self.outputs, self.statistics, self.statistics_read, self.results)
        return (self.queries,) + self.keys_values + self.biases + (self.scores,) + tails + always + turns + items


@aggregate
class KeysValues:
    """A role's end of the keys and values: its place in the one channel that they share, or in each of two."""

    ends: gl.tuple

    @jit
    def acquire_keys(self):
        slot, end = self.ends[0].acquire()
        return slot, KeysValues((end,) + self.ends[1:])

    @jit
    def acquire_values(self):
        LAST: gl.constexpr = len(self.ends) - 1
        slot, end = self.ends[LAST].acquire()
        return slot, KeysValues(self.ends[:LAST] + (end,))

    @jit
    def drain(self):
        for i in gl.static_range(len(self.ends)):
            self.ends[i].drain()


@jit
def producer_of(keys_values):
    ends = ()
    for i in gl.static_range(len(keys_values)):
        ends += (keys_values[i].producer(),)
    return KeysValues(ends)


@jit
def consumer_of(keys_values):
    ends = ()
    for i in gl.static_range(len(keys_values)):
        ends += (keys_values[i].consumer(),)
    return KeysValues(ends)


@jit
def alloc_keys_values(k_desc, v_desc, CONFIG: gl.constexpr, PIECES: gl.constexpr, PAIR: gl.constexpr):
    """PIECES: of a tile of K."""
    MULTICAST: gl.constexpr = gl.num_ctas() > 2
    descs = (k_desc,) * PIECES
    if v_desc.block_shape[-1] == PIECES * k_desc.block_shape[-1]:
        both = SharedMemoryChannel.alloc(descs, SLOTS=CONFIG.kv_slots, CONSUMERS=0, TWO_CTAS=PAIR, MULTICAST=MULTICAST)
        return (both,)
    else:
        keys = SharedMemoryChannel.alloc(descs, SLOTS=CONFIG.key_slots, CONSUMERS=0, TWO_CTAS=PAIR, MULTICAST=MULTICAST)
        values = SharedMemoryChannel.alloc(
            v_desc, SLOTS=CONFIG.value_slots, CONSUMERS=0, TWO_CTAS=PAIR, MULTICAST=MULTICAST
        )
        return (keys, values)


@jit
def alloc_biases(bias):
    channels = ()
    if bias[0] is not None:
        for _ in gl.static_range(QUERY_TILES):
            channels += (SharedMemoryChannel.alloc(bias[0], SLOTS=1, CONSUMERS=1),)
    return channels


@jit
def alloc_wires(q_desc, k_desc, v_desc, o_desc, bias, CONFIG: gl.constexpr, PIECES: gl.constexpr):
    """The channels for tiles of these descriptors. bias: of one, its descriptor, or None. PIECES: of a tile of Q, or of
    K."""
    BLOCK_N: gl.constexpr = k_desc.block_shape[-2]
    ROWS: gl.constexpr = q_desc.block_shape[-2]
    SCORES: gl.constexpr = accumulator_layout(q_desc.layout, BLOCK_N)
    OUTPUT: gl.constexpr = accumulator_layout(q_desc.layout, o_desc.block_shape[-1])
    PAIR: gl.constexpr = SCORES.two_ctas
    return Wires(
        queries=SharedMemoryChannel.alloc((q_desc,) * PIECES, SLOTS=QUERY_TILES, CONSUMERS=0, TWO_CTAS=PAIR),
        keys_values=alloc_keys_values(k_desc, v_desc, CONFIG, PIECES, PAIR),
        biases=alloc_biases(bias),
        scores=TensorMemoryChannel.alloc(gl.float32, [ROWS, BLOCK_N], SCORES, RINGS=QUERY_TILES),
        tails=SignalChannel.alloc(QUERY_TILES, TWO_CTAS=PAIR),
        alphas=SignalChannel.alloc(QUERY_TILES),
        outputs=TensorMemoryChannel.alloc(gl.float32, [ROWS, o_desc.block_shape[-1]], OUTPUT, RINGS=QUERY_TILES),
        statistics=SignalChannel.alloc(QUERY_TILES),
        statistics_read=SignalChannel.alloc(QUERY_TILES, TWO_CTAS=PAIR),
        results=SharedMemoryChannel.alloc(o_desc, SLOTS=CONFIG.result_slots, CONSUMERS=1),
        turns=SignalChannel.alloc(QUERY_TILES),
        items=WorkChannel.alloc(ITEM_SLOTS, ROLES),
        CONFIG=CONFIG,
        bias=bias,
    )
