"""Schedules and policies, replay, and what `check` and `launch` make of them."""

from collections.abc import Callable

import pytest
import torch

import gluon_cpu
from tests.compat import gl, jit, mbarrier
from tests.gluon_cpu import findings_hopper as hopper
from tests.gluon_cpu.layouts import PLAIN, ROW, ROW_1
from tests.gluon_cpu.support import new_barrier, poisoned


@jit
def talk(turn, STEPS: gl.constexpr, NAME: gl.constexpr):
    for step in range(STEPS):
        mbarrier.arrive(turn)
        print(NAME, step)


@jit
def two_talkers(out_ptr):
    first, second = new_barrier(1), new_barrier(1)
    gl.barrier()
    gl.warp_specialize([(talk, (first, 6, "left")), (talk, (second, 6, "right"))], [1])
    gl.store(out_ptr, 1)


def conversation(capsys: pytest.CaptureFixture[str], schedule: gluon_cpu.Schedule) -> list[str]:
    """Who spoke, in order."""
    capsys.readouterr()
    gluon_cpu.launch(two_talkers, (1,), poisoned(1, dtype=torch.int32), schedule=schedule)
    lines = capsys.readouterr().out.splitlines()
    said = [name for line in lines for name in ("left", "right") if name in line]
    assert sorted(said) == ["left"] * 6 + ["right"] * 6, lines
    return said


@pytest.mark.parametrize("policy", gluon_cpu.POLICIES)
def test_a_schedule_is_deterministic(capsys, policy):
    for seed in range(3):
        schedule = gluon_cpu.Schedule(policy, seed=seed)
        assert conversation(capsys, schedule) == conversation(capsys, schedule)


def test_seeds_explore_different_orders(capsys):
    orders = {tuple(conversation(capsys, gluon_cpu.Schedule("random", seed=seed))) for seed in range(10)}
    assert len(orders) >= 5


def test_starve_lets_each_role_come_last(capsys):
    orders = {tuple(conversation(capsys, gluon_cpu.Schedule("starve", seed=seed))) for seed in range(20)}
    assert ("left",) * 6 + ("right",) * 6 in orders
    assert ("right",) * 6 + ("left",) * 6 in orders


def test_unknown_policy_is_named():
    with pytest.raises(ValueError, match="whenever"):
        gluon_cpu.Schedule("whenever", seed=0)


def test_check_runs_the_schedules_asked_for():
    calls = []

    def right() -> None:
        calls.append(1)
        hopper.no_wait[(1,)](poisoned(128, dtype=torch.int32), BUG=False)

    gluon_cpu.check(right, schedules=20, policies=("random", "late"))
    assert len(calls) == 20


def orders_under_check(capsys: pytest.CaptureFixture[str], run: Callable[[], object]) -> set[tuple[str, ...]]:
    capsys.readouterr()
    gluon_cpu.check(run, schedules=10, quiet=True)
    said = [name for line in capsys.readouterr().out.splitlines() for name in ("left", "right") if name in line]
    assert len(said) == 120
    return {tuple(said[i : i + 12]) for i in range(0, len(said), 12)}


def test_check_uses_different_schedules(capsys):
    out = poisoned(1, dtype=torch.int32)
    assert len(orders_under_check(capsys, lambda: two_talkers[(1,)](out))) >= 3


def test_check_gives_its_schedules_to_launch_too(capsys):
    """A function that calls `launch` without a schedule must not run the same one each time."""
    out = poisoned(1, dtype=torch.int32)
    assert len(orders_under_check(capsys, lambda: gluon_cpu.launch(two_talkers, (1,), out))) >= 3


def test_check_stops_at_the_first_finding_and_says_how_to_replay_it(capsys):
    calls = []

    def wrong() -> None:
        calls.append(1)
        hopper.no_wait[(1,)](poisoned(128, dtype=torch.int32), BUG=True)

    with pytest.raises(gluon_cpu.DataRace) as caught:
        gluon_cpu.check(wrong, schedules=50)
    assert len(calls) == 1, "a race of happens-before shows in the first schedule"
    schedule = caught.value.schedule
    for said in (str(caught.value), "".join(capsys.readouterr())):
        assert schedule.policy in said
        assert f"seed={schedule.seed}" in said
    with pytest.raises(gluon_cpu.DataRace):
        gluon_cpu.launch(hopper.no_wait, (1,), poisoned(128, dtype=torch.int32), BUG=True, schedule=schedule)


@pytest.mark.parametrize("how", ["machine", "launch"])
def test_the_last_of_several_schedules_is_in_lowered_mode(how, capsys):
    """The compiler puts something in the bytes of a barrier that has not ended: in fast mode nothing shares bytes."""
    out, kernel = poisoned(1, dtype=torch.int32), hopper.captures_over_a_barrier

    def wrong() -> None:
        if how == "machine":
            kernel[(1,)](out, BUG=True)
        else:
            gluon_cpu.launch(kernel, (1,), out, BUG=True)

    gluon_cpu.check(wrong, schedules=1)
    gluon_cpu.check(wrong, schedules=3, mode="fast")
    with pytest.raises(gluon_cpu.BarrierMisuse) as caught:
        gluon_cpu.check(wrong, schedules=3)
    assert caught.value.mode == "lowered"
    assert capsys.readouterr().out.endswith(f"replay: schedule={caught.value.schedule!r}, mode='lowered'\n")
    with pytest.raises(gluon_cpu.BarrierMisuse) as again:
        gluon_cpu.launch(kernel, (1,), out, BUG=True, schedule=caught.value.schedule, mode=caught.value.mode)
    assert str(again.value) == str(caught.value)


def test_a_mode_that_goes_without_saying_is_not_said():
    with pytest.raises(gluon_cpu.DataRace) as caught:
        gluon_cpu.launch(hopper.store_to_one_peer, (1,), poisoned(64, 32, dtype=torch.int32), BUG=True, num_ctas=4)
    assert caught.value.mode is None
    assert "mode" not in str(caught.value)


def test_checks_can_be_off():
    """Then a race goes unreported, and the numbers are those of the schedule."""
    out = poisoned(128, dtype=torch.int32)
    schedule = gluon_cpu.Schedule("random", seed=0)
    gluon_cpu.launch(hopper.no_wait, (1,), out, BUG=True, checks=False, schedule=schedule)
    assert (out == 0).all()


@jit
def shared_hand_over(tile, ready, VALUE: gl.constexpr):
    tile.store(gl.full([128], VALUE, gl.int32, ROW_1))
    mbarrier.arrive(ready)


@jit
def wait_and_store(tile, ready, out_ptr):
    mbarrier.wait(ready, 0)
    gl.store(out_ptr + gl.program_id(0) * 128 + gl.arange(0, 128, ROW), tile.load(ROW))


@jit
def many_programs(out_ptr):
    tile = gl.allocate_shared_memory(gl.int32, [128], PLAIN)
    ready = new_barrier(1)
    gl.barrier()
    gl.warp_specialize([(wait_and_store, (tile, ready, out_ptr)), (shared_hand_over, (tile, ready, 9))], [1])


@pytest.mark.parametrize("policy", gluon_cpu.POLICIES)
def test_many_programs(policy):
    """Each program has its own shared memory and barriers."""
    out = poisoned(40, 128, dtype=torch.int32)
    gluon_cpu.launch(many_programs, (40,), out, schedule=gluon_cpu.Schedule(policy, seed=0))
    assert (out == 9).all()
