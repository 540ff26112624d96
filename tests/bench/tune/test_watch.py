"""A process that is watched: what hangs in it ends it, and only that."""

import math
import os
import signal
import sys
import time

import pytest

from bench.tune.watch import Watch, run_watched


class Clock:
    """Of the watching process alone: it moves when it is told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_what_is_within_its_time_is_not_over():
    clock = Clock()
    watch = Watch(clock)
    seen = [watch.is_over]
    with watch.within(5):
        for seconds in (4.9, 0.2):
            clock.now_s += seconds
            seen.append(watch.is_over)
    seen.append(watch.is_over)
    with pytest.raises(ValueError, match="invalid literal"), watch.within(5):
        int("no")
    clock.now_s += 10
    seen.append(watch.is_over)
    assert seen == [False, False, True, False, False]


def hang(watch: Watch) -> None:
    """For ever, as code does that never comes back."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    with watch.within(0):
        idle()


def idle() -> None:
    while True:
        time.sleep(60)


def test_a_hang_ends_the_process():
    """However slow the machine is, it is over sooner or later, as nothing else ends it."""
    watch = Watch()
    assert run_watched(hang, (watch,), watch, math.inf) == -signal.SIGKILL


def test_a_process_ends_with_the_time_of_all(monkeypatch):
    assert run_watched(idle, (), Watch(), 0.0) == -signal.SIGKILL


@pytest.mark.parametrize(("target", "args", "status"), [(sys.exit, (3,), 3), (os.abort, (), -signal.SIGABRT)])
def test_how_a_process_ends_by_itself(target, args, status):
    assert run_watched(target, args, Watch(), math.inf) == status
