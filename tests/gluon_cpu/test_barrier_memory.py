"""A barrier's bytes belong to it from its init to its invalidation, whatever else the compiler puts there."""

import pytest
import torch

import gluon_cpu
from tests.compat import fence_async_shared, gl, jit, mbarrier, tma
from tests.gluon_cpu.layouts import MATRIX, PLAIN, ROW, ROW_1
from tests.gluon_cpu.support import descriptor, new_barrier, poisoned, same


@pytest.fixture(params=gluon_cpu.POLICIES)
def schedule(request):
    return gluon_cpu.Schedule(request.param, seed=2)


@jit
def data_after_a_barrier(out_ptr, BUG: gl.constexpr):
    bar = new_barrier(1)
    gl.barrier()
    mbarrier.arrive(bar)
    mbarrier.wait(bar, 0)
    if not BUG:
        mbarrier.invalidate(bar)
    tile = gl.allocate_shared_memory(gl.int32, [128], PLAIN)  # in the bytes of `bar`, which is not used any more
    tile.store(gl.arange(0, 128, ROW))
    gl.store(out_ptr + gl.arange(0, 128, ROW), tile.load(ROW))


def test_data_where_a_barrier_lives(schedule):
    out = poisoned(128, dtype=torch.int32)
    options = {"mode": "lowered", "schedule": schedule}
    with pytest.raises(gluon_cpu.BarrierMisuse, match=r"memory of barrier bar\.barrier (.|\n)*never invalidated"):
        gluon_cpu.launch(data_after_a_barrier, (1,), out, BUG=True, **options)
    gluon_cpu.launch(data_after_a_barrier, (1,), out, BUG=False, **options)
    same(out, torch.arange(128, dtype=torch.int32))
    gluon_cpu.launch(data_after_a_barrier, (1,), out, BUG=True, schedule=schedule)  # a place of its own in fast mode


@jit
def barrier_after_data(desc, out_ptr, BUG: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout)
    tile.store(gl.full([32, 32], 1.0, gl.float32, MATRIX))
    fence_async_shared()
    tma.async_store(desc, [0, 0], tile)
    if not BUG:
        tma.store_wait(0)
    bar = new_barrier(1)  # in the bytes of `tile`
    gl.barrier()
    mbarrier.arrive(bar)
    mbarrier.wait(bar, 0)
    tma.store_wait(0)
    gl.store(out_ptr, 1)


def test_a_barrier_where_a_store_still_reads(schedule):
    def run(bug: bool) -> None:
        arguments = descriptor(poisoned(32, 32), [32, 32]), poisoned(1, dtype=torch.int32)
        gluon_cpu.launch(barrier_after_data, (1,), *arguments, BUG=bug, mode="lowered", schedule=schedule)

    with pytest.raises(gluon_cpu.RaceError, match=r"memory of barrier bar\.barrier|tile"):
        run(True)
    run(False)


@jit
def ends(bar, signal, BUG: gl.constexpr):
    if BUG:
        mbarrier.arrive(signal)
    mbarrier.invalidate(bar)
    if not BUG:
        mbarrier.arrive(signal)


@jit
def waits_and_writes(bar, signal):
    mbarrier.wait(signal, 0)
    bar.reinterpret(gl.int32, [2], PLAIN).store(gl.full([2], 7, gl.int32, ROW_1))


@jit
def data_by_another_role(out_ptr, BUG: gl.constexpr):
    """A barrier that is invalidated by one role, and its bytes then written by another."""
    bar, signal = new_barrier(1), new_barrier(1)
    gl.barrier()
    gl.warp_specialize([(ends, (bar, signal, BUG)), (waits_and_writes, (bar, signal))], [1])
    gl.store(out_ptr, 1)


def test_data_before_the_end_of_a_barrier(schedule):
    def run(bug: bool) -> None:
        gluon_cpu.launch(
            data_by_another_role, (1,), poisoned(1, dtype=torch.int32), BUG=bug, mode="lowered", schedule=schedule
        )

    with pytest.raises((gluon_cpu.DataRace, gluon_cpu.BarrierMisuse), match="waits_and_writes"):
        run(True)
    run(False)
