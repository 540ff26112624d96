"""SignalChannel: memory goes from role to role, and each touches it when it may."""

import functools

import pytest
import torch

import gluon_cpu
from channels import SignalChannel, close_all, init_all
from tests.channels.support import NO_BUG, finds, under_schedules
from tests.compat import gl, jit
from tests.gluon_cpu.layouts import PLAIN, ROW
from tests.gluon_cpu.support import poisoned, same

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
