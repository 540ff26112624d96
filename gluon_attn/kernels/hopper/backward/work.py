"""The key blocks that a program computes, as each role walks them: in the same order, each for itself."""

from gluon_attn.runtime.compat import aggregate, constexpr_function, gdc_wait, gl, jit

from ...common.packed import RECORD, heads_at_once
from ...common.queries import Keys
from ...common.sequence import Sequence, whole_sequence
from .shares import share_of


@constexpr_function
def first_keys_come_first(mask, keys, rotated):
    """Whether, if all key blocks are shared, the first ones of all heads come first, then the second ones: not one head
    after the other. Under a causal mask those cost the most, so programs end together. With 64 keys, at D=256, there
    are no registers for it."""
    return rotated and mask.hides_late_keys and keys > 64


@aggregate
class Order:
    """What there is to do, one item after the other: the key blocks of a KV head, the first one first, which under a
    causal mask is the one that most queries see; then those of the next.

    If blocks_per_item is 2, an item is two of them, the first and the last, the second and the last but one: together
    they cost as much as any other two. Of pairs, some programs have one more than others, which idle meanwhile. So
    those of the last heads follow one by one: of heads_at_once heads the first ones, then the second ones, and so on;
    then those of the next heads_at_once.

    Programs claim items, one after the other: who is free has the next. So those that begin together with the keys of a
    head go on together, and what one reads the others find in L2.

    Or the `shared` last key blocks, fewer than programs, are divided evenly into `shared_parts` parts. Each of these is
    an item, see shares.py.

    int32 scalars.
    """

    q_len: gl.tensor
    k_len: gl.tensor
    kv_heads: gl.tensor
    group: gl.tensor  # query heads of a KV head
    key_blocks: gl.tensor
    blocks_per_item: gl.tensor
    items_per_head: gl.tensor
    items: gl.tensor  # before those of the last heads, or those that are shared
    last_heads: gl.tensor
    heads_at_once: gl.tensor
    all_heads: gl.tensor  # KV heads of all batches
    shared: gl.tensor  # key blocks that programs share; 0, or last_heads is 0 and blocks_per_item 1
    shared_parts: gl.tensor  # parts that these are divided into, more than shared; 0 if none is
    KEYS: gl.constexpr
    BLOCK_M: gl.constexpr
    MASK: gl.constexpr  # a Mask
    ROTATED: gl.constexpr  # see `Keys`
    SCORE_MOD: gl.constexpr
    aux: gl.tuple
    records: gl.tuple  # of one: of packed sequences the key blocks, see packed.py; or None
    claimed: gl.tensor  # pointer: how many items have been claimed
    SHARES: gl.constexpr  # whether programs share key blocks

    @jit
    def keys_of(self, sequence, batch, kv_head, index, part, shares, share_first, share_end):
        """Key block `index` of a sequence; of its `shares` shares those from share_first to share_end - 1, which are of
        part `part`."""
        keys = Keys(
            batch=batch,
            kv_head=kv_head,
            first=index * self.KEYS,
            sequence=sequence,
            KEYS=self.KEYS,
            BLOCK_M=self.BLOCK_M,
            group=self.group,
            part=part,
            shares=shares,
            share_first=share_first,
            share_end=share_end,
            MASK=self.MASK,
            ROTATED=self.ROTATED,
            SCORE_MOD=self.SCORE_MOD,
            aux=self.aux,
            limits=(),
        )
        return keys.limited()


@jit
def order_of(
    q_desc,
    k_desc,
    blocks_per_item,
    last_heads,
    heads_at_once,
    shared,
    shared_parts,
    aux,
    records,
    claimed,
    MASK: gl.constexpr,
    SHARES: gl.constexpr,
    ROTATED: gl.constexpr,
    SCORE_MOD: gl.constexpr,
):
    """From descriptors of (B, H, Sq, D) and (B, Hkv, Sk, D). records: of one, a pointer; or None."""
    KEYS: gl.constexpr = k_desc.block_shape[-2]
    kv_heads = k_desc.shape[1]
    all_heads = k_desc.shape[0] * kv_heads
    key_blocks = (k_desc.shape[2] + KEYS - 1) // KEYS
    items_per_head = (key_blocks + blocks_per_item - 1) // blocks_per_item
    return Order(
        q_len=q_desc.shape[2],
        k_len=k_desc.shape[2],
        kv_heads=kv_heads,
        group=q_desc.shape[1] // kv_heads,
        key_blocks=key_blocks,
        blocks_per_item=blocks_per_item,
        items_per_head=items_per_head,
        items=(all_heads - last_heads) * items_per_head - shared,
        last_heads=last_heads,
        heads_at_once=heads_at_once,
        all_heads=all_heads,
        shared=shared,
        shared_parts=shared_parts,
        KEYS=KEYS,
        BLOCK_M=q_desc.block_shape[-2],
        MASK=MASK,
        ROTATED=ROTATED,
        SCORE_MOD=SCORE_MOD,
        aux=aux,
        records=records,
        claimed=claimed,
        SHARES=SHARES,
    )


@aggregate
class Work:
    """A key block: of an item of two the first one or the second; of a part the beginning of the next one, if it has
    that, or its own."""

    item: gl.tensor
    at_second: gl.tensor  # whether it is the second one
    order: Order

    @jit
    def is_left(self):
        order = self.order
        return self.item < order.items + order.last_heads * order.key_blocks + order.shared_parts

    @jit
    def keys(self):
        order = self.order
        sequence = whole_sequence(order.q_len, order.k_len)
        place = self.item - order.items
        part, shares, share_first, share_end = gl.to_tensor(0), gl.to_tensor(1), gl.to_tensor(0), gl.to_tensor(1)
        if order.SHARES:
            block = self.item
            if place >= 0:
                share = share_of(place, order)
                part, shares = place, order.shared_parts
                block = order.items + share.block + gl.where(self.at_second, 0, 1)
                share_first = gl.where(self.at_second, share.first, 0)
                share_end = gl.where(self.at_second, share.end, share.of_next)
            head, index = block // order.key_blocks, block % order.key_blocks
            if first_keys_come_first(order.MASK, order.KEYS, order.ROTATED):
                all_are_shared = order.items == 0
                head = gl.where(all_are_shared, block % order.all_heads, head)
                index = gl.where(all_are_shared, block // order.all_heads, index)
        else:
            head, index = self.item // order.items_per_head, self.item % order.items_per_head
            index = gl.where(self.at_second, order.key_blocks - 1 - index, index)
            if place >= 0:
                round_size = order.heads_at_once * order.key_blocks
                before, place = place // round_size * order.heads_at_once, place % round_size
                heads = gl.minimum(order.heads_at_once, order.last_heads - before)
                head = order.all_heads - order.last_heads + before + place % heads
                index = place // heads
        batch, kv_head = head // order.kv_heads, head % order.kv_heads
        return order.keys_of(sequence, batch, kv_head, index, part, shares, share_first, share_end)

    @jit
    def other_is_left(self):
        """Whether the other one of the item comes next."""
        order = self.order
        if order.SHARES:
            return ~self.at_second & (self.item >= order.items)
        else:
            alone = 2 * (self.item % order.items_per_head) + 1 >= order.key_blocks  # the middle one of an odd number
            return ~(self.at_second | alone | (self.item >= order.items) | (order.blocks_per_item == 1))


@aggregate
class PackedWork:
    """A key block of packed sequences. Of a group of heads the first records come first, then the second ones, and so
    on; then those of the next group. If sums are in a fixed order, a group is heads_at_once heads. What is not `place`
    is computed again for each: the gradient role has no registers for it.
    """

    place: gl.tensor
    order: Order

    @jit
    def count(self):
        """Of key blocks of a head."""
        return gl.load(self.order.records[0])

    @jit
    def at_once(self):
        """Heads of a group, of which the last may have fewer."""
        if self.order.ROTATED:
            return heads_at_once(self.count(), self.order.kv_heads)
        else:
            return self.order.heads_at_once

    @jit
    def is_left(self):
        return self.place < self.count() * self.order.kv_heads

    @jit
    def keys(self):
        order, at_once = self.order, self.at_once()
        round_size = at_once * self.count()
        before, place = self.place // round_size * at_once, self.place % round_size
        heads = gl.minimum(at_once, order.kv_heads - before)
        record = order.records[0] + (1 + place // heads) * RECORD
        q_first, q_len = gl.load(record), gl.load(record + 1)
        k_first, k_len = gl.load(record + 2), gl.load(record + 3)
        batch, kv_head, index = gl.load(record + 4), before + place % heads, gl.load(record + 5)
        sequence = Sequence(q_first, q_len, k_first, k_len, True)
        whole = gl.to_tensor(0), gl.to_tensor(1), gl.to_tensor(0), gl.to_tensor(1)
        return order.keys_of(sequence, batch, kv_head, index, *whole)


@aggregate
class ClaimedWork:
    """The key block at hand, of an item that the program has claimed. Immutable: `next()` returns the next.

    The load role claims one when it has asked for all that the one before needs, and tells the other roles through the
    channel of claims. Whatever number of programs runs at a time: all items before a claimed one are done, or have been
    claimed by programs that run.
    """

    item: gl.tensor
    at_second: gl.tensor  # whether it is the second one of its item
    order: Order
    end: gl.tuple  # of one: the role's end of the channel
    CLAIMS: gl.constexpr  # whether it is the load role

    @jit
    def alone(self):
        """The same key block, as a Work or a PackedWork: without the channel."""
        if self.order.records[0] is None:
            return Work(self.item, self.at_second, self.order)
        else:
            return PackedWork(self.item, self.order)

    @jit
    def is_left(self):
        return self.alone().is_left()

    @jit
    def keys(self):
        return self.alone().keys()

    @jit
    def next(self):
        if self.order.records[0] is None:
            if self.alone().other_is_left():
                at_second = self.item >= 0  # true, as a tensor
                following = ClaimedWork(self.item, at_second, self.order, self.end, self.CLAIMS)
            else:
                following = claim(self.order, self.end[0], self.CLAIMS)
            return following
        else:
            return claim(self.order, self.end[0], self.CLAIMS)


@jit
def claim(order, end, CLAIMS: gl.constexpr):
    """The ClaimedWork of the next item. end: of the channel of claims; the role's that CLAIMS, or another's."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot, end = end.acquire()
    if CLAIMS:
        item = gl.atomic_add(order.claimed, 1, sem="relaxed")
        slot.part(0).store(gl.full([1], item, gl.int32, LAYOUT))
        slot.publish()
    else:
        item = gl.sum(slot.part(0).load(LAYOUT), axis=0)
        slot.release_accessed()
    if order.SHARES:  # a part without a next key block has none at first
        at_second = (item >= order.items) & (share_of(item - order.items, order).of_next == 0)
    else:
        at_second = item < 0  # false, as a tensor
    return ClaimedWork(item, at_second, order, (end,), CLAIMS)


@jit
def first_work(order, claims, CLAIMS: gl.constexpr):
    """The first ClaimedWork of the role that claims, or of another. claims: the channel."""
    if CLAIMS or order.records[0] is not None:
        gdc_wait()  # for the kernel that sets the count to 0; and, in all roles, for the list of packed sequences
    return claim(order, claims.producer() if CLAIMS else claims.consumer(), CLAIMS)
