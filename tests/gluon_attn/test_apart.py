"""Items in processes of their own: a hang or a crash stops nothing else."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gluon_attn.apart import Apart, Skipped


def run_item(name: str) -> None:
    """Runs in a process of its own, see below."""
    print(f"this is {name}")
    if name == "fails":
        raise ValueError("a reason")
    if name == "skips":
        raise Skipped("another reason")
    if name == "hangs":
        time.sleep(600)
    if name == "crashes":
        os.abort()
    assert os.environ["GIVEN"] == "yes"


ITEMS = ("first", "fails", "hangs", "second", "crashes", "skips", "last")


@pytest.mark.slow
def test_a_hang_stops_nothing_else(monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # or nothing that is printed could get lost
    apart = Apart(
        function="tests.gluon_attn.test_apart:run_item",
        group=lambda name: "all",
        item_seconds=20,  # a busy machine needs some of them to start the process
        env={"GIVEN": "yes"},
    )
    with ThreadPoolExecutor(1) as pool:
        outcomes = next(iter(apart.start(ITEMS, pool).values())).result()
    assert {name: outcome.verdict for name, outcome in outcomes.items()} == {
        "first": "passed",
        "fails": "failed",
        "hangs": "failed",
        "second": "passed",
        "crashes": "failed",
        "skips": "skipped",
        "last": "passed",
    }
    assert "ValueError: a reason" in outcomes["fails"].text
    assert "this is fails" in outcomes["fails"].text
    assert "this is hangs" in outcomes["hangs"].text
    assert "run_item" in outcomes["hangs"].text  # where it hung
    assert "this is crashes" in outcomes["crashes"].text
    assert "another reason" in outcomes["skips"].text


def test_a_group_that_keeps_crashing_is_given_up():
    apart = Apart(
        function="tests.gluon_attn.test_apart:run_item", group=lambda name: "all", item_seconds=60, restarts=0
    )
    outcomes = apart.run_group(["crashes", "first"])
    assert outcomes["crashes"].verdict == "failed"
    assert "not run" in outcomes["first"].text
