"""`python -m bench learn`: what it times is right, on gluon_cpu in place of the card; and what it writes and shows."""

import json
import sys
from functools import partial
from typing import Any

import pytest
import torch

import gluon_cpu
from bench import __main__ as bench
from bench import learn
from bench.timing import Timing
from gluon_attn.device import Device
from gluon_attn.lessons import lessons

SMALL = learn.Sizes(programs=2, tiles=2, heads=1, length=256, gemm=256, device="cpu")


@pytest.fixture
def timed(monkeypatch) -> None:
    """As if each call took the longer, the later it comes."""

    def times(calls: Any, **options: Any) -> dict[str, Timing]:
        return {name: Timing(1e-6 * (10 - i), (1e-6, 1.1e-6)) for i, name in enumerate(calls)}

    monkeypatch.setattr(learn, "time_interleaved", times)
    for name in ("attention", "attention_backward"):
        monkeypatch.setattr(learn, name, partial(getattr(learn, name), device=Device.hopper()))


@pytest.mark.slow
@pytest.mark.parametrize("make", learn.PROBLEMS, ids=lambda make: make.__name__)
def test_every_call_is_right(make, timed):
    with gluon_cpu.machine():
        problem = make(SMALL)
        point = json.loads(json.dumps(learn.measure(problem, 1)))
    assert point["refused"] == {}
    assert [result["name"] for result in point["results"]] == [call.name for call in problem.calls]
    assert {call.lesson for call in problem.calls} - {None} <= set(lessons())


def test_what_is_wrong_is_told_and_not_timed(timed):
    out = torch.zeros(4)

    def half() -> torch.Tensor:
        out[:2] = 1
        return out

    calls = (
        learn.Call(lesson=1, name="right", run=lambda: out.fill_(1.0)),
        learn.Call(lesson=2, name="half of it", run=half),
    )
    problem = learn.Problem(name="ones", work=1e6, unit="GB/s", tolerance=0.0, out=out, calls=calls)
    point = learn.measure(problem, 1)
    assert list(point["refused"]) == ["half of it"]
    assert [result["name"] for result in point["results"]] == ["right"]


REPORT = {
    "provenance": {"card": "NVIDIA H200", "date": "2026-01-01", "triton": "3.9.0"},
    "points": [
        {
            "problem": "attention",
            "unit": "TFLOP/s",
            "results": [
                {"lesson": 1, "name": "unfused", "microseconds": 900.0, "rate": 90.4, "spread": 0.01},
                {"lesson": 4, "name": "one consumer", "microseconds": 450.0, "rate": 180.8, "spread": 0.01},
                {"lesson": None, "name": "library", "microseconds": 150.0, "rate": 542.0, "spread": 0.01},
                {"lesson": 5, "name": "turns", "microseconds": 225.0, "rate": 361.0, "spread": 0.01},
            ],
            "refused": {"other": "differs by 1"},
        }
    ],
}


def test_tables(tmp_path, monkeypatch, capsys):
    """A yardstick is nobody's lesson before."""
    file = tmp_path / "report.json"
    file.write_text(json.dumps(REPORT), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["bench", "learn", "--show", str(file)])
    bench.main()
    shown = capsys.readouterr().out
    assert "On an H200, 2026-01-01, Triton 3.9.0." in shown
    rows = ("1 | unfused | 900 | 90 | –", "4 | one consumer | 450 | 181 | 2.00", "– | library | 150 | 542 | –")
    assert all(f"| {row} |" in shown for row in rows)
    assert "| 5 | turns | 225 | 361 | 2.00 |" in shown
    assert "Not timed: other differs by 1." in shown


def test_a_step_begins_at_the_row_that_differs_in_one_thing(monkeypatch):
    """Not at one that was not timed; a caption names it where it is not the row above."""
    monkeypatch.setattr(learn, "AGAINST", {"turns": "unfused", "one consumer": "not timed"})
    shown = "\n".join(learn.tables(REPORT))
    assert "| 4 | one consumer | 450 | 181 | – |" in shown
    assert "| 5 | turns | 225 | 361 | 4.00 |" in shown
    assert "\n\nSome steps do not begin at the row above.\n\n- *turns*: from *unfused*\n\n" in shown


def test_steps_begin_at_rows_of_the_same_problem(timed):
    with gluon_cpu.machine():
        named = [{call.name for call in make(SMALL).calls} for make in learn.PROBLEMS]
    for name, start in learn.AGAINST.items():
        assert [name in names and start in names for names in named].count(True) == 1, name


def card(monkeypatch, capability: tuple[int, int] | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


@pytest.mark.parametrize("capability", [None, (8, 0), (10, 0)])
def test_another_card_or_none_is_refused(capability, monkeypatch):
    card(monkeypatch, capability)
    with pytest.raises(SystemExit, match=r"needs a Hopper card .*nothing was timed"):
        learn.main([])


@pytest.mark.parametrize("arguments", [["--out", "x.txt"], ["--rounds", "0"]])
def test_wrong_options_are_refused(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        learn.main(arguments)
    assert f"{arguments[0]}: expected" in capsys.readouterr().err


def test_the_whole_run(tmp_path, monkeypatch, timed, capsys):
    """The file is there after each problem."""
    card(monkeypatch, (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("Card", (), {"multi_processor_count": 2}))
    monkeypatch.setattr(learn, "provenance", lambda commit: REPORT["provenance"])
    monkeypatch.setattr(learn, "PROBLEMS", (lambda _: learn.copies(SMALL),))
    with gluon_cpu.machine():
        learn.main(["--out", str(tmp_path / "new" / "out.json"), "--rounds", "1"])
    written = json.loads((tmp_path / "new" / "out.json").read_text(encoding="utf-8"))
    assert [point["unit"] for point in written["points"]] == ["GB/s"]
    assert "a ring of 3 by hand" in capsys.readouterr().out
