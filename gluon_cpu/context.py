"""`machine`: a context in which ordinary launches run here. `check`: many schedules of whatever a function launches."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .defaults import DEFAULT_MODE, DEFAULT_SCHEDULE, LAUNCHED, RUNNING
from .findings import Finding
from .launch import Report, launch
from .ops.mbarrier import plural
from .progress import Cost, Progress
from .schedule import POLICIES, Schedule
from .timeline import Timeline


@contextlib.contextmanager
def machine(target: str = "sm_90a", **options: Any) -> Iterator[list[Report]]:
    """Ordinary `kernel[grid](...)` calls of Gluon kernels within run on the machine; yields the list of all reports.

    options: those of `launch`. What a call gives itself (num_warps, num_ctas) counts before them. `schedule` and
    `mode` hold for calls of `launch` within that give none as well.
    """
    from .compat import GluonJITFunction
    from .hooks import stand_in_driver

    reports: list[Report] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup:
            raise NotImplementedError("warmup: there is nothing to warm up on the CPU machine")
        merged: dict[str, Any] = {"target": target, **options, **kwargs}
        if callable(grid):
            names = dict(zip(self.arg_names, args, strict=False)) | kwargs
            grid = grid(names)
        return launch(self, grid, *args, **merged)

    previous = GluonJITFunction.__dict__.get("run")
    GluonJITFunction.run = run
    token = DEFAULT_SCHEDULE.set(options.get("schedule") or DEFAULT_SCHEDULE.get())
    mode_token = DEFAULT_MODE.set(options.get("mode") or DEFAULT_MODE.get())
    running_token = RUNNING.set(True)
    launched_token = LAUNCHED.set(reports)
    try:
        with stand_in_driver(target):
            yield reports
    finally:
        LAUNCHED.reset(launched_token)
        RUNNING.reset(running_token)
        DEFAULT_MODE.reset(mode_token)
        DEFAULT_SCHEDULE.reset(token)
        if previous is None:
            del GluonJITFunction.run
        else:
            GluonJITFunction.run = previous


def running() -> bool:
    """Whether ordinary launches run on the machine here: within `machine` or `check`."""
    return RUNNING.get()


def plan(count: int, policies: Sequence[str] | None, seed: int, **options: Any) -> list[dict[str, Any]]:
    """What to give `machine` for each of `count` runs: the policies in turn, each with seeds from `seed` on.

    The last of several runs is in lowered mode, unless a mode is given. Else kernels of one CTA would run in fast mode
    alone, which shows nothing of what the compiler does with memory and fences. Most of that shows under any schedule,
    so one run will do. It is the last one, so that a bug that shows anyway need not wait for a second compilation.
    """
    names = POLICIES if policies is None else policies
    runs = [options | {"schedule": Schedule(names[i % len(names)], seed + i // len(names))} for i in range(count)]
    if count > 1:
        runs[-1] = {"mode": "lowered"} | runs[-1]
    return runs


@dataclass
class CheckResult:
    """What `check` saw: how many schedules ran, and the finding that stopped it, if any.

    cost: what the first schedule took; None if that one had a finding.
    """

    tried: int
    finding: Finding | None
    schedule: Schedule | None
    seconds: float
    cost: Cost | None = None

    @property
    def ok(self) -> bool:
        return self.finding is None

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.finding is None:
            return f"{plural(self.tried, 'schedule')}, no finding, {self.seconds:.1f} s"
        name = type(self.finding).__name__
        return f"{name} after {plural(self.tried, 'schedule')}:\n{self.finding}"  # which says how to replay it


def check(
    fn: Callable[[], Any],
    schedules: int = 200,
    policies: Sequence[str] = POLICIES,
    *,
    seed: int = 0,
    target: str = "sm_90a",
    quiet: bool = False,
    progress: bool | None = None,
    **options: Any,
) -> CheckResult:
    """Call `fn` under `machine`, once per schedule, the policies in turn; raises the first finding.

    The last of several schedules runs in lowered mode, unless a mode is given.
    Before that it prints the finding with the policy and the seed that replay it: `schedule=Schedule(policy, seed)`.
    progress: whether stderr says what a schedule costs and how far it is; default: if it is a terminal, unless `quiet`.
    timeline: as of `launch`, drawn once: of the last launch, or of that with the finding.
    """
    start = time.perf_counter()
    picture = None if options.get("timeline") is None else Timeline(options["timeline"], later=True)
    if picture is not None:
        options["timeline"] = picture
    shown = Progress(False if quiet and progress is None else progress)
    try:
        for i, chosen in enumerate(shown.over(plan(schedules, policies, seed, **options))):
            try:
                with machine(target, **chosen) as shown.reports:
                    fn()
            except Finding as finding:
                shown.clear()
                if not quiet:
                    print(CheckResult(i + 1, finding, chosen["schedule"], time.perf_counter() - start, shown.cost))
                raise
    finally:
        if picture is not None:
            picture.draw()
    result = CheckResult(schedules, None, None, time.perf_counter() - start, shown.cost)
    if not quiet:
        print(result)
    return result
