"""SignalChannel, and Turn on top of it: memory goes from role to role, and each touches it when it may."""

import functools

import pytest
import torch

import gluon_cpu
from channels import SignalChannel, close_all, init_all, turn_of
from tests.channels.support import NO_BUG, finds, under_schedules
from tests.compat import gl, jit
from tests.gluon_cpu.support import PLAIN, ROW, poisoned, same

ROUNDS = 4

NO_INIT = gl.constexpr(1)
NOT_SENT = gl.constexpr(2)
SENT_TWICE = gl.constexpr(3)
SENT_TOO_EARLY = gl.constexpr(4)
NOT_AWAITED = gl.constexpr(5)


@jit
def send(tile, there, seen, rounds, bug):
    there, seen = there.producer(0), seen.consumer(0, FIRST_IS_FREE=True)
    for i in range(rounds):
        seen = seen.acquire()
        if bug == SENT_TOO_EARLY:
            there.release()
        tile.store(gl.arange(0, 128, ROW) + i)
        if (bug != NOT_SENT) & (bug != SENT_TOO_EARLY):
            there.release()
        if bug == SENT_TWICE:
            there.release()


@jit
def receive(tile, there, seen, out_ptr, rounds, bug):
    there, seen = there.consumer(0), seen.producer(0)
    for i in range(rounds):
        if bug != NOT_AWAITED:
            there = there.acquire()
        gl.store(out_ptr + i * 128 + gl.arange(0, 128, ROW), tile.load(ROW))
        seen.release()


@jit(do_not_specialize=["bug"])
def signals(out_ptr, rounds, bug):
    tile = gl.allocate_shared_memory(gl.int32, [128], PLAIN)
    there, seen = SignalChannel.alloc(SIGNALS=1), SignalChannel.alloc(SIGNALS=1)
    if bug != NO_INIT:
        init_all((there, seen))
    gl.warp_specialize(
        [(receive, (tile, there, seen, out_ptr, rounds, bug)), (send, (tile, there, seen, rounds, bug))],
        [4],
        [24],
    )
    if bug != NO_INIT:
        close_all((there, seen))


def run_signals(schedule, bug=NO_BUG):
    out = poisoned(ROUNDS, 128, dtype=torch.int32)
    gluon_cpu.launch(signals, (1,), out, ROUNDS, bug, schedule=schedule)
    same(out, torch.arange(128, dtype=torch.int32) + torch.arange(ROUNDS, dtype=torch.int32)[:, None])


def test_signals():
    under_schedules(run_signals)


BUGS = {
    "no init": (NO_INIT, gluon_cpu.BarrierMisuse),
    "not sent": (NOT_SENT, gluon_cpu.Deadlock),
    "sent twice": (SENT_TWICE, gluon_cpu.BarrierMisuse),
    "sent before it is true": (SENT_TOO_EARLY, gluon_cpu.DataRace),
    "not awaited": (NOT_AWAITED, gluon_cpu.UninitialisedRead),
}


@pytest.mark.parametrize(("bug", "kind"), BUGS.values(), ids=BUGS.keys())
def test_signals_broken(bug, kind):
    finds(kind, functools.partial(run_signals, bug=bug.value))


# --- Turns

NOT_TAKEN = gl.constexpr(1)
NOT_PASSED_ON = gl.constexpr(2)
PASSED_ON_TOO_EARLY = gl.constexpr(3)


@jit
def in_turn(tile, turns, rounds, bug, ROLE: gl.constexpr):
    """x becomes 2 x + ROLE: what comes out tells the order."""
    turn = turn_of(turns, ROLE, TAKE_TURNS=True)
    for _ in range(rounds):
        if bug != NOT_TAKEN:
            turn = turn.take()
        x = tile.load(ROW)
        if bug == PASSED_ON_TOO_EARLY:
            turn.pass_on()
        tile.store(2 * x + ROLE)
        if (bug != NOT_PASSED_ON) & (bug != PASSED_ON_TOO_EARLY):
            turn.pass_on()


@jit(do_not_specialize=["bug"])
def three_in_turn(out_ptr, rounds, bug):
    tile = gl.allocate_shared_memory(gl.int32, [128], PLAIN, gl.full([128], 0, gl.int32, ROW))
    turns = SignalChannel.alloc(SIGNALS=3)
    init_all((turns,))
    gl.warp_specialize(
        [
            (in_turn, (tile, turns, rounds, NO_BUG_HERE, 0)),
            (in_turn, (tile, turns, rounds, NO_BUG_HERE, 1)),
            (in_turn, (tile, turns, rounds, bug, 2)),
        ],
        [4, 4],
        [24, 24],
    )
    gl.store(out_ptr + gl.arange(0, 128, ROW), tile.load(ROW))
    close_all((turns,))


NO_BUG_HERE = gl.constexpr(NO_BUG)


def run_turns(schedule, bug=NO_BUG):
    out = poisoned(128, dtype=torch.int32)
    gluon_cpu.launch(three_in_turn, (1,), out, ROUNDS, bug, schedule=schedule)
    x = 0
    for role in [0, 1, 2] * ROUNDS:
        x = 2 * x + role
    same(out, torch.full((128,), x, dtype=torch.int32))


def test_turns():
    under_schedules(run_turns)


TURN_BUGS = {
    "not taken": (NOT_TAKEN, gluon_cpu.DataRace),
    "not passed on": (NOT_PASSED_ON, gluon_cpu.Deadlock),
    "passed on too early": (PASSED_ON_TOO_EARLY, gluon_cpu.DataRace),
}


@pytest.mark.parametrize(("bug", "kind"), TURN_BUGS.values(), ids=TURN_BUGS.keys())
def test_turns_broken(bug, kind):
    finds(kind, functools.partial(run_turns, bug=bug.value))
