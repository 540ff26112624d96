"""The list of key blocks of packed sequences, and how programs of the Hopper backward walk it: executed, against brute
force."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import gluon_cpu
from channels.compat import gl, jit
from gluon_attn.backward.plan import BackwardPlan
from gluon_attn.backward.table import HOPPER
from gluon_attn.device import Device
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.kernels.common.packed import RECORD
from gluon_attn.kernels.hopper.backward.packed import list_key_blocks, number_of, padded_block
from gluon_attn.problem import Problem
from gluon_attn.tensors import PACKED
from tests.gluon_attn.kernels.claims import note_claims
from tests.gluon_cpu.support import descriptor

KEYS = 64  # of a block, and BLOCK_M
MASKS = {
    "full": Mask(),
    "causal": Mask(causal=True),
    "to the right": Mask(right=70),
    "window": Mask(causal=True, left=50),
    "window to both sides": Mask(left=100, right=3),
    "chunks": Mask(causal=True, chunk=100),
}
# Queries and keys of each sequence, rows after the last one, how many keys count.
MIXES: dict[str, tuple[list[int], list[int], tuple[int, int], list[int] | None]] = {
    "edges": ([130, 0, 5, 70, 300, 1], [64, 90, 0, 200, 129, 1], (0, 70), None),
    "equal": ([128] * 5, [192] * 5, (3, 0), None),
    "one": ([1000], [700], (0, 0), None),
    "some keys count": ([100, 90, 80], [300, 40, 64], (0, 1), [200, 0, 64]),
    "more than are looked at at a time": ([3, 1] * 80, [2, 70] * 80, (0, 0), None),
}


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def plan_of(mix: str, mask: Mask) -> BackwardPlan:
    q_lens, k_lens, (more_q, more_k), _ = MIXES[mix]
    problem = Problem(
        dtype=torch.bfloat16, batch=1, heads=6, kv_heads=3, q_len=sum(q_lens) + more_q, kv_len=sum(k_lens) + more_k,
        head_dim=256, causal=mask.causal, left=mask.left, right=mask.right, chunk=mask.chunk, scale=1.0, layout=PACKED,
        sequences=len(q_lens),
    )  # fmt: skip
    return BackwardPlan.of(problem, HOPPER[256], Device.hopper())


def records(mix: str, mask: Mask) -> tuple[Tensor, list[list[int]]]:
    """The list as the kernel leaves it, and its records."""
    q_lens, k_lens, _, used = MIXES[mix]
    plan = plan_of(mix, mask)
    assert plan.config.keys == KEYS == plan.config.block_m
    memory = torch.full(((1 + plan.capacity) * RECORD.value,), -7, dtype=torch.int32)
    count = None if used is None else torch.tensor(used, dtype=torch.int32)
    with gluon_cpu.machine():
        list_key_blocks[(plan.list_programs,)](
            starts(q_lens), starts(k_lens), count, memory, *plan.list_numbers.values(), KEYS, num_warps=4
        )
    found = memory.view(-1, RECORD.value)
    return memory, found[1 : 1 + int(found[0, 0]), :6].tolist()


def steps(q_len: int, k_len: int, index: int, mask: Mask) -> int:
    """Row blocks from the first that sees a key block to the last of the sequence."""
    rows = mask.rows_seen(index * KEYS, min((index + 1) * KEYS, k_len) - 1, q_len, k_len)
    return -(-q_len // KEYS) - rows.start // KEYS if rows else 0


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("mix", MIXES)
def test_list_of_key_blocks(mix, mask):
    q_lens, k_lens, (_, more_k), used = MIXES[mix]
    _, found = records(mix, mask)
    cu_q, cu_k = starts(q_lens).tolist(), starts(k_lens).tolist()
    counted = k_lens if used is None else used
    want = {}
    for number, (queries, keys, length) in enumerate(zip(pairwise(cu_q), cu_k, counted, strict=False)):
        for index in range(-(-length // KEYS)):
            want[number, index] = (queries[0], queries[1] - queries[0], keys, length)
    for index in range(-(-more_k // KEYS)):
        want[len(k_lens), index] = (0, 0, cu_k[-1], more_k)
    assert {(number, index): (*rest,) for *rest, number, index in found} == want
    assert len(found) == len(want), "each once"
    for number in range(len(k_lens) + 1):
        order = [index for *_, of, index in found if of == number]
        assert order == sorted(order), "of a sequence, the first comes first: its dQ is added up in that order"
    if not mask.hides_early_keys:
        costs = [steps(q_len, k_len, index, mask) for _, q_len, _, k_len, _, index in found]
        for one, other in pairwise(costs):
            assert one >= other - 1, "longest first; within a block of rows, the order is open"


@jit
def note_padded(numbers, firsts, cu_q, rows, sequences, BLOCK: gl.constexpr):
    number = number_of(gl.program_id(0), cu_q, rows, sequences, BLOCK)
    gl.store(numbers + gl.program_id(0), number)
    first = gl.where(number < sequences, gl.load(cu_q + gl.minimum(number, sequences)), gl.load(cu_q + sequences))
    gl.store(firsts + gl.program_id(0), padded_block(first, number, BLOCK))


@pytest.mark.parametrize("mix", MIXES)
def test_padded_row_blocks_are_of_one_sequence_each(mix):
    q_lens, _, (more_q, _), _ = MIXES[mix]
    plan = plan_of(mix, Mask())
    numbers, firsts = (torch.full((plan.row_blocks,), -1, dtype=torch.int32) for _ in range(2))
    with gluon_cpu.machine():
        note_padded[(plan.row_blocks,)](
            numbers, firsts, starts(q_lens), plan.problem.q_len, len(q_lens), KEYS, num_warps=4
        )
    assert (numbers.diff() >= 0).all()
    for number, length in enumerate([*q_lens, more_q]):
        mine = (numbers == number).nonzero().flatten().tolist()
        assert len(mine) >= -(-length // KEYS)
        assert not mine or (firsts[mine] == mine[0]).all()


def claims_of(
    memory: Tensor, programs: int, heads: int, rotated: bool, heads_at_once: int = 1
) -> tuple[Tensor, Tensor]:
    """At [head, sequence, key block]: how often it was claimed; and as which item."""
    q, k = (torch.zeros(1, count, 64, 16, dtype=torch.bfloat16) for count in (2 * heads, heads))
    visits, items = torch.zeros(2, heads, 8, 32, dtype=torch.int32)
    descriptors = descriptor(q, [1, 1, KEYS, 16]), descriptor(k, [1, 1, KEYS, 16])
    claimed = torch.zeros(2, dtype=torch.int32)
    mask, strides = Mask(causal=True), (32, 8 * 32)
    with gluon_cpu.machine():
        note_claims[(programs,)](
            visits, items, None, claimed, memory, *descriptors, 1, 0, heads_at_once, mask, rotated, strides, num_warps=4
        )
    return visits, items


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("programs", [1, 5, 13, 60])
def test_programs_claim_what_is_listed(programs, heads):
    """Each key block once; of a head before all those of a later group."""
    memory, found = records("edges", Mask(causal=True))
    visits, items = claims_of(memory, programs, heads, rotated=True)
    want = torch.zeros_like(visits)
    for *_, sequence, index in found:
        want[:, sequence, index] = 1
    assert torch.equal(visits, want)
    last = items.masked_fill(want == 0, 0).flatten(1).amax(1)
    assert (last[1:] >= last[:-1]).all()


@pytest.mark.parametrize("heads_at_once", [1, 2, 3])
def test_in_a_fixed_order_key_blocks_are_claimed_as_they_are_listed(heads_at_once):
    """After those of the heads before in its group, and those before in the list."""
    memory, found = records("edges", Mask(causal=True))
    visits, items = claims_of(memory, 7, 3, rotated=False, heads_at_once=heads_at_once)
    want = [
        (head, *record[4:])
        for before in range(0, 3, heads_at_once)
        for record in found
        for head in range(before, min(before + heads_at_once, 3))
    ]
    assert int(visits.sum()) == len(want)
    assert [int(items[at]) for at in want] == list(range(len(want)))
