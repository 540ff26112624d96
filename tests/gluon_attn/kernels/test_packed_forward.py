"""How programs of the forward walk the list of row blocks of packed sequences: executed, against brute force."""

import pytest
import torch

import gluon_cpu
from channels.compat import gl, jit
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.kernels.common.packed import RECORD, first_packed_work
from gluon_attn.kernels.common.sizes import Lengths

BLOCK_M = 64
CAUSAL = Mask(causal=True)


@jit
def note_work(visits, rounds, loads, records_ptr, heads, count, MASK: gl.constexpr, BLOCK_M: gl.constexpr):
    """At [head, number]: how often it comes, and after how many others of its program; of each program, key blocks."""
    none = gl.to_tensor(0)
    lengths = Lengths(none, none, BLOCK_M, BLOCK_M, MASK, None, (none,) * 4, (records_ptr,))
    work, step, load = first_packed_work(lengths, heads), 0, 0
    while work.is_left():
        rows = work.rows()
        at = rows.block.head * count + rows.block.batch  # the records' numbers stand for sequences
        gl.atomic_add(visits + at, 1)
        gl.atomic_add(rounds + at, step)
        load += rows.key_range().steps()
        work, step = work.next(), step + 1
    gl.store(loads + gl.program_id(0), load)


def walk(programs: int, heads: int, blocks: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(visits, rounds, loads). blocks: of each record, which row block of its sequence it is; longest first."""
    records = torch.zeros(1 + len(blocks), RECORD.value, dtype=torch.int32)
    records[0, 0] = len(blocks)
    for number, block in enumerate(blocks):
        length = (block + 1) * BLOCK_M
        records[1 + number, :6] = torch.tensor([0, length, 0, length, number, block])
    visits, rounds = torch.zeros(2, heads, max(len(blocks), 1), dtype=torch.int32)
    loads = torch.zeros(programs, dtype=torch.int32)
    with gluon_cpu.machine(outputs=[]):
        note_work[(programs,)](
            visits, rounds, loads, records, heads, len(blocks), CAUSAL, BLOCK_M, num_warps=1
        )  # fmt: skip
    return visits[:, : len(blocks)], rounds, loads


EQUAL = [block for block in range(15, -1, -1) for _ in range(8)]  # eight sequences of 16 row blocks
MIXED = sorted([block for length in (40, 17, 9, 9, 5, 3, 2, 2, 1, 1, 1) for block in range(length)], reverse=True)


@pytest.mark.parametrize("blocks", [EQUAL, MIXED, [3, 2, 1, 0], [0], []], ids=["equal", "mixed", "four", "one", "none"])
@pytest.mark.parametrize(("programs", "heads"), [(132, 16), (5, 1), (7, 3), (13, 8), (200, 2)])
def test_each_row_block_of_each_head_is_computed_once(programs, heads, blocks):
    visits, _, _ = walk(programs, heads, blocks)
    assert (visits == 1).all()


@pytest.mark.parametrize(("blocks", "heads"), [(EQUAL, 16), (EQUAL, 8), (EQUAL, 32), (MIXED, 16), (MIXED, 40)])
@pytest.mark.slow_but("blocks4-40", "blocks1-8")
def test_programs_have_equally_much_to_do(blocks, heads):
    _, _, loads = walk(132, heads, blocks)
    assert int(loads.sum()) == heads * sum(block + 1 for block in blocks)
    assert int(loads.max()) <= 1.15 * float(loads.float().mean())


def test_few_heads_are_computed_at_a_time():
    """Their K and V are to stay in L2. A program has about two row blocks of each group."""
    _, rounds, _ = walk(132, 16, EQUAL)
    first = rounds.float().mean(dim=1)  # of each head
    assert torch.equal(first.sort()[0], first)
    assert int(rounds[:2].max()) <= 2 < int(rounds[14:].min())
