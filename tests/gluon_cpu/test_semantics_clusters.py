"""What several CTAs do at one place: atomics by one of them for all, and gathers from each other's shared memory."""

import pytest
import torch

import gluon_cpu
from tests.compat import TensorDescriptor, cluster, gl, jit, mbarrier, tma, tma_blackwell
from tests.gluon_cpu.layouts import MATRIX_COPIES, MATRIX_HALVES, PLAIN_HALVES, ROW_COPIES, ROW_HALVES
from tests.gluon_cpu.support import descriptor, new_barrier, normal, poisoned, same, store_matrix

RACE = (gluon_cpu.DataRace, gluon_cpu.UninitialisedRead)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@jit
def next_tile(counter_ptr, out_ptr):
    """A number for the cluster, which is counted up once."""
    i = gl.arange(0, 256, ROW_HALVES)
    gl.store(out_ptr + i, i * 0 + gl.atomic_add(counter_ptr, 1))


def test_a_counter_counts_clusters(launch):
    counter, out = ints(5), poisoned(256, dtype=torch.int32)
    launch(next_tile, (1,), counter, out, num_ctas=2)
    same(counter, ints(6))
    same(out, torch.full((256,), 5, dtype=torch.int32))


@jit
def last_one_adds(parts_ptr, count_ptr, out_ptr, SEM: gl.constexpr):
    """Each program stores its part, and the last one adds the two; each of its CTAs half of the elements."""
    i = gl.arange(0, 256, ROW_HALVES)
    gl.store(parts_ptr + 256 * gl.program_id(0) + i, i)
    if gl.atomic_add(count_ptr, 1, sem=SEM) == 1:
        gl.store(out_ptr + i, gl.load(parts_ptr + (255 - i)) + gl.load(parts_ptr + 256 + i))


def semaphore(launch, sem: str) -> torch.Tensor:
    out = poisoned(256, dtype=torch.int32)
    launch(last_one_adds, (2,), poisoned(512, dtype=torch.int32), ints(0), out, SEM=sem, num_ctas=2)
    return out


def test_a_release_is_of_all_ctas_and_all_learn_what_one_acquires(launch):
    same(semaphore(launch, "acq_rel"), torch.full((256,), 255, dtype=torch.int32))


@pytest.mark.parametrize("sem", ["relaxed", "release", "acquire"])
def test_less_order_than_that_is_a_race(launch, sem):
    with pytest.raises(gluon_cpu.DataRace, match="data race on parts_ptr"):
        semaphore(launch, sem)


@jit
def atomics_of_copies(x_ptr, out_ptr):
    """Both CTAs have all pointers: one of them does it, the other has what that one got."""
    i = gl.arange(0, 128, ROW_COPIES)
    j = gl.arange(0, 256, ROW_HALVES)
    added = gl.atomic_add(x_ptr + i, i)
    compared = gl.atomic_cas(x_ptr + i, i, i + 1)
    polled = gl.atomic_poll(x_ptr + i, i + 1)
    late = gl.atomic_poll(x_ptr, 5, timeout_ns=100)
    read = gl.atomic_load(x_ptr + i)
    gl.atomic_store(x_ptr, 9)
    gl.store(out_ptr + i, added + compared * 1000 + polled.to(gl.int32) * 1000000)
    gl.store(out_ptr + 128 + i, read)
    gl.store(out_ptr + 256 + j, j * 0 + late.to(gl.int32))


def test_atomics_of_copies(launch):
    x, out = torch.zeros(128, dtype=torch.int32), poisoned(512, dtype=torch.int32)
    launch(atomics_of_copies, (1,), x, out, num_ctas=2)
    i = torch.arange(128, dtype=torch.int32)
    same(x, torch.where(i == 0, 9, i + 1))
    same(out, torch.cat([i * 1000 + 1000000, i + 1, 0 * i, 0 * i]))


@jit
def poll_for_the_pair(flag_ptr, data_ptr, out_ptr, SEM: gl.constexpr):
    """One CTA polls; what it acquires, the other one knows too."""
    i = gl.arange(0, 256, ROW_HALVES)
    if gl.program_id(0) == 0:
        gl.store(data_ptr + i, i)
        gl.atomic_xchg(flag_ptr, 1, sem="release")
    else:
        gl.atomic_poll(flag_ptr, 1, sem=SEM)
        gl.store(out_ptr + i, gl.load(data_ptr + i))


def test_a_poll_is_by_one_cta_for_all(launch):
    data, out = poisoned(256, dtype=torch.int32), poisoned(256, dtype=torch.int32)
    launch(poll_for_the_pair, (2,), ints(0), data, out, SEM="acquire", num_ctas=2)
    same(out, torch.arange(256, dtype=torch.int32))
    with pytest.raises(gluon_cpu.DataRace, match="data race on data_ptr"):
        launch(poll_for_the_pair, (2,), ints(0), data, out, SEM="relaxed", num_ctas=2)


@jit
def add_a_copy(desc, WAIT: gl.constexpr):
    """Both CTAs hold the tile: it is added once."""
    one = gl.full([32, 32], 1.0, gl.float32, MATRIX_COPIES)
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout, one)
    tma.async_atomic_add(desc, [0, 0], tile)
    if WAIT:
        tma.store_wait(0)
    tile.store(one + one)
    tma.async_atomic_add(desc, [0, 0], tile)
    tma.store_wait(0)
    cluster.barrier()


def test_reduction_of_a_tile_that_every_cta_holds(launch):
    x = torch.zeros(32, 32)
    launch(add_a_copy, (1,), descriptor(x, [32, 32], cga=[[0, 0]]), WAIT=True, num_ctas=2)
    same(x, torch.full((32, 32), 3.0))
    with pytest.raises(gluon_cpu.DataRace, match="data race on tile"):
        launch(add_a_copy, (1,), descriptor(x, [32, 32], cga=[[0, 0]]), WAIT=False, num_ctas=2)


@jit
def reverse(out_ptr, BARRIER: gl.constexpr):
    """Each element from the shared memory of the other CTA, in the last of three slots."""
    i = gl.arange(0, 256, ROW_HALVES)
    tiles = gl.allocate_shared_memory(gl.int32, [3, 256], PLAIN_HALVES)
    tiles.index(0).store(0 * i)
    tile = tiles.index(2)
    tile.store(i)
    if BARRIER:
        cluster.barrier()
    gl.store(out_ptr + i, tile.gather(255 - i, axis=0))
    cluster.barrier()


def test_gather_over_ctas(launch):
    out = poisoned(256, dtype=torch.int32)
    launch(reverse, (1,), out, BARRIER=True, num_ctas=2)
    same(out, torch.arange(255, -1, -1, dtype=torch.int32))
    with pytest.raises(RACE, match="shared memory of CTA"):
        launch(reverse, (1,), out, BARRIER=False, num_ctas=2)


@jit
def gather_and_end(out_ptr, LAST: gl.constexpr):
    """Without the last barrier a CTA may end while the other still reads its shared memory."""
    i = gl.arange(0, 256, ROW_HALVES)
    tile = gl.allocate_shared_memory(gl.int32, [256], PLAIN_HALVES)
    tile.store(i)
    cluster.barrier()
    gl.store(out_ptr + i, tile.gather(i ^ 128, axis=0))
    if LAST:
        cluster.barrier()
    tile.store(0 * i)


def test_what_another_cta_reads_may_not_change(launch):
    out = poisoned(256, dtype=torch.int32)
    launch(gather_and_end, (1,), out, LAST=True, num_ctas=2)
    same(out, torch.arange(256, dtype=torch.int32) ^ 128)
    with pytest.raises(gluon_cpu.DataRace, match="data race on tile"):
        launch(gather_and_end, (1,), out, LAST=False, num_ctas=2)


@jit
def scatter_columns(out_ptr, BARRIER: gl.constexpr):
    """Rows of a matrix to the rows of the other CTA, in reverse. That one must have begun, hence the first barrier."""
    tile = gl.allocate_shared_memory(gl.int32, [64, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0], [[1, 0]]))
    rows = gl.arange(0, 64, gl.SliceLayout(1, MATRIX_HALVES))
    columns = gl.arange(0, 32, gl.SliceLayout(0, MATRIX_HALVES))
    at = rows[:, None] * 32 + columns[None, :]
    cluster.barrier()
    tile.scatter(at, 63 - rows[:, None] + 0 * at, axis=0)
    if BARRIER:
        cluster.barrier()
    store_matrix(out_ptr, tile.load(MATRIX_HALVES))
    cluster.barrier()


def test_scatter_over_ctas(launch):
    out = poisoned(64, 32, dtype=torch.int32)
    launch(scatter_columns, (1,), out, BARRIER=True, num_ctas=2)
    same(out, torch.arange(64 * 32, dtype=torch.int32).view(64, 32).flip(0))
    with pytest.raises(RACE, match="shared memory of CTA"):
        launch(scatter_columns, (1,), out, BARRIER=False, num_ctas=2)


@jit
def count_over_ctas(out_ptr):
    """Both CTAs add to each element of both."""
    i = gl.arange(0, 256, ROW_HALVES)
    tile = gl.allocate_shared_memory(gl.int32, [256], PLAIN_HALVES)
    tile.store(0 * i)
    cluster.barrier()
    tile.atomic_scatter_add(i, i & 7, axis=0)
    cluster.barrier()
    gl.store(out_ptr + i, tile.load(ROW_HALVES))


def test_atomics_over_ctas(launch):
    out = poisoned(256, dtype=torch.int32)
    launch(count_over_ctas, (1,), out, num_ctas=2)
    want = torch.zeros(256, dtype=torch.int32)
    want.index_add_(0, torch.arange(256) & 7, torch.arange(256, dtype=torch.int32))
    same(out, want)


def row_descriptor(t: torch.Tensor, cga: list[list[int]]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(t, [1, 32], gl.NVMMASharedLayout(128, 32, 2, cga_layout=cga))


@jit
def gather_rows(desc, stored, ROWS: gl.constexpr, WAIT: gl.constexpr):
    """Each CTA gathers half of the rows into its half of the tile, and scatters them."""
    tile = gl.allocate_shared_memory(gl.float32, [64, 32], desc.layout)
    loaded = new_barrier(1)
    cluster.barrier()
    rows = gl.arange(0, 64, ROWS)
    mbarrier.expect(loaded, tile.nbytes_per_cta)
    tma_blackwell.async_gather(desc, (rows * 5) % 64, 0, loaded, tile)
    if WAIT:
        mbarrier.wait(loaded, 0)
    tma_blackwell.async_scatter(stored, 63 - rows, 0, tile)
    tma.store_wait(0)
    mbarrier.wait(loaded, 0)
    cluster.barrier()


def test_tma_gather_and_scatter_of_rows_over_ctas(blackwell_launch):
    x, out = normal(64, 32), poisoned(64, 32)
    rows = gl.SliceLayout(0, gl.BlockedLayout([1, 4], [32, 1], [1, 4], [1, 0], [[0, 1]]))
    descriptors = [row_descriptor(t, [[1, 0]]) for t in (x, out)]
    blackwell_launch(gather_rows, (1,), *descriptors, ROWS=rows, WAIT=True, num_ctas=2)
    same(out, x[torch.arange(64) * 5 % 64].flip(0))
    with pytest.raises(RACE, match="shared memory of CTA"):
        blackwell_launch(gather_rows, (1,), *descriptors, ROWS=rows, WAIT=False, num_ctas=2)


COPIES_BY_ROW = gl.constexpr(gl.SliceLayout(0, gl.BlockedLayout([1, 4], [32, 1], [1, 4], [1, 0], [[0, 0]])))


@jit
def scatter_a_copy(desc, WAIT: gl.constexpr):
    """Both CTAs hold the tile: one of them writes its rows, as compiled."""
    one = gl.full([32, 32], 1.0, gl.float32, MATRIX_COPIES)
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout, one)
    rows = gl.arange(0, 32, COPIES_BY_ROW)
    tma_blackwell.async_scatter(desc, 2 * rows, 0, tile)
    if WAIT:
        tma.store_wait(0)
    tile.store(one + one)
    tma_blackwell.async_scatter(desc, 2 * rows + 1, 0, tile)
    tma.store_wait(0)
    cluster.barrier()


def test_scatter_of_a_tile_that_every_cta_holds(blackwell_launch):
    x = poisoned(64, 32)
    blackwell_launch(scatter_a_copy, (1,), row_descriptor(x, [[0, 0]]), WAIT=True, num_ctas=2)
    same(x, torch.tensor([1.0, 2.0]).repeat(32)[:, None].expand(64, 32))
    with pytest.raises(gluon_cpu.DataRace, match="data race on tile"):
        blackwell_launch(scatter_a_copy, (1,), row_descriptor(x, [[0, 0]]), WAIT=False, num_ctas=2)


@jit
def gather_copies(desc, out_ptr, MULTICAST: gl.constexpr, WAIT: gl.constexpr):
    """Both CTAs get all rows: each by its own gather, or by one of CTA 0 for both."""
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout)
    loaded = new_barrier(1)
    cluster.barrier()
    mbarrier.expect(loaded, tile.nbytes_per_cta)
    rows = gl.arange(0, 32, COPIES_BY_ROW)
    tma_blackwell.async_gather(desc, rows * 5 % 32, 0, loaded, tile, multicast=MULTICAST)
    if WAIT:
        mbarrier.wait(loaded, 0)
    store_matrix(out_ptr, tile.load(MATRIX_HALVES))
    mbarrier.wait(loaded, 0)
    cluster.barrier()


@pytest.mark.parametrize("multicast", [False, True])
def test_gather_of_a_tile_that_every_cta_holds(blackwell_launch, multicast):
    x, out = normal(32, 32), poisoned(32, 32)
    arguments = row_descriptor(x, [[0, 0]]), out
    blackwell_launch(gather_copies, (1,), *arguments, MULTICAST=multicast, WAIT=True, num_ctas=2)
    same(out, x[torch.arange(32) * 5 % 32])
    with pytest.raises(RACE, match="shared memory of CTA"):
        blackwell_launch(gather_copies, (1,), *arguments, MULTICAST=multicast, WAIT=False, num_ctas=2)


@jit
def wait_for_all_but_the_copy(halves, copies, ONE: gl.constexpr):
    """A bulk group in which CTA 1 stores nothing, as CTA 0 does it for both, counts all the same."""
    one = gl.full([64, 32], 1.0, gl.float32, MATRIX_HALVES)
    a = gl.allocate_shared_memory(gl.float32, [64, 32], halves.layout, one)
    two = gl.full([32, 32], 2.0, gl.float32, MATRIX_COPIES)
    b = gl.allocate_shared_memory(gl.float32, [32, 32], copies.layout, two)
    tma.async_store(halves, [0, 0], a)
    tma.async_store(copies, [0, 0], b)
    tma.store_wait(1 if ONE else 2)
    a.store(3.0 * one)
    tma.store_wait(0)
    cluster.barrier()


def test_an_empty_bulk_group_counts(launch):
    x, y = poisoned(64, 32), poisoned(32, 32)
    arguments = descriptor(x, [64, 32], cga=[[1, 0]]), descriptor(y, [32, 32], cga=[[0, 0]])
    launch(wait_for_all_but_the_copy, (1,), *arguments, ONE=True, num_ctas=2)
    same(x, torch.ones(64, 32))
    same(y, torch.full((32, 32), 2.0))
    with pytest.raises(gluon_cpu.DataRace, match="data race on a"):
        launch(wait_for_all_but_the_copy, (1,), *arguments, ONE=False, num_ctas=2)
