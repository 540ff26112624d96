"""The gradient role: two warpgroups that take a block of keys past all queries that see it, to dK, dV and dQ.

Products are transposed, keys as rows, so that P and dS are left operands in the registers in which they are computed:

    S = K Qᵀ    dP = V dOᵀ    dV += P dO    dK += dS Q    dQ = dSᵀ K, dS through shared memory

with P = exp2(scale_log2 S - LSE) and dS = P (dP - delta), see docs/backward.md. The method is FlashAttention's (Dao et
al., 2022); that two warpgroups share dS is FlashAttention-3's (Shah et al., 2024).

At D=256 there are registers for 64 keys only. Then each warpgroup has half of the columns of dK and dV, and needs all
of P and dS, which both go through shared memory. At 192 with V of 128 there are registers for dK or for dV: so each has
a launch of its own, that of dK with dQ. dV alone needs no dP and dS.
"""

from channels import SharedMemoryConsumer, SharedMemoryProducer, Slot, tma
from gluon_attn.runtime.compat import (
    aggregate,
    fence_async_shared,
    gl,
    jit,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...common.pieces import from_column, pieces_of
from ...common.score_mod import LOG2_E, is_by_distance, score_scale_of
from ...common.sequence import key_coords
from ..inline_asm import wait_apart, widened
from ..pieces import multiply_transposed, zeros_in_pieces
from .layouts import accumulator_layout, in_register_order, left_operand_layout
from .operands import first_tile
from .shares import collect, hand_in
from .work import first_work


@aggregate
class Ends:
    """The role's ends of its channels, but for K and V; and which of the DS_SLOTS is next."""

    queries: SharedMemoryConsumer
    douts: SharedMemoryConsumer
    dqs: SharedMemoryProducer
    ds_slot: gl.tensor


@aggregate
class State:
    """What the role carries from one row block to the next."""

    dk: gl.tuple  # [KEYS, D] fp32, still to be multiplied with the scale: its pieces; none if another launch has it
    dv: gl.tuple  # of one [KEYS, D] fp32; or of none, likewise
    p: gl.tuple  # if dV alone is computed, of one: P [KEYS, BLOCK_M] of the step before, in 16 bits; else of none
    ends: Ends


@aggregate
class StepSlots:
    """The row block of a step, in acquired slots."""

    q_slot: Slot
    do_slot: Slot
    q: gl.tuple  # [BLOCK_M, D]: its pieces
    do: gl.shared_memory_descriptor  # [BLOCK_M, D]


@jit
def multiply(a, b, LAYOUT: gl.constexpr):
    """Issue the product of a and b, shared memory: [M, N] fp32, to be waited for."""
    product = gl.zeros([a.shape[0], b.shape[1]], gl.float32, LAYOUT)
    return warpgroup_mma(a, b, product, use_acc=False, is_async=True)


@jit
def of_columns(slot, SCORES: gl.constexpr):
    """The statistics in a slot, one for each column of the scores: [1, BLOCK_M]."""
    LAST: gl.constexpr = slot.PARTS - 1
    BLOCK_M: gl.constexpr = slot.part(LAST).shape[3]
    return slot.view([BLOCK_M], part=LAST).load(gl.SliceLayout(0, SCORES))[None, :]


@jit
def bias_of_scores(slot, scale_log2, PART: gl.constexpr, SHAPE: gl.constexpr, SCORES: gl.constexpr):
    """What S = K Qᵀ starts with: the bias, part PART of the slot of Q, in units of raw scores. [KEYS, BLOCK_M] fp32."""
    factor = LOG2_E / scale_log2
    KEYS: gl.constexpr = SHAPE[0]
    if slot.part(PART).shape[2] == 1:
        row = slot.view([KEYS], part=PART).load(gl.SliceLayout(1, SCORES)).to(gl.float32) * factor
        return row[:, None].broadcast_to(SHAPE)
    else:
        tile = slot.view([SHAPE[1], KEYS], part=PART).permute((1, 0))
        return widened(tile.load(SCORES)) * factor


@jit
def weights_of(s, slot, keys, row, head, scale, MASKED: gl.constexpr):
    """(P [KEYS, BLOCK_M], what a function made of the raw scores S), given the slot of Q, in which LSE is."""
    lse = of_columns(slot, s.type.layout)
    modified = keys.modified(s, row, head, scale.before)
    if MASKED:
        masked = keys.mask(modified, row, head)
    else:
        masked = modified
    return gl.exp2(masked * scale.log2 - lse), modified


@jit
def hand_over_dbias(ds, dqs, desc):
    """Give dS [KEYS, BLOCK_M], which is what a bias of each row has as its gradient here, to the reduce role: in tiles
    of `desc` [rows, KEYS], through slots of dQ. Returns the next end."""
    PIECES: gl.constexpr = ds.shape[1] // desc.block_shape[2]
    if PIECES > 1:
        halves = gl.split(ds.reshape([ds.shape[0], 2, ds.shape[1] // 2]).permute((0, 2, 1)))
    else:
        halves = (ds,)
    gl.static_assert(len(halves) == PIECES)
    for i in gl.static_range(PIECES):
        slot, dqs = dqs.acquire()
        tile = first_tile(slot.part(0), desc).reshape([ds.shape[1] // PIECES, ds.shape[0]])
        tile.permute((1, 0)).store(halves[i].to(desc.dtype))
        slot.publish()
    return dqs


@jit
def add_dbias_row(ds, keys, head, operands):
    """Add dS [KEYS, BLOCK_M] to the gradient of a bias that all queries have in common."""
    bias, dbias = operands.bias[0], operands.bias[2]
    batch, of_head = gl.minimum(keys.batch, bias.shape[0] - 1), gl.minimum(head, bias.shape[1] - 1)
    first = (batch * bias.shape[1] + of_head).to(gl.int64) * keys.sequence.k_len
    key = keys.first + gl.arange(0, ds.shape[0], gl.SliceLayout(1, ds.type.layout))
    gl.atomic_add(dbias + first + key, gl.sum(ds, axis=1), mask=key < keys.sequence.k_len, sem="relaxed")


@jit
def hand_over(dq, dqs):
    """Give a row block's dQ [BLOCK_M, N], all columns or a part of them, to the reduce role. Returns the next end."""
    slot, dqs = dqs.acquire()
    slot.view([dq.shape[0] * dq.shape[1] // 32, 32]).store(in_register_order(dq))
    slot.publish()
    return dqs


@jit
def from_registers(p, ds, ds_tile, k, rows, state, dqs):
    """What follows from P and dS [KEYS, BLOCK_M] in 16 bits, with both as left operands from registers: (dK, dV, the
    next end of dqs). Frees the slots. dS is in ds_tile too, as this role has just written it."""
    LEFT: gl.constexpr = left_operand_layout(state.dv[0].type.layout)
    left_p = gl.convert_layout(p, LEFT, assert_trivial=True)
    dv = warpgroup_mma(left_p, rows.do, state.dv[0], is_async=True)
    fence_async_shared()  # the role's writes of dS, and its reads of statistics, before what engines do with either
    gl.barrier()  # each warpgroup reads what the other has written
    dq = multiply(ds_tile.permute((1, 0)), k[0], accumulator_layout(rows.q[0].shape[0], rows.q[0].shape[1]))
    dv = wait_apart(dv, 1)
    left_ds = gl.convert_layout(ds, LEFT, assert_trivial=True)
    dk = warpgroup_mma(left_ds, rows.q[0], state.dk[0], is_async=True)
    dqs = hand_over(wait_apart(dq, 1), dqs)  # dK goes on
    dk, _ = warpgroup_mma_wait(0, deps=[dk, left_ds])
    rows.do_slot.release()
    rows.q_slot.release()
    return (dk,), (dv,), dqs


@jit
def without_dv(ds, ds_tile, k, rows, state, dqs):
    """The same where another launch has dV: (dK, the next end of dqs). dK and dQ are in pieces. dO, which dP alone has
    needed, is freed beside the products."""
    PIECES: gl.constexpr = len(k)
    LEFT: gl.constexpr = left_operand_layout(state.dk[0].type.layout)
    DQ: gl.constexpr = accumulator_layout(rows.q[0].shape[0], rows.q[0].shape[1])
    fence_async_shared()  # as above
    gl.barrier()
    dq = ()
    for i in gl.static_range(PIECES):
        dq += (multiply(ds_tile.permute((1, 0)), k[i], DQ),)
    left_ds = gl.convert_layout(ds, LEFT, assert_trivial=True)
    dk = ()
    for i in gl.static_range(PIECES):
        dk += (warpgroup_mma(left_ds, rows.q[i], state.dk[i], is_async=True),)
    rows.do_slot.release()
    for i in gl.static_range(PIECES):
        dqs = hand_over(wait_apart(dq[i], 2 * PIECES - 1 - i), dqs)
    dk = warpgroup_mma_wait(0, deps=dk + (left_ds,))[:PIECES]
    rows.q_slot.release()
    return dk, dqs


@jit
def parts_of(k):
    """The right operands of the parts in which dQ is computed: the halves of the columns, or the pieces."""
    HALF: gl.constexpr = k[0].shape[1] // 2
    return k if len(k) > 1 else (k[0].slice(0, HALF, dim=1), k[0].slice(HALF, HALF, dim=1))


@jit
def from_memory(p, p_tile, ds_tile, k, rows, state, dqs):
    """The same with both from shared memory. dQ comes in parts of its columns, for which there are registers. The first
    is handed over beside dV and dK, so that TMA adds it meanwhile. dO is freed when dV is there, and the next part is
    issued then: before that the loop would be up to 6 % slower, or spill more."""
    PIECES: gl.constexpr = len(k)
    parts = parts_of(k)
    DQ: gl.constexpr = accumulator_layout(rows.q[0].shape[0], parts[0].shape[1])
    p_tile.store(p)
    fence_async_shared()  # as above, and of P
    gl.barrier()
    dq = multiply(ds_tile.permute((1, 0)), parts[0], DQ)
    dv = warpgroup_mma(p_tile, rows.do, state.dv[0], is_async=True)
    dk = state.dk[:0]
    for i in gl.static_range(PIECES):
        dk += (warpgroup_mma(ds_tile, rows.q[i], state.dk[i], is_async=True),)
    dqs = hand_over(wait_apart(dq, 1 + PIECES), dqs)
    dv = warpgroup_mma_wait(PIECES, deps=[dv])
    rows.do_slot.release()
    following = multiply(ds_tile.permute((1, 0)), parts[1], DQ)
    dk = waited(dk, 1)
    rows.q_slot.release()
    for i in gl.static_range(2, len(parts)):
        dq = following
        following = multiply(ds_tile.permute((1, 0)), parts[i], DQ)
        dqs = hand_over(wait_apart(dq, 1), dqs)
    return dk, (dv,), hand_over(warpgroup_mma_wait(0, deps=[following]), dqs)


@jit
def waited(pieces, PENDING: gl.constexpr):
    """`warpgroup_mma_wait` for several, which for one returns it alone."""
    if len(pieces) > 1:
        return warpgroup_mma_wait(PENDING, deps=pieces)
    else:
        return (warpgroup_mma_wait(PENDING, deps=pieces),)


@jit
def start_scores(queries, k, keys, operands, scale_log2, SCORES: gl.constexpr):
    """Issue S = K Qᵀ of the row block that comes next: (S [KEYS, BLOCK_M], to be waited for; the slot of Q; Q's pieces;
    the next end of queries)."""
    q_slot, queries = queries.acquire()
    q = pieces_of(q_slot, [keys.BLOCK_M, k[0].shape[1]], 0, len(k))
    if operands.bias[0] is None:
        start = None
    else:
        start = bias_of_scores(q_slot, scale_log2, len(k), [keys.KEYS, keys.BLOCK_M], SCORES)
    return multiply_transposed(k, q, SCORES, start), q_slot, q, queries


@jit
def next_block(state, k, v, keys, row, head, wires, operands, scale, MASKED: gl.constexpr):
    """One step: what the queries of a row block, from `row` on, add to dK and dV, and what these keys add to dQ of
    the row block. head: of the queries, counted for a function, or the gradient of a bias, alone. Returns the next
    State.

    The statistics are read after the waits: held across them, they would cost registers that D=64 does not have.
    """
    BLOCK_M: gl.constexpr = keys.BLOCK_M
    DTYPE: gl.constexpr = v.dtype
    SCORES: gl.constexpr = accumulator_layout(keys.KEYS, BLOCK_M)
    ends = state.ends
    douts = ends.douts
    if wires.CONFIG.rings_in_step:
        douts = douts.in_step_with(ends.queries)
    s, q_slot, q, queries = start_scores(ends.queries, k, keys, operands, scale.log2, SCORES)
    do_slot, douts = douts.acquire()
    do = do_slot.view([BLOCK_M, v.shape[1]], part=0)
    dp = multiply(v, do.permute((1, 0)), SCORES)  # [KEYS, BLOCK_M]
    s = wait_apart(s, 1)  # dP goes on
    p, modified = weights_of(s, q_slot, keys, row, head, scale, MASKED)
    dp = wait_apart(dp, 0)
    ds = p * (dp - of_columns(do_slot, SCORES))
    ds = keys.derived(ds, s, modified, row, head, scale.before)
    dqs = ends.dqs
    if operands.bias[1] is not None:
        dqs = hand_over_dbias(ds, dqs, operands.bias[1])
    if operands.bias[2] is not None:
        add_dbias_row(ds, keys, head, operands)
    ds = ds.to(DTYPE)
    ds_tile = wires.ds.index(ends.ds_slot)
    ds_tile.store(ds)
    rows = StepSlots(q_slot, do_slot, q, do)
    if not wires.CONFIG.has_dv:
        dk, dqs = without_dv(ds, ds_tile, k, rows, state, dqs)
        dv = ()
    elif wires.CONFIG.exchanges_p:
        dk, dv, dqs = from_memory(p.to(DTYPE), wires.p, ds_tile, k, rows, state, dqs)
    else:
        dk, dv, dqs = from_registers(p.to(DTYPE), ds, ds_tile, k, rows, state, dqs)
    return State(dk, dv, (), Ends(queries, douts, dqs, (ends.ds_slot + 1) % wires.CONFIG.ds_slots))


@jit
def start_dv(state, do):
    """Issue what P of the step before, or zeros, adds to dV, given its dO [BLOCK_M, D]: (dV, P as its operand), to be
    waited for."""
    LEFT: gl.constexpr = left_operand_layout(state.dv[0].type.layout)
    left_p = gl.convert_layout(state.p[0], LEFT, assert_trivial=True)
    return warpgroup_mma(left_p, do, state.dv[0], is_async=True), left_p


@jit
def next_block_of_dv(state, k, keys, row, head, wires, operands, scale, MASKED: gl.constexpr):
    """`next_block` where another launch has dK and dQ. The product for dV is that of the step before: beside it the
    exponentials of this one are computed."""
    BLOCK_M: gl.constexpr = keys.BLOCK_M
    SCORES: gl.constexpr = accumulator_layout(keys.KEYS, BLOCK_M)
    ends = state.ends
    s, q_slot, _, queries = start_scores(ends.queries, k, keys, operands, scale.log2, SCORES)
    do_slot, douts = ends.douts.acquire()
    dv, left_p = start_dv(state, do_slot.view([BLOCK_M, state.dv[0].shape[1]], part=0))
    s = wait_apart(s, 1)  # dV goes on
    p, _ = weights_of(s, q_slot, keys, row, head, scale, MASKED)
    p = p.to(operands.k.dtype)
    ends.queries.wait_again()  # which passes at once: past it the assembler would move half of the exponentials
    dv, _ = warpgroup_mma_wait(0, deps=[dv, left_p])
    do_slot.release()
    q_slot.release_accessed()
    return State((), (dv,), (p,), Ends(queries, douts, ends.dqs, ends.ds_slot))


@jit
def last_of_dv(state):
    """The State with what the last step's P adds to dV."""
    ends = state.ends
    do_slot, douts = ends.douts.acquire()
    dv, left_p = start_dv(state, do_slot.view([state.p[0].shape[1], state.dv[0].shape[1]], part=0))
    dv, _ = warpgroup_mma_wait(0, deps=[dv, left_p])
    do_slot.release()
    return State((), (dv,), (), Ends(ends.queries, douts, ends.dqs, ends.ds_slot))


@jit
def in_step(tile, step):
    """A tile [KEYS, D] as it is in each step, of fewer than 2^30. The compiler does not know that it stays where it is:
    else it would compute all descriptors of its products before the loop, for which there are no registers."""
    ONE: gl.constexpr = [1] + tile.shape
    return reinterpret(tile, tile.dtype, ONE, tile.layout).index(step >> 30)


@jit
def all_in_step(tiles, step):
    in_this = tiles[:0]
    for i in gl.static_range(len(tiles)):
        in_this += (in_step(tiles[i], step),)
    return in_this


@jit
def walk(state, k, v, keys, first, steps, after, wires, operands, scale, MASKED: gl.constexpr):
    """Steps without a mask of all heads, or those with one of one head, that come before or after. Only for a mask it
    counts which row block it is; and for a function, of scores or of masks, or for the gradient of a bias, by the
    number `first` of the first of these steps."""
    walked = keys.query_range()
    COUNTED: gl.constexpr = keys.SCORE_MOD is not None or operands.bias[2] is not None
    for step in range(steps):
        if not COUNTED and (keys.MASK.function is None or not MASKED):
            head, row = keys.kv_head, walked.masked_block(step, after) * keys.BLOCK_M
        else:
            member, block = walked.visit(first + step)
            head, row = keys.head(member), block * keys.BLOCK_M
        if is_by_distance(keys.SCORE_MOD):  # the slope is the head's
            scale = score_scale_of(scale.log2, keys.SCORE_MOD, head, keys.batch, keys.aux)
        keys_in_step = all_in_step(k, step)
        if wires.CONFIG.has_dk:
            state = next_block(state, keys_in_step, in_step(v, step), keys, row, head, wires, operands, scale, MASKED)
        else:
            state = next_block_of_dv(state, keys_in_step, keys, row, head, wires, operands, scale, MASKED)
    return state


@jit
def store_staged(grad, desc, coords, tile):
    """Start the store of dK or dV [KEYS, D] through memory that nobody else uses."""
    tile.reshape(grad.shape).store(grad.to(desc.dtype))
    tma.store_own(desc, coords, tile)


@jit
def store_grads(dk, dv, ends, wires, operands, keys):
    """Store dK and dV through memory that nobody uses between two key blocks: dV through that of dS, while the last dQ
    is added, and dK through that of dQ; or both through that, one after the other. K and V have their own, so that the
    next ones are loaded meanwhile. Where another launch has dK, nothing else is where dS would be."""
    coords = key_coords(keys, keys.kv_head, keys.first)
    if wires.CONFIG.has_dv and wires.CONFIG.ds_stages:
        store_staged(dv[0], operands.dv, coords, first_tile(wires.ds, operands.dv))
    if not wires.CONFIG.has_dk:
        tma.wait_stores_read()
        return
    memory = ends.dqs.borrow().part(0)
    if wires.CONFIG.has_dv and not wires.CONFIG.ds_stages:
        store_staged(dv[0], operands.dv, coords, first_tile(memory, operands.dv))
        tma.wait_stores_read()
    tile = first_tile(memory, operands.dk)
    for i in gl.static_range(len(dk)):
        store_staged(dk[i] * operands.scale, operands.dk, from_column(coords, i * operands.dk.block_shape[-1]), tile)
        tma.wait_stores_read()


@jit
def gradient(wires, order, operands):
    """Computes and stores dK and dV of every key block, and dQ as far as it comes from that."""
    KEYS: gl.constexpr = operands.k.block_shape[-2]
    D: gl.constexpr = operands.k.block_shape[-1]
    DV: gl.constexpr = operands.v.block_shape[-1]
    BLOCK_M: gl.constexpr = operands.q.block_shape[-2]
    PIECES: gl.constexpr = operands.PIECES
    keys_values = wires.keys_values.consumer()
    ends = Ends(wires.queries.consumer(), wires.douts.consumer(), wires.dqs.producer(), gl.to_tensor(0))
    work = first_work(order, wires.claims, CLAIMS=False)
    while work.is_left():
        keys = work.keys()
        walked = keys.query_range()
        kv_slot, keys_values = keys_values.acquire()
        k = pieces_of(kv_slot, [KEYS, D], 0, PIECES)
        v, dk, dv, p = None, (), (), ()
        if wires.CONFIG.has_dk:
            v = kv_slot.view([KEYS, DV], part=PIECES)
            dk = zeros_in_pieces(PIECES, [KEYS, D], accumulator_layout(KEYS, D))
        if wires.CONFIG.has_dv:
            dv = (gl.zeros([KEYS, DV], gl.float32, accumulator_layout(KEYS, DV)),)
        if not wires.CONFIG.has_dk:
            p = (gl.zeros([KEYS, BLOCK_M], operands.k.dtype, accumulator_layout(KEYS, BLOCK_M)),)
        state = State(dk, dv, p, ends)
        scale = score_scale_of(operands.scale_log2, keys.SCORE_MOD, keys.head(0), keys.batch, keys.aux)
        first = gl.to_tensor(0)
        if keys.MASK.hides_early_keys:
            # Masked steps come before the unmasked ones too. The masked loop is entered twice rather than compiled
            # twice: for those before, and for those after, which no unmasked ones follow.
            for after in range(2):
                masked = gl.where(after == 0, walked.masked_steps_before(), walked.masked_steps())
                for _ in range(order.group):
                    state = walk(state, k, v, keys, first, masked, after, wires, operands, scale, MASKED=True)
                    first += masked
                unmasked = gl.where(after == 0, walked.unmasked_steps(), 0)
                state = walk(state, k, v, keys, first, unmasked, after, wires, operands, scale, MASKED=False)
                first += unmasked
        else:
            state = walk(state, k, v, keys, first, walked.unmasked_steps(), 1, wires, operands, scale, MASKED=False)
            first += walked.unmasked_steps()
            for _ in range(order.group):
                state = walk(state, k, v, keys, first, walked.masked_steps(), 1, wires, operands, scale, MASKED=True)
                first += walked.masked_steps()
        if not wires.CONFIG.has_dk:
            state = last_of_dv(state)
        kv_slot.release()
        ends = state.ends
        if operands.handed_in[0] is None:
            store_grads(state.dk, state.dv, ends, wires, operands, keys)
        elif keys.share_end < keys.shares:
            hand_in(state.dk, state.dv, keys.part, operands)
        else:
            dk, dv = state.dk, state.dv
            if keys.share_first > 0:
                dk, dv = collect(dk, dv, keys.part, order, operands)
            store_grads(dk, dv, ends, wires, operands, keys)
        work = work.next()
