"""Work in child processes: answers, errors, hangs and crashes."""

import math
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.ahead import Failed, Workers, cores


def run_all(work: Callable[[Any], Any], jobs: Sequence[Any], *, at_once: int, limit_s: float) -> list[tuple[int, Any]]:
    with Workers(work, at_once=at_once, limit_s=limit_s) as workers:
        return list(workers.run(jobs))


def test_answers_and_errors():
    found = dict(run_all(math.sqrt, [4.0, -1.0, 9.0], at_once=2, limit_s=60))
    assert found[0] == 2
    assert found[2] == 3
    assert isinstance(found[1], Failed)
    assert found[1].why.startswith("ValueError: ")


def test_what_hangs_is_killed_and_the_rest_is_done():
    start = time.monotonic()
    found = dict(run_all(time.sleep, [0.0, 600.0, 0.01, 0.02], at_once=1, limit_s=1))
    assert found == {0: None, 1: Failed("took more than 1 s"), 2: None, 3: None}
    assert time.monotonic() - start < 300


def test_what_crashes_takes_nothing_along():
    found = dict(run_all(os._exit, [3, 4], at_once=1, limit_s=60))
    assert found == {0: Failed("its process ended with 3"), 1: Failed("its process ended with 4")}


def test_without_jobs():
    assert run_all(time.sleep, [], at_once=4, limit_s=1) == []


def test_without_time_nothing_is_done_any_more():
    """What is being done then is given up, and the processes are there for more work."""
    with Workers(time.sleep, at_once=2, limit_s=600) as workers:
        assert list(workers.run([600.0, 600.0, 600.0], within_s=0)) == []
        assert sorted(workers.run([0.0, 0.01])) == [(0, None), (1, None)]
        begun = [number for number, _ in workers.run([0.0, 600.0], within_s=1)]
        assert begun in ([], [0])
        assert len(workers.there) <= 1


def process_id(_: object) -> int:
    return os.getpid()


def test_processes_stay_for_more_work():
    with Workers(process_id, at_once=1, limit_s=60) as workers:
        first, second = (dict(workers.run([None, None])) for _ in range(2))
    assert set(first.values()) == set(second.values())
    assert len(set(first.values())) == 1


def test_what_is_no_longer_waited_for_is_given_up():
    start = time.monotonic()
    with Workers(time.sleep, at_once=2, limit_s=600) as workers:
        for number, _ in workers.run([0.0, 600.0, 600.0]):
            assert number == 0
            break
        assert dict(workers.run([0.0])) == {0: None}
    assert time.monotonic() - start < 300


def start_sleeping(path: str) -> None:
    """Start a process that sleeps, write its id, and wait for it: as Triton does with the assembler."""
    with subprocess.Popen(["sleep", "600"]) as child:
        Path(path).write_text(str(child.pid))


@pytest.mark.slow  # a limit within which a busy machine too has begun
def test_what_a_killed_process_had_started_is_killed_too(tmp_path):
    path = tmp_path / "pid"
    found = run_all(start_sleeping, [str(path)], at_once=1, limit_s=40)
    assert found == [(0, Failed("took more than 40 s"))]
    pid, deadline = int(path.read_text()), time.monotonic() + 60
    while time.monotonic() < deadline:
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or ") Z " in state.read_text():
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} still runs")


@pytest.mark.parametrize(
    ("text", "expected"), [("100000 100000", 1), ("50000 100000", 1), ("max 100000", None), (None, None)]
)
def test_cores_are_those_that_a_container_has(tmp_path, text, expected):
    path = tmp_path / "cpu.max"
    if text is not None:
        path.write_text(text + "\n")
    assert cores(path) == (len(os.sched_getaffinity(0)) if expected is None else expected)
