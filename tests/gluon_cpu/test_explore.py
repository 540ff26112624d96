"""Schedules, replay, traces, printing and stepping, the pytest plugin and the command."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gluon_cpu
from gluon_cpu import generate
from tests.compat import gl, jit, mbarrier
from tests.gluon_cpu import findings_hopper as hopper
from tests.gluon_cpu.support import PLAIN, ROW, ROW_1, descriptor, new_barrier, normal, poisoned, same

ROOT = Path(__file__).parents[2]
POLICIES = ("random", "late", "early", "pct", "starve")


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


@pytest.mark.parametrize("policy", POLICIES)
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


# ---------------------------------------------------------------------------------------------------------------------
# Seeing what happens
# ---------------------------------------------------------------------------------------------------------------------


def spans(events: list[dict]) -> dict[tuple[int, int], list[dict]]:
    rows: dict[tuple[int, int], list[dict]] = {}
    for event in events:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
    return rows


def trace_of_a_pipeline(tmp_path: Path) -> list[dict]:
    a, b = normal(64, 64, dtype=torch.bfloat16), normal(32, 64, dtype=torch.bfloat16)
    arguments = descriptor(a, [64, 64]), descriptor(b, [32, 64]), poisoned(64, 32)
    file = tmp_path / "out.json"
    gluon_cpu.launch(hopper.slot_freed_before_the_product, (1,), *arguments, BUG=False, trace=str(file))
    loaded = json.loads(file.read_text(encoding="utf-8"))
    return loaded["traceEvents"] if isinstance(loaded, dict) else loaded


def test_trace_is_a_chrome_trace_with_a_row_for_each_role_and_engine(tmp_path):
    events = trace_of_a_pipeline(tmp_path)
    for event in events:
        assert {"ph", "pid"} <= event.keys()
        if event["ph"] == "X":
            assert {"name", "ts", "dur", "tid"} <= event.keys()
            assert event["dur"] >= 0
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    for row in ("multiply_role", "load_role", "TMA", "wgmma"):
        assert any(row.lower() in name.lower() for name in names), (row, names)
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert set(spans(events)) <= named, "a row without a name"


def test_spans_of_a_role_do_not_overlap(tmp_path):
    for row in spans(trace_of_a_pipeline(tmp_path)).values():
        row.sort(key=lambda e: (e["ts"], -e["dur"]))
        for earlier, later in itertools.pairwise(row):
            nested = later["ts"] + later["dur"] <= earlier["ts"] + earlier["dur"]
            assert nested or later["ts"] >= earlier["ts"] + earlier["dur"] - 1e-9


def test_trace_shows_waits_and_their_causes(tmp_path):
    events = trace_of_a_pipeline(tmp_path)
    waits = [e for e in events if e["ph"] == "X" and "wait" in e["name"]]
    assert waits
    flows = [e for e in events if e["ph"] in ("s", "f", "t")]
    starts, ends = ({e["id"] for e in flows if e["ph"] == ph} for ph in ("s", "f"))
    assert ends, "no arrow from a cause to a wait"
    assert ends <= starts


@jit
def printing(x_ptr, out_ptr, scale):
    x = gl.load(x_ptr + gl.arange(0, 128, ROW))
    print("scaled by", scale)
    y = x * scale
    print("y", y)
    gl.store(out_ptr + gl.arange(0, 128, ROW), y)


def test_print_shows_scalars_and_tensors(capsys):
    out = poisoned(128, dtype=torch.int32)
    gluon_cpu.launch(printing, (1,), torch.arange(128, dtype=torch.int32), out, 17)
    printed = capsys.readouterr().out
    assert "scaled by" in printed
    assert "17" in printed
    assert str(127 * 17) in printed


@jit
def stopping(x_ptr, out_ptr, scale):
    total = 0
    for step in range(3):
        x = gl.load(x_ptr + step)
        total += x * scale
        breakpoint()  # <- stops here
    gl.store(out_ptr, total)


def test_breakpoint_stops_at_the_kernels_line_with_its_names(monkeypatch):
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(i for i, text in enumerate(source, 1) if text.endswith("# <- stops" + " here"))
    seen = []

    def hook(*_args: object, **_options: object) -> None:
        frame = sys._getframe()
        while frame is not None and not (frame.f_code.co_filename == __file__ and frame.f_code.co_name != "hook"):
            frame = frame.f_back  # type: ignore[assignment]
        assert frame is not None, "no frame of the kernel's file on the stack"
        values = {name: int(frame.f_locals[name]) for name in ("step", "x", "total", "scale")}
        seen.append((frame.f_lineno, values))

    monkeypatch.setattr(sys, "breakpointhook", hook)
    out = poisoned(1, dtype=torch.int32)
    gluon_cpu.launch(stopping, (1,), torch.tensor([5, 7, 9], dtype=torch.int32), out, 10)
    assert out.item() == 210
    assert [at for at, _ in seen] == [line] * 3
    assert [values["total"] for _, values in seen] == [50, 120, 210]
    assert [values["step"] for _, values in seen] == [0, 1, 2]
    assert seen[1][1]["x"] == 7
    assert seen[1][1]["scale"] == 10


# ---------------------------------------------------------------------------------------------------------------------
# Ways to run
# ---------------------------------------------------------------------------------------------------------------------


@jit
def doubled(x_ptr, out_ptr, N: gl.constexpr):
    i = gl.program_id(0) * N + gl.arange(0, N, ROW)
    gl.store(out_ptr + i, gl.load(x_ptr + i) * 2)


def test_machine_runs_ordinary_launches():
    x, out = normal(512), poisoned(512)
    with gluon_cpu.machine(target="sm_90a"):
        doubled[(4,)](x, out, N=128, num_warps=4)
        doubled[lambda meta: (512 // meta["N"],)](x, out, N=128)
    same(out, x * 2)


def test_machine_reports_findings_and_leaves_nothing_behind():
    with pytest.raises(gluon_cpu.DataRace), gluon_cpu.machine(target="sm_90a"):
        hopper.no_wait[(1,)](poisoned(128, dtype=torch.int32), BUG=True)
    with pytest.raises(Exception) as outside:  # noqa: PT011  # as without gluon_cpu: no driver, or a tensor on the CPU
        doubled[(4,)](normal(512), poisoned(512), N=128)
    assert not isinstance(outside.value, gluon_cpu.Finding)


@pytest.mark.parametrize("mode", ["fast", "lowered"])
def test_both_modes_agree(mode):
    x, out = normal(128), poisoned(128)
    gluon_cpu.launch(doubled, (1,), x, out, N=128, mode=mode)
    same(out, x * 2)
    with pytest.raises(gluon_cpu.DataRace):
        gluon_cpu.launch(hopper.no_wait, (1,), poisoned(128, dtype=torch.int32), BUG=True, mode=mode)


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_103a"])
def test_targets(target):
    x, out = normal(128), poisoned(128)
    gluon_cpu.launch(doubled, (1,), x, out, N=128, target=target)
    same(out, x * 2)


@jit
def foreign(x_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    embedded = gl.fpsan.embed(gl.load(x_ptr + i))  # <- no such machine
    gl.store(out_ptr + i, embedded)


def test_unknown_operation_is_named_with_its_line(monkeypatch):
    monkeypatch.delitem(generate.HANDLERS, "tti.experimental_fpsan_embed")  # as if Triton had added it yesterday
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(i for i, text in enumerate(source, 1) if text.endswith("# <- no" + " such machine"))
    with pytest.raises(NotImplementedError, match="fpsan_embed") as caught:
        gluon_cpu.launch(foreign, (1,), normal(128), poisoned(128, dtype=torch.int32))
    assert f"{Path(__file__).name}:{line}" in str(caught.value)


# A project's test file, with a right kernel and one with a race.
PROJECT = """
import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ROW = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
ROW_1 = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def writer(tile, ready):
    tile.store(gl.full([128], 1, gl.int32, ROW_1))
    mbarrier.arrive(ready)


@gluon.jit
def reader(tile, ready, out_ptr, WAIT: gl.constexpr):
    if WAIT:
        mbarrier.wait(ready, 0)
    gl.store(out_ptr + gl.arange(0, 128, ROW), tile.load(ROW))


@gluon.jit
def hand_over(out_ptr, WAIT: gl.constexpr):
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile = gl.allocate_shared_memory(gl.int32, [128], plain, gl.full([128], 0, gl.int32, ROW))
    ready = mbarrier.allocate_mbarrier()
    mbarrier.init(ready, count=1)
    gl.barrier()
    gl.warp_specialize([(reader, (tile, ready, out_ptr, WAIT)), (writer, (tile, ready))], [1])


def right():
    out = torch.zeros(128, dtype=torch.int32)
    hand_over[(1,)](out, WAIT=True)
    assert bool((out == 1).all())


def wrong():
    hand_over[(1,)](torch.zeros(128, dtype=torch.int32), WAIT=False)


@pytest.mark.gluon_schedules(7)
def test_right(gluon_machine):
    right()


@pytest.mark.gluon_schedules(7)
def test_wrong(gluon_machine):
    wrong()


def test_without_marker(gluon_machine):
    right()
"""


def run_command(tmp_path: Path, *command: str) -> subprocess.CompletedProcess:
    (tmp_path / "test_project.py").write_text(PROJECT, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )


def test_pytest_plugin(tmp_path):
    command = ("pytest", "-p", "gluon_cpu.pytest_plugin", "-p", "no:cacheprovider", "--strict-markers", "-v")
    done = run_command(tmp_path, *command, "test_project.py")
    printed = done.stdout + done.stderr
    assert done.returncode == 1, printed
    failed = [line for line in printed.splitlines() if line.startswith("FAILED")]
    assert failed, printed
    assert all("test_wrong" in line for line in failed), printed
    assert "DataRace" in printed
    assert "writer" in printed
    assert "reader" in printed
    assert "seed" in printed, "how to replay it"
    assert "test_right[late-1-lowered]" in printed, "the last of seven"


# Tests that catch what the machine finds.
CATCHING = """
import pytest
from test_project import wrong


@pytest.mark.gluon_schedules(1)
@pytest.mark.parametrize("then", ["goes on", "fails", "hides it", "tells"])
def test_catching(gluon_machine, then):
    try:
        wrong()
    except Exception as error:
        if then == "tells":
            raise AssertionError("because of it") from error
        if then == "hides it":
            raise AssertionError("not because of it") from None
    assert then != "fails"
"""


def test_pytest_plugin_reports_a_finding_that_the_test_catches(tmp_path):
    (tmp_path / "test_catching.py").write_text(CATCHING, encoding="utf-8")
    done = run_command(
        tmp_path, "pytest", "-p", "gluon_cpu.pytest_plugin", "-p", "no:cacheprovider", "test_catching.py"
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 1, printed
    errors = [line for line in printed.splitlines() if line.startswith("ERROR ")]
    assert len(errors) == 3, printed
    assert not any("tells" in line for line in errors), "the test's own failure shows it"
    assert "the test caught it and went on" in printed


ACCEPTING = """
import pytest
from gluon_cpu import Accept
from test_project import right, wrong

known = Accept(kind="DataRace", place="reader", reason="known")
no_more = Accept(kind="OutOfBounds", place="reader", reason="was mended")


@pytest.mark.gluon_schedules(3, accept=[known, no_more])
def test_accepting(gluon_machine):
    wrong()


@pytest.mark.gluon_schedules(1, accept=[no_more])
def test_failing(gluon_machine):
    right()
    assert False
"""


def test_pytest_plugin_lists_what_was_accepted(tmp_path):
    (tmp_path / "test_accepting.py").write_text(ACCEPTING, encoding="utf-8")
    options = ("-p", "gluon_cpu.pytest_plugin", "-p", "no:cacheprovider")
    done = run_command(tmp_path, "pytest", *options, "test_accepting.py")
    printed = done.stdout + done.stderr
    assert "3 passed" in printed
    listed = printed.partition("gluon_cpu: accepted findings")[2].splitlines()[1:3]
    assert listed == [
        "test_accepting.py::test_accepting: accepted 3 times: DataRace at reader: known",
        "test_accepting.py::test_accepting: accepted, but not found: OutOfBounds at reader: was mended",
    ], printed
    assert "test_failing: accepted" not in printed, "a test that failed did not go to its end"


def test_command_line(tmp_path):
    right = run_command(tmp_path, "gluon_cpu", "check", "test_project.py::right", "--schedules", "5")
    assert right.returncode == 0, right.stdout + right.stderr
    wrong = run_command(tmp_path, "gluon_cpu", "check", "test_project.py::wrong")
    printed = wrong.stdout + wrong.stderr
    assert wrong.returncode == 1, printed
    for word in ("writer", "reader", "tile", "test_project.py:", "seed"):
        assert word in printed, printed


@pytest.mark.slow
def test_command_line_in_lowered_mode_and_of_what_is_not_there(tmp_path):
    lowered = run_command(
        tmp_path, "gluon_cpu", "check", "test_project.py::wrong", "--mode", "lowered", "--schedules", "1"
    )
    assert "mode='lowered'" in lowered.stdout
    missing = run_command(tmp_path, "gluon_cpu", "check", "test_project.py::nothing")
    assert missing.returncode not in (0, 1), "a mistake in the command is no finding"
    assert "nothing" in missing.stdout + missing.stderr


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


@pytest.mark.parametrize("policy", POLICIES)
def test_many_programs(policy):
    """Each program has its own shared memory and barriers."""
    out = poisoned(40, 128, dtype=torch.int32)
    gluon_cpu.launch(many_programs, (40,), out, schedule=gluon_cpu.Schedule(policy, seed=0))
    assert (out == 9).all()
