"""What a check costs and how far it is, by a clock of these tests."""

import io

import pytest
import torch

import gluon_cpu
from gluon_cpu.launch import Report
from gluon_cpu.progress import Progress, duration
from tests.compat import gl, jit
from tests.gluon_cpu.layouts import ROW
from tests.gluon_cpu.support import normal, poisoned


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    def said(self) -> list[str]:
        """What was on the line, each time it changed, and what stayed."""
        return [line.strip() for line in self.getvalue().replace("\r\x1b[K", "\n").splitlines() if line.strip()]


def report(compile_seconds: float = 0.0, mode: str = "fast") -> Report:
    schedule = gluon_cpu.Schedule("random", 0)
    return Report("kernel", schedule, mode, 4, 1, 250, compile_seconds, 0.5)


def run(stream: Stream, count: int, shown: bool | None = None, mode: str | None = None) -> Progress:
    """`count` schedules of half a second, of two launches; the first and the last compile for three seconds."""
    now = [100.0]
    progress = Progress(shown, stream=stream, clock=lambda: now[0])
    runs = [{} if mode is None else {"mode": mode} for _ in range(count)]
    if count > 1 and mode is None:
        runs[-1] = {"mode": "lowered"}
    for i, _ in enumerate(progress.over(runs)):
        compiles = i == 0 or (i == count - 1 and mode is None)
        progress.reports = [report(3.0 if compiles else 0.0, mode or "fast"), report(mode=mode or "fast")]
        now[0] += 3.5 if compiles else 0.5
    return progress


def test_the_first_schedule_says_what_all_will_take():
    stream = Stream(terminal=True)
    cost = run(stream, 200).cost
    assert cost is not None
    assert (cost.launches, cost.programs, cost.steps, cost.seconds, cost.compile_seconds) == (2, 8, 500, 0.5, 3.0)
    said = stream.said()
    assert said[:2] == [
        "schedule 1 of 200: the first compiles",
        # 200 halves of a second, and compiling twice.
        "a schedule: 2 launches, 8 programs, 500 steps, 0.5 s, after 3.0 s of compiling; all 200: about 106.0 s",
    ]


def test_what_is_left():
    stream = Stream(terminal=True)
    run(stream, 200)
    assert "2 of 200 schedules, about 102.0 s left" in stream.said()  # 198 of them, and the lowered compilation
    assert stream.said()[-1] == "199 of 200 schedules, about 3.5 s left"
    assert stream.getvalue().endswith("\r\x1b[K"), "the line is cleared"


def test_one_mode_compiles_once():
    stream = Stream(terminal=True)
    run(stream, 200, mode="lowered")
    assert stream.said()[1].endswith("all 200: about 103.0 s")
    assert stream.said()[-1] == "199 of 200 schedules, about 0.5 s left"


def test_a_single_schedule_needs_no_estimate():
    stream = Stream(terminal=True)
    run(stream, 1)
    assert stream.said()[-1] == "a schedule: 2 launches, 8 programs, 500 steps, 0.5 s, after 3.0 s of compiling"


def test_where_lines_stay_there_are_few():
    stream = Stream(terminal=False)
    run(stream, 200, shown=True)
    assert "\r" not in stream.getvalue()
    assert len(stream.said()) == 10, "the cost, and one each ten of the 99.5 seconds left"
    assert stream.said()[1] == "21 of 200 schedules, about 92.5 s left"


@pytest.mark.parametrize(("terminal", "shown"), [(False, None), (True, False), (False, False)])
def test_silent(terminal, shown):
    stream = Stream(terminal)
    assert run(stream, 5, shown).cost is not None
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12.3 ms"), (2.04, "2.0 s"), (119.0, "119.0 s"), (600.0, "10 min"), (9000.0, "2.5 h")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@jit
def doubled(x_ptr, out_ptr, N: gl.constexpr):
    i = gl.program_id(0) * N + gl.arange(0, N, ROW)
    gl.store(out_ptr + i, gl.load(x_ptr + i) * 2)


@jit
def past_the_end(x_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    gl.store(out_ptr + i, gl.load(x_ptr + 512 + i))


def test_check_says_what_a_schedule_costs(capsys):
    """Both ways to launch count."""
    x, out = normal(512), poisoned(512)

    def launches() -> None:
        doubled[(4,)](x, out, N=128)
        gluon_cpu.launch(doubled, (2,), x, torch.empty(256), N=128)

    result = gluon_cpu.check(launches, schedules=3, progress=True)
    assert result.cost is not None
    assert (result.cost.launches, result.cost.programs) == (2, 6)
    assert result.cost.steps == sum(r.steps for r in reports_of(launches))
    printed = capsys.readouterr()
    assert printed.err.startswith("a schedule: 2 launches, 6 programs, ")
    assert "all 3: about " in printed.err
    assert printed.out.startswith("3 schedules, no finding")


def reports_of(launches) -> list[Report]:
    with gluon_cpu.machine() as reports:
        launches()
    return reports


def test_check_is_silent_off_a_terminal(capsys):
    x, out = normal(512), poisoned(512)
    result = gluon_cpu.check(lambda: doubled[(4,)](x, out, N=128), schedules=3, quiet=True)
    assert result.cost is not None
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("options", "silent"), [({}, False), ({"quiet": True}, True), ({"progress": False}, True)])
def test_check_on_a_terminal(options, silent, monkeypatch):
    stream = Stream(terminal=True)
    monkeypatch.setattr("sys.stderr", stream)
    x, out = normal(512), poisoned(512)
    gluon_cpu.check(lambda: doubled[(4,)](x, out, N=128), schedules=3, **options)
    assert (stream.getvalue() == "") == silent


def test_a_finding_comes_on_a_line_of_its_own(monkeypatch):
    stream = Stream(terminal=True)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("sys.stdout", stream)
    with pytest.raises(gluon_cpu.OutOfBounds):
        gluon_cpu.check(lambda: past_the_end[(1,)](normal(512), poisoned(128)), schedules=3)
    assert "\r\x1b[KOutOfBounds after 1 schedule:\n" in stream.getvalue()
