"""The device code that says which tile a program computes, and which keys a row sees: executed, against brute force."""

import itertools

import pytest
import torch

import gluon_cpu
from channels.compat import gl, jit
from gluon_attn.kernels.common.schedule import tile_schedule
from gluon_attn.kernels.hopper.forward.work import first_work

BLOCK_M, BLOCK_N = 64, 64


RUN_TIME = ["batch", "heads", "length", "blocks_per_item", "heads_per_group"]


@jit
def square_schedule(batch, heads, length, blocks_per_item, heads_per_group, LONGEST_FIRST: gl.constexpr):
    shape = (batch, heads, length)
    return tile_schedule(shape, shape, blocks_per_item, heads_per_group, 64, 64, True, LONGEST_FIRST)


@jit(do_not_specialize=RUN_TIME)
def note_visits(
    numbers,
    steps,
    batch,
    heads,
    length,
    blocks_per_item,
    heads_per_group,
    ROW_BLOCKS: gl.constexpr,
    LONGEST_FIRST: gl.constexpr,
):
    """For each visit of the persistent walk, add 1 + 1000 * (the tile's number) to numbers[batch, head, row block], and
    1000 * (the program) + (how many tiles it has done before) to steps, likewise."""
    schedule = square_schedule(batch, heads, length, blocks_per_item, heads_per_group, LONGEST_FIRST)
    number, step = schedule.first(), 0
    while number < schedule.tiles:
        tile = schedule.tile(number)
        at = (tile.batch * heads + tile.head) * ROW_BLOCKS + tile.first_row // 64
        gl.atomic_add(numbers + at, 1 + 1000 * number)
        gl.atomic_add(steps + at, 1000 * gl.program_id(0) + step)
        number, step = schedule.following(number), step + 1


def walk(
    *, programs: int, row_blocks: int, blocks_per_item: int = 1, heads_per_group: int = 1, longest_first: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """[2 batches * 3 heads, row blocks]: the number of each; and 1000 * program + step. All must be visited once."""
    numbers = torch.zeros(6, row_blocks, dtype=torch.int32)
    steps = torch.zeros_like(numbers)
    q_len = row_blocks * BLOCK_M - 5  # the last row block is a partial one
    with gluon_cpu.machine():
        note_visits[(programs,)](
            numbers, steps, 2, 3, q_len, blocks_per_item, heads_per_group, row_blocks, longest_first, num_warps=1
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
def test_pairs_cost_the_same(row_blocks):
    """Under a square causal mask row block r costs r + 1, also where a pair spans two heads."""
    numbers, _ = walk(programs=3, row_blocks=row_blocks, blocks_per_item=2)
    cost = torch.zeros(6 * row_blocks // 2, dtype=torch.int64)
    cost.index_add_(0, (numbers // 2).flatten().long(), torch.arange(1, row_blocks + 1).repeat(6))
    assert (cost == row_blocks + 1).all()


@pytest.mark.parametrize("row_blocks", [1, 2, 7])
def test_the_heaviest_first(row_blocks):
    numbers, _ = walk(programs=3, row_blocks=row_blocks)
    assert (numbers == torch.arange(6)[:, None] * row_blocks + torch.arange(row_blocks).flip(0)).all()


@pytest.mark.parametrize("heads_per_group", [1, 2, 4, 6])
@pytest.mark.parametrize("row_blocks", [1, 3, 4])
def test_longest_first(row_blocks, heads_per_group):
    """Groups of heads in order; in a group the last row block of each head, then the last but one of each, and so on.

    6 heads do not divide into groups of 4: the last group is smaller.
    """
    numbers, _ = walk(programs=3, row_blocks=row_blocks, heads_per_group=heads_per_group, longest_first=True)
    order = [
        (head, row_block)
        for first in range(0, 6, heads_per_group)
        for row_block in reversed(range(row_blocks))
        for head in range(first, min(6, first + heads_per_group))
    ]
    assert [int(numbers[head, row_block]) for head, row_block in order] == list(range(len(order)))


@jit(do_not_specialize=RUN_TIME)
def note_work(
    items,
    steps,
    parts,
    batch,
    heads,
    length,
    blocks_per_item,
    heads_per_group,
    ROW_BLOCKS: gl.constexpr,
    LONGEST_FIRST: gl.constexpr,
):
    """As note_visits, of the walk of Hopper's roles: 1 + 1000 * (program + programs * the items it has done before);
    the steps; and which of four parts the first role computes."""
    schedule = square_schedule(batch, heads, length, blocks_per_item, heads_per_group, LONGEST_FIRST)
    work, step, item = first_work(schedule), 0, gl.program_id(0)
    while work.is_left():
        tile = work.tile()
        at = (tile.batch * heads + tile.head) * ROW_BLOCKS + tile.first_row // 64
        gl.atomic_add(items + at, 1 + 1000 * item)
        gl.atomic_add(steps + at, 1000 * gl.program_id(0) + step)
        gl.atomic_add(parts + at, work.part(0, 4))
        following = work.next()
        item += gl.where(following.second, 0, gl.num_programs(0))
        work, step = following, step + 1


def hopper_walk(*, programs: int, row_blocks: int, blocks_per_item: int, last_heads: int = 0) -> list[torch.Tensor]:
    """[2 batches * 3 heads, row blocks]: the item of each; 1000 * program + step; the first role's part. last_heads:
    whose row blocks are walked one by one; their items mean nothing."""
    found = [torch.zeros(6, row_blocks, dtype=torch.int32) for _ in range(3)]
    q_len = row_blocks * BLOCK_M - 5
    with gluon_cpu.machine():
        note_work[(programs,)](
            *found, 2, 3, q_len, blocks_per_item, last_heads, row_blocks, last_heads > 0, num_warps=1
        )
    items, steps, parts = found
    assert (items % 1000).eq(1).all(), items
    return [items // 1000, steps, parts]


@pytest.mark.parametrize("blocks_per_item", [1, 2])
@pytest.mark.parametrize("row_blocks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("programs", [1, 3, 5, 40])
def test_hopper_visits_every_row_block_once(blocks_per_item, row_blocks, programs):
    items, steps, parts = hopper_walk(programs=programs, row_blocks=row_blocks, blocks_per_item=blocks_per_item)
    per_head = -(-row_blocks // blocks_per_item)
    from_end = torch.arange(row_blocks).flip(0)
    place = torch.minimum(from_end, from_end.flip(0)) if blocks_per_item == 2 else from_end
    assert (items == torch.arange(6)[:, None] * per_head + place).all()
    assert (steps // 1000 == items % programs).all()
    for program in range(programs):  # each takes its items in order, and none between the two tiles of a pair
        mine = steps // 1000 == program
        order = (steps[mine] % 1000).argsort()
        assert sorted((steps[mine] % 1000).tolist()) == list(range(int(mine.sum())))
        assert (items[mine][order].diff() >= 0).all()
    # The first role has the first part of an item's first tile, and the last part of its second.
    for item in items.unique():
        tiles = items == item
        assert parts[tiles][(steps[tiles] % 1000).argsort()].tolist() == [0, 3][: int(tiles.sum())]


def test_hopper_heads_begin_pairs_differently():
    """Every other one of the three of a batch with the light tile, where a head has more than a pair."""
    for row_blocks, light_first in ((2, [0, 0, 0, 0, 0, 0]), (4, [0, 1, 0, 0, 1, 0])):
        _, steps, _ = hopper_walk(programs=1, row_blocks=row_blocks, blocks_per_item=2)
        assert (steps[:, 0] < steps[:, -1]).int().tolist() == light_first


def single_rounds(pairs: int, count: int, programs: int) -> list[tuple[list[int | None], bool]]:
    """The places 0 ... count - 1 in rounds, each in order of the programs, and whether it is a way back. The first
    completes the last round of pairs, if that is not complete, on a way there."""
    begun = pairs % programs
    cuts = [0] if begun == 0 else [0, programs - begun]
    cuts += range(cuts[-1] + programs, count + programs, programs)
    back, found = pairs > 0 and begun == 0, []
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
def test_hopper_ends_with_single_row_blocks(programs, row_blocks, last_heads):
    _, steps, parts = hopper_walk(programs=programs, row_blocks=row_blocks, blocks_per_item=2, last_heads=last_heads)
    items = -(-row_blocks // 2)
    before = [0] * programs  # tiles of the other heads that each program has done
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
            assert int(parts[at]) == (3 if back else 0)


def test_single_row_blocks_even_out():
    """Pairs: half of the programs have three, the others two. With four heads one by one, no program has to compute
    more than a fifteenth above the mean."""
    keys = torch.arange(1, 17).expand(6, 16)
    loads = []
    for last_heads in (0, 4):
        _, steps, _ = hopper_walk(programs=20, row_blocks=16, blocks_per_item=2, last_heads=last_heads)
        load = torch.zeros(20).index_add_(0, (steps // 1000).flatten(), keys.flatten().float())
        loads.append(float(load.max() / load.mean()))
    assert loads[0] == pytest.approx(1.25)
    assert loads[1] < 1 + 1 / 15


@jit(do_not_specialize=["one", "number", "offset", "q_len", "kv_len"])
def describe_rows(found, one, number, offset, q_len, kv_len, CAUSAL: gl.constexpr):
    schedule = tile_schedule(
        (one, one, q_len), (one, one, kv_len), one, one, BLOCK_M=128, BLOCK_N=64, CAUSAL=CAUSAL, LONGEST_FIRST=False
    )
    rows = schedule.rows(schedule.tile(number)).part(offset, 64)
    gl.store(found, rows.first)
    gl.store(found + 1, rows.blocks())
    gl.store(found + 2, rows.masked_blocks())


LENGTHS = (1, 63, 64, 65, 128, 200)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_blocks_to_walk_and_to_mask(causal):
    with gluon_cpu.machine():
        for q_len, kv_len in itertools.product(LENGTHS, LENGTHS):
            for number, first in enumerate(reversed(range(0, q_len, 128))):
                for offset in (0, 64):
                    found = torch.full((3,), -1, dtype=torch.int32)
                    describe_rows[(1,)](found, 1, number, offset, q_len, kv_len, CAUSAL=causal, num_warps=1)
                    rows = torch.arange(first + offset, first + offset + 64)[:, None]
                    seen = torch.arange(kv_len)[None, :] <= (rows + kv_len - q_len if causal else rows * 0 + kv_len)
                    some, every = seen.any(dim=0).nonzero(), seen.all(dim=0).nonzero()
                    blocks = int(some.max()) // BLOCK_N + 1 if some.numel() else 1  # one block, all masked
                    unmasked = (int(every.max()) + 1) // BLOCK_N if every.numel() else 0
                    assert found.tolist() == [first + offset, blocks, blocks - unmasked], (q_len, kv_len, first)
