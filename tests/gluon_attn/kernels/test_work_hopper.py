"""The row blocks that a program of the Hopper kernel computes, and in which order: executed, against brute force."""

import itertools

import pytest
import torch

import gluon_cpu
from channels.compat import gl, jit
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.kernels.common.sizes import Lengths, counts_of
from gluon_attn.kernels.hopper.forward.work import Order, first_work, share_of

BLOCK_M = 64
CAUSAL = Mask(causal=True)


@jit
def square_order(batch, heads, length, blocks_per_item, last_heads, MASK: gl.constexpr, LONGEST_FIRST: gl.constexpr):
    lengths = Lengths(length, length, 64, 64, MASK, None, (), (None,))
    return Order(counts_of((batch, heads, length), lengths), blocks_per_item, last_heads, lengths, LONGEST_FIRST)


@jit(do_not_specialize=["batch", "heads", "length", "blocks_per_item", "last_heads"])
def note_work(
    items,
    steps,
    shares,
    batch,
    heads,
    length,
    blocks_per_item,
    last_heads,
    ROW_BLOCKS: gl.constexpr,
    MASK: gl.constexpr,
    LONGEST_FIRST: gl.constexpr,
):
    """For each row block of the walk, at [batch, head, row block]: add to items 1 + 1000 * (program + programs * the
    items it has done before), to steps 1000 * program + the row blocks before, and to shares which of four shares the
    first role computes."""
    order = square_order(batch, heads, length, blocks_per_item, last_heads, MASK, LONGEST_FIRST)
    work, step, item = first_work(order), 0, gl.program_id(0)
    while work.is_left():
        block = work.rows().block
        at = (block.batch * heads + block.head) * ROW_BLOCKS + block.first_row // 64
        gl.atomic_add(items + at, 1 + 1000 * item)
        gl.atomic_add(steps + at, 1000 * gl.program_id(0) + step)
        gl.atomic_add(shares + at, share_of(work, MASK, 0, 4))
        following = work.next()
        item += gl.where(following.way_back, 0, gl.num_programs(0))
        work, step = following, step + 1


def walk(*, programs: int, row_blocks: int, blocks_per_item: int, last_heads: int = 0) -> list[torch.Tensor]:
    """[2 batches * 3 heads, row blocks]: the item of each; 1000 * program + step; the first role's share. last_heads:
    whose row blocks are walked one by one; their items mean nothing."""
    found = [torch.zeros(6, row_blocks, dtype=torch.int32) for _ in range(3)]
    q_len = row_blocks * BLOCK_M - 5
    with gluon_cpu.machine():
        note_work[(programs,)](
            *found, 2, 3, q_len, blocks_per_item, last_heads, row_blocks, CAUSAL, last_heads > 0, num_warps=1
        )
    items, steps, shares = found
    assert (items % 1000).eq(1).all(), items
    return [items // 1000, steps, shares]


@pytest.mark.parametrize("blocks_per_item", [1, 2])
@pytest.mark.parametrize("row_blocks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("programs", [1, 3, 5, 40])
def test_every_row_block_is_visited_once(blocks_per_item, row_blocks, programs):
    items, steps, shares = walk(programs=programs, row_blocks=row_blocks, blocks_per_item=blocks_per_item)
    per_head = -(-row_blocks // blocks_per_item)
    from_end = torch.arange(row_blocks).flip(0)
    place = torch.minimum(from_end, from_end.flip(0)) if blocks_per_item == 2 else from_end
    assert (items == torch.arange(6)[:, None] * per_head + place).all()
    assert (steps // 1000 == items % programs).all()
    for program in range(programs):  # each takes its items in order, and none between the two row blocks of one
        mine = steps // 1000 == program
        order = (steps[mine] % 1000).argsort()
        assert sorted((steps[mine] % 1000).tolist()) == list(range(int(mine.sum())))
        assert (items[mine][order].diff() >= 0).all()
    # The first role has the first share of an item's first row block, and the last share of its second.
    for item in items.unique():
        mine = items == item
        assert shares[mine][(steps[mine] % 1000).argsort()].tolist() == [0, 3][: int(mine.sum())]


def test_heads_begin_items_differently():
    """Every other one of the three of a batch with the light one, where a head has more than one item."""
    for row_blocks, light_first in ((2, [0, 0, 0, 0, 0, 0]), (4, [0, 1, 0, 0, 1, 0])):
        _, steps, _ = walk(programs=1, row_blocks=row_blocks, blocks_per_item=2)
        assert (steps[:, 0] < steps[:, -1]).int().tolist() == light_first


def single_rounds(items: int, count: int, programs: int) -> list[tuple[list[int | None], bool]]:
    """The places 0 ... count - 1 in rounds, each in order of the programs, and whether it is a way back. The first
    completes the last round of items of two, if that is not complete, on a way there."""
    begun = items % programs
    cuts = [0] if begun == 0 else [0, programs - begun]
    cuts += range(cuts[-1] + programs, count + programs, programs)
    back, found = items > 0 and begun == 0, []
    for start, end in itertools.pairwise(cuts):
        places: list[int | None] = [i if i < count else None for i in range(start, end)]
        missing: list[int | None] = [None] * (programs - len(places))
        places = missing + places
        found.append((places[::-1] if back else places, back))
        back = not back
    return found


@pytest.mark.parametrize("last_heads", [1, 2, 4, 6])
@pytest.mark.parametrize("row_blocks", [1, 3, 4, 7])
@pytest.mark.parametrize("programs", [1, 3, 5, 12, 40])
def test_the_last_heads_end_with_single_row_blocks(programs, row_blocks, last_heads):
    _, steps, shares = walk(programs=programs, row_blocks=row_blocks, blocks_per_item=2, last_heads=last_heads)
    items = -(-row_blocks // 2)
    before = [0] * programs  # row blocks of the other heads that each program has done
    for head, row_block in itertools.product(range(6 - last_heads), range(row_blocks)):
        program = int(steps[head, row_block]) // 1000
        assert program == (head * items + min(row_block, row_blocks - 1 - row_block)) % programs
        before[program] += 1
    order = [(head, row) for row in reversed(range(row_blocks)) for head in range(6 - last_heads, 6)]
    rounds = single_rounds((6 - last_heads) * items, len(order), programs)
    for program in range(programs):
        mine = [(order[place], back) for places, back in rounds if (place := places[program]) is not None]
        for i, (at, back) in enumerate(mine):
            assert int(steps[at]) == 1000 * program + before[program] + i
            assert int(shares[at]) == (3 if back else 0)


def test_single_row_blocks_even_out():
    """Items of two: half of the programs have three, the others two. With four heads one by one, no program has to
    compute more than a fifteenth above the mean."""
    keys = torch.arange(1, 17).expand(6, 16)
    loads = []
    for last_heads in (0, 4):
        _, steps, _ = walk(programs=20, row_blocks=16, blocks_per_item=2, last_heads=last_heads)
        load = torch.zeros(20).index_add_(0, (steps // 1000).flatten(), keys.flatten().float())
        loads.append(float(load.max() / load.mean()))
    assert loads[0] == pytest.approx(1.25)
    assert loads[1] < 1 + 1 / 15
