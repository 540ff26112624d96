"""Ring: slots and laps, lap after lap, alone and under barriers; right and broken."""

import functools

import pytest
import torch

import gluon_cpu
from channels.ring import Ring, ring_start
from tests.channels.support import NO_BUG, finds, under_schedules
from tests.compat import gl, jit, mbarrier
from tests.gluon_cpu.layouts import PLAIN, ROW
from tests.gluon_cpu.support import poisoned, same

SLOTS = [1, 2, 3, 4, 5]
LAPS = 5

# --- Alone


@jit
def walk(out_ptr, steps, SLOTS: gl.constexpr, LAP: gl.constexpr):
    ring = ring_start(SLOTS, LAP)
    for i in range(steps):
        gl.store(out_ptr + 3 * i, ring.slot())
        gl.store(out_ptr + 3 * i + 1, ring.this_lap())
        gl.store(out_ptr + 3 * i + 2, ring.previous_lap())
        ring = ring.next()


@pytest.mark.parametrize("lap", [0, 1])
@pytest.mark.parametrize("slots", SLOTS)
def test_slots_and_laps(slots, lap):
    steps = LAPS * slots + 1
    out = poisoned(steps, 3, dtype=torch.int32)
    gluon_cpu.launch(walk, (1,), out, steps, slots, lap, num_warps=1)
    laps = [(step // slots + lap) % 2 for step in range(steps)]
    want = [[step % slots, parity, 1 - parity] for step, parity in enumerate(laps)]
    same(out, torch.tensor(want, dtype=torch.int32))


# --- Under barriers: a producer a ring ahead of its consumer

WAITS_FOR_THIS_LAP = gl.constexpr(1)
DOES_NOT_WAIT = gl.constexpr(2)
STAYS = gl.constexpr(3)
READS_PREVIOUS_LAP = gl.constexpr(4)


@jit
def put(tiles, filled, freed, steps, bug, SLOTS: gl.constexpr):
    ring = ring_start(SLOTS)
    for i in range(steps):
        if bug == WAITS_FOR_THIS_LAP:
            mbarrier.wait(freed.index(ring.slot()), ring.this_lap())
        elif bug != DOES_NOT_WAIT:
            mbarrier.wait(freed.index(ring.slot()), ring.previous_lap())
        tiles.index(ring.slot()).store(gl.arange(0, 128, ROW) + i)
        mbarrier.arrive(filled.index(ring.slot()), count=1)
        ring = Ring(gl.where(bug == STAYS, ring.position, ring.next().position), SLOTS)


@jit
def take(tiles, filled, freed, out_ptr, steps, bug, SLOTS: gl.constexpr):
    ring = ring_start(SLOTS)
    for i in range(steps):
        if bug == READS_PREVIOUS_LAP:
            mbarrier.wait(filled.index(ring.slot()), ring.previous_lap())
        else:
            mbarrier.wait(filled.index(ring.slot()), ring.this_lap())
        gl.store(out_ptr + i * 128 + gl.arange(0, 128, ROW), tiles.index(ring.slot()).load(ROW))
        mbarrier.arrive(freed.index(ring.slot()), count=1)
        ring = ring.next()


@jit(do_not_specialize=["bug"])
def passed_on(out_ptr, steps, bug, SLOTS: gl.constexpr):
    tiles = gl.allocate_shared_memory(gl.int32, [SLOTS, 128], PLAIN)
    filled, freed = mbarrier.allocate_mbarrier(batch=SLOTS), mbarrier.allocate_mbarrier(batch=SLOTS)
    for i in gl.static_range(SLOTS):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(freed.index(i), count=1)
    gl.warp_specialize(
        [(take, (tiles, filled, freed, out_ptr, steps, bug, SLOTS)), (put, (tiles, filled, freed, steps, bug, SLOTS))],
        [4],
        [24],
    )
    for i in gl.static_range(SLOTS):
        mbarrier.invalidate(filled.index(i))
        mbarrier.invalidate(freed.index(i))


def run(schedule, bug=NO_BUG, slots=3):
    steps = LAPS * slots + 1
    out = poisoned(steps, 128, dtype=torch.int32)
    gluon_cpu.launch(passed_on, (1,), out, steps, bug, slots, schedule=schedule)
    same(out, torch.arange(128, dtype=torch.int32) + torch.arange(steps, dtype=torch.int32)[:, None])


@pytest.mark.parametrize("slots", SLOTS)
def test_under_barriers(slots):
    under_schedules(functools.partial(run, slots=slots))


BUGS = {
    "the producer waits for what nobody has freed": (WAITS_FOR_THIS_LAP, gluon_cpu.Deadlock),
    "the producer does not wait": (DOES_NOT_WAIT, gluon_cpu.DataRace),
    "the producer stays in its slot": (STAYS, gluon_cpu.BarrierMisuse),
    "the consumer waits for the lap before": (READS_PREVIOUS_LAP, gluon_cpu.UninitialisedRead),
}


@pytest.mark.parametrize(("bug", "kind"), BUGS.values(), ids=BUGS.keys())
def test_under_barriers_broken(bug, kind):
    finds(kind, functools.partial(run, bug=bug.value))
