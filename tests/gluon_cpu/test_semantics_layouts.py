"""Layouts: who holds what, conversions, reductions and scans within a CTA and across two."""

import pytest
import torch

import gluon_cpu
from tests.compat import gl, jit
from tests.gluon_cpu.layouts import (
    MATRIX,
    MATRIX_COLUMN_HALVES,
    MATRIX_COPIES,
    MATRIX_HALVES,
    ROW,
    ROW_COPIES,
    ROW_HALVES,
)
from tests.gluon_cpu.support import addresses, load_matrix, normal, poisoned, same, small_integers, store_matrix

BLOCKED_T = gl.constexpr(gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1]))
ACCUMULATOR = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
LINEAR = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [32, 0]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[64, 8],
    )
)


@jit
def through_layout(x_ptr, out_ptr, M: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Load by rows, convert, store from the other layout."""
    store_matrix(out_ptr, gl.convert_layout(load_matrix(x_ptr, M, N, MATRIX), LAYOUT))


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (BLOCKED_T, (64, 32)),
        (ACCUMULATOR, (64, 32)),
        (LINEAR, (64, 8)),
        (gl.constexpr(gl.DotOperandLayout(0, ACCUMULATOR.value, 2)), (64, 16)),
    ],
    ids=["blocked", "accumulator", "linear", "dot operand"],
)
def test_convert_layout_keeps_every_element(launch, layout, shape):
    x = normal(*shape)
    out = poisoned(*shape)
    launch(through_layout, (1,), x, out, M=shape[0], N=shape[1], LAYOUT=layout)
    same(out, x)


@jit
def auto_layout(out_ptr):
    x = gl.arange(0, 128)
    y = gl.set_auto_layout(x * 2 + 1, ROW)
    gl.store(out_ptr + gl.arange(0, 128, ROW), y)


def test_auto_layout(launch):
    out = poisoned(128, dtype=torch.int32)
    launch(auto_layout, (1,), out)
    same(out, 2 * torch.arange(128, dtype=torch.int32) + 1)


@jit
def reshapes(x_ptr, out_ptr):
    x = load_matrix(x_ptr, 16, 32, MATRIX)
    low, high = gl.split(x.reshape([16, 16, 2]))
    joined = gl.join(high, low).reshape([16, 32])  # neighbours swapped
    flipped = joined.permute((1, 0)).reshape([512])
    store_matrix(out_ptr, gl.convert_layout(flipped.reshape([32, 16]), BLOCKED_T))


def test_reshape_split_join_permute(launch):
    x = normal(16, 32)
    out = poisoned(32, 16)
    launch(reshapes, (1,), x, out)
    same(out, x.reshape(16, 16, 2).flip(2).reshape(16, 32).T.contiguous())


@jit
def broadcasts(x_ptr, out_ptr):
    column = gl.load(x_ptr + gl.arange(0, 32, gl.SliceLayout(1, MATRIX)))
    row = gl.load(x_ptr + 32 + gl.arange(0, 16, gl.SliceLayout(0, MATRIX)))
    store_matrix(out_ptr, column[:, None] * 10 + gl.expand_dims(row, 0))


def test_expand_dims_and_broadcast(launch):
    x = small_integers(48)
    out = poisoned(32, 16)
    launch(broadcasts, (1,), x, out)
    same(out, x[:32, None] * 10 + x[None, 32:])


@jit
def reductions(x_ptr, column_ptr, row_ptr, all_ptr):
    x = load_matrix(x_ptr, 64, 32, MATRIX)
    rows = gl.arange(0, 64, gl.SliceLayout(1, MATRIX))
    gl.store(column_ptr + rows, gl.max(x, axis=1))
    gl.store(column_ptr + 64 + rows, gl.sum(x, axis=1))
    gl.store(column_ptr + 128 + rows, gl.min(x, axis=1))
    columns = gl.arange(0, 32, gl.SliceLayout(0, MATRIX))
    gl.store(row_ptr + columns, gl.sum(x, axis=0))
    gl.store(all_ptr, gl.sum(gl.sum(x, axis=0), axis=0))
    gl.store(all_ptr + 1, gl.max(x))


def test_reduce(launch):
    x = small_integers(64, 32)
    by_row, by_column, whole = poisoned(3, 64), poisoned(32), poisoned(2)
    launch(reductions, (1,), x, by_row, by_column, whole)
    same(by_row, torch.stack([x.amax(1), x.sum(1), x.amin(1)]))
    same(by_column, x.sum(0))
    same(whole, torch.stack([x.sum(), x.max()]))


@jit
def reduce_nan(x_ptr, out_ptr):
    x = load_matrix(x_ptr, 64, 32, MATRIX)
    gl.store(out_ptr + gl.arange(0, 64, gl.SliceLayout(1, MATRIX)), gl.max(x, axis=1))


def test_max_of_a_row_ignores_nan(launch):
    x = small_integers(64, 32)
    x[:, 5] = float("nan")
    x[3] = -float("inf")
    out = poisoned(64)
    launch(reduce_nan, (1,), x, out)
    same(out, x.nan_to_num(-float("inf"), neginf=-float("inf")).amax(1))


@jit
def larger(value, index, other_value, other_index):
    other = (other_value > value) | ((other_value == value) & (other_index < index))
    return gl.where(other, other_value, value), gl.where(other, other_index, index)


@jit
def argmax_kernel(x_ptr, value_ptr, index_ptr):
    x = load_matrix(x_ptr, 64, 32, MATRIX)
    index = gl.arange(0, 32, gl.SliceLayout(0, MATRIX))[None, :] + gl.full([64, 32], 0, gl.int32, MATRIX)
    value, where = gl.reduce((x, index), 1, larger)
    rows = gl.arange(0, 64, gl.SliceLayout(1, MATRIX))
    gl.store(value_ptr + rows, value)
    gl.store(index_ptr + rows, where)


def test_reduce_of_a_tuple_by_a_function_of_the_kernel(launch):
    x = small_integers(64, 32)
    value, index = poisoned(64), poisoned(64, dtype=torch.int32)
    launch(argmax_kernel, (1,), x, value, index)
    same(value, x.amax(1))
    same(index, x.argmax(1).to(torch.int32))


@jit
def sum_bf16(x_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    x = gl.load(x_ptr + i)
    gl.store(out_ptr, gl.sum(x, axis=0, dtype=gl.float32))
    gl.store(out_ptr + 1, gl.sum(x, axis=0).to(gl.float32))  # in the type of x: rounded after each addition


def test_sum_of_bf16_in_fp32_and_in_its_own_type(launch):
    x = torch.full((128,), 0.0, dtype=torch.bfloat16)
    x[:2] = torch.tensor([256.0, 1.0])  # in bf16, 256 + 1 is 256
    out = poisoned(2)
    launch(sum_bf16, (1,), x, out)
    assert out.tolist() == [257.0, 256.0]


@jit
def scans(x_ptr, out_ptr):
    x = load_matrix(x_ptr, 16, 32, MATRIX)
    store_matrix(out_ptr, gl.cumsum(x, axis=1))
    store_matrix(out_ptr + 512, gl.cumsum(x, axis=0))
    store_matrix(out_ptr + 1024, gl.cumsum(x, axis=1, reverse=True))
    store_matrix(out_ptr + 1536, gl.cumprod(x, axis=1))


def test_cumsum_and_cumprod(launch):
    x = small_integers(16, 32, largest=1)
    out = poisoned(4, 16, 32)
    launch(scans, (1,), x, out)
    same(out, torch.stack([x.cumsum(1), x.cumsum(0), x.flip(1).cumsum(1).flip(1), x.cumprod(1)]))


@jit
def affine(a, b, c, d):
    """x -> a x + b, then x -> c x + d: associative, not commutative."""
    return c * a, c * b + d


@jit
def scan_of_pairs(a_ptr, b_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    a, b = gl.associative_scan((gl.load(a_ptr + i), gl.load(b_ptr + i)), 0, affine)
    gl.store(out_ptr + i, a)
    gl.store(out_ptr + 128 + i, b)


def test_associative_scan_of_a_tuple_keeps_the_order(launch):
    a, b = small_integers(128, dtype=torch.int32, seed=1), small_integers(128, dtype=torch.int32, seed=2)
    out = poisoned(2, 128, dtype=torch.int32)
    launch(scan_of_pairs, (1,), a, b, out)
    x, y, want = 1, 0, []
    for c, d in zip(a.tolist(), b.tolist(), strict=True):
        x, y = c * x, c * y + d
        x, y = ((v + 2**31) % 2**32 - 2**31 for v in (x, y))
        want.append((x, y))
    same(out, torch.tensor(want, dtype=torch.int32).T.contiguous())


@jit
def collatz(x, y):
    steps = 0
    while x != 1:
        x = x // 2 if x % 2 == 0 else 3 * x + 1
        steps += 1
    return steps, y + steps


@jit
def map_kernel(x_ptr, y_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    steps, shifted = gl.map_elementwise(collatz, gl.load(x_ptr + i), gl.load(y_ptr + i))
    gl.store(out_ptr + i, steps)
    gl.store(out_ptr + 128 + i, shifted)


def test_map_elementwise_loops_for_each_element(launch):
    x, y = torch.arange(1, 129, dtype=torch.int32), small_integers(128, dtype=torch.int32)
    out = poisoned(2, 128, dtype=torch.int32)
    launch(map_kernel, (1,), x, y, out)

    def steps(n: int) -> int:
        return 0 if n == 1 else 1 + steps(n // 2 if n % 2 == 0 else 3 * n + 1)

    want = torch.tensor([steps(n) for n in range(1, 129)], dtype=torch.int32)
    same(out, torch.stack([want, y + want]))


@jit
def gather_kernel(x_ptr, index_ptr, out_ptr):
    x = load_matrix(x_ptr, 32, 32, MATRIX)
    index = load_matrix(index_ptr, 32, 32, MATRIX)
    store_matrix(out_ptr, gl.gather(x, index, axis=0))
    store_matrix(out_ptr + 1024, gl.gather(x, index, axis=1))


def test_gather(launch):
    x = normal(32, 32)
    index = torch.randint(0, 32, (32, 32), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    out = poisoned(2, 32, 32)
    launch(gather_kernel, (1,), x, index, out)
    same(out, torch.stack([x.gather(0, index.long()), x.gather(1, index.long())]))


@jit
def histogram_kernel(x_ptr, out_ptr):
    x = gl.load(x_ptr + gl.arange(0, 128, ROW))
    counts = gl.histogram(x, 32, mask=x != 5, layout=ROW)
    gl.store(out_ptr + gl.arange(0, 32, ROW), counts)


def test_histogram(launch):
    x = torch.randint(0, 32, (128,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    out = poisoned(32, dtype=torch.int32)
    launch(histogram_kernel, (1,), x, out)
    want = torch.bincount(x, minlength=32).to(torch.int32)
    want[5] = 0
    same(out, want)


@jit
def dot_fma_kernel(a_ptr, b_ptr, out_ptr):
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MATRIX, 0)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MATRIX, 0)
    a = gl.convert_layout(load_matrix(a_ptr, 16, 8, MATRIX), LEFT)
    b = gl.convert_layout(load_matrix(b_ptr, 8, 32, MATRIX), RIGHT)
    store_matrix(out_ptr, gl.dot_fma(a, b, gl.full([16, 32], 1.0, gl.float32, MATRIX)))


def test_dot_fma(launch):
    a, b = small_integers(16, 8, seed=1), small_integers(8, 32, seed=2)
    out = poisoned(16, 32)
    launch(dot_fma_kernel, (1,), a, b, out)
    same(out, a @ b + 1)


# ---------------------------------------------------------------------------------------------------------------------
# Two CTAs: each holds the coordinates of its block bases
# ---------------------------------------------------------------------------------------------------------------------


@jit
def shards(x_ptr, out_ptr, LAYOUT: gl.constexpr):
    store_matrix(out_ptr, load_matrix(x_ptr, 32, 32, LAYOUT) + 1.0)


@pytest.mark.parametrize("layout", [MATRIX_HALVES, MATRIX_COLUMN_HALVES], ids=["rows", "columns"])
def test_two_ctas_write_their_own_halves(launch, layout):
    x = normal(32, 32)
    out = poisoned(32, 32)
    launch(shards, (1,), x, out, LAYOUT=layout, num_ctas=2)
    same(out, x + 1)


@jit
def convert_across(x_ptr, out_ptr, FROM: gl.constexpr, TO: gl.constexpr):
    x = load_matrix(x_ptr, 32, 32, FROM)
    store_matrix(out_ptr, gl.convert_layout(x * 2.0, TO))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (MATRIX_HALVES, MATRIX_COLUMN_HALVES),
        (MATRIX_COLUMN_HALVES, MATRIX_HALVES),
        (MATRIX_COPIES, MATRIX_HALVES),
    ],
    ids=["rows to columns", "columns to rows", "copies to rows"],
)
def test_convert_layout_across_ctas(launch, source, target):
    x = normal(32, 32)
    out = poisoned(32, 32)
    launch(convert_across, (1,), x, out, FROM=source, TO=target, num_ctas=2)
    same(out, x * 2)


@jit
def reduce_across(x_ptr, out_ptr):
    """Each CTA holds half of the rows: the sum over rows needs both."""
    x = load_matrix(x_ptr, 64, 32, MATRIX_HALVES)
    total = gl.convert_layout(gl.sum(x, axis=0), ROW_HALVES)  # [32]
    gl.store(out_ptr + gl.arange(0, 32, ROW_HALVES), total)
    most = gl.max(x, axis=1)  # [64], rows sharded: no exchange
    gl.store(out_ptr + 32 + gl.arange(0, 64, gl.SliceLayout(1, MATRIX_HALVES)), most)


def test_reduce_across_ctas(launch):
    x = small_integers(64, 32)
    out = poisoned(96)
    launch(reduce_across, (1,), x, out, num_ctas=2)
    same(out, torch.cat([x.sum(0), x.amax(1)]))


@jit
def four_ctas(x_ptr, out_ptr, FROM: gl.constexpr, TO: gl.constexpr):
    x = gl.load(addresses(x_ptr, 64, 64, FROM))
    store_matrix(
        out_ptr, gl.convert_layout(x, TO) + gl.convert_layout(gl.max(x, axis=1), gl.SliceLayout(1, TO))[:, None]
    )


def test_four_ctas(launch):
    x = small_integers(64, 64)
    out = poisoned(64, 64)
    quarters = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], [[1, 0], [0, 1]])
    rows = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], [[2, 0], [1, 0]])
    launch(four_ctas, (1,), x, out, FROM=quarters, TO=rows, num_ctas=4)
    same(out, x + x.amax(1, keepdim=True))


@jit
def copies_in_both(out_ptr):
    """A replicated tensor is the same in both CTAs; one of them writes it."""
    i = gl.arange(0, 128, ROW_COPIES)
    gl.store(out_ptr + gl.arange(0, 128, ROW_HALVES), gl.convert_layout(i * 3, ROW_HALVES))


def test_replicated_over_ctas(launch):
    out = poisoned(128, dtype=torch.int32)
    launch(copies_in_both, (1,), out, num_ctas=2)
    same(out, 3 * torch.arange(128, dtype=torch.int32))


@jit
def initial_value_of_other_shards(out_ptr):
    BOTH: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], [[0]])
    tile = gl.allocate_shared_memory(gl.int32, [128], BOTH, gl.arange(0, 128, ROW_HALVES))
    gl.store(out_ptr + gl.arange(0, 128, ROW_COPIES), tile.load(ROW_COPIES))


def test_an_initial_value_of_which_each_cta_has_a_half(launch):
    """Each CTA writes what it has, into its own copy: the other half of each copy is written by nobody."""
    with pytest.raises(gluon_cpu.UninitialisedRead, match=r"bytes (0 to 256|256 to 512)"):
        launch(initial_value_of_other_shards, (1,), poisoned(128, dtype=torch.int32), num_ctas=2)


@jit
def histogram_over_ctas(x_ptr, out_ptr, INPUT: gl.constexpr, BINS: gl.constexpr):
    x = gl.load(x_ptr + gl.arange(0, 256, INPUT))
    gl.store(out_ptr + gl.arange(0, 64, BINS), gl.histogram(x, 64, layout=BINS))
    gl.store(out_ptr + 64 + gl.arange(0, 64, BINS), gl.histogram(x, 64, mask=x > 9, layout=BINS))


@pytest.mark.parametrize("copies", [False, True])
def test_histogram_over_ctas(launch, copies):
    """Each CTA counts the elements of both, and keeps its half of the bins."""
    x = torch.randint(0, 64, (256,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    out = poisoned(128, dtype=torch.int32)
    layout = ROW_COPIES if copies else ROW_HALVES
    launch(histogram_over_ctas, (1,), x, out, INPUT=layout, BINS=ROW_HALVES, num_ctas=2)
    count = torch.bincount(x, minlength=64).to(torch.int32)
    same(out, torch.cat([count, torch.where(torch.arange(64) > 9, count, 0)]))
