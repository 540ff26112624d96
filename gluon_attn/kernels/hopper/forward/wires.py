"""The wires of the Hopper kernel: its channels, by what flows through them."""

from channels import SharedMemoryChannel, SharedMemoryConsumer, SignalChannel, Turn
from gluon_attn.runtime.compat import aggregate, gl, jit

from ..layouts import key_major_layout


@aggregate
class Wires:
    """Each channel's contract: who fills it -> who reads it, its slots, who frees them.

    queries: load -> every softmax role; QUERY_SLOTS slots of one tile per softmax role; freed by each role after its
             last use of the tile. Sharded: each CTA of a cluster loads its own rows. A tile may be in pieces: as many
             parts of the slot (see pieces.py). So may those of K and of V.
    keys:    load -> every softmax role; KV_SLOTS slots of [BLOCK_N, D]; freed by each role when QKᵀ is done. With two
             CTAs one load fills both (multicast), and the slot is free when both CTAs have freed it. With a bias a slot
             has that too, after the pieces of K: a tile [ROWS, BLOCK_N] for each softmax role, or a row for all.
    values:  as keys, but of V, in fp8 of [D, BLOCK_N]; freed by each role when PV is done.
    loaded_values: the same channel, unless a role transposes V. Then it is as keys, load -> transpose; and values are
             transpose -> every softmax role, in each CTA its own.
    turns:   softmax role i -> role i + 1, around; role 0 has the first turn (if turns). One signal per key block: who
             has its scores, or in the first block of a row block has issued its product, lets the next role issue,
             so that one role's softmax runs beside another's products.
    output:  no channel but memory: one tile per softmax role, in which it alone stages O for its store; the queries'
             own if O is staged there.
    """

    queries: SharedMemoryChannel
    keys: SharedMemoryChannel
    loaded_values: SharedMemoryChannel
    values: SharedMemoryChannel
    turns: SignalChannel
    output: gl.shared_memory_descriptor
    CONFIG: gl.constexpr  # a HopperConfig
    QK: gl.constexpr  # pieces of a tile of Q, or of K
    bias: gl.tuple  # of one: the descriptor of a bias; or None

    @jit
    def channels(self):
        transposing = (self.loaded_values,) if self.CONFIG.transpose_registers > 0 else ()
        return (self.queries, self.keys, self.values) + transposing + (self.turns,)


@jit
def tiles_of_bias(bias, ROLES: gl.constexpr):
    """Descriptors of the tiles of a bias in a slot. bias: of one, its descriptor, or None."""
    if bias[0] is None:
        return bias[:0]
    elif bias[0].block_shape[2] == 1:
        return bias
    else:
        return bias * ROLES


@jit
def alloc_wires(q_desc, k_desc, v_desc, o_desc, bias, CONFIG: gl.constexpr, PIECES: gl.constexpr):
    """The channels for tiles of these descriptors. bias: of one, its descriptor, or None. PIECES: how many Q and K
    have, and V."""
    ROLES: gl.constexpr = CONFIG.softmax_roles
    SHARED: gl.constexpr = gl.num_ctas() > 1
    QK: gl.constexpr = PIECES[0]
    V: gl.constexpr = PIECES[1]
    queries = SharedMemoryChannel.alloc((q_desc,) * (ROLES * QK), SLOTS=CONFIG.query_slots, CONSUMERS=ROLES)
    of_keys = (k_desc,) * QK + tiles_of_bias(bias, ROLES)
    keys = SharedMemoryChannel.alloc(of_keys, SLOTS=CONFIG.kv_slots, CONSUMERS=ROLES, MULTICAST=SHARED)
    if CONFIG.transpose_registers > 0:
        loaded_values = SharedMemoryChannel.alloc((v_desc,) * V, SLOTS=CONFIG.kv_slots, CONSUMERS=1, MULTICAST=SHARED)
        LAYOUT: gl.constexpr = key_major_layout(v_desc.block_shape[-2], v_desc.layout.cga_layout)
        SHAPE: gl.constexpr = [CONFIG.kv_slots * V, v_desc.block_shape[-1], v_desc.block_shape[-2]]
        tiles = gl.allocate_shared_memory(v_desc.dtype, SHAPE, LAYOUT)
        values = SharedMemoryChannel.over(tiles, SLOTS=CONFIG.kv_slots, CONSUMERS=ROLES)
    else:
        values = SharedMemoryChannel.alloc((v_desc,) * V, SLOTS=CONFIG.kv_slots, CONSUMERS=ROLES, MULTICAST=SHARED)
        loaded_values = values
    turns = SignalChannel.alloc(SIGNALS=ROLES)
    if CONFIG.stage_in_queries:
        output = queries.tiles[0]
    else:
        output = gl.allocate_shared_memory(o_desc.dtype, [ROLES * V] + o_desc.block_shape, o_desc.layout)
    return Wires(
        queries=queries,
        keys=keys,
        loaded_values=loaded_values,
        values=values,
        turns=turns,
        output=output,
        CONFIG=CONFIG,
        QK=QK,
        bias=bias,
    )


@aggregate
class Ends:
    """The ends through which a softmax role gets one key block after the other."""

    keys: SharedMemoryConsumer
    values: SharedMemoryConsumer
    turn: Turn

    @jit
    def skip(self):
        """Pass over one block that only other roles' rows see.

        Each slot is waited for even so before it is freed: to free it unseen would let this role pass a later wait one
        lap early. The turn comes before the values, as in a block that is computed: with a ring of one slot the values
        are loaded only when every role has freed the keys, and a role that waits for its turn has not.
        """
        k, keys = self.keys.acquire()
        k.release()
        turn = self.turn.take()
        turn.pass_on()
        v, values = self.values.acquire()
        v.release()
        return Ends(keys, values, turn)
