"""A Chrome trace of a run: one row per role and per engine, waits with an arrow from what ended them.

Open it in Perfetto or chrome://tracing. Time is counted in steps of the scheduler, one to a microsecond: it shows the
order of things, not how long they take on a card.
"""

import json
from pathlib import Path
from typing import Any

from .ir.locations import short


def label(info: Any) -> str:
    if info is None:
        return "starts"
    where = f" ({short(info.site.frames[0].file)}:{info.site.frames[0].line})" if info.site.frames else ""
    return f"{info.what}{where}"


class Trace:
    def __init__(self, path: str) -> None:
        self.path = Path(path)
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

    def step(self, agent: Any) -> None:
        """A role was let go on: from where it stopped to where it stops next."""
        info = agent.at
        source = {"source": info.site.source, "where": info.site.where} if info is not None else {}
        self.span(agent.cluster.number, agent.who, label(info), float(agent.cluster.machine.steps), 1.0, **source)

    def task(self, task: Any) -> None:
        info = task.info
        now = float(task.cluster.machine.steps)
        self.span(task.cluster.number, task.who, label(info), now, 1.0, source=info.site.source, where=info.site.where)

    def product(self, agent: Any, info: Any) -> None:
        self.span(agent.cluster.number, f"wgmma for {agent.who}", label(info), float(agent.cluster.machine.steps), 1.0)

    def block(self, agent: Any, waitable: Any) -> None:
        name = getattr(waitable, "place", None) or waitable.describe()
        self.blocked[agent] = (float(agent.cluster.machine.steps) + 1, f"wait: {name}")

    def wake(self, agent: Any, waitable: Any) -> None:
        start, name = self.blocked.pop(agent, (None, ""))
        if start is None:
            return
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
        """Nothing to draw: the row ends."""

    def save(self) -> None:
        self.path.write_text(json.dumps({"traceEvents": self.events, "displayTimeUnit": "ms"}), encoding="utf-8")
