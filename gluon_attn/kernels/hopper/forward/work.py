"""The tiles that a program computes, as each role walks them: in the same order, each for itself."""

from gluon_attn.runtime.compat import (
    aggregate,
    constexpr_function,
    gl,
    jit,
)

from ...common.schedule import Tile, TileSchedule


@constexpr_function
def costs_differ(causal, parts):
    """Whether parts of a tile's rows cost so differently that it pays to exchange them."""
    return causal and parts > 2  # of two, by a block at most


@constexpr_function
def may_skip(causal, role, roles):
    """Whether a tile has key blocks that the role's rows do not see: no, if they are always its last ones."""
    return causal and (costs_differ(causal, roles) or role < roles - 1)


@aggregate
class Work:
    """The tile at hand. Immutable: `next()` returns the next.

    Program p of n does items p, p + n, ..., numbered through a head before the next, so that programs working at the
    same time share its K and V in L2. An item is a row block, the last of a head first; or a pair of them, of which
    under a square causal mask every one costs the same. `next()` adds n digit by digit: divisions would delay every
    tile, as nothing begins before it is known which.

    If LONGEST_FIRST, the row blocks of the last `heads_per_group` heads are not paired but follow one by one, those
    with most keys first, of all these heads in turn. Of pairs, some programs have one more than others, which idle
    meanwhile; of the lightest row blocks that matters little. Programs take them there and back, as an ox ploughs: who
    had a heavier one has a lighter one next.
    """

    batch: gl.tensor
    head: gl.tensor
    item: gl.tensor  # of the head
    second: gl.tensor  # whether it is the second row block of a pair; among the last heads, whether on a way back
    single: gl.tensor  # place in the order of the last heads' row blocks, as if on a way there; negative before
    batch_step: gl.tensor
    head_step: gl.tensor
    item_step: gl.tensor
    items: gl.tensor  # of a head
    schedule: TileSchedule

    @jit
    def is_left(self):
        if self.schedule.LONGEST_FIRST:
            return self.place() < self.schedule.heads_per_group * self.schedule.row_blocks
        else:
            return self.batch < self.schedule.batches

    @jit
    def place(self):
        """In the order of the last heads' row blocks: on a way back counted from the other end of the programs."""
        back = gl.num_programs(0) - 1 - 2 * gl.program_id(0)
        return self.single + gl.where((self.single >= 0) & self.second, back, 0)

    @jit
    def tile(self):
        """Every other head begins its pairs with the light one, if it has several: measured, see docs/tuning.md."""
        schedule = self.schedule
        batch, head = self.batch, self.head
        row_block = schedule.row_blocks - 1 - self.item
        if schedule.CAUSAL:
            swapped = (schedule.blocks_per_item == 2) & (self.items > 1) & ((self.head & 1) == 1)
            row_block = gl.where(self.second ^ swapped, self.item, row_block)
        if schedule.LONGEST_FIRST:  # noqa: SIM102 - known when the kernel is compiled, unlike the next
            if self.single >= 0:
                place, heads = self.place(), schedule.heads_per_group
                row_block = schedule.row_blocks - 1 - place // heads
                head = schedule.all_heads - heads + place % heads
                batch, head = head // schedule.heads, head % schedule.heads
        return Tile(batch, head, row_block * schedule.BLOCK_M)

    @jit
    def part(self, ROLE: gl.constexpr, ROLES: gl.constexpr):
        """Which of ROLES equal parts of the tile's rows a role computes. Under a causal mask the last part costs the
        most: who has it in one tile of a pair, or on the way there, has the first in the other, or on the way back."""
        if costs_differ(self.schedule.CAUSAL, ROLES):
            return gl.where(self.second, ROLES - 1 - ROLE, ROLE)
        else:
            return ROLE

    @jit
    def next(self):
        schedule = self.schedule
        to_second, second, single = self.second, self.second, self.single
        if schedule.CAUSAL:  # the middle one of an odd number of row blocks is alone
            to_second = (schedule.blocks_per_item == 2) & ~second & (2 * self.item + 1 < schedule.row_blocks)
            if schedule.LONGEST_FIRST:
                to_second = to_second & (single < 0)
                single += gl.where(to_second, 0, gl.num_programs(0))
                # The first round after pairs that all programs begin among the last heads is a way back.
                way_back = gl.where(self.single < 0, single >= gl.program_id(0), ~second)
                second = gl.where(single < 0, to_second, way_back)
            else:
                second = to_second
        item = self.item + gl.where(to_second, 0, self.item_step)
        head = self.head + gl.where(to_second, 0, self.head_step) + gl.where(item >= self.items, 1, 0)
        batch = self.batch + gl.where(to_second, 0, self.batch_step) + gl.where(head >= schedule.heads, 1, 0)
        item = gl.where(item >= self.items, item - self.items, item)
        head = gl.where(head >= schedule.heads, head - schedule.heads, head)
        steps = (self.batch_step, self.head_step, self.item_step)
        return Work(batch, head, item, second, single, *steps, self.items, schedule)


@jit
def first_work(schedule):
    items = (schedule.row_blocks + schedule.blocks_per_item - 1) // schedule.blocks_per_item
    batch, head, item = digits(gl.program_id(0), items, schedule.heads)
    batch_step, head_step, item_step = digits(gl.num_programs(0), items, schedule.heads)
    single = gl.program_id(0) - (schedule.all_heads - schedule.heads_per_group) * items
    return Work(batch, head, item, item < 0, single, batch_step, head_step, item_step, items, schedule)


@jit
def digits(number, items, heads):
    return number // items // heads, number // items % heads, number % items
