"""The picture of a run: its rows, who ends whose wait, who is stuck; by its SVG, in which text is text."""

import importlib.util
import itertools
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch

import gluon_cpu
from gluon_cpu import timeline
from gluon_cpu.__main__ import main
from tests.compat import gl, jit, mbarrier
from tests.gluon_cpu import findings_hopper as hopper
from tests.gluon_cpu import findings_more as more
from tests.gluon_cpu.project import run_main
from tests.gluon_cpu.support import descriptor, new_barrier, normal, poisoned

pytest.importorskip("matplotlib")

SVG = "{http://www.w3.org/2000/svg}"


class Drawn:
    """What an SVG shows."""

    def __init__(self, file: Path) -> None:
        self.root = ET.fromstring(file.read_text(encoding="utf-8"))
        self.texts = ["".join(t.itertext()) for t in self.root.iter(f"{SVG}text")]
        self.parts = {g.get("id", ""): g for g in self.root.iter(f"{SVG}g")}

    def tips(self, kind: str) -> list[str]:
        """What a browser shows of each box, wait or arrow."""
        found = [g for name, g in self.parts.items() if name.startswith(f"{kind}-")]
        return [g.findtext(f"{SVG}title", "") for g in found]

    def frames(self) -> list[tuple[float, float, float]]:
        """(y, left, right) of each box and each wait."""
        found = []
        for name, g in self.parts.items():
            if name.startswith(("box-", "wait-")):
                path = next(g.iter(f"{SVG}path")).get("d", "")
                numbers = [float(x) for x in re.findall(r"-?[\d.]+", path)]
                found.append((max(numbers[1::2]), min(numbers[::2]), max(numbers[::2])))
        return found


def pipeline(file: Path, bug: bool = False, **options: Any) -> None:
    products(hopper.slot_freed_before_the_product, poisoned(64, 32), BUG=bug, timeline=file, **options)


def products(kernel: Any, out: torch.Tensor, **options: Any) -> None:
    a, b = normal(64, 64, dtype=torch.bfloat16), normal(32, 64, dtype=torch.bfloat16)
    gluon_cpu.launch(kernel, (1,), descriptor(a, [64, 64]), descriptor(b, [32, 64]), out, **options)


def test_a_row_for_each_role_and_each_engine(tmp_path):
    file = tmp_path / "run.svg"
    pipeline(file)
    drawn = Drawn(file)
    rows = [t for t in drawn.texts if t in ("multiply_role", "load_role") or " for " in t]
    engines = ["TMA load for multiply_role", "wgmma for multiply_role"]
    assert rows == ["multiply_role", *engines, "load_role", "TMA load for load_role"]
    assert drawn.texts.count("done") == 2
    assert "waits for ever" not in drawn.texts
    assert any(t.startswith("slot_freed_before_the_product, schedule random 0") for t in drawn.texts)


def test_an_arrow_from_who_releases_to_who_waits(tmp_path):
    file = tmp_path / "run.svg"
    pipeline(file)
    waits, arrows = Drawn(file).tips("wait"), Drawn(file).tips("arrow")
    assert len(arrows) == len(waits) > 0
    ends = {(arrow.split(" ends the wait of ")[0], arrow.split(" ends the wait of ")[1]) for arrow in arrows}
    assert ("TMA load for load_role", "multiply_role for filled") in ends
    assert {who for who, whom in ends if whom == "load_role for freed"} == {"multiply_role"}


def test_a_box_names_its_line(tmp_path):
    file = tmp_path / "run.svg"
    pipeline(file)
    line = next(
        n
        for n, text in enumerate(Path(hopper.__file__).read_text(encoding="utf-8").splitlines(), 1)
        if text.startswith("def multiply_role")
    )
    boxes = [tip for tip in Drawn(file).tips("box") if tip.startswith("multiply_role: wgmma")]
    assert len(boxes) == 3
    lines = {int(m[1]) for tip in boxes if (m := re.search(r"findings_hopper\.py:(\d+) in multiply_role", tip))}
    assert all(line < n < line + 30 for n in lines)
    assert lines
    assert f"{min(lines)} wgmma" in Drawn(file).texts


def overlaps(drawn: Drawn) -> list[tuple[float, float, float]]:
    """Boxes and waits that begin before the one before them in their row ends."""
    frames = sorted(drawn.frames())
    return [b for a, b in itertools.pairwise(frames) if a[0] == b[0] and a[2] > b[1] + 1e-6]


@pytest.mark.parametrize("policy", gluon_cpu.POLICIES)
def test_nothing_in_a_row_overlaps(policy, tmp_path):
    file = tmp_path / "run.svg"
    pipeline(file, schedule=gluon_cpu.Schedule(policy, seed=1))
    drawn = Drawn(file)
    assert len(drawn.frames()) > 20
    assert overlaps(drawn) == []


def test_what_an_engine_does_in_one_step_stands_side_by_side(tmp_path):
    """Under `late` two products run in the step of the wait for both."""
    file = tmp_path / "run.svg"
    late = gluon_cpu.Schedule("late", seed=0)
    products(hopper.result_before_its_wait, poisoned(2, 64, 32), BUG=False, schedule=late, timeline=file)
    drawn = Drawn(file)
    assert len([tip for tip in drawn.tips("box") if tip.startswith("wgmma for ")]) == 2
    assert overlaps(drawn) == []


def test_a_schedule_has_one_picture(tmp_path):
    files = [tmp_path / f"{i}.svg" for i in range(3)]
    for file, seed in zip(files, (0, 0, 1), strict=True):
        pipeline(file, schedule=gluon_cpu.Schedule("random", seed))
    first, again, other = (file.read_bytes() for file in files)
    assert first == again
    assert first != other


def test_png(tmp_path):
    file = tmp_path / "run.png"
    pipeline(file)
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    assert width > height > 400, "five rows and a legend"


def test_a_deadlock_shows_who_is_stuck(tmp_path):
    file = tmp_path / "run.svg"
    with pytest.raises(gluon_cpu.Deadlock):
        gluon_cpu.launch(
            more.each_waits_for_the_other, (1,), poisoned(1, dtype=torch.int32), BUG=True, timeline=str(file)
        )
    drawn = Drawn(file)
    stuck = [t for t in drawn.texts if t.startswith("for ever: ")]
    assert len(stuck) == 2
    assert all(t.endswith("phase 0: 1 arrival missing") for t in stuck)
    assert "waits for ever" in drawn.texts, "the legend"
    assert any(t.endswith(": Deadlock") for t in drawn.texts)
    assert drawn.tips("arrow") == []


def test_a_race_shows_where(tmp_path):
    file = tmp_path / "run.svg"
    with pytest.raises(gluon_cpu.DataRace):
        pipeline(file, bug=True)
    drawn = Drawn(file)
    here = [tip for tip in drawn.tips("box") if tip.startswith("DataRace showed here\n")]
    assert len(here) == 1
    assert "where the finding showed" in drawn.texts


def test_rows_of_two_ctas(tmp_path):
    file = tmp_path / "run.svg"
    x = descriptor(normal(64, 32), [32, 32], cga=[[0, 0]])
    gluon_cpu.launch(hopper.multicast_over_the_peer, (1,), x, poisoned(64), BUG=False, num_ctas=2, timeline=file)
    names = [t for t in Drawn(file).texts if t.endswith(("(CTA 0)", "(CTA 1)"))]
    assert names == sorted(names, key=lambda name: name[-2])
    assert {name[-2] for name in names} == {"0", "1"}
    assert "TMA load for multicast_over_the_peer (CTA 0)" in names


@jit
def back(ping, pong, STEPS: gl.constexpr):
    for step in range(STEPS):
        mbarrier.wait(ping, step & 1)
        mbarrier.arrive(pong)


@jit
def forth(ping, pong, out_ptr, STEPS: gl.constexpr, RIGHT: gl.constexpr):
    for step in range(STEPS):
        mbarrier.arrive(ping)
        mbarrier.wait(pong, step & 1)
    gl.device_assert(RIGHT, "not right")
    gl.store(out_ptr + gl.program_id(0), 1)


@jit
def many_steps(out_ptr, STEPS: gl.constexpr, RIGHT: gl.constexpr):
    ping, pong = new_barrier(1), new_barrier(1)
    gl.barrier()
    gl.warp_specialize([(forth, (ping, pong, out_ptr, STEPS, RIGHT)), (back, (ping, pong, STEPS))], [1])


def test_one_program_of_many(tmp_path):
    file = tmp_path / "run.svg"
    gluon_cpu.launch(many_steps, (3,), poisoned(3, dtype=torch.int32), STEPS=3, RIGHT=True, timeline=file)
    texts = Drawn(file).texts
    assert "many_steps, program 0 of 3, schedule random 0" in texts
    assert [t for t in texts if t in ("forth", "back")] == ["forth", "back"]


def test_a_long_run_shows_its_beginning_or_how_it_ends(tmp_path):
    right, wrong = tmp_path / "right.svg", tmp_path / "wrong.svg"
    out = poisoned(1, dtype=torch.int32)
    gluon_cpu.launch(many_steps, (1,), out, STEPS=100, RIGHT=True, timeline=right)
    with pytest.raises(gluon_cpu.DeviceAssert):
        gluon_cpu.launch(many_steps, (1,), out, STEPS=100, RIGHT=False, timeline=wrong)
    beginning, end = Drawn(right), Drawn(wrong)
    assert re.search(r"the first 2\d\d of \d+ steps", " ".join(beginning.texts))
    assert re.search(r"the last 2\d\d of \d+ steps: DeviceAssert", " ".join(end.texts))
    assert any("new_barrier" in tip for tip in beginning.tips("box"))
    assert not any("new_barrier" in tip for tip in end.tips("box"))
    assert "done" not in beginning.texts


def test_what_cannot_be_drawn_is_said_before_the_run(tmp_path, monkeypatch):
    out = poisoned(1, dtype=torch.int32)

    def launch(name: str) -> None:
        gluon_cpu.launch(many_steps, (1,), out, STEPS=1, RIGHT=True, timeline=tmp_path / name)

    with pytest.raises(ValueError, match=r"timeline: expected a file name that ends in \.svg or \.png, got .*run\.pdf"):
        launch("run.pdf")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"timeline: needs matplotlib, found none; install it with: pip install"):
        launch("run.svg")
    assert torch.equal(out, poisoned(1, dtype=torch.int32)), "it ran"
    assert list(tmp_path.iterdir()) == []


def test_ordinary_launches(tmp_path):
    file = tmp_path / "run.svg"
    with gluon_cpu.machine(timeline=file):
        many_steps[(1,)](poisoned(1, dtype=torch.int32), STEPS=1, RIGHT=True)
    assert "forth" in Drawn(file).texts


def test_a_trace_and_a_picture_of_one_run(tmp_path):
    pipeline(tmp_path / "run.svg", trace=tmp_path / "run.json")
    assert {path.name for path in tmp_path.iterdir()} == {"run.svg", "run.json"}


@pytest.mark.parametrize("right", [True, False])
def test_check_draws_once(right, tmp_path, monkeypatch):
    """Drawing takes longer than many a schedule."""
    drawn = []
    save = timeline.Picture.save

    def counted(picture: timeline.Picture, path: Path) -> None:
        drawn.append(picture.title())
        save(picture, path)

    monkeypatch.setattr(timeline.Picture, "save", counted)
    out, file = poisoned(1, dtype=torch.int32), tmp_path / "run.svg"

    def run() -> None:
        many_steps[(1,)](out, STEPS=1, RIGHT=right)

    if right:
        gluon_cpu.check(run, schedules=4, policies=("random",), quiet=True, timeline=file)
        assert drawn == ["many_steps, schedule random 3"]
    else:
        with pytest.raises(gluon_cpu.DeviceAssert):
            gluon_cpu.check(run, schedules=4, quiet=True, timeline=file)
        assert drawn == ["many_steps, schedule random 0: DeviceAssert"]
    assert file.exists()


STUCK = """
import torch
from tests.gluon_cpu import findings_more as more


def run():
    more.each_waits_for_the_other[(1,)](torch.zeros(1, dtype=torch.int32), BUG=True)
"""


def test_command_line(tmp_path):
    (tmp_path / "stuck.py").write_text(STUCK, encoding="utf-8")

    done = run_main(tmp_path, main, "check", "stuck.py::run", "--timeline", "run.svg")
    assert done.returncode == 1, done.stdout + done.stderr
    assert len([t for t in Drawn(tmp_path / "run.svg").texts if t.startswith("for ever: ")]) == 2
    wrong = run_main(tmp_path, main, "check", "stuck.py::run", "--timeline", "run.gif")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("timeline: expected a file name that ends in .svg or .png, got run.gif")
