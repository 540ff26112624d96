"""`machine`: a context in which ordinary launches run here. `check`: many schedules of whatever a function launches."""

import contextlib
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import given
from .defaults import DEFAULT_MODE, DEFAULT_SCHEDULE, LAUNCHED, RUNNING
from .findings import Finding
from .launch import OPTIONS, Report, launch
from .ops.mbarrier import plural
from .progress import Cost, Progress
from .schedule import POLICIES, Schedule
from .timeline import Timeline
from .verdicts import SEEN, Accept, Seen, Verdicts, shown
from .wanted import Wanted

# Held by the thread that runs kernels on the machine: how Triton runs kernels, and its driver, are the process's.
OF_THE_PROCESS = threading.RLock()


@contextlib.contextmanager
def machine(target: str = "sm_90a", **options: Any) -> Iterator[list[Report]]:
    """Ordinary `kernel[grid](...)` calls of Gluon kernels within run on the machine; yields the list of all reports.

    options: those of `launch`. What a call gives itself (num_warps, num_ctas) counts before them. `schedule` and
    `mode` hold for calls of `launch` within that give none as well.
    Raises ValueError for a target that there is not, and at the end for an entry of `outputs` that no launch had. A
    kernel of plain Triton raises TypeError, as the machine has nothing to run it on.
    Threads have it one after the other: it stands in for parts of Triton that all threads share. So a thread that is
    waited for within must not ask for it.
    """
    from .compat import GluonJITFunction, JITFunction
    from .front import arch_of, compile_options
    from .hooks import stand_in_driver

    arch_of(target)
    given.known(options, OPTIONS | compile_options(), "machine")
    Verdicts(options.get("skip", ()), options.get("accept", ()))
    if not isinstance(options.get("schedule"), Schedule | None):
        raise TypeError(f"schedule: expected a Schedule, as Schedule('late', seed=0), got {options['schedule']!r}")
    outputs = options.get("outputs")
    mine = None
    if outputs is not None and not isinstance(outputs, Wanted):
        mine = options["outputs"] = Wanted(outputs, shared=True)
    reports: list[Report] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup:  # compiled for a card, by Triton alone: host code looks at registers, shared memory or PTX
            return plain(self, *args, grid=grid, warmup=True, **kwargs)
        merged: dict[str, Any] = {"target": target, **options, **kwargs}
        if callable(grid):
            names = dict(zip(self.arg_names, args, strict=False)) | kwargs
            grid = grid(names)
        return launch(self, grid, *args, **merged)

    def refuse(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        raise TypeError(
            f"kernel: expected a Gluon kernel (@gluon.jit), got a Triton kernel (@triton.jit), {self.__name__}"
        )

    with OF_THE_PROCESS:
        previous, plain = GluonJITFunction.__dict__.get("run"), JITFunction.run
        GluonJITFunction.run, JITFunction.run = run, refuse
        token = DEFAULT_SCHEDULE.set(options.get("schedule") or DEFAULT_SCHEDULE.get())
        mode_token = DEFAULT_MODE.set(options.get("mode") or DEFAULT_MODE.get())
        running_token = RUNNING.set(True)
        launched_token = LAUNCHED.set(reports)
        try:
            with stand_in_driver(target):
                yield reports
            if mine is not None and reports:
                mine.refuse_unmet()
        finally:
            LAUNCHED.reset(launched_token)
            RUNNING.reset(running_token)
            DEFAULT_MODE.reset(mode_token)
            DEFAULT_SCHEDULE.reset(token)
            JITFunction.run = plain
            if previous is None:
                del GluonJITFunction.run
            else:
                GluonJITFunction.run = previous


def running() -> bool:
    """Whether ordinary launches run on the machine here: within `machine` or `check`."""
    return RUNNING.get()


def plan(count: int, policies: Sequence[str] | None, seed: int, **options: Any) -> list[dict[str, Any]]:
    """What to give `machine` for each of `count` runs: one policy after the other, each with seeds from `seed` on.

    The last of several runs is in lowered mode, unless a mode is given. Else kernels of one CTA would run in fast mode
    alone, which shows nothing of what the compiler does with memory and fences. Most of that shows under any schedule,
    so one run will do. It is the last one, so that a bug that shows anyway need not wait for a second compilation.
    Raises ValueError for less than one run or no policy, which would check nothing, and TypeError for a schedule.
    """
    given.whole("schedules", count)
    if count < 1:
        raise ValueError(f"schedules: expected at least one, got {count}; none would check nothing")
    if "schedule" in options:
        raise TypeError("schedule: many are made here; to run one alone, give schedules=1, policies=[...] and seed=")
    names = POLICIES if policies is None else policies
    given.listed("policies", names, of=f"policies, some of {POLICIES}")
    names = list(names)
    if not names:
        raise ValueError(f"policies: expected some of {POLICIES}, got none; none would check nothing")
    given.whole("seed", seed)
    runs = [options | {"schedule": Schedule(names[i % len(names)], seed + i // len(names))} for i in range(count)]
    if count > 1:
        runs[-1] = {"mode": "lowered"} | runs[-1]
    return runs


class NothingChecked(Exception):
    """No kernel was launched, so that there was nothing to find anything in."""


@dataclass
class CheckResult:
    """What `check` saw: how many schedules ran, how many launches, the findings, and which of them were accepted.

    cost: what the first schedule took; None if that one had a finding.
    notes: what the function did beside: caught a finding, raised something else.
    """

    tried: int
    launches: int
    findings: list[Finding]
    accepted: Counter[Accept]
    unused: list[Accept]  # accepted, but not found
    seconds: float
    cost: Cost | None = None
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        never = "".join(f"\n  accepted, but not found: {entry}" for entry in self.unused)
        rest = shown(self.accepted) + never + "".join(f"\n  {note}" for note in self.notes)
        if not self.findings:
            return f"{plural(self.tried, 'schedule')}, no finding, {self.seconds:.1f} s{rest}"
        texts = [
            f"{type(f).__name__} after {plural(self.tried, 'schedule')}:\n{f}" for f in self.findings
        ]  # each says how to replay it
        count = f"{plural(len(texts), 'finding')}:\n\n" if len(texts) > 1 else ""
        return count + "\n\n".join(texts) + rest


def findings_in(error: BaseException) -> tuple[list[Finding], BaseException | None]:
    """The findings that an exception is or holds, and what else it is."""
    if isinstance(error, Finding):
        return [error], None
    if not isinstance(error, BaseExceptionGroup):
        return [], error
    parts = [findings_in(inner) for inner in error.exceptions]
    return [finding for found, _ in parts for finding in found], error.split(Finding)[1]


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
    """Call `fn` under `machine`, once per schedule, the policies one after the other; raises the first finding.

    The last of several schedules runs in lowered mode, unless a mode is given.
    Before that it prints the finding with the policy and the seed that replay it: `schedule=Schedule(policy, seed)`.
    options: those of `launch`. With keep_going=True all schedules run, and an ExceptionGroup of the distinct findings
    comes at the end: a finding is distinct by its kind and its lines. What the function raises beside findings is in
    the group too, once. A finding that the function catches is one all the same: `accept` passes over a known one.
    progress: whether stderr says what a schedule costs and how far it is; default: if it is a terminal, unless `quiet`.
    timeline: as of `launch`, drawn once: of the last launch, or of that with the finding.
    Raises NothingChecked if `fn` launches no kernel, and ValueError for less than one schedule.
    """
    start = time.perf_counter()
    if not callable(fn):
        raise TypeError(f"fn: expected a function without arguments that launches kernels, got {fn!r}")
    runs = plan(schedules, policies, seed, **options)
    picture = None if options.get("timeline") is None else Timeline(options["timeline"], later=True)
    bar = Progress(False if quiet and progress is None else progress)
    name = getattr(fn, "__name__", repr(fn))
    seen = Seen()
    token = SEEN.set(seen)
    tried = 0
    crash: BaseException | None = None
    notes = set()
    try:
        for chosen in bar.over(runs):
            tried += 1
            try:
                with machine(target, **chosen | ({} if picture is None else {"timeline": picture})) as bar.reports:
                    fn()
            except (Exception, SystemExit) as error:
                found, rest = findings_in(error)
                seen.raised += [finding for finding in found if finding not in seen.raised]
                crash = crash or rest
            else:
                if not seen.launches:
                    raise NothingChecked(f"{name} launched no kernel: there was nothing to check")
                if seen.raised:
                    notes.add(f"{name} caught a finding and went on; to pass over a known one, give accept=[...]")
            if seen.collect() and not options.get("keep_going"):
                break
            if crash is not None and not seen.findings:
                if not quiet and seen.accepted:
                    print(f"{name} raised {type(crash).__name__}, which may follow from this:{shown(seen.accepted)}")
                raise crash
    finally:
        bar.clear()
        SEEN.reset(token)
        if picture is not None:
            picture.draw()
    unused = [entry for entry in options.get("accept", ()) if entry not in seen.accepted]
    seconds = time.perf_counter() - start
    if crash is not None:
        words = "".join(traceback.format_exception_only(crash)).strip()
        notes.add(f"{name} raised something else as well, which may follow from a finding: {words}")
    result = CheckResult(
        tried, seen.launches, seen.findings, seen.accepted, unused, seconds, bar.cost, tuple(sorted(notes))
    )
    if not quiet:
        print(result)
    if crash is not None or (result.findings and options.get("keep_going")):
        message = f"{plural(len(result.findings), 'finding')} in {plural(tried, 'schedule')}"
        if crash is None:
            raise ExceptionGroup(message, result.findings)
        raise BaseExceptionGroup(f"{message}, and {type(crash).__name__}", [*result.findings, crash])
    if result.findings:
        raise result.findings[0]
    return result
