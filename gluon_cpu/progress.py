"""What a check costs, known after its first schedule, and how far it is: a line on stderr."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from .launch import Report
from .ops.mbarrier import plural

# Seconds from one line to the next: on a terminal it changes in place, elsewhere each stays.
ON_TERMINAL, ELSEWHERE = 0.1, 10.0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one schedule. seconds: without those that went into compiling."""

    launches: int
    programs: int
    steps: int
    seconds: float
    compile_seconds: float

    def __str__(self) -> str:
        launches = "1 launch" if self.launches == 1 else f"{self.launches} launches"
        return (
            f"{launches}, {plural(self.programs, 'program')}, {plural(self.steps, 'step')}, {duration(self.seconds)}, "
            f"after {duration(self.compile_seconds)} of compiling"
        )


def duration(seconds: float) -> str:
    if seconds < 0.1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Progress:
    """shown: None: if the stream is a terminal. `reports`: of the launches of the schedule that runs."""

    def __init__(
        self, shown: bool | None, *, stream: TextIO | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.clock = clock
        self.terminal = self.stream.isatty()
        self.shown = self.terminal if shown is None else shown
        self.reports: list[Report] = []
        self.cost: Cost | None = None
        self.seconds = 0.0  # of all schedules so far, without compiling
        self.again = 0.0  # for compiling in another mode, by the last schedule
        self.last_said = -math.inf

    def over(self, runs: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The runs, each timed until the next is asked for."""
        if self.terminal:
            self.say(f"schedule 1 of {len(runs)}: the first compiles")
        for done, run in enumerate(runs, 1):
            start = self.clock()
            yield run
            compiling = sum(r.compile_seconds for r in self.reports)
            self.seconds += max(self.clock() - start - compiling, 0.0)
            if done == 1:
                self.first(runs, compiling)
            elif done < len(runs) and self.clock() - self.last_said >= (ON_TERMINAL if self.terminal else ELSEWHERE):
                self.say(f"{done} of {len(runs)} schedules, about {duration(self.left(done, len(runs)))} left")
        self.clear()

    def left(self, done: int, total: int) -> float:
        return self.seconds / done * (total - done) + self.again

    def first(self, runs: Sequence[dict[str, Any]], compiling: float) -> None:
        """The first schedule is over: what it took, and what all will take."""
        programs, steps = (sum(getattr(r, name) for r in self.reports) for name in ("programs", "steps"))
        self.cost = Cost(
            launches=len(self.reports),
            programs=programs,
            steps=steps,
            seconds=self.seconds,
            compile_seconds=compiling,
        )
        if runs[-1].get("mode") == "lowered" and any(r.mode != "lowered" for r in self.reports):
            self.again = compiling
        whole = duration(compiling + self.seconds + self.left(1, len(runs)))
        self.clear()
        self.say(
            f"a schedule: {self.cost}" + (f"; all {len(runs)}: about {whole}" if len(runs) > 1 else ""), stays=True
        )

    def say(self, text: str, stays: bool = False) -> None:
        if self.shown:
            self.stream.write(f"\r\033[K{text}" if self.terminal else text)
            self.stream.write("\n" if stays or not self.terminal else "")
            self.stream.flush()
            self.last_said = self.clock()

    def clear(self) -> None:
        """Before anything else is printed."""
        if self.shown and self.terminal:
            self.stream.write("\r\033[K")
            self.stream.flush()
