"""Engines, groups and programs that keep no order among themselves: caught whatever happened to run first."""

import pytest
import torch

import gluon_cpu
from tests.compat import async_copy, fence_async_shared, gl, jit, mbarrier, tma
from tests.gluon_cpu.layouts import MATRIX, PLAIN, ROW
from tests.gluon_cpu.support import descriptor, load_matrix, new_barrier, normal, poisoned, same, store_matrix

SCHEDULES = [gluon_cpu.Schedule(policy, seed) for policy in gluon_cpu.POLICIES for seed in range(4)]
MATRIX_1 = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [1, 1], [1, 0]))


@pytest.fixture(params=SCHEDULES, ids=lambda s: f"{s.policy}-{s.seed}")
def schedule(request):
    return request.param


def ints(*shape: int) -> torch.Tensor:
    return poisoned(*shape, dtype=torch.int32)


@jit
def two_stores(desc, BUG: gl.constexpr):
    a = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout, gl.full([32, 32], 1.0, gl.float32, MATRIX))
    b = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout, gl.full([32, 32], 2.0, gl.float32, MATRIX))
    fence_async_shared()
    tma.async_store(desc, [0, 0], a)
    if not BUG:
        tma.store_wait(0, read_only=False)
    tma.async_store(desc, [0, 0], b)
    tma.store_wait(0)


def test_two_stores_of_a_role_to_one_place(schedule):
    out = poisoned(32, 32)
    with pytest.raises(gluon_cpu.DataRace, match="async_store"):
        gluon_cpu.launch(two_stores, (1,), descriptor(out, [32, 32]), True, schedule=schedule)
    gluon_cpu.launch(two_stores, (1,), descriptor(out, [32, 32]), False, schedule=schedule)
    same(out, torch.full((32, 32), 2.0))


@jit
def tile_of_two_stores(first, second, PENDING: gl.constexpr, REUSE: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], first.layout, gl.zeros([32, 32], gl.float32, MATRIX))
    fence_async_shared()
    tma.async_store(first, [0, 0], tile)
    tma.async_store(second, [0, 0], tile)
    tma.store_wait(PENDING)
    if REUSE:
        tile.store(gl.full([32, 32], 2.0, gl.float32, MATRIX))
        tma.store_wait(0)


@pytest.mark.parametrize("reuse", [True, False], ids=["reused", "exit"])
def test_the_newer_of_two_stores_still_reads_the_tile(schedule, reuse):
    outs = [descriptor(poisoned(32, 32), [32, 32]) for _ in range(2)]
    with pytest.raises(gluon_cpu.DataRace if reuse else gluon_cpu.LifetimeError):
        gluon_cpu.launch(tile_of_two_stores, (1,), *outs, 1, reuse, schedule=schedule)
    gluon_cpu.launch(tile_of_two_stores, (1,), *outs, 0, reuse, schedule=schedule)


@jit
def two_copies(x_ptr, out_ptr, BUG: gl.constexpr):
    at = gl.arange(0, 128, ROW)
    tile = gl.allocate_shared_memory(gl.int32, [128], PLAIN)
    async_copy.async_load(tile, x_ptr + at)
    if not BUG:
        async_copy.commit_group()
        async_copy.wait_group(0)
    async_copy.async_load(tile, x_ptr + 128 + at)
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.store(out_ptr + at, tile.load(ROW))


def test_two_copies_of_one_group_into_one_place(schedule):
    x, out = torch.arange(256, dtype=torch.int32), ints(128)
    with pytest.raises(gluon_cpu.DataRace, match=r"cp\.async"):
        gluon_cpu.launch(two_copies, (1,), x, out, True, schedule=schedule)
    gluon_cpu.launch(two_copies, (1,), x, out, False, schedule=schedule)
    same(out, x[128:])


@jit
def counts_and_reads(count_ptr, out_ptr, BUG: gl.constexpr):
    gl.atomic_add(count_ptr, 1, sem="relaxed")
    if gl.program_id(0) == 0:
        if BUG:
            gl.store(out_ptr, gl.load(count_ptr))
        else:
            gl.store(out_ptr, gl.atomic_add(count_ptr, 0, sem="relaxed"))


def test_a_plain_read_beside_another_programs_atomic(schedule):
    """The reader's own atomic may have come after the other one, and is then the last write."""
    with pytest.raises(gluon_cpu.DataRace, match="atomic"):
        gluon_cpu.launch(counts_and_reads, (2,), torch.zeros(1, dtype=torch.int32), ints(1), True, schedule=schedule)
    gluon_cpu.launch(counts_and_reads, (2,), torch.zeros(1, dtype=torch.int32), ints(1), False, schedule=schedule)


@jit
def awaits_flag(flag_ptr, seen):
    while gl.atomic_add(flag_ptr, 0, sem="acquire") == 0:
        pass
    mbarrier.arrive(seen)


@jit
def reads_what_was_announced(data_ptr, out_ptr, seen, BUG: gl.constexpr):
    if not BUG:
        mbarrier.wait(seen, 0)
    at = gl.arange(0, 128, ROW)
    gl.store(out_ptr + at, gl.load(data_ptr + at))


@jit
def hand_over(data_ptr, flag_ptr, out_ptr, BUG: gl.constexpr):
    if gl.program_id(0) == 0:
        gl.store(data_ptr + gl.arange(0, 128, ROW), gl.arange(0, 128, ROW))
        gl.atomic_add(flag_ptr, 1, sem="release")
    else:
        seen = new_barrier(1)
        gl.barrier()
        gl.warp_specialize(
            [(reads_what_was_announced, (data_ptr, out_ptr, seen, BUG)), (awaits_flag, (flag_ptr, seen))], [1]
        )


def test_what_one_role_acquires_its_peers_learn_through_a_barrier(schedule):
    out = ints(128)
    gluon_cpu.launch(hand_over, (2,), ints(128), torch.zeros(1, dtype=torch.int32), out, False, schedule=schedule)
    same(out, torch.arange(128, dtype=torch.int32))
    with pytest.raises(gluon_cpu.DataRace, match="data_ptr"):
        gluon_cpu.launch(hand_over, (2,), ints(128), torch.zeros(1, dtype=torch.int32), out, True, schedule=schedule)


@jit
def barrier_of_two_lives(desc, out_ptr):
    a = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout)
    b = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout)
    loaded = mbarrier.allocate_mbarrier()
    for life in gl.static_range(2):
        mbarrier.init(loaded, count=1)
        mbarrier.expect(loaded, 8192)
        tma.async_load(desc, [0, 0], loaded, a if life == 0 else b)
        tma.async_load(desc, [0, 0], loaded, b if life == 0 else a)
        mbarrier.wait(loaded, 0)
        mbarrier.invalidate(loaded)
    store_matrix(out_ptr, a.load(MATRIX) + b.load(MATRIX))


def test_a_barrier_initialised_anew_starts_from_nothing(schedule):
    x, out = normal(32, 32), poisoned(32, 32)
    gluon_cpu.launch(barrier_of_two_lives, (1,), descriptor(x, [32, 32]), out, schedule=schedule)
    same(out, 2 * x)


@jit
def nothing():
    pass


@jit
def store_tile(desc, tile):
    tma.async_store(desc, [0, 0], tile)
    tma.store_wait(0)


@jit
def fill_tile(tile):
    tile.store(gl.full([32, 32], 1.0, gl.float32, MATRIX_1))


@jit
def written_and_stored_by_two(desc, CHILD_WRITES: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout)
    if CHILD_WRITES:
        gl.warp_specialize([(nothing, ()), (fill_tile, (tile,))], [1])
        store_tile(desc, tile)
    else:
        tile.store(gl.full([32, 32], 1.0, gl.float32, MATRIX))
        gl.warp_specialize([(nothing, ()), (store_tile, (desc, tile))], [1])


@pytest.mark.parametrize("child_writes", [True, False])
@pytest.mark.parametrize("mode", ["fast", "lowered"])
def test_the_compilers_fence_where_roles_start_and_end(mode, child_writes):
    """The fast mode has no fences of the compiler; it must not ask for what the compiler puts there."""
    out = poisoned(32, 32)
    gluon_cpu.launch(written_and_stored_by_two, (1,), descriptor(out, [32, 32]), child_writes, mode=mode)
    same(out, torch.ones(32, 32))


@jit
def global_round_trip(ptr, desc, out_ptr, HOW: gl.constexpr):
    """Something into global memory, then a copy of it by an engine."""
    staged = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout)
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout)
    loaded = new_barrier(1)
    gl.barrier()
    staged.store(gl.full([32, 32], 3.0, gl.float32, MATRIX))
    fence_async_shared()
    if HOW == "TMA store":
        tma.async_store(desc, [0, 0], staged)
        tma.store_wait(0, read_only=False)
    else:
        store_matrix(ptr, gl.full([32, 32], 3.0, gl.float32, MATRIX))
        fence_async_shared(cluster=True)
    if HOW == "store, then reduction":
        tma.async_atomic_add(desc, [0, 0], staged)
        tma.store_wait(0)
    else:
        mbarrier.expect(loaded, 4096)
        tma.async_load(desc, [0, 0], loaded, tile)
        mbarrier.wait(loaded, 0)
        store_matrix(out_ptr, tile.load(MATRIX))


@pytest.mark.parametrize("mode", ["fast", "lowered"])
def test_no_fence_of_gluon_covers_global_memory(mode):
    """fence_async_shared is fence.proxy.async.shared::cta, or .shared::cluster, and the compiler adds no other."""
    data, out = poisoned(32, 32), poisoned(32, 32)
    arguments = data, descriptor(data, [32, 32]), out
    for how in ("store", "store, then reduction"):
        with pytest.raises(gluon_cpu.MissingFence, match="covers shared memory only"):
            gluon_cpu.launch(global_round_trip, (1,), *arguments, HOW=how, mode=mode)
    gluon_cpu.launch(global_round_trip, (1,), *arguments, HOW="TMA store", mode=mode)
    same(out, torch.full((32, 32), 3.0))


@jit
def hand_over_between_programs(desc, flag_ptr, ptr, out_ptr, BY_TMA: gl.constexpr):
    if gl.program_id(0) == 0:
        store_matrix(ptr, gl.full([32, 32], 3.0, gl.float32, MATRIX))
        gl.atomic_xchg(flag_ptr, 1, sem="release")
    else:
        while gl.atomic_add(flag_ptr, 0, sem="acquire") == 0:
            pass
        if BY_TMA:
            tile = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout)
            loaded = new_barrier(1)
            gl.barrier()
            mbarrier.expect(loaded, 4096)
            tma.async_load(desc, [0, 0], loaded, tile)
            mbarrier.wait(loaded, 0)
            store_matrix(out_ptr, tile.load(MATRIX))
        else:
            store_matrix(out_ptr, load_matrix(ptr, 32, 32, MATRIX))


def test_no_fence_covers_what_another_program_wrote():
    def run(by_tma: bool) -> None:
        data, flag = poisoned(32, 32), torch.zeros(1, dtype=torch.int32)
        gluon_cpu.launch(hand_over_between_programs, (2,), descriptor(data, [32, 32]), flag, data, out, BY_TMA=by_tma)

    out = poisoned(32, 32)
    run(False)
    same(out, torch.full((32, 32), 3.0))
    with pytest.raises(gluon_cpu.MissingFence, match="covers shared memory only"):
        run(True)


@jit
def arrives_once(bar):
    mbarrier.arrive(bar)


@jit
def three_arrivals(COUNT: gl.constexpr):
    bar = new_barrier(COUNT)
    gl.barrier()
    gl.warp_specialize([(arrives_once, (bar,)), (arrives_once, (bar,)), (arrives_once, (bar,))], [1, 1])


def test_an_arrival_that_spills_into_the_next_phase(schedule):
    with pytest.raises(
        gluon_cpu.BarrierMisuse, match=r"can count for the wrong phase(.|\n)*init count of 2 is too low"
    ):
        gluon_cpu.launch(three_arrivals, (1,), 2, schedule=schedule)
    gluon_cpu.launch(three_arrivals, (1,), 3, schedule=schedule)


@jit
def loads_ahead(desc, tiles, loaded, seen, BUG: gl.constexpr):
    for step in range(2):
        if not BUG and step > 0:
            mbarrier.wait(seen, 0)
        tma.async_load(desc, [step * 32, 0], loaded, tiles.index(step))  # <- issued a phase too early
        if BUG and step > 0:
            mbarrier.wait(seen, 0)
        mbarrier.expect(loaded, tiles.index(step).nbytes_per_cta)


@jit
def sums_tiles(tiles, loaded, seen, out_ptr):
    rows = gl.arange(0, 32, gl.SliceLayout(1, MATRIX))
    for step in range(2):
        mbarrier.wait(loaded, step & 1)
        gl.store(out_ptr + step * 32 + rows, gl.sum(tiles.index(step).load(MATRIX), 1))
        mbarrier.arrive(seen)


@jit
def two_tiles_on_one_barrier(desc, out_ptr, BUG: gl.constexpr):
    tiles = gl.allocate_shared_memory(gl.float32, [2, 32, 32], desc.layout)
    loaded, seen = new_barrier(1), new_barrier(1)
    gl.barrier()
    gl.warp_specialize(
        [(sums_tiles, (tiles, loaded, seen, out_ptr)), (loads_ahead, (desc, tiles, loaded, seen, BUG))], [1]
    )


def test_bytes_that_can_count_for_the_phase_before(schedule):
    """The load has a tile of its own, so nothing is overwritten; but its bytes may complete the wrong phase."""

    def run(bug: bool) -> None:
        out = poisoned(64)
        gluon_cpu.launch(two_tiles_on_one_barrier, (1,), descriptor(x, [32, 32]), out, bug, schedule=schedule)
        torch.testing.assert_close(out, x.sum(1))

    x = normal(64, 32)
    run(False)
    with pytest.raises((gluon_cpu.BarrierMisuse, gluon_cpu.RaceError, gluon_cpu.UninitialisedRead)):
        run(True)


@jit
def touch_and_fence(tile, out_ptr, WRITE: gl.constexpr):
    if WRITE:
        tile.store(gl.full([32, 32], 1.0, gl.float32, MATRIX))
    else:
        store_matrix(out_ptr, tile.load(MATRIX))
    fence_async_shared()


@jit
def copy(desc, tile, loaded, OUT: gl.constexpr):
    if OUT:
        tma.async_store(desc, [0, 0], tile)
        tma.store_wait(0)
    else:
        mbarrier.expect(loaded, 4096)
        tma.async_load(desc, [0, 0], loaded, tile)
        mbarrier.wait(loaded, 0)


@jit
def fenced_and_unordered(desc, out_ptr, WRITE: gl.constexpr):
    """One role writes or reads a tile, with a fence; a copy out of it or into it is ordered by nothing."""
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout, gl.zeros([32, 32], gl.float32, MATRIX))
    loaded = new_barrier(1)
    fence_async_shared()
    gl.barrier()
    gl.warp_specialize([(touch_and_fence, (tile, out_ptr, WRITE)), (copy, (desc, tile, loaded, WRITE))], [1])
    mbarrier.invalidate(loaded)


@pytest.mark.parametrize("write", [True, False], ids=["write", "read"])
def test_no_fence_is_asked_for_where_order_is_missing(write):
    def run_it():
        memory = normal(1024).reshape(32, 32)
        fenced_and_unordered[(1,)](descriptor(memory, [32, 32]), poisoned(1024), write)

    with pytest.raises(ExceptionGroup) as caught:
        gluon_cpu.check(run_it, schedules=20, keep_going=True, quiet=True)
    assert {type(f).__name__ for f in caught.value.exceptions} <= {"DataRace", "ReuseRace"}
    assert gluon_cpu.check(run_it, schedules=20, skip=["DataRace"], quiet=True)
