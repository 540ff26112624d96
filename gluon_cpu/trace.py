"""What happens in a run: one row per role and per engine, waits with what ended them.

Written as a Chrome trace for Perfetto or chrome://tracing, or drawn by timeline.py. Time is counted in steps of the
scheduler, one to a microsecond: it shows the order of things, not how long they take on a card.
"""

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .findings import Deadlock, Finding
from .ir.locations import short
from .ops.mbarrier import Barrier
from .ops.tma import Task


@dataclass(frozen=True, kw_only=True, order=True, slots=True)
class Row:
    """A role, or an engine that works for it. Rows sort by program, CTA, role, and the engines after their role."""

    program: int
    cta: int
    role_number: int
    engine: str  # '': the role itself
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """Something done in one step."""

    row: Row
    step: int
    nth: int  # of this row in this step
    info: Any  # the operation; None: it only starts
    finding: bool = False  # where the run ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """A wait that blocked; `ended_by` is the box (row, step, nth) that let it go on."""

    row: Row
    start: int
    end: int | None  # None: it never ended
    target: Any
    phase: int | None  # that it waits for, of a barrier
    ended_by: tuple[Row, int, int] | None = None


def row_for(agent: Any, engine: str) -> Row:
    role = agent.role + (f" (CTA {agent.cta.number})" if agent.cluster.num_ctas > 1 else "")
    return Row(
        program=agent.cluster.number,
        cta=agent.cta.number,
        role_number=agent.role_number,
        engine=engine,
        name=f"{engine} for {role}" if engine else role,
    )


def label(info: Any) -> str:
    if info is None:
        return "starts"
    where = f" ({short(info.site.frames[0].file)}:{info.site.frames[0].line})" if info.site.frames else ""
    return f"{info.what}{where}"


class Trace:
    def __init__(self, path: str | None) -> None:
        """path: None to record without writing."""
        self.path = None if path is None else Path(path)
        self.boxes: list[Box] = []
        self.waits: list[Wait] = []
        self.open: dict[Any, Wait] = {}  # by agent
        self.known: dict[tuple[Any, str], Row] = {}
        self.ends: dict[Row, int] = {}  # the step in which a role was done
        self.finding: Finding | None = None
        self.counts: Counter[Row] = Counter()  # of boxes, in this step
        self.counted = -1
        self.events: list[dict[str, Any]] = []
        self.rows: dict[tuple[int, str], int] = {}
        self.row_end: dict[tuple[int, int], float] = {}
        self.blocked: dict[Any, tuple[float, str]] = {}
        self.flows = 0
        self.last: tuple[int, int, float] = (0, 0, 0.0)  # the row and time of what happened last

    def row(self, pid: int, name: str) -> int:
        key = (pid, name)
        if key not in self.rows:
            self.rows[key] = len(self.rows) + 1
            if not any(p == pid for p, _ in list(self.rows)[:-1]):
                self.meta(pid, 0, "process_name", f"program {pid}")
            self.meta(pid, self.rows[key], "thread_name", name)
        return self.rows[key]

    def meta(self, pid: int, tid: int, kind: str, name: str) -> None:
        self.events.append({"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}})

    def span(self, pid: int, row: str, name: str, start: float, duration: float, **args: Any) -> None:
        if self.path is None:
            return
        tid = self.row(pid, row)
        end = self.row_end.get((pid, tid), 0.0)
        if start < end:  # several within one step of the scheduler
            start, duration = end, min(duration, 0.01)
        self.row_end[(pid, tid)] = start + duration
        event = {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start, "dur": duration}
        if args:
            event["args"] = args
        self.events.append(event)
        self.last = (pid, tid, start)

    def row_of(self, runner: Any, engine: str = "") -> Row:
        """runner: an agent, or a task of an engine."""
        key = (runner.agent, runner.engine) if isinstance(runner, Task) else (runner, engine)
        if key not in self.known:
            self.known[key] = row_for(*key)
        return self.known[key]

    def box(self, row: Row, step: int, info: Any) -> None:
        if step != self.counted:
            self.counts, self.counted = Counter(), step
        self.boxes.append(Box(row=row, step=step, nth=self.counts[row], info=info))
        self.counts[row] += 1

    def step(self, agent: Any) -> None:
        """A role was let go on: from where it stopped to where it stops next."""
        info = agent.at
        self.box(self.row_of(agent), agent.cluster.machine.steps, info)
        source = {"source": info.site.source, "where": info.site.where} if info is not None else {}
        self.span(agent.cluster.number, agent.who, label(info), float(agent.cluster.machine.steps), 1.0, **source)

    def task(self, task: Any) -> None:
        info = task.info
        self.box(self.row_of(task), task.cluster.machine.steps, info)
        now = float(task.cluster.machine.steps)
        self.span(task.cluster.number, task.who, label(info), now, 1.0, source=info.site.source, where=info.site.where)

    def product(self, agent: Any, info: Any) -> None:
        self.box(self.row_of(agent, "wgmma"), agent.cluster.machine.steps, info)
        self.span(agent.cluster.number, f"wgmma for {agent.who}", label(info), float(agent.cluster.machine.steps), 1.0)

    def block(self, agent: Any, waitable: Any) -> None:
        self.counts[self.boxes.pop().row] -= 1  # the step just taken: it did nothing but begin to wait
        phase = agent.wanted_phase if isinstance(waitable, Barrier) else None
        self.open[agent] = Wait(
            row=self.row_of(agent), start=agent.cluster.machine.steps, end=None, target=waitable, phase=phase
        )
        name = getattr(waitable, "place", None) or waitable.describe()
        self.blocked[agent] = (float(agent.cluster.machine.steps) + 1, f"wait: {name}")

    def wake(self, agent: Any, waitable: Any) -> None:
        start, name = self.blocked.pop(agent, (None, ""))
        if start is None:
            return
        runner, now = agent.cluster.machine.at, agent.cluster.machine.steps
        # An engine's box is there already, a role's comes after its step.
        nth = max(self.counts[self.row_of(runner)] - 1, 0) if self.counted == now else 0
        self.waits.append(replace(self.open.pop(agent), end=now, ended_by=(self.row_of(runner), now, nth)))
        cause = self.cause(agent)
        end = float(agent.cluster.machine.steps) + 1
        pid, tid = agent.cluster.number, self.row(agent.cluster.number, agent.who)
        where = agent.at.site.where if agent.at is not None else ""
        self.span(pid, agent.who, name, start, max(end - start, 0.0), where=where)
        self.flows += 1
        flow = {"name": "ends the wait", "cat": "wait", "id": self.flows}
        self.events.append({"ph": "s", "pid": cause[0], "tid": cause[1], "ts": cause[2], **flow})
        self.events.append({"ph": "f", "bp": "e", "pid": pid, "tid": tid, "ts": max(start, end - 0.001), **flow})

    def cause(self, agent: Any) -> tuple[int, int, float]:
        """Row and time of whoever is running: it is about to wake `agent`."""
        runner = agent.cluster.machine.at
        pid = runner.cluster.number
        return pid, self.row(pid, runner.who), float(runner.cluster.machine.steps) + 0.5

    def finish(self, agent: Any) -> None:
        """The role is done with its last step."""
        self.step(agent)
        self.ends[self.row_of(agent)] = agent.cluster.machine.steps

    def found(self, machine: Any, finding: Finding) -> None:
        """The run ended so; the operation that showed it gets its box, which a step that raises does not draw."""
        self.finding = finding
        runner = machine.at
        info = None if runner is None else runner.info if isinstance(runner, Task) else runner.at
        if isinstance(finding, Deadlock) or info is None or info.site not in finding.sites:
            return
        row = self.row_of(runner)
        if not (self.boxes and (self.boxes[-1].row, self.boxes[-1].step) == (row, machine.steps)):
            self.box(row, machine.steps, info)
        self.boxes[-1] = replace(self.boxes[-1], finding=True)

    def save(self) -> None:
        if self.path is None:
            return
        self.path.write_text(json.dumps({"traceEvents": self.events, "displayTimeUnit": "ms"}), encoding="utf-8")
