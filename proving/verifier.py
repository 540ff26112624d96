"""Running the verifier, and its answer. Everything but a proof is a failure, `unsupported` and `timeout` included."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGE = "sentryward"
# What `result` and `checks` must say: the safety of every schedule, and with a reference the function computed too.
RACE_FREE = ("race_free", {"synchronization": "passed", "memory": "passed", "equivalence": "not_requested"})
VERIFIED = ("verified", {"synchronization": "passed", "memory": "passed", "equivalence": "passed"})
GRACE_SECONDS = 30  # for the verifier to end by itself and say how far it came


def version() -> str | None:
    """The installed verifier's, or None."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True, kw_only=True)
class Limits:
    seconds: float = 600
    memory_mib: int = 6000


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """result, checks: the verifier's words. memory_mib: its peak. findings: what it found, in its own structure."""

    result: str
    checks: dict[str, str]
    seconds: float
    memory_mib: float
    findings: tuple[dict[str, Any], ...] = ()
    warnings: int = 0
    report: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def race_free(self) -> bool:
        return (self.result, self.checks) == RACE_FREE and not self.warnings

    @property
    def verified(self) -> bool:
        return (self.result, self.checks) == VERIFIED and not self.warnings


def verdict_of(stdout: str, *, seconds: float, stderr: str = "") -> Verdict:
    """The verdict in what the verifier printed. What is no report of it is a `tool_failure`; never raises."""
    try:
        report = json.loads(stdout)
        result, checks = report["result"], report["checks"]
        if not isinstance(result, str) or not isinstance(checks, dict):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        finding = {"code": "no_report", "message": (stderr or stdout)[-2000:]}
        return Verdict(result="tool_failure", checks={}, seconds=seconds, memory_mib=0, findings=(finding,))
    # A report that does not say that it has all its warnings has at least one.
    warnings = report.get("warning_count") or 0
    if result in (RACE_FREE[0], VERIFIED[0]) and report.get("warning_count") is None:
        warnings = 1
    findings = [*report.get("diagnostics", ()), *report.get("races", ()), *report.get("warnings", ())]
    return Verdict(
        result=result,
        checks=checks,
        seconds=seconds,
        memory_mib=report.get("peak_rss_mib") or 0,
        findings=tuple(f for f in findings if isinstance(f, dict)),
        warnings=warnings,
        report=report,
    )


def verify(
    ptx: str,
    kernel_input: dict[str, Any],
    limits: Limits,
    *,
    reference: str | None = None,
    binding: dict[str, Any] | None = None,
) -> Verdict:
    """Run the verifier in a process of its own. reference, binding: a function to compare with (see equivalence.py).

    Raises RuntimeError if the verifier is not installed.
    """
    if version() is None:
        raise RuntimeError(f"{PACKAGE}: expected the verifier, found none; install it with pip install -e '.[prove]'")
    with tempfile.TemporaryDirectory(prefix="proving-") as folder:
        files = {"kernel.ptx": ptx, "input.json": json.dumps(kernel_input)}
        if reference is not None:
            files |= {"reference.py": reference, "binding.json": json.dumps(binding)}
        for name, text in files.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", PACKAGE, "kernel.ptx", "--input", "input.json"]
        command += ["--timeout", str(limits.seconds), "--memory-limit-mib", str(limits.memory_mib)]
        if reference is not None:
            command += ["--reference", "reference.py", "--reference-binding", "binding.json"]
        started = time.monotonic()
        stdout, stderr = run(command, folder, limits.seconds + GRACE_SECONDS)
        return verdict_of(stdout, seconds=time.monotonic() - started, stderr=stderr)


def run(command: list[str], folder: str, seconds: float) -> tuple[str, str]:
    """(stdout, stderr) of a command that is ended, with every process it started, after `seconds`."""
    # A session of its own, so that the verifier's worker ends with it; nice, as a proof can wait and people cannot.
    process = subprocess.Popen(
        ["nice", "-n", "10", *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        late = {"result": "timeout", "checks": {}, "diagnostics": [{"code": "killed", "message": f"after {seconds} s"}]}
        return json.dumps(late), ""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
