"""The row blocks that a program computes, as each role walks them: in the same order, each for itself."""

from channels import WorkConsumer
from gluon_attn.runtime.compat import aggregate, gl, jit

from ...common.packed import first_packed_work
from ...common.sizes import Counts, Lengths


@aggregate
class Order:
    """Numbers for the row blocks of all heads, and which a program computes: items of one or two row blocks, numbered
    one after the other.

    Numbers run through a head before the next head starts, so that programs working at the same time share its K and V
    in L2; or, if LONGEST_FIRST, through `l2_heads` heads, a row block of each. A head's last row block, the heaviest
    under a causal mask, comes first. If items are of two, the first row block is next, then the last but one, and so
    on: under a square causal mask two that follow each other cost the same together. Every other head is numbered in
    reverse, for so they do where an item spans two heads.
    """

    counts: Counts
    all_row_blocks: gl.tensor  # of all heads
    blocks_per_item: gl.tensor
    l2_heads: gl.tensor
    lengths: Lengths
    LONGEST_FIRST: gl.constexpr

    @jit
    def first(self):
        """The number of this program's first row block. A program is done when its number is not below
        `all_row_blocks`."""
        return gl.program_id(0) * self.blocks_per_item

    @jit
    def following(self, number):
        """The number of this program's next row block."""
        others = (gl.num_programs(0) - 1) * self.blocks_per_item
        return number + 1 + gl.where(self.is_second_of_two(number + 1), 0, others)

    @jit
    def is_second_of_two(self, number):
        """Whether a row block, a place or a head is the second of two neighbours; never if items are single blocks."""
        return (number & (self.blocks_per_item - 1)) != 0

    @jit
    def head_and_place(self, number):
        """(head, counted through all batches; place among the head's row blocks)."""
        row_blocks = self.counts.row_blocks
        if self.LONGEST_FIRST:
            group = number // (self.l2_heads * row_blocks)
            first_head = group * self.l2_heads
            heads = gl.minimum(self.l2_heads, self.counts.all_heads - first_head)  # the last group may be smaller
            in_group = number - first_head * row_blocks
            place = in_group // heads
            return first_head + in_group - place * heads, place
        else:
            head = number // row_blocks
            place = number % row_blocks
            return head, gl.where(self.is_second_of_two(head), row_blocks - 1 - place, place)

    @jit
    def rows(self, number):
        """The Rows of the row block of that number."""
        head, place = self.head_and_place(number)
        item = place >> (self.blocks_per_item - 1)
        index = gl.where(self.is_second_of_two(place), item, self.counts.row_blocks - 1 - item)
        return self.lengths.rows(head // self.counts.heads, head % self.counts.heads, index)


@aggregate
class Work:
    """The row block at hand. Immutable: `next()` returns the next."""

    number: gl.tensor  # not below `order.all_row_blocks` when there is none left
    answers: WorkConsumer
    order: Order
    DYNAMIC: gl.constexpr

    @jit
    def is_left(self):
        return self.number < self.order.all_row_blocks

    @jit
    def rows(self):
        return self.order.rows(self.number)

    @jit
    def next(self):
        """As the order has it, or DYNAMIC: what the hardware hands out, where every row block is an item."""
        if self.DYNAMIC:
            number, answers = self.answers.acquire(none=self.order.all_row_blocks)
        else:
            number, answers = self.order.following(self.number), self.answers
        return Work(number, answers, self.order, self.DYNAMIC)


@jit
def first_work(wires, order):
    """A Work; of packed sequences a PackedWork."""
    if order.lengths.records[0] is None:
        return first_of_batch(wires, order)
    else:
        return first_packed_work(order.lengths, order.counts.heads)


@jit
def first_of_batch(wires, order):
    return Work(order.first(), wires.items.consumer(), order, wires.CONFIG.dynamic)
