"""Traces of a launch."""

import itertools
import json
from pathlib import Path

import torch

import gluon_cpu
from tests.gluon_cpu import findings_hopper as hopper
from tests.gluon_cpu.support import descriptor, normal, poisoned


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
