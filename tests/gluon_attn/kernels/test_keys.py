"""KeyRange and Rows: which key blocks a role walks and which of them it masks, executed against brute force."""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import gluon_cpu
from channels.compat import gl, jit
from gluon_attn.kernels.common.keys import KeyRange
from gluon_attn.kernels.common.mask import LARGEST_LIMIT, Mask
from gluon_attn.kernels.common.sizes import Lengths
from gluon_attn.reference import masked
from tests.slow import slow_if

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
    rows = Lengths(q_len, kv_len, 128, 64, MASK, None, (), (None,)).rows(batch, head, index)
    for half in gl.static_range(2):
        share = rows.slice(half * 64, 64)
        at = found + half * 26
        store_range(at, share.key_range(), 1)
        gl.store(at + 9, share.first)
        gl.store(at + 10, share.visible(0))
        gl.store(at + 11, share.visible(63))
        gl.store(at + 12, share.block.batch)
        gl.store(at + 13, share.block.head)
        gl.store(at + 14, share.block.first_row)
        gl.store(at + 15, share.hidden(0))
        gl.store(at + 16, share.hidden(63))
        store_range(at + 17, rows.key_range().masked_as(share.key_range()), 1)
    store_range(found + 52, rows.key_range(), 1)


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


def seen_by(first: int, count: int, q_len: int, kv_len: int, mask: Mask) -> torch.Tensor:
    """[rows, kv_len]: whether row first + i sees a key. Of `count` rows, those that are not past the last query."""
    limits: dict[str, Any] = {"window": (mask.left, mask.right), "chunk": mask.chunk}
    return masked(torch.zeros(q_len, kv_len), causal=mask.causal, **limits)[first : first + count] == 0


def check_range(numbers: list[int], walked: torch.Tensor, masked: torch.Tensor, where: Any) -> Range:
    """That a range's numbers are those of a walk over every block with a key that some row of `walked` sees, one at
    least, unmasked those that every row of `masked` sees whole. Of no rows, it only has to be one."""
    found = Range(*numbers[:4])
    some = walked.any(dim=0).nonzero() // BLOCK_N
    if some.numel():
        assert (found.first, found.end) == (int(some.min()), int(some.max()) + 1), where
    assert 0 <= found.first < found.end <= -(-walked.shape[1] // BLOCK_N), where
    assert found.first <= found.unmasked_first <= found.unmasked_end <= found.end, where
    for block in range(found.first, found.end if len(masked) else found.first):
        columns = masked[:, block * BLOCK_N : (block + 1) * BLOCK_N]
        whole = columns.shape[1] == BLOCK_N and bool(columns.all())
        assert whole == (found.unmasked_first <= block < found.unmasked_end), where
    assert numbers == found.numbers(), where
    return found


LENGTHS = (1, 63, 64, 65, 66, 128, 200)
FEW_LENGTHS = (1, 64, 65, 200, 333)
LIMITS = (0, 1, 63, 64, 130, 500, LARGEST_LIMIT)
BOTH = ((0, 1), (1, 1), (5, 64), (63, 1), (64, 130), (130, 130), (500, 2), (LARGEST_LIMIT, LARGEST_LIMIT))
CHUNKS = (1, 2, 63, 64, 65, 128, 200, 500, LARGEST_LIMIT)
MASKS = [
    *(Mask(causal=causal) for causal in (False, True)),
    *(Mask(causal=causal, left=left) for left in LIMITS for causal in (False, True)),
    *(Mask(right=right) for right in LIMITS[1:]),
    *(Mask(left=left, right=right) for left, right in BOTH),
    *(Mask(causal=causal, chunk=chunk) for chunk in CHUNKS for causal in (False, True)),
    Mask(left=70, chunk=200),
    Mask(right=3, chunk=65),
    Mask(left=64, right=70, chunk=128),
    Mask(causal=True, left=30, chunk=130),
]


@pytest.mark.parametrize("mask", slow_if(lambda mask: MASKS.index(mask) % 7 != 0, MASKS), ids=str)
def test_of_rows(mask):
    """Few and many queries, more and fewer of them than keys, rows that see no key, rows past the last query."""
    lengths = LENGTHS if mask in (Mask(), Mask(causal=True)) else FEW_LENGTHS
    nothing_seen = skipped = 0
    with gluon_cpu.machine():
        for q_len, kv_len in itertools.product(lengths, lengths):
            for index, first in enumerate(range(0, q_len, BLOCK_M)):
                found = torch.full((52 + NUMBERS,), -(10**6), dtype=torch.int32)
                describe_rows[(1,)](found, 5, 7, index, q_len, kv_len, mask, num_warps=1)
                where = (q_len, kv_len, first)
                all_seen = seen_by(first, BLOCK_M, q_len, kv_len, mask)
                block = check_range(found[52:].tolist(), all_seen, all_seen, where)
                skipped += block.first
                for half in (0, 1):
                    got = found[26 * half : 26 * half + 26].tolist()
                    begin = first + SHARE * half
                    seen = seen_by(begin, SHARE, q_len, kv_len, mask)
                    share = check_range(got[:NUMBERS], seen, seen, where)
                    assert got[9] == begin
                    for row, visible, hidden in ((0, got[10], got[15]), (SHARE - 1, got[11], got[16])):
                        expected = torch.zeros(kv_len, dtype=torch.bool)
                        expected[max(0, hidden) : max(0, visible)] = True
                        if row < len(seen):
                            assert torch.equal(expected, seen[row]), where
                            nothing_seen += not expected.any()
                    assert got[12:15] == [5, 7, first]
                    # It walks the block's steps, of which its own mask says which are unmasked.
                    walked = check_range(got[17:], all_seen, seen, where)
                    assert (walked.first, walked.end) == (block.first, block.end)
                    assert block.first <= share.first < share.end <= block.end, "no step but the block's"
    assert (nothing_seen > 0) == mask.some_rows_see_nothing(max(lengths), min(lengths))
    narrow = min(n for n in (mask.left, mask.chunk, LARGEST_LIMIT) if n is not None) < 300
    assert (skipped > 0) == narrow


WINDOWS = (
    Mask(causal=True, left=1000),
    Mask(left=500, right=500),
    Mask(chunk=1024),
    Mask(causal=True, chunk=1024),
)


@pytest.mark.parametrize("mask", WINDOWS, ids=str)
def test_of_a_window_the_steps_do_not_grow_with_the_sequence(mask):
    """And most of them are unmasked, if it is wide. Of a row block in the middle, up to the largest length."""
    steps = set()
    with gluon_cpu.machine():
        for length in (2**13, 2**20, 2**31 - 2**12):
            found = torch.zeros(52 + NUMBERS, dtype=torch.int32)
            index = length // BLOCK_M // 2 + 4
            describe_rows[(1,)](found, 0, 0, index, length, length, mask, num_warps=1)
            first, end, unmasked_first, unmasked_end, *_ = found[52:].tolist()
            keys = mask.keys_seen(index * BLOCK_M, (index + 1) * BLOCK_M - 1, length, length)
            assert keys / BLOCK_N <= end - first <= keys / BLOCK_N + 2
            assert unmasked_end - unmasked_first >= (keys - 2 * BLOCK_M) // BLOCK_N - 1
            steps.add(end - first)
    assert len(steps) == 1


def test_equal_masks_are_equal_objects():
    """So that a kernel is compiled once."""
    assert Mask(right=0, left=3) == Mask(causal=True, left=3) == Mask(causal=True, left=3, right=7)
    assert len({str(mask) for mask in (Mask(right=0), Mask(causal=True), Mask(causal=True, right=9))}) == 1
    assert len({str(mask) for mask in MASKS}) == len(MASKS)


def test_what_a_mask_refuses():
    assert not Mask(causal=True).hides_early_keys
    assert Mask(left=0).hides_early_keys
    for name, least in (("left", 0), ("right", 0), ("chunk", 1)):
        for limit in (least - 1, LARGEST_LIMIT + 1):
            limits: dict[str, Any] = {name: limit}
            with pytest.raises(
                ValueError, match=rf"^self\.{name}={limit} must be from {least} to {LARGEST_LIMIT}, or None for no "
            ):
                Mask(**limits)


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
