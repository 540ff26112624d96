"""KeyRange and Rows: which key blocks a role walks and which of them it masks, executed against brute force."""

import itertools
from dataclasses import dataclass

import pytest
import torch

import gluon_cpu
from channels.compat import gl, jit
from gluon_attn.kernels.common.keys import KeyRange
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.kernels.common.sizes import Lengths

BLOCK_M, BLOCK_N, SHARE = 128, 64, 64
NUMBERS = 9  # that `store_range` stores


@jit
def store_range(found, keys, step):
    gl.store(found, keys.first)
    gl.store(found + 1, keys.end)
    gl.store(found + 2, keys.unmasked_first)
    gl.store(found + 3, keys.unmasked_end)
    gl.store(found + 4, keys.steps())
    gl.store(found + 5, keys.masked_steps())
    gl.store(found + 6, keys.unmasked_end_step())
    gl.store(found + 7, keys.block(0))
    gl.store(found + 8, keys.block(step))


@jit(do_not_specialize=["batch", "head", "index", "q_len", "kv_len"])
def describe_rows(found, batch, head, index, q_len, kv_len, MASK: gl.constexpr):
    """Of a row block, of each half of it, and of the block walked as the halves mask it."""
    rows = Lengths(q_len, kv_len, 128, 64, MASK, None).rows(batch, head, index)
    for half in gl.static_range(2):
        share = rows.slice(half * 64, 64)
        at = found + half * 24
        store_range(at, share.keys(), 1)
        gl.store(at + 9, share.first)
        gl.store(at + 10, share.visible(0))
        gl.store(at + 11, share.visible(63))
        gl.store(at + 12, share.block.batch)
        gl.store(at + 13, share.block.head)
        gl.store(at + 14, share.block.first_row)
        store_range(at + 15, rows.keys().masked_as(share.keys()), 1)
    store_range(found + 48, rows.keys(), 1)


@dataclass(frozen=True)
class Range:
    first: int
    end: int
    unmasked_first: int
    unmasked_end: int

    def numbers(self) -> list[int]:
        """What the methods of KeyRange say, by walking: all steps, those before the first unmasked block, the step
        after the last one, the blocks of steps 0 and 1."""
        walk = list(reversed(range(self.first, self.end)))
        whole = [self.unmasked_first <= block < self.unmasked_end for block in walk]
        masked = whole.index(True) if any(whole) else None
        after = len(whole) - whole[::-1].index(True) if any(whole) else None
        if masked is None or after is None:  # as many as there are; and then no unmasked one follows
            masked, after = self.end - self.unmasked_end, self.end - self.unmasked_first
        fields = [self.first, self.end, self.unmasked_first, self.unmasked_end]
        return [*fields, len(walk), masked, after, walk[0], walk[0] - 1]


def seen_by(first: int, count: int, q_len: int, kv_len: int, causal: bool) -> torch.Tensor:
    """[count, kv_len]: whether row first + i sees a key. Rows past the last query too."""
    rows = torch.arange(first, first + count)[:, None]
    return torch.arange(kv_len)[None, :] <= (rows + kv_len - q_len if causal else rows * 0 + kv_len)


def range_of(seen: torch.Tensor) -> Range:
    """Every block with a key that some row sees, one at least; unmasked those that every row sees whole."""
    some, every = seen.any(dim=0).nonzero(), seen.all(dim=0).nonzero()
    end = int(some.max()) // BLOCK_N + 1 if some.numel() else 1
    return Range(0, end, 0, (int(every.max()) + 1) // BLOCK_N if every.numel() else 0)


LENGTHS = (1, 63, 64, 65, 66, 128, 200)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_of_rows(causal):
    """Few and many queries, more and fewer of them than keys, rows that see no key, rows past the last query."""
    nothing_seen = 0
    with gluon_cpu.machine():
        for q_len, kv_len in itertools.product(LENGTHS, LENGTHS):
            for index, first in enumerate(range(0, q_len, BLOCK_M)):
                found = torch.full((48 + NUMBERS,), -(10**6), dtype=torch.int32)
                describe_rows[(1,)](found, 5, 7, index, q_len, kv_len, Mask(causal=causal), num_warps=1)
                where = (q_len, kv_len, first)
                block = range_of(seen_by(first, BLOCK_M, q_len, kv_len, causal))
                assert found[48:].tolist() == block.numbers(), where
                for half in (0, 1):
                    got = found[24 * half : 24 * half + 24].tolist()
                    begin = first + SHARE * half
                    seen = seen_by(begin, SHARE, q_len, kv_len, causal)
                    share = range_of(seen)
                    assert got[:NUMBERS] == share.numbers(), where
                    counts = seen.sum(dim=1).tolist()
                    nothing_seen += counts[0] == 0
                    assert [got[9], max(0, got[10]), max(0, got[11])] == [begin, counts[0], counts[-1]], where
                    assert got[12:15] == [5, 7, first]
                    # It walks the block's steps, of which its own mask says which are unmasked.
                    walked = Range(block.first, block.end, share.unmasked_first, share.unmasked_end)
                    assert got[15:] == walked.numbers(), where
    assert (nothing_seen > 0) == causal


@jit(do_not_specialize=["first", "end", "unmasked_first", "unmasked_end"])
def describe_range(found, first, end, unmasked_first, unmasked_end):
    keys = KeyRange(first, end, unmasked_first, unmasked_end)
    store_range(found, keys, 1)
    for step in range(keys.steps()):
        gl.store(found + 9 + step, keys.block(step))


RANGES = {
    "all": Range(0, 5, 0, 5),
    "a causal one": Range(0, 5, 0, 3),
    "a window": Range(2, 9, 4, 7),
    "a window, whole at its first end": Range(3, 6, 3, 5),
    "a window, whole at its last end": Range(3, 6, 4, 6),
    "one block": Range(4, 5, 4, 5),
}


@pytest.mark.parametrize("keys", RANGES.values(), ids=RANGES.keys())
def test_from_its_four_numbers(keys):
    """Also from a first block on that is not 0, as a window has it."""
    walk = list(reversed(range(keys.first, keys.end)))
    found = torch.full((NUMBERS + len(walk),), -1, dtype=torch.int32)
    with gluon_cpu.machine():
        fields = (keys.first, keys.end, keys.unmasked_first, keys.unmasked_end)
        describe_range[(1,)](found, *fields, num_warps=1)
    assert found[:NUMBERS].tolist() == keys.numbers()
    assert found[NUMBERS:].tolist() == walk
    # The steps are masked ones, unmasked ones, masked ones again.
    _, _, _, _, steps, masked, unmasked_end_step, *_ = found.tolist()
    kinds = [keys.unmasked_first <= block < keys.unmasked_end for block in walk]
    assert kinds == [masked <= step < unmasked_end_step for step in range(steps)]
