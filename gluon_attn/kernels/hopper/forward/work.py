"""The row blocks that a program computes, as each role walks them: in the same order, each for itself."""

from gluon_attn.runtime.compat import aggregate, constexpr_function, gl, jit

from ...common.packed import first_packed_work
from ...common.sizes import Counts, Lengths


@constexpr_function
def costs_differ(mask, shares):
    """Whether shares of a row block cost so differently that it pays to exchange them."""
    return mask.hides_late_keys and shares > 2  # of two, by a key block at most


@constexpr_function
def may_skip_late_keys(mask, role, roles):
    """Whether a row block has key blocks after all that the role's rows see: no, if they are always its last ones."""
    return mask.has_ranges or (mask.hides_late_keys and (costs_differ(mask, roles) or role < roles - 1))


@constexpr_function
def may_skip_early_keys(mask, role, roles):
    """Whether a row block has key blocks before all that the role's rows see: no, if they are always its first ones."""
    return mask.has_ranges or (mask.hides_early_keys and (costs_differ(mask, roles) or role > 0))


@aggregate
class Order:
    """In which order row blocks are computed. blocks_per_item: 1, or 2 for a heavy row block with a light one.
    last_heads: of the last heads, how many are computed together, if LONGEST_FIRST. int32 scalars."""

    counts: Counts
    blocks_per_item: gl.tensor
    last_heads: gl.tensor
    lengths: Lengths
    LONGEST_FIRST: gl.constexpr


@aggregate
class Work:
    """The row block at hand. Immutable: `next()` returns the next.

    Program p of n does items p, p + n, ..., numbered through a head before the next, so that programs working at the
    same time share its K and V in L2. An item is a row block, the last of a head first; or two, a heavy one with a
    light one, which under a square causal mask always cost the same. `next()` adds n digit by digit: divisions would
    delay every row block, as nothing begins before it is known which.

    If LONGEST_FIRST, the row blocks of the last heads follow one by one, those with most keys first, of all these
    heads. Of items of two, some programs have one more than others, which idle meanwhile; of the lightest row blocks
    that matters little. Programs take them there and back, as an ox ploughs: who had a heavier one has a lighter one
    next.
    """

    batch: gl.tensor
    head: gl.tensor
    item: gl.tensor  # of the head
    way_back: gl.tensor  # there and back go programs over an item's two row blocks, or over the last heads' rounds
    last_place: gl.tensor  # place in the order of the last heads' row blocks, as if on a way there; negative before
    batch_step: gl.tensor
    head_step: gl.tensor
    item_step: gl.tensor
    items: gl.tensor  # of a head
    order: Order

    @jit
    def is_left(self):
        if self.order.LONGEST_FIRST:
            return self.place() < self.order.last_heads * self.order.counts.row_blocks
        else:
            return self.batch < self.order.counts.batches

    @jit
    def place(self):
        """In the order of the last heads' row blocks: on a way back counted from the other end of the programs."""
        back = gl.num_programs(0) - 1 - 2 * gl.program_id(0)
        return self.last_place + gl.where((self.last_place >= 0) & self.way_back, back, 0)

    @jit
    def rows(self):
        """Every other head begins its items with the light one, if it has several: measured, see
        docs/lab_log.md#the-order-of-row-blocks."""
        order, counts = self.order, self.order.counts
        batch, head = self.batch, self.head
        index = counts.row_blocks - 1 - self.item
        if order.lengths.MASK.hides_late_keys:
            swapped = (order.blocks_per_item == 2) & (self.items > 1) & ((self.head & 1) == 1)
            index = gl.where(self.way_back ^ swapped, self.item, index)
        if order.LONGEST_FIRST:  # noqa: SIM102 - known when the kernel is compiled, unlike the next
            if self.last_place >= 0:
                place, heads = self.place(), order.last_heads
                index = counts.row_blocks - 1 - place // heads
                head = counts.all_heads - heads + place % heads
                batch, head = head // counts.heads, head % counts.heads
        return order.lengths.rows(batch, head, index)

    @jit
    def next(self):
        order, counts = self.order, self.order.counts
        to_second, way_back, last_place = self.way_back, self.way_back, self.last_place
        if order.lengths.MASK.hides_late_keys:  # the middle one of an odd number of row blocks is alone
            to_second = (order.blocks_per_item == 2) & ~way_back & (2 * self.item + 1 < counts.row_blocks)
            if order.LONGEST_FIRST:
                to_second = to_second & (last_place < 0)
                last_place += gl.where(to_second, 0, gl.num_programs(0))
                # The first round after items of two that all programs begin among the last heads is a way back.
                turned = gl.where(self.last_place < 0, last_place >= gl.program_id(0), ~way_back)
                way_back = gl.where(last_place < 0, to_second, turned)
            else:
                way_back = to_second
        item = self.item + gl.where(to_second, 0, self.item_step)
        head = self.head + gl.where(to_second, 0, self.head_step) + gl.where(item >= self.items, 1, 0)
        batch = self.batch + gl.where(to_second, 0, self.batch_step) + gl.where(head >= counts.heads, 1, 0)
        item = gl.where(item >= self.items, item - self.items, item)
        head = gl.where(head >= counts.heads, head - counts.heads, head)
        steps = (self.batch_step, self.head_step, self.item_step)
        return Work(batch, head, item, way_back, last_place, *steps, self.items, order)


@jit
def share_of(work, MASK: gl.constexpr, ROLE: gl.constexpr, ROLES: gl.constexpr):
    """Which of ROLES equal shares of the rows a role computes. Under a causal mask the last share costs the most:
    who has it on the way there has the first on the way back."""
    if costs_differ(MASK, ROLES):
        return gl.where(work.way_back, ROLES - 1 - ROLE, ROLE)
    else:
        return ROLE


@jit
def first_work(order):
    """A Work; of packed sequences a PackedWork."""
    if order.lengths.records[0] is None:
        return first_of_batch(order)
    else:
        return first_packed_work(order.lengths, order.counts.heads)


@jit
def first_of_batch(order):
    counts = order.counts
    items = (counts.row_blocks + order.blocks_per_item - 1) // order.blocks_per_item
    batch, head, item = digits(gl.program_id(0), items, counts.heads)
    batch_step, head_step, item_step = digits(gl.num_programs(0), items, counts.heads)
    last_place = gl.program_id(0) - (counts.all_heads - order.last_heads) * items
    way_back = item < 0  # false, as a tensor
    return Work(batch, head, item, way_back, last_place, batch_step, head_step, item_step, items, order)


@jit
def digits(number, items, heads):
    return number // items // heads, number // items % heads, number % items
