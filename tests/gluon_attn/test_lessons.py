"""`python -m gluon_attn learn`: what it lists, runs, copies and refuses. The lessons are in tests/docs."""

import re
import subprocess
import sys

import pytest

from gluon_attn import lessons
from gluon_attn.__main__ import main


def test_without_a_number_it_lists_the_lessons(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gluon_attn", "learn"])
    main()
    assert re.findall(r"^ *(\d+)  \w", capsys.readouterr().out, re.MULTILINE) == [str(n) for n in lessons.lessons()]


def test_it_runs_a_lesson(monkeypatch, capsys):
    monkeypatch.setattr(lessons, "quiet_exit", lambda: None)
    lessons.main(["1"])
    assert "output 30\n" in capsys.readouterr().out


@pytest.mark.parametrize("number", ["0", "x"])
def test_a_lesson_that_there_is_not(number, capsys):
    with pytest.raises(SystemExit, match="2"):
        lessons.main([number])
    assert "invalid" in capsys.readouterr().err


@pytest.mark.slow
def test_a_copy_to_work_on_runs(tmp_path, capsys):
    folder = tmp_path / "mine"
    lessons.main(["--copy", str(folder)])
    done = subprocess.run([sys.executable, folder / "01_attention.py"], capture_output=True, text=True)
    assert (done.returncode, done.stdout[:7]) == (0, "by hand")
    with pytest.raises(SystemExit, match="2"):
        lessons.main(["--copy", str(folder)])
    assert "expected a folder that is not there yet" in capsys.readouterr().err
