"""Runs a kernel under several schedules, right or with one bug.

The bugs are chosen at run time, by a number, so that a kernel and all its bugs are compiled once.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest

import gluon_cpu
from tests.compat import CompilationError

SCHEDULES = [
    gluon_cpu.Schedule(policy, seed=seed) for policy in ("random", "late", "starve", "early") for seed in (0, 1)
]
NO_BUG = 0


def under_schedules(run: Callable[[gluon_cpu.Schedule], None]) -> None:
    for schedule in SCHEDULES:
        run(schedule)


def finds(kind: type[gluon_cpu.Finding], run: Callable[[gluon_cpu.Schedule], None]) -> None:
    """`run` ends with a finding of exactly this kind, under one schedule at the latest."""
    with pytest.raises(gluon_cpu.Finding) as found:
        under_schedules(run)
    assert found.type is kind, found.value


def refuses(message: str | None, run: Callable[..., Any], *args: Any, **options: Any) -> None:
    """The compiler refuses the kernel with this message: a regular expression, but for its brackets. None: it does
    not."""
    if message is None:
        run(*args, **options)
        return
    with pytest.raises(CompilationError) as found:
        run(*args, **options)
    first: BaseException = found.value
    while first.__cause__ is not None:
        first = first.__cause__
    assert re.search(message.replace("[", r"\["), str(first))
