"""The key blocks that a program computes, as each role walks them: in the same order, each for itself."""

from gluon_attn.runtime.compat import aggregate, gl, jit

from ...common.queries import Keys
from ...common.sequence import Sequence


@aggregate
class Order:
    """What there is to do, one item after the other: the key blocks of a KV head, the first one first, which under a
    causal mask is the one that most queries see; then those of the next.

    If blocks_per_item is 2, an item is two of them, the first and the last, the second and the last but one: together
    they cost as much as any other two. Of pairs, some programs have one more than others, which idle meanwhile. So
    those of the last heads follow one by one: of heads_at_once heads the first ones, then the second ones, and so on;
    then those of the next heads_at_once. int32 scalars.
    """

    q_len: gl.tensor
    k_len: gl.tensor
    kv_heads: gl.tensor
    group: gl.tensor  # query heads of a KV head
    key_blocks: gl.tensor
    blocks_per_item: gl.tensor
    items_per_head: gl.tensor
    items: gl.tensor  # before those of the last heads
    last_heads: gl.tensor
    heads_at_once: gl.tensor
    all_heads: gl.tensor  # KV heads of all batches
    parts: gl.tensor  # of a key block's queries, each for a program of its own
    KEYS: gl.constexpr
    BLOCK_M: gl.constexpr
    MASK: gl.constexpr  # a Mask
    ROTATED: gl.constexpr  # see `Keys`


@jit
def order_of(
    q_desc, k_desc, blocks_per_item, last_heads, heads_at_once, parts, MASK: gl.constexpr, ROTATED: gl.constexpr
):
    """From descriptors of (B, H, Sq, D) and (B, Hkv, Sk, D)."""
    KEYS: gl.constexpr = k_desc.block_shape[2]
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
        items=(all_heads - last_heads) * items_per_head,
        last_heads=last_heads,
        heads_at_once=heads_at_once,
        all_heads=all_heads,
        parts=parts,
        KEYS=KEYS,
        BLOCK_M=q_desc.block_shape[2],
        MASK=MASK,
        ROTATED=ROTATED,
    )


@aggregate
class Work:
    """The key block at hand. Immutable: `next()` returns the next: the other one of the item, or one of the item that
    is as many on as there are programs.

    Programs take the single ones there and back, as an ox ploughs: who had a heavier one has a lighter one next. Not
    where each program has one item, as it has if the sums are to be in a fixed order.
    """

    item: gl.tensor
    way_back: gl.tensor  # at the second block of an item
    order: Order

    @jit
    def place(self):
        """In the order of the last heads' key blocks; negative before them. The first round that all programs begin
        there is a way back."""
        order, programs = self.order, gl.num_programs(0)
        place = self.item - order.items
        if order.ROTATED:  # else each program has one item
            round = self.item // programs - (order.items + programs - 1) // programs
            place += gl.where((round >= 0) & (round % 2 == 0), programs - 1 - 2 * gl.program_id(0), 0)
        return place

    @jit
    def is_left(self):
        return self.place() < self.order.last_heads * self.order.key_blocks

    @jit
    def keys(self):
        order = self.order
        head, index = self.item // order.items_per_head, self.item % order.items_per_head
        index = gl.where(self.way_back, order.key_blocks - 1 - index, index)
        place = self.place()
        if place >= 0:
            turns = order.heads_at_once * order.key_blocks
            before, place = place // turns * order.heads_at_once, place % turns
            heads = gl.minimum(order.heads_at_once, order.last_heads - before)
            head = order.all_heads - order.last_heads + before + place % heads
            index = place // heads
        sequence = Sequence(gl.to_tensor(0), order.q_len, gl.to_tensor(0), order.k_len)
        batch, kv_head = head // order.kv_heads, head % order.kv_heads
        return Keys(
            batch=batch,
            kv_head=kv_head,
            first=index * order.KEYS,
            sequence=sequence,
            KEYS=order.KEYS,
            BLOCK_M=order.BLOCK_M,
            group=order.group,
            part=gl.program_id(0) % order.parts,
            parts=order.parts,
            MASK=order.MASK,
            ROTATED=order.ROTATED,
        )

    @jit
    def number(self, keys):
        """Of the key block, among those of all heads."""
        return (keys.batch * self.order.kv_heads + keys.kv_head) * self.order.key_blocks + keys.first // keys.KEYS

    @jit
    def next(self):
        order = self.order
        alone = 2 * (self.item % order.items_per_head) + 1 >= order.key_blocks  # the middle one of an odd number
        single = alone | (self.item >= order.items) | (order.blocks_per_item == 1)
        way_back = ~self.way_back & ~single
        return Work(self.item + gl.where(way_back, 0, gl.num_programs(0)), way_back, order)


@jit
def first_work(order):
    """If a key block is walked in parts, there are as many programs as parts, and no next item."""
    return Work(gl.program_id(0) // order.parts, gl.program_id(0) < 0, order)
