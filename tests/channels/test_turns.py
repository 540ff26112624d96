"""Turn: roles touch memory one after the other, in a ring."""

import functools

import pytest
import torch

import gluon_cpu
from channels import SignalChannel, close_all, init_all, turn_of
from tests.channels.support import NO_BUG, finds, under_schedules
from tests.compat import gl, jit
from tests.gluon_cpu.layouts import PLAIN, ROW
from tests.gluon_cpu.support import poisoned, same

ROUNDS = 4

NOT_TAKEN = gl.constexpr(1)
NOT_PASSED_ON = gl.constexpr(2)
PASSED_ON_TOO_EARLY = gl.constexpr(3)
NO_BUG_HERE = gl.constexpr(NO_BUG)


@jit
def takes_turns(tile, turns, rounds, bug, ROLE: gl.constexpr):
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
def three_roles(out_ptr, rounds, bug):
    tile = gl.allocate_shared_memory(gl.int32, [128], PLAIN, gl.full([128], 0, gl.int32, ROW))
    turns = SignalChannel.alloc(SIGNALS=3)
    init_all((turns,))
    gl.warp_specialize(
        [
            (takes_turns, (tile, turns, rounds, NO_BUG_HERE, 0)),
            (takes_turns, (tile, turns, rounds, NO_BUG_HERE, 1)),
            (takes_turns, (tile, turns, rounds, bug, 2)),
        ],
        [4, 4],
        [24, 24],
    )
    gl.store(out_ptr + gl.arange(0, 128, ROW), tile.load(ROW))
    close_all((turns,))


def run(schedule, bug=NO_BUG):
    out = poisoned(128, dtype=torch.int32)
    gluon_cpu.launch(three_roles, (1,), out, ROUNDS, bug, schedule=schedule)
    x = 0
    for role in [0, 1, 2] * ROUNDS:
        x = 2 * x + role
    same(out, torch.full((128,), x, dtype=torch.int32))


def test_turns():
    under_schedules(run)


BUGS = {
    "not taken": (NOT_TAKEN, gluon_cpu.DataRace),
    "not passed on": (NOT_PASSED_ON, gluon_cpu.Deadlock),
    "passed on too early": (PASSED_ON_TOO_EARLY, gluon_cpu.DataRace),
}


@pytest.mark.parametrize(("bug", "kind"), BUGS.values(), ids=BUGS.keys())
def test_turns_broken(bug, kind):
    finds(kind, functools.partial(run, bug=bug.value))


# --- Turns that are switched off


@jit
def alone(out_ptr, TAKE_TURNS: gl.constexpr):
    turns = SignalChannel.alloc(SIGNALS=2)
    init_all((turns,))
    turn = turn_of(turns, 1, TAKE_TURNS).take()  # the turn after role 0's, which does not exist
    turn.pass_on()
    gl.store(out_ptr + gl.arange(0, 128, ROW), gl.full([128], 1, gl.int32, ROW))
    close_all((turns,))


def test_switched_off_nobody_waits():
    out = poisoned(128, dtype=torch.int32)
    gluon_cpu.launch(alone, (1,), out, False)
    same(out, torch.ones(128, dtype=torch.int32))
    with pytest.raises(gluon_cpu.Deadlock):
        gluon_cpu.launch(alone, (1,), poisoned(128, dtype=torch.int32), True)
