"""What becomes of a finding: skipped, accepted with a reason, kept for the end; and what is no finding at all."""

from typing import Any

import pytest
import torch

import gluon_cpu
from gluon_cpu import __main__ as command
from tests.compat import gl, jit, mbarrier
from tests.gluon_cpu.layouts import PLAIN, ROW, ROW_1
from tests.gluon_cpu.support import new_barrier, normal, poisoned


@jit
def fill(tile, ready, SIGNALS: gl.constexpr):
    tile.store(gl.full([128], 7.0, gl.float32, ROW_1))  # <- written
    if SIGNALS:
        mbarrier.arrive(ready)


@jit
def three_faults(x_ptr, out_ptr, FIRST: gl.constexpr, SECOND: gl.constexpr, THIRD: gl.constexpr):
    """A read of what nobody wrote, a race behind it, and a store beyond the end behind that."""
    i = gl.arange(0, 128, ROW)
    empty = gl.allocate_shared_memory(gl.float32, [128], PLAIN)
    if not FIRST:
        empty.store(gl.load(x_ptr + i))
    gl.store(out_ptr + i, empty.load(ROW))
    tile = gl.allocate_shared_memory(gl.float32, [128], PLAIN)
    ready = new_barrier(1)
    gl.barrier()
    gl.warp_specialize([(read, (tile, ready, out_ptr, SECOND)), (fill, (tile, ready, not SECOND))], [1])
    mbarrier.invalidate(ready)
    if THIRD:
        gl.store(out_ptr + 128 + i, gl.load(x_ptr + i))


@jit
def read(tile, ready, out_ptr, BUG: gl.constexpr):
    if not BUG:
        mbarrier.wait(ready, 0)
    gl.store(out_ptr + gl.arange(0, 128, ROW), tile.load(ROW))


ANY: Any = gluon_cpu  # for calls that a type checker would refuse
FIRST_KIND = gluon_cpu.Accept(kind="UninitialisedRead", place="three_faults", reason="of no use to anybody")


def run(*faults: bool, grid=(1,), **options):
    return gluon_cpu.launch(three_faults, grid, normal(128), poisoned(128), *faults, **options)


def right(**options):
    return run(False, False, False, **options)


def check(**options):
    """Of a function that would have no finding."""
    return gluon_cpu.check(right, **{"schedules": 1, "quiet": True, **options})


def enter(**options):
    with gluon_cpu.machine(**options):
        pass


def findings(group: ExceptionGroup) -> list[gluon_cpu.Finding]:
    return [f for f in group.exceptions if isinstance(f, gluon_cpu.Finding)]


def kinds(group: ExceptionGroup) -> list[str]:
    return sorted({type(f).__name__ for f in findings(group)})


def test_without_faults_nothing_is_found():
    assert run(False, False, False).accepted == {}


def test_a_skipped_kind_lets_the_next_show():
    with pytest.raises(gluon_cpu.UninitialisedRead):
        run(True, True, True)
    with pytest.raises(gluon_cpu.DataRace):
        run(True, True, True, skip=["UninitialisedRead"], schedule=gluon_cpu.Schedule("starve", 1))
    with pytest.raises(gluon_cpu.OutOfBounds):
        run(True, True, True, skip=["UninitialisedRead", "RaceError"])
    run(True, True, True, skip=["UninitialisedRead", "RaceError", "OutOfBounds"])


def test_an_accepted_finding_is_listed_with_its_reason():
    report = run(True, False, False, accept=[FIRST_KIND])
    assert report.accepted == {FIRST_KIND: 1}
    assert "of no use to anybody" in str(report)
    with pytest.raises(gluon_cpu.RaceError):
        run(True, True, False, accept=[FIRST_KIND], schedule=gluon_cpu.Schedule("starve", 1))


@pytest.mark.parametrize(("place", "covers"), [
    ("test_verdicts.py", True), ("gluon_cpu/test_verdicts.py", True), ("three_faults", True), ("fill", False),
    ("verdicts.py", False), ("test_verdicts.py:1", False),
])  # fmt: skip
def test_an_acceptance_is_for_its_place_alone(place, covers):
    accept = [gluon_cpu.Accept(kind="UninitialisedRead", place=place, reason="known")]
    if covers:
        run(True, False, False, accept=accept)
    else:
        with pytest.raises(gluon_cpu.UninitialisedRead):
            run(True, False, False, accept=accept)


def test_an_acceptance_by_line():
    with pytest.raises(gluon_cpu.UninitialisedRead) as caught:
        run(True, False, False)
    line = caught.value.sites[0].frames[0].line
    run(True, False, False, accept=[
        gluon_cpu.Accept(kind="UninitialisedRead", place=f"test_verdicts.py:{line}", reason="known")
    ])  # fmt: skip


def test_all_findings_of_one_launch():
    with pytest.raises(ExceptionGroup) as caught:
        run(True, True, True, keep_going=True)
    assert kinds(caught.value) == ["DataRace", "OutOfBounds", "UninitialisedRead"]
    assert all(f.schedule is not None and f.kernel == "three_faults" for f in findings(caught.value))
    run(False, False, False, keep_going=True)


@jit
def stuck(out_ptr):
    gl.store(out_ptr + 128 + gl.arange(0, 128, ROW), 1.0)
    never = new_barrier(1)
    mbarrier.wait(never, 0)


def test_a_finding_that_ends_the_run_is_the_last_of_all():
    with pytest.raises(ExceptionGroup) as caught:
        gluon_cpu.launch(stuck, (1,), poisoned(128), keep_going=True)
    assert [type(f) for f in caught.value.exceptions] == [gluon_cpu.OutOfBounds, gluon_cpu.Deadlock]


def test_check_collects_distinct_findings_of_all_schedules(capsys):
    def fn():
        three_faults[(1,)](normal(128), poisoned(128), True, True, True)

    with pytest.raises(ExceptionGroup) as caught:
        gluon_cpu.check(fn, schedules=10, keep_going=True)
    assert kinds(caught.value) == ["DataRace", "OutOfBounds", "UninitialisedRead"]
    identities = {(type(f), frozenset(s.key for s in f.sites)) for f in findings(caught.value)}
    assert len(identities) == len(caught.value.exceptions)
    printed = capsys.readouterr().out
    assert "findings:" in printed
    assert "OutOfBounds after 10 schedules" in printed


def test_what_was_collected_is_kept_when_the_function_raises_something_else(capsys):
    calls = []

    def fn():
        calls.append(1)
        three_faults[(1,)](normal(128), poisoned(128), True, False, len(calls) > 1)
        raise AssertionError("wrong numbers")

    with pytest.raises(ExceptionGroup, match="2 findings in 3 schedules, and AssertionError") as caught:
        gluon_cpu.check(fn, schedules=3, keep_going=True)
    assert [type(f).__name__ for f in caught.value.exceptions] == ["UninitialisedRead", "OutOfBounds", "AssertionError"]
    printed = capsys.readouterr().out
    assert printed.startswith("2 findings:")
    assert "fn raised something else as well, which may follow from a finding: AssertionError: wrong numbers" in printed


def test_what_was_accepted_is_told_where_the_function_raises(capsys):
    def fn():
        three_faults[(1,)](normal(128), poisoned(128), True, False, False)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        gluon_cpu.check(fn, schedules=3, accept=[FIRST_KIND])
    printed = capsys.readouterr().out
    assert printed == f"fn raised KeyError, which may follow from this:\n  accepted: {FIRST_KIND}\n"


def test_a_crash_without_a_finding_ends_the_check_at_once():
    calls = []

    def fn():
        calls.append(1)
        three_faults[(1,)](normal(128), poisoned(128), False, False, False)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        gluon_cpu.check(fn, schedules=3, keep_going=True)
    assert len(calls) == 1


@pytest.mark.parametrize("afterwards", ["nothing", "something else", "a group of findings"])
def test_a_finding_that_the_function_catches_is_reported(afterwards, capsys):
    def fn():
        try:
            three_faults[(1,)](normal(128), poisoned(128), True, False, False)
        except Exception as error:
            if afterwards == "something else":
                raise ValueError("mine") from None
            if afterwards == "a group of findings":
                raise ExceptionGroup("several", [error]) from None

    expected = ExceptionGroup if afterwards == "something else" else gluon_cpu.UninitialisedRead
    with pytest.raises(expected):
        gluon_cpu.check(fn, schedules=3)
    printed = capsys.readouterr().out
    assert printed.startswith("UninitialisedRead after 1 schedule")
    assert ("fn caught a finding and went on" in printed) == (afterwards == "nothing")
    assert gluon_cpu.check(fn, schedules=3, accept=[FIRST_KIND]).ok


def test_check_says_what_was_accepted_and_what_was_not_met(capsys):
    other = gluon_cpu.Accept(kind="DataRace", place="fill", reason="a race that there is not")

    def fn():
        three_faults[(1,)](normal(128), poisoned(128), True, False, False)

    result = gluon_cpu.check(fn, schedules=4, accept=[FIRST_KIND, other])
    assert result.ok
    assert result.accepted == {FIRST_KIND: 4}
    assert result.unused == [other]
    printed = capsys.readouterr().out
    assert "accepted 4 times: UninitialisedRead at three_faults: of no use to anybody" in printed
    assert "accepted, but not found: DataRace at fill" in printed


@pytest.mark.parametrize(("make", "error", "words"), [
    (lambda: gluon_cpu.Accept(kind="Race", place="f", reason="r"), ValueError, "kind: expected a kind of finding"),
    (lambda: gluon_cpu.Accept(kind="Deadlock", place="f", reason="r"), ValueError, "nothing goes on after it"),
    (lambda: gluon_cpu.Accept(kind="DataRace", place=" ", reason="r"), ValueError, "place: expected a text"),
    (lambda: gluon_cpu.Accept(kind="DataRace", place="f", reason=""), ValueError, "reason: expected a text"),
    (lambda: gluon_cpu.Accept.parse("DataRace@f"), ValueError, "expected KIND@PLACE=REASON"),
    (lambda: run(False, False, False, skip="DataRace"), TypeError, "skip: expected a list"),
    (lambda: run(False, False, False, skip=["Race"]), ValueError, "skip: expected a kind of finding"),
    (lambda: run(False, False, False, accept=["DataRace"]), TypeError, "accept: expected gluon_cpu.Accept"),
    (lambda: run(False, False, False, target="sm_80"), ValueError, "target: expected 'sm_90a'"),
    (lambda: run(False, False, False, target=90), ValueError, "target: expected 'sm_90a'.*got 90"),
    (lambda: run(False, False, False, schedule="late"), TypeError, "schedule: expected a Schedule"),
    (lambda: run(False, False, False, resident=0), ValueError, "resident: expected at least 1, got 0"),
    (lambda: gluon_cpu.launch(lambda: None, (1,)), TypeError, "kernel: expected a Gluon kernel"),
    (lambda: gluon_cpu.check(lambda: None, schedules=0), ValueError, "schedules: expected at least one, got 0"),
    (lambda: gluon_cpu.check(lambda: None, schedules=2), gluon_cpu.NothingChecked, "launched no kernel"),
    (lambda: gluon_cpu.check(lambda: None, target="sm_42"), ValueError, "target: expected 'sm_90a'"),
    (lambda: right(skip=5), TypeError, r"skip: expected a list of kinds of findings, got 5: write"),
    (lambda: right(accept=FIRST_KIND), TypeError, r"accept: expected a list of gluon_cpu.Accept objects.*write \["),
    (lambda: check(accept=FIRST_KIND), TypeError, "accept: expected a list of gluon_cpu.Accept objects"),
    (lambda: check(policies=[]), ValueError, "policies: expected some of .*got none"),
    (lambda: check(policies="late"), TypeError, r"policies: expected a list.*got 'late': write \['late'\]"),
    (lambda: check(seed="x"), TypeError, "seed: expected a whole number, got 'x'"),
    (lambda: check(schedules=2.5), TypeError, "schedules: expected a whole number, got 2.5"),
    (lambda: check(schedules="5"), TypeError, "schedules: expected a whole number, got '5'"),
    (lambda: check(schedule=gluon_cpu.Schedule("late", 1)), TypeError, "schedule: many are made here.*schedules=1"),
    (lambda: check(keepgoing=True), TypeError, "keepgoing: no option and no parameter of machine.*keep_going"),
    (lambda: ANY.check(3), TypeError, "fn: expected a function without arguments.*got 3"),
    (lambda: enter(foo=3), TypeError, "foo: no option and no parameter of machine; leave it out"),
    (lambda: enter(schedule="late"), TypeError, "schedule: expected a Schedule"),
    (lambda: right(keepgoing=True), TypeError, "keepgoing: no option.*three_faults; did you mean keep_going"),
    (lambda: right(grid=None), TypeError, "grid: expected whole numbers.*got None"),
    (lambda: right(grid="4"), TypeError, "grid: expected whole numbers.*got '4'"),
    (lambda: right(grid=(1.5,)), TypeError, r"grid: expected whole numbers.*got \(1.5,\)"),
    (lambda: right(grid=(1, 1, 1, 1)), ValueError, "grid: expected one to three sizes, got 4"),
    (lambda: right(grid=()), ValueError, "grid: expected one to three sizes, got 0"),
    (lambda: right(grid=(4, 0)), ValueError, r"grid: expected positive sizes, got \(4, 0\)"),
    (lambda: run(False), TypeError, r"three_faults: expected arguments for \(x_ptr, .*missing .*'SECOND'"),
    (lambda: run(False, False, False, True), TypeError, "three_faults: expected .*too many positional arguments"),
    (lambda: half_into("out"), TypeError, "out_ptr: expected a tensor, a tensor descriptor.*got 'out'"),
    (lambda: half_into([1, 2]), TypeError, r"out_ptr: expected a tensor.*got \[1, 2\]"),
    (lambda: right(num_warps="4"), TypeError, "num_warps: expected a whole number, got '4'"),
    (lambda: right(num_warps=3), ValueError, "num_warps: expected a power of two from 1 to 32, got 3"),
    (lambda: right(num_ctas=32), ValueError, "num_ctas: expected a power of two from 1 to 16, got 32"),
    (lambda: right(checks="no"), TypeError, "checks: expected True or False, got 'no'"),
    (lambda: right(resident=1.5), TypeError, "resident: expected a whole number, got 1.5"),
    (lambda: right(trace="absent/out.json"), ValueError, "trace: expected a file in a folder that there is.*make"),
    (lambda: right(trace="."), ValueError, "trace: expected the name of a file, got the folder"),
    (lambda: right(trace=3), TypeError, "trace: expected the name of a file, got 3"),
    (lambda: right(timeline="absent/out.svg"), ValueError, "timeline: expected a file in a folder that there is"),
    (lambda: ANY.Schedule(seed="x"), TypeError, "seed: expected a whole number, got 'x'"),
    (lambda: ANY.Accept(kind="DataRace", place="f", reason=3), TypeError, "reason: expected a text, got 3"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_kernel_of_plain_triton_is_refused():
    from triton import jit as triton_jit

    from tests.gluon_cpu import plain_triton

    kernel = triton_jit(plain_triton.copy)
    with gluon_cpu.machine(), pytest.raises(TypeError, match=r"expected a Gluon kernel.*got a Triton kernel"):
        kernel[(1,)](normal(128), poisoned(128))
    with pytest.raises(TypeError, match=r"expected a Gluon kernel.*got a Triton kernel"):
        gluon_cpu.launch(kernel, (1,), normal(128), poisoned(128))


SCRIPT = """
import sys
import torch
from tests.gluon_cpu.test_verdicts import first_half, normal, poisoned, three_faults

def wrong():
    three_faults[(1,)](normal(128), poisoned(128), True, False, False)

def several():
    three_faults[(1,)](normal(128), poisoned(128), True, True, True)

def nothing():
    pass

def crash():
    raise KeyError("mine")

def caught():
    try:
        wrong()
    except Exception:  # as a user's fallback may: the finding is to be told all the same
        pass

def wrong_numbers():
    wrong()
    assert False, "the numbers are wrong"

def partial():
    first_half[(1,)](normal(128), torch.ones(256))

def of_two(x, y, z=1, *more, **options):
    pass

def leave():
    sys.exit(0)

def leave_with_one():
    sys.exit(1)
"""
AT_IMPORT = {
    "missing": "import there_is_no_such_module",
    "unreadable": "def run(:",
    "raising": "raise ValueError('boo')",
    "leaving": "import sys; sys.exit(0)",
    "finding": """
import gluon_cpu
from tests.gluon_cpu.test_verdicts import normal, poisoned, three_faults
gluon_cpu.launch(three_faults, (1,), normal(128), poisoned(128), True, False, False)
""",
}


@pytest.mark.parametrize(("arguments", "status", "words"), [
    (["wrong"], 1, ["UninitialisedRead after 1 schedule"]),
    (["wrong", "--skip", "UninitialisedRead"], 0, ["no finding"]),
    (["wrong", "--accept", "UninitialisedRead@three_faults=known"], 0, ["accepted 2 times", "three_faults: known"]),
    (["several", "--keep-going"], 1, ["findings:", "UninitialisedRead", "OutOfBounds"]),
    (["wrong", "--target", "sm_80"], 2, ["target: expected"]),
    (["wrong", "--schedules", "0"], 2, ["--schedules: expected at least 1"]),
    (["wrong", "--skip", "Race"], 2, ["skip: expected a kind"]),
    (["wrong", "--accept", "DataRace"], 2, ["expected KIND@PLACE=REASON"]),
    (["wrong", "--trace", "absent/out.json"], 2, ["--trace: expected a file in a folder that there is"]),
    (["wrong", "--timeline", "absent/out.svg"], 2, ["timeline: expected a file in a folder that there is"]),
    (["absent"], 2, ["has no function absent"]),
    (["of_two"], 2, ["expected a function without arguments, got one that needs x, y"]),
    (["three_faults"], 2, ["expected a function that launches kernels, got a kernel"]),
    (["nothing"], 3, ["launched no kernel"]),
    (["crash"], 4, ["KeyError", "that is no finding"]),
    (["caught"], 1, ["UninitialisedRead after 1 schedule", "caught caught a finding and went on"]),
    (["wrong_numbers", "--keep-going"], 1, ["UninitialisedRead after 2 schedules", "raised AssertionError: that is"]),
    (["partial"], 0, ["no finding"]),
    (["partial", "--outputs", "out_ptr"], 1, ["512 of the 1024 bytes"]),
    (["leave"], 4, ["raised SystemExit: that is no finding"]),
    (["leave_with_one"], 4, ["raised SystemExit: that is no finding"]),
])  # fmt: skip
def test_exit_status_of_the_command(tmp_path, capsys, arguments, status, words):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    name, *rest = arguments
    assert command.main(["check", f"{file}::{name}", "--schedules", "2", *rest]) == status
    said = capsys.readouterr()
    for word in words:
        assert word in said.out + said.err


@pytest.mark.parametrize(("name", "status", "words"), [
    ("missing", 4, ["as its file raised ModuleNotFoundError: that is no finding", "there_is_no_such_module"]),
    ("unreadable", 4, ["as its file raised SyntaxError: that is no finding"]),
    ("raising", 4, ["as its file raised ValueError: that is no finding", "boo"]),
    ("leaving", 4, ["as its file raised SystemExit: that is no finding"]),
    ("finding", 1, ["UninitialisedRead while the file of", "replay: schedule="]),
])  # fmt: skip
def test_exit_status_for_a_file_that_raises_while_it_is_loaded(tmp_path, capsys, name, status, words):
    file = tmp_path / f"{name}.py"
    file.write_text(AT_IMPORT[name])
    assert command.main(["check", f"{file}::run"]) == status
    said = capsys.readouterr()
    for word in words:
        assert word in said.out + said.err


def test_outputs_that_are_written_in_part():
    """No fault, unless they came as NaN or are named."""
    x, ones = normal(128), torch.ones(256)
    for out in (torch.zeros(256), ones):
        gluon_cpu.launch(first_half, (1,), x, out)
    gluon_cpu.launch(first_half, (1,), x, poisoned(256), outputs=[])
    with pytest.raises(gluon_cpu.OutputError, match="512 of the 1024 bytes"):
        gluon_cpu.launch(first_half, (1,), x, poisoned(256))
    with pytest.raises(gluon_cpu.OutputError, match="512 of the 1024 bytes"):
        gluon_cpu.launch(first_half, (1,), x, ones, outputs=[ones])


@jit
def first_half(x_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    gl.store(out_ptr + i, gl.load(x_ptr + i))


def half_into(out, **options):
    return gluon_cpu.launch(first_half, (1,), normal(128), out, **options)


@pytest.mark.parametrize("way", [["out_ptr"], ("out_ptr",), {"out_ptr"}])
def test_outputs_by_name(way):
    with pytest.raises(gluon_cpu.OutputError, match="512 of the 1024 bytes"):
        half_into(torch.ones(256), outputs=way)
    half_into(torch.ones(128), outputs=way)
    with pytest.raises(gluon_cpu.OutputError, match="512 of the 1024 bytes"):
        gluon_cpu.check(lambda: first_half[(1,)](normal(128), torch.ones(256)), schedules=1, outputs=way)


@jit
def of_a_tuple(x_ptr, outs):
    i = gl.arange(0, 128, ROW)
    gl.store(outs[1] + i, gl.load(x_ptr + i))


def test_outputs_of_a_tuple_by_name():
    outs = torch.ones(128), torch.ones(128)
    gluon_cpu.launch(of_a_tuple, (1,), normal(128), outs, outputs=["outs.1"])
    with pytest.raises(gluon_cpu.OutputError, match=r"output outs\.0"):
        gluon_cpu.launch(of_a_tuple, (1,), normal(128), outs, outputs=["outs"])


ONES = torch.ones(256)


@pytest.mark.parametrize(("outputs", "error", "words"), [
    (ONES, TypeError, r"outputs: expected a list.*got a Tensor of shape \(256,\): write"),
    ("out_ptr", TypeError, "outputs: expected a list.*got 'out_ptr'"),
    ([ONES[:128]], ValueError, r"got a Tensor of shape \(128,\), which is no argument of.*a view of it is another"),
    ([torch.ones(256)], ValueError, "outputs: expected tensors among the arguments"),
    ([None], ValueError, "got None, which is no argument"),
    (["out"], ValueError, r"got 'out', which is no argument of.*one of \['x_ptr', 'out_ptr'\]"),
])  # fmt: skip
@pytest.mark.parametrize("how", ["launch", "machine", "check"])
def test_outputs_that_are_no_arguments_are_refused(how, outputs, error, words):
    def ordinary():
        first_half[(1,)](normal(128), ONES)

    def in_a_machine():
        with gluon_cpu.machine(outputs=outputs):
            ordinary()

    ways = {
        "launch": lambda: half_into(ONES, outputs=outputs),
        "machine": in_a_machine,
        "check": lambda: gluon_cpu.check(ordinary, schedules=2, outputs=outputs),
    }
    with pytest.raises(error, match=words):
        ways[how]()


def test_outputs_of_one_of_several_launches():
    out = torch.ones(128)
    with gluon_cpu.machine(outputs=["outs.1", out]):
        first_half[(1,)](normal(128), out)
        of_a_tuple[(1,)](normal(128), (torch.ones(128), torch.ones(128)))
