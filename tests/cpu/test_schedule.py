"""The device code that says which tile a program computes, and which keys a row sees: executed, against brute force."""

import itertools

import pytest
import torch

import gluon_cpu
from channels.compat import gl, jit
from gluon_attn.kernels.common.schedule import tile_schedule

BLOCK_M, BLOCK_N = 64, 64


RUN_TIME = ["batch", "heads", "q_len", "kv_len", "blocks_per_item", "heads_per_group"]


@jit(do_not_specialize=RUN_TIME)
def number_visits(
    visits,
    batch,
    heads,
    q_len,
    kv_len,
    blocks_per_item,
    heads_per_group,
    ROW_BLOCKS: gl.constexpr,
    LONGEST_FIRST: gl.constexpr,
):
    """Add 1 + 1000 * (the item) to visits[batch, head, row block] for each visit of the persistent walk."""
    schedule = tile_schedule(
        (batch, heads, q_len),
        (batch, heads, kv_len),
        blocks_per_item,
        heads_per_group,
        BLOCK_M=64,
        BLOCK_N=64,
        CAUSAL=True,
        LONGEST_FIRST=LONGEST_FIRST,
    )
    for item in range(gl.program_id(0), schedule.items, gl.num_programs(0)):
        for i in range(schedule.tiles_in(item)):
            tile = schedule.tile(item, i)
            at = (tile.batch * heads + tile.head) * ROW_BLOCKS + tile.first_row // 64
            gl.atomic_add(visits + at, 1 + 1000 * item)


def visits_of(
    *, programs: int, row_blocks: int, blocks_per_item: int = 1, heads_per_group: int = 1, longest_first: bool = False
) -> torch.Tensor:
    """[2 batches, 3 heads, row blocks] of the item that computes each. Every one must be visited exactly once."""
    visits = torch.zeros(2, 3, row_blocks, dtype=torch.int32)
    q_len = row_blocks * BLOCK_M - 5  # the last row block is a partial one
    with gluon_cpu.machine():
        number_visits[(programs,)](
            visits, 2, 3, q_len, q_len, blocks_per_item, heads_per_group, row_blocks, longest_first, num_warps=1
        )
    assert (visits % 1000).eq(1).all(), visits
    return visits // 1000


@pytest.mark.parametrize("blocks_per_item", [1, 2])
@pytest.mark.parametrize("row_blocks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("programs", [1, 3])
def test_every_row_block_is_visited_once(blocks_per_item, row_blocks, programs):
    items = visits_of(programs=programs, row_blocks=row_blocks, blocks_per_item=blocks_per_item)
    items = items.view(6, row_blocks)
    for head, by_row_block in enumerate(items.tolist()):  # through a head before the next
        per_head = -(-row_blocks // blocks_per_item)
        assert all(item // per_head == head for item in by_row_block)
        assert by_row_block[-1] == head * per_head  # the heaviest first


@pytest.mark.parametrize("heads_per_group", [1, 2, 4, 6])
@pytest.mark.parametrize("row_blocks", [1, 3, 4])
def test_longest_first(row_blocks, heads_per_group):
    """Groups of heads in order; in a group the last row block of each head, then the last but one of each, and so on.

    6 heads do not divide into groups of 4: the last group is smaller.
    """
    found = visits_of(programs=3, row_blocks=row_blocks, heads_per_group=heads_per_group, longest_first=True)
    items = found.view(6, row_blocks).tolist()
    order = [
        (head, row_block)
        for first in range(0, 6, heads_per_group)
        for row_block in reversed(range(row_blocks))
        for head in range(first, min(6, first + heads_per_group))
    ]
    assert [items[head][row_block] for head, row_block in order] == list(range(len(order)))


@jit(do_not_specialize=["one", "first", "q_len", "kv_len"])
def describe_rows(found, one, first, q_len, kv_len, CAUSAL: gl.constexpr):
    schedule = tile_schedule(
        (one, one, q_len), (one, one, kv_len), one, one, BLOCK_M=64, BLOCK_N=64, CAUSAL=CAUSAL, LONGEST_FIRST=False
    )
    rows = schedule.rows(first, 64)
    gl.store(found, rows.blocks())
    gl.store(found + 1, rows.masked_blocks())


LENGTHS = (1, 63, 64, 65, 128, 200)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_blocks_to_walk_and_to_mask(causal):
    with gluon_cpu.machine():
        for q_len, kv_len in itertools.product(LENGTHS, LENGTHS):
            for first in range(0, q_len, BLOCK_M):
                found = torch.full((2,), -1, dtype=torch.int32)
                describe_rows[(1,)](found, 1, first, q_len, kv_len, CAUSAL=causal, num_warps=1)
                rows = torch.arange(first, first + BLOCK_M)[:, None]
                seen = torch.arange(kv_len)[None, :] <= (rows + kv_len - q_len if causal else rows * 0 + kv_len)
                some, every = seen.any(dim=0).nonzero(), seen.all(dim=0).nonzero()
                blocks = int(some.max()) // BLOCK_N + 1 if some.numel() else 1  # one block, all masked
                unmasked = (int(every.max()) + 1) // BLOCK_N if every.numel() else 0
                assert found.tolist() == [blocks, blocks - unmasked], (q_len, kv_len, first)
