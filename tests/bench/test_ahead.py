"""Work in child processes: answers, errors, hangs and crashes."""

import math
import os
import time

from bench.ahead import Failed, run_all


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
    assert list(run_all(time.sleep, [], at_once=4, limit_s=1)) == []
