"""The key blocks that a program of the Hopper backward computes, and in which order: executed, against brute force."""

import dataclasses
import itertools

import pytest
import torch

import gluon_cpu
from channels import close_all, init_all
from channels.compat import gl, jit
from gluon_attn.backward.plan import BackwardPlan
from gluon_attn.backward.table import pick_config
from gluon_attn.device import Device
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.kernels.hopper.backward.wires import alloc_claims
from gluon_attn.kernels.hopper.backward.work import first_work, order_of
from gluon_attn.problem import Problem
from tests.gluon_attn.kernels.claims import claim, note_claims
from tests.gluon_cpu.support import descriptor
from tests.slow import slow_if

BATCH, KV_HEADS, GROUP, KEYS, BLOCK_M = 2, 3, 2, 64, 64
HEADS = BATCH * KV_HEADS
CAUSAL = Mask(causal=True)


def walk(
    *, programs: int, key_blocks: int, blocks_per_item: int, last_heads: int, heads_at_once: int, rotated: bool
) -> list[list[tuple[int, int]]]:
    """Of each item its key blocks, (head of all batches, index), in the order in which its program visits them. Fails
    unless each comes once, and a program visits those of an item in a row, and those of a later item later."""
    visits, items, places = torch.zeros(3, HEADS, key_blocks, dtype=torch.int32)
    q = torch.zeros(BATCH, KV_HEADS * GROUP, 100, 16, dtype=torch.bfloat16)
    k = torch.zeros(BATCH, KV_HEADS, key_blocks * KEYS - 5, 16, dtype=torch.bfloat16)
    descriptors = descriptor(q, [1, 1, BLOCK_M, 16]), descriptor(k, [1, 1, KEYS, 16])
    claimed = torch.zeros(2, dtype=torch.int32)
    numbers, strides = (blocks_per_item, last_heads, heads_at_once), (KV_HEADS * key_blocks, key_blocks)
    with gluon_cpu.machine():
        note_claims[(programs,)](
            visits, items, places, claimed, None, *descriptors, *numbers, CAUSAL, rotated, strides, num_warps=4
        )
    assert visits.eq(1).all(), visits
    count = int(items.max()) + 1
    assert claimed[0] == count + programs, "each program claims until nothing is left"
    found: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    visited: list[list[int]] = [[] for _ in range(programs)]
    for place, *at in sorted((int(places[at]), *at) for at in itertools.product(range(HEADS), range(key_blocks))):
        head, index = at
        found[int(items[head, index])].append((head, index))
        assert place % 1000 == len(visited[place // 1000])
        visited[place // 1000].append(int(items[head, index]))
    assert all(mine == sorted(mine) for mine in visited)
    assert sum(len(set(mine)) for mine in visited) == count, "an item is of one program"
    return found


def items_of(key_blocks: int, blocks_per_item: int, last_heads: int, heads_at_once: int) -> list[list[tuple[int, int]]]:
    """All items in order, and which key blocks each is."""
    items = []
    for head in range(HEADS - last_heads):
        left = list(range(key_blocks))
        while left:
            mine = [left.pop(0)]
            if blocks_per_item == 2 and left:
                mine.append(left.pop())
            items.append([(head, index) for index in mine])
    last = list(range(HEADS - last_heads, HEADS))
    while last:
        at_once, last = last[:heads_at_once], last[heads_at_once:]
        items += [[(head, index)] for index in range(key_blocks) for head in at_once]
    return items


@pytest.mark.parametrize(
    ("programs", "rotated"),
    slow_if(lambda case: case == (50, False), itertools.product([1, 3, 5, 50], [False, True])),
)
@pytest.mark.parametrize("blocks_per_item", [1, 2])
@pytest.mark.slow_but("1-50-True", "2-3-True", "1-3-False", "2-5-False", "1-1-True", "2-1-True")
def test_every_key_block_is_of_one_item_and_visited_once(programs, blocks_per_item, rotated):
    for key_blocks, last_heads, heads_at_once in itertools.product((1, 2, 3, 4, 7), (0, 2, HEADS), (1, 2, 4, 9)):
        if last_heads == 0 and heads_at_once > 1:
            continue
        split = {"blocks_per_item": blocks_per_item, "last_heads": last_heads, "heads_at_once": heads_at_once}
        found = walk(programs=programs, key_blocks=key_blocks, rotated=rotated, **split)
        assert found == items_of(key_blocks, **split), (key_blocks, split)


def plan_of(
    key_blocks: int, processors: int, *, deterministic: bool, causal: bool = True, q_len: int = 100
) -> BackwardPlan:
    """Of a problem with that many key blocks to a head, whatever the size of one. Of 100 queries none is shared."""
    problem = Problem(
        dtype=torch.bfloat16, batch=BATCH, heads=KV_HEADS * GROUP, kv_heads=KV_HEADS, q_len=q_len,
        kv_len=128 * key_blocks - 5, head_dim=128, causal=causal, scale=1.0, layout="bhsd",
    )  # fmt: skip
    device = dataclasses.replace(Device.hopper(), sm_count=processors)
    return BackwardPlan.of(problem, pick_config(problem), device, deterministic=deterministic)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("processors", [1, 5, 12, 40])
def test_in_order_key_blocks_are_claimed_after_those_that_they_wait_for(processors, causal):
    """A program adds to a row block once the one with the keys before has, which was claimed before."""
    for key_blocks in (1, 2, 3, 7):
        plan = plan_of(key_blocks, processors, deterministic=True, causal=causal)
        assert (plan.blocks_per_item, plan.last_heads) == (1, HEADS)
        items = walk(
            programs=plan.programs,
            key_blocks=key_blocks,
            blocks_per_item=1,
            last_heads=HEADS,
            heads_at_once=plan.heads_at_once,
            rotated=False,
        )
        claimed = [block for item in items for block in item]
        for head, index in itertools.product(range(HEADS), range(1, key_blocks)):
            assert claimed.index((head, index - 1)) < claimed.index((head, index))


@pytest.mark.parametrize("processors", [1, 5, 7, 12, 20])
@pytest.mark.parametrize("key_blocks", [8, 15, 16, 31])
def test_under_a_causal_mask_all_end_within_half_a_key_block(processors, key_blocks):
    """By a model of the plan's items, whose order `test_every_key_block_is_of_one_item_and_visited_once` executes. Key
    block i costs as many row blocks as see it, and who is free has the next item. No program has more than half of the
    heaviest above the mean; by items of two alone, five of these cases would."""
    plan = plan_of(key_blocks, processors, deterministic=False)
    assert plan.blocks_per_item == 2
    loads = [0] * plan.programs
    for item in items_of(key_blocks, 2, plan.last_heads, plan.heads_at_once):
        loads[loads.index(min(loads))] += sum(key_blocks - index for _, index in item)
    assert sum(loads) == HEADS * key_blocks * (key_blocks + 1) // 2
    assert max(loads) - sum(loads) / len(loads) <= key_blocks / 2


@jit
def note_steps(claims, order, steps, tasks):
    work = first_work(order, claims, CLAIMS=False)
    while work.is_left():
        keys = work.keys()
        index = keys.first // order.KEYS
        block = (keys.batch * order.kv_heads + keys.kv_head) * order.key_blocks + index
        task = gl.where(work.at_second, 1, 0)
        if keys.shares > 1:
            at = tasks + (keys.part * 2 + task) * 3
            gl.store(at, block)
            gl.store(at + 1, keys.share_first)
            gl.store(at + 2, keys.share_end)
        walked = keys.query_range()
        for step in range(walked.steps()):
            member, row_block = walked.visit(step)
            head = keys.batch * order.kv_heads * order.group + keys.head(member)
            at = steps + (head * order.key_blocks + index) * keys.row_blocks() + row_block
            gl.atomic_add(at, 10000 * keys.part + 1000 + task)
        work = work.next()


@jit(do_not_specialize=["shared", "shared_parts"])
def note_shares(steps, tasks, claimed, q_desc, k_desc, shared, shared_parts, MASK: gl.constexpr, ROTATED: gl.constexpr):
    """At [batch, query head, key block, row block]: add to steps 10000 * the part + 1000, and 1 if it is the second
    thing that the part does. At [part, 0 or 1] of tasks, three to each: the key block, if it is shared, and from which
    share to which the part has."""
    one, none = gl.to_tensor(1), gl.to_tensor(0)
    aux = (none, none, none, none)
    order = order_of(
        q_desc, k_desc, one, none, one, shared, shared_parts, aux, (None,), claimed, MASK, True, ROTATED, None
    )
    claims = alloc_claims(CONSUMERS=1)
    init_all((claims,))
    gl.warp_specialize([(note_steps, (claims, order, steps, tasks)), (claim, (claims, order))], [1], [24])
    close_all((claims,))


ROW_BLOCKS = 11


def shares_walked(
    programs: int, key_blocks: int, shared: int, shared_parts: int, mask: Mask, rotated: bool, keys: int = KEYS
) -> tuple[torch.Tensor, list[list[tuple[int, int, int]]]]:
    """At [query head of all batches, key block, row block]: what `note_shares` adds there; and of each part what it
    does."""
    steps = torch.zeros(HEADS * GROUP, key_blocks, ROW_BLOCKS, dtype=torch.int32)
    tasks = torch.full((shared_parts, 2, 3), -1, dtype=torch.int32)
    claimed = torch.zeros(1, dtype=torch.int32)
    q = torch.zeros(BATCH, KV_HEADS * GROUP, ROW_BLOCKS * BLOCK_M - 3, 16, dtype=torch.bfloat16)
    k = torch.zeros(BATCH, KV_HEADS, key_blocks * keys - 5, 16, dtype=torch.bfloat16)
    descriptors = descriptor(q, [1, 1, BLOCK_M, 16]), descriptor(k, [1, 1, keys, 16])
    with gluon_cpu.machine():
        note_shares[(programs,)](steps, tasks, claimed, *descriptors, shared, shared_parts, mask, rotated, num_warps=4)
    whole = HEADS * key_blocks - shared
    assert claimed == whole + shared_parts + programs, "each program claims until nothing is left"
    return steps, [[(b, i, j) for b, i, j in of_one if b >= 0] for of_one in tasks.tolist()]


SHARED = {  # programs, key blocks of a head, shared, shared_parts
    "three of six, in halves": (6, 1, 6, 12),
    "all, by a few more": (7, 1, 6, 7),
    "all, each by many": (20, 1, 6, 20),
    "the last one": (5, 1, 1, 5),
    "by fewer than there are": (5, 1, 1, 3),
    "after two rounds": (7, 3, 4, 7),
    "after two rounds, nearly all": (8, 4, 8 - 1, 8),
    "after a round, across heads": (25, 7, 17, 25),
}


@pytest.mark.parametrize(
    ("causal", "rotated", "keys", "by_index"),
    [(True, True, 128, True), (False, True, 128, False), (True, False, 128, False), (True, True, 64, False)],
)
def test_if_all_are_shared_the_first_key_blocks_of_all_heads_come_first(causal, rotated, keys, by_index):
    """Each key block in two parts, of which programs have more than one. Not without a mask, in a fixed order, or at
    D=256, which has 64 keys: there one head follows the other."""
    key_blocks = 3
    shared = HEADS * key_blocks
    _, tasks = shares_walked(4, key_blocks, shared, 2 * shared, Mask(causal=causal), rotated, keys)
    for part, [(block, first, end)] in enumerate(tasks):
        number = part // 2
        head, index = (number % HEADS, number // HEADS) if by_index else divmod(number, key_blocks)
        assert block == head * key_blocks + index
        assert (first, end) == (part % 2 * shared, (part % 2 + 1) * shared)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("case", SHARED)
def test_shares_are_even_and_whoever_ends_a_key_block_knows_who_began_it(case, causal):
    programs, key_blocks, shared, shared_parts = SHARED[case]
    programs = max(programs, shared_parts)
    steps, tasks = shares_walked(programs, key_blocks, shared, shared_parts, Mask(causal=causal), rotated=True)
    first_row = [0] * key_blocks
    if causal:
        shift = key_blocks * KEYS - 5 - (ROW_BLOCKS * BLOCK_M - 3)
        first_row = [max(0, index * KEYS - shift) // BLOCK_M for index in range(key_blocks)]
    for index, first in enumerate(first_row):
        assert steps[:, index, :first].eq(0).all()
        seen = steps[:, index, first:]
        assert ((seen % 10000 == 1000) | (seen % 10000 == 1001)).all(), "each step is walked once"

    handed_in: dict[int, list[int]] = {}
    for part, mine in enumerate(tasks):
        assert len(mine) in (1, 2)
        assert sum(end - first for _, first, end in mine) == shared
        for block, _, end in mine:
            if end < shared_parts:
                handed_in.setdefault(block, []).append(part)
    assert all(sum(end < shared_parts for *_, end in mine) <= 1 for mine in tasks), "a part has room to hand in once"
    for part, mine in enumerate(tasks):
        for nth, (block, first, end) in enumerate(mine):
            if end == shared_parts:
                assert nth == len(mine) - 1, "it has handed in before it waits"
                number = block - (HEADS * key_blocks - shared)
                begun = number * shared_parts // shared
                assert handed_in.get(block, []) == list(range(begun, part)), "all of a lower number"
                assert (first == 0) == (begun == part)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("processors", [13, 26, 45, 132])
def test_in_order_who_shares_has_one_task_and_waits_for_lower_numbers(processors, causal):
    """As a program that began the next key block first would wait for what it does second."""
    sharing = 0
    for key_blocks in (1, 2, 7):
        plan = plan_of(key_blocks, processors, deterministic=True, causal=causal, q_len=ROW_BLOCKS * BLOCK_M)
        if plan.shared == 0:
            continue
        sharing += 1
        mask = Mask(causal=causal)
        steps, tasks = shares_walked(plan.programs, key_blocks, plan.shared, plan.shared_parts, mask, rotated=False)
        assert all(len(mine) == 1 for mine in tasks)
        for index in range(1, key_blocks):
            walked = steps[:, index] > 0
            assert (steps[:, index] // 10000 > steps[:, index - 1] // 10000)[walked].all()
    assert sharing
