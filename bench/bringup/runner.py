"""Steps, one after the other, each in a process of its own with a time limit; and the report on them.

A kernel that has never run may hang, take its process down, or take the CUDA context with it. So the runner itself
never touches the card. It starts a step as the leader of a process group, kills the whole group in the end, whatever is
left of it, and writes the report anew after each step: what is known then stays known.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PRINTED = 8000  # characters of what a step printed that go into the report
KILL_SECONDS = 30  # for a process that was killed to go: one that waits for a driver may not


class Skip(Exception):
    """Raised by a step that cannot run here, or that is no use here: says why."""


class Notes:
    """What a step finds out. Written down at once, so that it outlives the step's process."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def put(self, key: str, value: Any) -> None:
        """For the report as JSON. A key that comes again replaces what was there."""
        self.append({"key": key, "value": value})

    def say(self, line: str) -> None:
        """For the report as text."""
        self.append({"line": line})

    def append(self, entry: dict[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """run: called with the step's Notes; returns if all is well, raises Skip, or raises anything else.
    seconds: its time limit. needs: steps without whose passing it makes no sense. env: added to its environment."""

    name: str
    run: Callable[[Notes], None]
    seconds: float
    needs: Sequence[str] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True)
class Result:
    """verdict: passed, failed or skipped. reason: why not passed. data, lines: what the step noted."""

    name: str
    verdict: str
    reason: str = ""
    seconds: float = 0.0
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    lines: list[str] = dataclasses.field(default_factory=list)
    printed: str = ""


def run_steps(steps: Sequence[Step], reference: str, done: Callable[[list[Result]], None]) -> list[Result]:
    """reference: "module:name" of `steps`, by which a new process finds them. done: called after each step."""
    results: list[Result] = []
    for step in steps:
        verdicts = {result.name: result for result in results}
        missing = [verdicts[name] for name in step.needs if name in verdicts and verdicts[name].verdict != "passed"]
        if missing:
            why = "; ".join(dict.fromkeys(map(reason_of, missing)))
            results.append(Result(name=step.name, verdict="skipped", reason=why))
        else:
            results.append(run_apart(step, reference))
        done(results)
    return results


def reason_of(missing: Result) -> str:
    """Why what needs this result is skipped. A skipped one has the reason already."""
    return missing.reason if missing.verdict == "skipped" else f"needs {missing.name!r}, which failed"


def run_apart(step: Step, reference: str) -> Result:
    """Run a step in a process group of its own."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        noted, printed = Path(folder) / "noted", Path(folder) / "printed"
        noted.touch()
        with printed.open("w") as output:
            process = subprocess.Popen(
                # -u: a step that is killed writes nothing more.
                [sys.executable, "-u", "-m", "bench.bringup.child", reference, step.name, str(noted)],
                cwd=ROOT,
                env={**os.environ, **step.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                ended = wait(process, step.seconds)
            finally:  # also when the runner is interrupted: the group would not hear of it
                gone = kill_group(process)
        result = read_notes(step.name, noted)
        result.printed = printed.read_text(encoding="utf-8", errors="replace")[-PRINTED:]
    result.seconds = time.monotonic() - start
    if not ended:
        result.verdict, result.reason = "failed", f"killed: it had not ended after {step.seconds:g} s"
        result.reason += "" if gone else f", nor had its process (id {process.pid}) {KILL_SECONDS} s after that"
    elif not result.verdict:
        result.verdict, result.reason = "failed", f"its process died, exit status {process.returncode}"
    return result


def wait(process: subprocess.Popen, seconds: float) -> bool:
    """Whether it ends in time. Not reaped: its id, which is its group's, stays taken until the group is killed."""
    deadline = time.monotonic() + seconds
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def kill_group(process: subprocess.Popen) -> bool:
    """Whether the leader is gone then."""
    os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(KILL_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def read_notes(name: str, noted: Path) -> Result:
    result = Result(name=name, verdict="")
    for line in noted.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # the process died while writing it
            continue
        if "key" in entry:
            result.data[entry["key"]] = entry["value"]
        elif "line" in entry:
            result.lines.append(entry["line"])
        else:
            result.verdict, result.reason = entry["verdict"], entry["reason"]
    return result
