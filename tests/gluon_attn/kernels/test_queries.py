"""Keys and QueryRange: which row blocks a block of keys walks, in which order, and which of them it masks, executed
against brute force."""

import itertools

import pytest
import torch

import gluon_cpu
from channels.compat import gl, jit
from gluon_attn import reference
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.kernels.common.queries import AT_ONCE, Keys
from gluon_attn.kernels.common.sequence import whole_sequence
from tests.slow import slow_if

NUMBERS = 7  # before those of the steps
WHOLE = (1, 0, 1)  # one share, from 0 to 1


@jit(do_not_specialize=["first", "q_len", "kv_len", "group", "shares", "share_first", "share_end"])
def describe(
    found,
    first,
    q_len,
    kv_len,
    group,
    shares,
    share_first,
    share_end,
    KEYS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    MASK: gl.constexpr,
    ROTATED: gl.constexpr,
):
    """first, end, unmasked_first and the three counts of steps of some keys' row blocks; then the head of each step,
    and its row block; then each masked step of a head once more, as the gradient role counts them."""
    sequence = whole_sequence(q_len, kv_len)
    zero, five = gl.to_tensor(0), gl.to_tensor(5)
    shared = (zero, shares, share_first, share_end)
    keys = Keys(zero, five, first, sequence, KEYS, BLOCK_M, group, *shared, MASK, ROTATED, None, (), ())
    walked = keys.query_range()
    steps = walked.steps()
    gl.store(found, walked.first)
    gl.store(found + 1, walked.end)
    gl.store(found + 2, walked.unmasked_first)
    gl.store(found + 3, walked.rotation)
    gl.store(found + 4, steps)
    gl.store(found + 5, walked.unmasked_steps())
    gl.store(found + 6, walked.masked_steps())
    for step in range(steps):
        member, block = walked.visit(step)
        gl.store(found + 7 + 2 * step, keys.head(member))
        gl.store(found + 8 + 2 * step, block)
    for step in range(walked.masked_steps()):
        gl.store(found + 7 + 2 * steps + step, walked.masked_block(step, 1))


def seen(first: int, keys: int, q_len: int, kv_len: int, causal: bool) -> torch.Tensor:
    """[q_len, keys]: whether a query sees a key; no key at or past kv_len is one."""
    key = first + torch.arange(keys)[None, :]
    query = torch.arange(q_len)[:, None]
    return (key < kv_len) & ((key <= query + kv_len - q_len) if causal else (query >= 0))


def check(
    found: list[int], first: int, keys: int, block_m: int, q_len: int, kv_len: int, group: int, causal: bool,
    rotated: bool,
) -> list[int]:  # fmt: skip
    """Of one block of keys. Returns the row blocks that it walks."""
    blocks = seen(first, keys, q_len, kv_len, causal).split(block_m)
    some = [i for i, block in enumerate(blocks) if block.any()]
    partly = [i for i in some if not blocks[i].all()]
    whole = [i for i in some if blocks[i].all()]
    steps, unmasked_steps, masked_steps = found[4:NUMBERS]
    assert (found[0], found[1]) == (some[0], some[-1] + 1)
    assert (steps, unmasked_steps, masked_steps) == (len(some) * group, len(whole) * group, len(partly))
    visits = list(zip(*[iter(found[NUMBERS : NUMBERS + 2 * steps])] * 2, strict=True))
    assert sorted(visits) == [(5 * group + member, block) for member in range(group) for block in some], "each one once"
    # Those without a mask first, from the last block on, or from another step on and around: of one head after the
    # other, or under a causal mask of all heads, a few blocks of each. There, late keys of several heads begin with the
    # first block; and who begins where is counted from the other end.
    assert found[2] == (whole[0] if whole else found[1])
    heads = range(5 * group, 6 * group)
    upwards = causal and rotated and group > 1 and first >= kv_len / 2
    number = -(-kv_len // keys) - 1 - first // keys if upwards else first // keys
    assert found[3] == (2 * number % max(1, len(whole) * (group if causal else 1)) if rotated else 0)
    if causal:
        walk = whole if upwards else whole[::-1]
        parts = [walk[i : i + AT_ONCE.value] for i in range(0, len(walk), AT_ONCE.value)]
        around = [(head, block) for part in parts for head in heads for block in part]
        around = around[found[3] :] + around[: found[3]]
    else:
        turned = whole[::-1][found[3] :] + whole[::-1][: found[3]]
        around = [(head, block) for head in heads for block in turned]
    assert visits[:unmasked_steps] == around
    assert visits[unmasked_steps:] == [(head, block) for head in heads for block in reversed(partly)]
    assert found[NUMBERS + 2 * steps :][:masked_steps] == partly[::-1], "what the gradient role masks"
    return some


LENGTHS = (1, 63, 64, 65, 127, 128, 129, 200, 700)
SHAPES = {"keys as rows": (128, 128), "more keys": (128, 64), "as D=256": (64, 64), "more rows": (64, 128)}


@pytest.mark.parametrize("rotated", slow_if(bool, [False, True]))
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("keys", "block_m"), SHAPES.values(), ids=SHAPES.keys())
def test_against_every_pair_of_query_and_key(keys, block_m, causal, rotated):
    turned = both = 0
    with gluon_cpu.machine():
        for q_len, kv_len in itertools.product(LENGTHS, LENGTHS):
            group = 1 + (q_len + kv_len) % 3
            before: list[int] = list(range(-(-q_len // block_m)))
            for first in range(0, kv_len, keys):
                found = torch.full((NUMBERS + 3 * group * (-(-q_len // block_m)),), -(10**6), dtype=torch.int32)
                at = (found, first, q_len, kv_len, group, *WHOLE)
                describe[(1,)](*at, keys, block_m, Mask(causal=causal), rotated, num_warps=1)
                numbers = found.tolist()
                try:
                    walked = check(numbers, first, keys, block_m, q_len, kv_len, group, causal, rotated)
                except AssertionError as error:
                    raise AssertionError(f"{q_len=} {kv_len=} {first=} {group=}: {numbers}") from error
                assert set(walked) <= set(before), "who adds in order waits for the keys before: they see all of these"
                before = walked
                turned += numbers[3] > 0
                both += numbers[5] > 0 and numbers[6] > 0
    assert (turned > 0) == rotated
    assert (both > 0) == causal


@jit(do_not_specialize=["first", "q_len", "kv_len", "group"])
def describe_windows(found, first, q_len, kv_len, group, KEYS: gl.constexpr, BLOCK_M: gl.constexpr, MASK: gl.constexpr):
    """Steps, those before, and those without a mask; then the head and row block of each; and, after that, of each how
    many blocks of keys before these see the row block."""
    sequence = whole_sequence(q_len, kv_len)
    zero, one = gl.to_tensor(0), gl.to_tensor(1)
    keys = Keys(zero, zero, first, sequence, KEYS, BLOCK_M, group, zero, one, zero, one, MASK, False, None, (), ())
    walked = keys.query_range()
    steps = walked.steps()
    gl.store(found, steps)
    gl.store(found + 1, walked.masked_steps_before() * group)
    gl.store(found + 2, walked.unmasked_steps())
    for step in range(steps):
        member, block = walked.visit(step)
        gl.store(found + 3 + 3 * step, member)
        gl.store(found + 4 + 3 * step, block)
        gl.store(found + 5 + 3 * step, keys.key_blocks_before(block))


WINDOWS = {
    "narrow": Mask(causal=True, left=30),
    "wide": Mask(causal=True, left=300),
    "own": Mask(causal=True, left=0),
    "both sides": Mask(left=100, right=70),
    "to the right": Mask(right=64),
    "to the left": Mask(left=64),
    "chunks": Mask(causal=True, chunk=100),
    "chunks, both sides": Mask(chunk=150),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_against_every_pair(name):
    """Row blocks with a pair are walked, once for each head, no others are; those without a mask see all; and who adds
    in order counts the blocks of keys before that see the row block."""
    mask, keys, block_m, group = WINDOWS[name], 128, 64, 2
    with gluon_cpu.machine():
        for q_len, kv_len in itertools.product((1, 64, 129, 500), (1, 128, 200, 700)):
            scores = torch.zeros(q_len, kv_len)
            window = (mask.left, mask.right)
            visible = reference.masked(scores, causal=mask.causal, window=window, chunk=mask.chunk) == 0
            padded = torch.zeros(-(-q_len // block_m) * block_m, -(-kv_len // keys) * keys, dtype=torch.bool)
            padded[:q_len, :kv_len] = visible
            pairs = padded.unflatten(1, (-1, keys)).unflatten(0, (-1, block_m)).transpose(1, 2)  # (rows, keys, m, n)
            some = pairs.flatten(2).any(-1)
            for index in range(some.shape[1]):
                found = torch.full((3 + 3 * group * some.shape[0],), -(10**6), dtype=torch.int32)
                given = (found, index * keys, q_len, kv_len, group, keys, block_m, mask)
                describe_windows[(1,)](*given, num_warps=1)
                steps, before, unmasked = found[:3].tolist()
                visits = found[3 : 3 + 3 * steps].view(-1, 3).tolist()
                want = [i for i in range(some.shape[0]) if some[i, index]]
                case = f"{q_len=} {kv_len=} {index=}: {visits}"
                assert sorted((m, b) for m, b, _ in visits) == [(m, b) for m in range(group) for b in want], case
                for step, (_, block, number) in enumerate(visits):
                    rows = min(block_m, q_len - block * block_m)
                    if before <= step < before + unmasked:
                        assert pairs[block, index, :rows].all(), case
                    assert number == int(some[block, :index].sum()), case


def test_neighbours_begin_apart():
    """With 16 row blocks and no mask, each of the first eight blocks of keys begins at one of its own."""
    starts = []
    with gluon_cpu.machine():
        for index in range(8):
            found = torch.full((NUMBERS + 32,), -1, dtype=torch.int32)
            describe[(1,)](found, 128 * index, 1024, 1024, 1, *WHOLE, 128, 64, Mask(causal=False), True, num_warps=1)
            starts.append(int(found[NUMBERS + 1]))
    assert starts == [15, 13, 11, 9, 7, 5, 3, 1]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("bounds", [(0, 1, 2), (0, 1, 3, 4), (0, 4, 7), (0, 50, 101, 132)], ids=str)
def test_shares_divide_the_row_blocks(bounds, causal):
    """Each step of the whole is one of a share, with a mask or without as there; each has as many row blocks as it has
    of all shares, but for one at most."""
    q_len, kv_len, group = 700, 300, 2

    def visits(first: int, *share: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        found = torch.full((NUMBERS + 3 * group * 11,), -1, dtype=torch.int32)
        with gluon_cpu.machine():
            describe[(1,)](found, first, q_len, kv_len, group, *share, 128, 64, Mask(causal=causal), True, num_warps=1)
        numbers = found.tolist()
        steps, unmasked = numbers[4:6]
        pairs = list(zip(*[iter(numbers[NUMBERS : NUMBERS + 2 * steps])] * 2, strict=True))
        return pairs[:unmasked], pairs[unmasked:]

    for first in range(0, kv_len, 128):
        whole = visits(first, *WHOLE)
        shares = list(itertools.pairwise(bounds))
        each = [visits(first, bounds[-1], *share) for share in shares]
        for kind in range(2):
            assert sorted(whole[kind]) == sorted(step for steps in each for step in steps[kind])
        row_blocks = (len(whole[0]) + len(whole[1])) // group
        for (begin, end), (unmasked, masked) in zip(shares, each, strict=True):
            assert abs((len(unmasked) + len(masked)) // group - row_blocks * (end - begin) / bounds[-1]) < 1
