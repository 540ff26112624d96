"""docs/gluon_cpu.md: its code runs, and the messages it shows are those that are printed.

After a change of a message or a picture: `python -m tests.docs.test_gluon_cpu_page` writes the real ones.
"""

import importlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import gluon_cpu
from tests.docs.examples import Page, mended

ROOT = Path(__file__).parents[2]
PAGE = Page("gluon_cpu.md")
TEXT = PAGE.path.read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The examples lie in a new folder each time: nothing of them is worth keeping."""
    monkeypatch.setenv("GLUON_CPU_CACHE", str(tmp_path / "cache"))


def special_cases(kind: type) -> set[str]:
    subclasses: list[type] = kind.__subclasses__()
    return {name for cls in subclasses for name in {cls.__name__, *special_cases(cls)}}


def test_every_finding_is_on_the_page():
    assert [name for name in special_cases(gluon_cpu.Finding) if f"`{name}`" not in TEXT] == []


@pytest.mark.parametrize("block", PAGE.findings, ids=lambda b: b.name)
def test_message_is_as_printed(block, tmp_path):
    assert PAGE.printed(block, tmp_path) == block.message


@pytest.mark.parametrize("block", PAGE.findings, ids=lambda b: b.name)
def test_fix_silences_it(block, tmp_path):
    fixed = mended(block.code)
    assert fixed != block.code, "the example shows no fix"
    with PAGE.examples(tmp_path, **{block.name: fixed}):
        assert gluon_cpu.check(importlib.import_module(block.name).run, schedules=10, quiet=True).ok


def test_pieces_run(tmp_path):
    """The blocks that are no files: one after the other, in one namespace."""
    with PAGE.examples(tmp_path):
        names: dict[str, Any] = {"double": importlib.import_module("double").double}
        for block in PAGE.blocks:
            if not block.name:
                exec(block.code, names)


def test_looking_inside(tmp_path, monkeypatch, capsys):
    stops = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(sys._getframe(1).f_locals))
    x, out = torch.arange(128, dtype=torch.int32), torch.full((1,), -1, dtype=torch.int32)
    with PAGE.examples(tmp_path):
        gluon_cpu.launch(importlib.import_module("looking").total, (1,), x, out)
    assert out.item() == 127 * 64
    assert str(127 * 64) in capsys.readouterr().out
    assert stops[0]["x"].max() == 127
    assert "role" in stops[0]


def test_assembly(tmp_path):
    x, out = torch.arange(128, dtype=torch.int32), torch.full((128,), -1, dtype=torch.int32)
    with PAGE.examples(tmp_path):
        gluon_cpu.launch(importlib.import_module("assembly").bits_set, (1,), x, out)
    assert out.tolist() == [i.bit_count() for i in range(128)]


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=580
    )


def test_pytest_example(tmp_path):
    with PAGE.examples(tmp_path):
        done = command(
            tmp_path, "pytest", "-p", "gluon_cpu.pytest_plugin", "-p", "no:cacheprovider", "examples/test_double.py"
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_command_prints_what_the_page_shows(tmp_path):
    with PAGE.examples(tmp_path):
        done = command(tmp_path, "gluon_cpu", "check", "examples/race.py::run")
    assert done.returncode == 1, done.stderr
    assert done.stdout == PAGE.files["race"].message


def forgotten(code: str) -> str:
    """The code with its wrong line deleted, and nothing put in for it."""
    return "".join(line for line in code.splitlines(keepends=True) if "# fix: " not in line)


PICTURES = {"timeline": mended, "timeline_deadlock": forgotten}


def picture(name: str, folder: Path) -> str:
    """What the page's command draws."""
    with PAGE.examples(folder, product=PICTURES[name](PAGE.files["product"].code)):
        (words,) = re.findall(r"^python -m (gluon_cpu .* --timeline timeline\.svg)$", TEXT, re.MULTILINE)
        done = command(folder, *words.split())
    assert done.returncode == int(name != "timeline"), done.stdout + done.stderr
    return (folder / "timeline.svg").read_text(encoding="utf-8")


def shown(svg: str) -> list[str]:
    """All text, that under the mouse too: where it stands differs from one matplotlib to the next."""
    return re.findall(r">([^<>]+)</(?:text|title)>", svg)


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_as_drawn(name, tmp_path):
    pytest.importorskip("matplotlib")
    kept = PAGE.path.with_name(f"{name}.svg")
    assert kept.stat().st_size < 60_000
    drawn = shown(picture(name, tmp_path))
    assert drawn == shown(kept.read_text(encoding="utf-8"))
    assert "TMA load for loader" in drawn
    assert ("waits for ever" in drawn) == (name == "timeline_deadlock")


def update() -> None:
    """Write the messages as they are printed now into the page, and draw its pictures."""
    PAGE.write_messages()
    for name in PICTURES:
        with tempfile.TemporaryDirectory() as folder:
            PAGE.path.with_name(f"{name}.svg").write_text(picture(name, Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    update()
