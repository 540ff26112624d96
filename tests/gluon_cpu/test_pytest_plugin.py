"""The pytest plugin."""

import pytest

from tests.gluon_cpu.project import run_command, run_main

OPTIONS = ("-p", "gluon_cpu.pytest_plugin", "-p", "no:cacheprovider")


def test_pytest_plugin(tmp_path):
    done = run_main(tmp_path, pytest.main, *OPTIONS, "--strict-markers", "-v", "test_project.py")
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
from kernels import wrong


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


@pytest.mark.slow
def test_pytest_plugin_reports_a_finding_that_the_test_catches(tmp_path):
    (tmp_path / "test_catching.py").write_text(CATCHING, encoding="utf-8")
    done = run_command(tmp_path, "pytest", *OPTIONS, "test_catching.py")
    printed = done.stdout + done.stderr
    assert done.returncode == 1, printed
    errors = [line for line in printed.splitlines() if line.startswith("ERROR ")]
    assert len(errors) == 3, printed
    assert not any("tells" in line for line in errors), "the test's own failure shows it"
    assert "the test caught it and went on" in printed


ACCEPTING = """
import pytest
from gluon_cpu import Accept
from kernels import right, wrong

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
    done = run_main(tmp_path, pytest.main, *OPTIONS, "test_accepting.py")
    printed = done.stdout + done.stderr
    assert "3 passed" in printed
    listed = printed.partition("gluon_cpu: accepted findings")[2].splitlines()[1:3]
    assert listed == [
        "test_accepting.py::test_accepting: accepted 3 times: DataRace at reader: known",
        "test_accepting.py::test_accepting: accepted, but not found: OutOfBounds at reader: was mended",
    ], printed
    assert "test_failing: accepted" not in printed, "a test that failed did not go to its end"


WRONG_MARKER = """
import pytest
from kernels import right


@pytest.mark.gluon_schedules(0)
def test_of_no_schedule(gluon_machine):
    right()


@pytest.mark.gluon_schedules(1)
def test_beside_it(gluon_machine):
    right()
"""


def test_a_wrong_marker_fails_its_own_test_alone(tmp_path):
    (tmp_path / "test_marker.py").write_text(WRONG_MARKER, encoding="utf-8")
    done = run_main(tmp_path, pytest.main, *OPTIONS, "test_marker.py")
    printed = done.stdout + done.stderr
    assert "gluon_schedules: schedules: expected at least one, got 0" in printed, printed
    assert "1 passed, 1 error" in printed, printed
