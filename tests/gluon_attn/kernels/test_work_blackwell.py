"""The row blocks that a program of the Blackwell kernel computes, and in which order: executed, against brute force."""

import pytest
import torch

import gluon_cpu
from channels.compat import gl, jit
from gluon_attn.kernels.blackwell.forward.work import Order
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.kernels.common.sizes import Lengths, counts_of

BLOCK_M = 64
CAUSAL = Mask(causal=True)


@jit
def square_order(batch, heads, length, blocks_per_item, l2_heads, MASK: gl.constexpr, LONGEST_FIRST: gl.constexpr):
    lengths = Lengths(length, length, 64, 64, MASK, None, (), (None,))
    counts = counts_of((batch, heads, length), lengths)
    return Order(counts, counts.all_heads * counts.row_blocks, blocks_per_item, l2_heads, lengths, LONGEST_FIRST)


@jit(do_not_specialize=["batch", "heads", "length", "blocks_per_item", "l2_heads"])
def note_visits(
    numbers,
    steps,
    batch,
    heads,
    length,
    blocks_per_item,
    l2_heads,
    ROW_BLOCKS: gl.constexpr,
    MASK: gl.constexpr,
    LONGEST_FIRST: gl.constexpr,
):
    """For each visit of the persistent walk, add 1 + 1000 * its number to numbers[batch, head, row block], and
    1000 * (the program) + (how many it has done before) to steps, likewise."""
    order = square_order(batch, heads, length, blocks_per_item, l2_heads, MASK, LONGEST_FIRST)
    number, step = order.first(), 0
    while number < order.all_row_blocks:
        block = order.rows(number).block
        at = (block.batch * heads + block.head) * ROW_BLOCKS + block.first_row // 64
        gl.atomic_add(numbers + at, 1 + 1000 * number)
        gl.atomic_add(steps + at, 1000 * gl.program_id(0) + step)
        number, step = order.following(number), step + 1


def walk(
    *, programs: int, row_blocks: int, blocks_per_item: int = 1, l2_heads: int = 1, longest_first: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """[2 batches * 3 heads, row blocks]: the number of each; and 1000 * program + step. All must be visited once."""
    numbers = torch.zeros(6, row_blocks, dtype=torch.int32)
    steps = torch.zeros_like(numbers)
    q_len = row_blocks * BLOCK_M - 5  # the last row block is a partial one
    with gluon_cpu.machine():
        note_visits[(programs,)](
            numbers, steps, 2, 3, q_len, blocks_per_item, l2_heads, row_blocks, CAUSAL, longest_first, num_warps=1
        )
    assert (numbers % 1000).eq(1).all(), numbers
    return numbers // 1000, steps


@pytest.mark.parametrize("blocks_per_item", [1, 2])
@pytest.mark.parametrize("row_blocks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("programs", [1, 3])
def test_every_row_block_is_visited_once(blocks_per_item, row_blocks, programs):
    numbers, steps = walk(programs=programs, row_blocks=row_blocks, blocks_per_item=blocks_per_item)
    assert sorted(numbers.flatten().tolist()) == list(range(6 * row_blocks))
    assert (numbers // row_blocks == torch.arange(6)[:, None]).all()  # through a head before the next
    items, second = numbers // blocks_per_item, numbers % blocks_per_item
    assert (steps == 1000 * (items % programs) + items // programs * blocks_per_item + second).all()


@pytest.mark.parametrize("row_blocks", [2, 3, 4, 7])
def test_items_of_two_cost_the_same(row_blocks):
    """Under a square causal mask row block r costs r + 1, also where an item spans two heads."""
    numbers, _ = walk(programs=3, row_blocks=row_blocks, blocks_per_item=2)
    cost = torch.zeros(6 * row_blocks // 2, dtype=torch.int64)
    cost.index_add_(0, (numbers // 2).flatten().long(), torch.arange(1, row_blocks + 1).repeat(6))
    assert (cost == row_blocks + 1).all()


@pytest.mark.parametrize("row_blocks", [1, 2, 7])
def test_the_heaviest_first(row_blocks):
    numbers, _ = walk(programs=3, row_blocks=row_blocks)
    assert (numbers == torch.arange(6)[:, None] * row_blocks + torch.arange(row_blocks).flip(0)).all()


@pytest.mark.parametrize("l2_heads", [1, 2, 4, 6])
@pytest.mark.parametrize("row_blocks", [1, 3, 4])
def test_longest_first(row_blocks, l2_heads):
    """Groups of heads in order; in a group the last row block of each head, then the last but one of each, and so on.

    6 heads do not divide into groups of 4: the last group is smaller.
    """
    numbers, _ = walk(programs=3, row_blocks=row_blocks, l2_heads=l2_heads, longest_first=True)
    order = [
        (head, row_block)
        for first in range(0, 6, l2_heads)
        for row_block in reversed(range(row_blocks))
        for head in range(first, min(6, first + l2_heads))
    ]
    assert [int(numbers[head, row_block]) for head, row_block in order] == list(range(len(order)))
