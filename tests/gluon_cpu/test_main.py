"""The command `python -m gluon_cpu`."""

import pytest

from gluon_cpu.__main__ import main
from tests.gluon_cpu.project import run_command, run_main


def test_command_line(tmp_path):
    right = run_main(tmp_path, main, "check", "kernels.py::right", "--schedules", "5")
    assert right.returncode == 0, right.stdout + right.stderr
    wrong = run_main(tmp_path, main, "check", "kernels.py::wrong")
    printed = wrong.stdout + wrong.stderr
    assert wrong.returncode == 1, printed
    for word in ("writer", "reader", "tile", "kernels.py:", "seed"):
        assert word in printed, printed


@pytest.mark.slow
def test_the_command_as_a_process(tmp_path):
    right = run_command(tmp_path, "gluon_cpu", "check", "kernels.py::right", "--schedules", "5")
    assert (right.returncode, right.stderr) == (0, ""), right.stdout + right.stderr
    wrong = run_command(tmp_path, "gluon_cpu", "check", "kernels.py::wrong")
    assert wrong.returncode == 1, wrong.stdout + wrong.stderr
    assert wrong.stdout.startswith("DataRace after 1 schedule"), wrong.stdout


@pytest.mark.slow
def test_command_line_in_lowered_mode_and_of_what_is_not_there(tmp_path):
    lowered = run_command(tmp_path, "gluon_cpu", "check", "kernels.py::wrong", "--mode", "lowered", "--schedules", "1")
    assert "mode='lowered'" in lowered.stdout
    missing = run_command(tmp_path, "gluon_cpu", "check", "kernels.py::nothing")
    assert missing.returncode not in (0, 1), "a mistake in the command is no finding"
    assert "nothing" in missing.stdout + missing.stderr
