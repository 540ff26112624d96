"""The report: one JSON file to send back, and the same as a short text to read."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .runner import Result

MACHINE = "machine"  # the step whose data are the provenance of all others


def write(folder: Path, results: Sequence[Result], planned: Sequence[str]) -> None:
    """planned: the names of all steps, also of those that have not run yet."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(as_json(results, planned), indent=1) + "\n", encoding="utf-8")
    (folder / "report.txt").write_text(as_text(results, planned) + "\n", encoding="utf-8")


def provenance_of(results: Sequence[Result]) -> dict[str, Any]:
    return next((result.data for result in results if result.name == MACHINE), {})


def as_json(results: Sequence[Result], planned: Sequence[str]) -> dict[str, Any]:
    return {
        "provenance": provenance_of(results),
        "verdicts": {verdict: counted(results, verdict) for verdict in ("passed", "failed", "skipped")},
        "not_run": list(planned[len(results) :]),
        "steps": [dataclasses.asdict(result) for result in results],
    }


def counted(results: Sequence[Result], verdict: str) -> int:
    return sum(result.verdict == verdict for result in results)


def as_text(results: Sequence[Result], planned: Sequence[str]) -> str:
    width = max(map(len, planned))
    lines = ["Bring-up of gluon-attn", ""]
    lines += [f"{key:<12}{value}" for key, value in provenance_of(results).items()]
    for result in results:
        lines += ["", heading(result, width)]
        lines += [f"    {line}" for line in result.lines]
    lines += [f"\n{name:<{width}}  not run" for name in planned[len(results) :]]
    totals = ", ".join(f"{counted(results, verdict)} {verdict}" for verdict in ("passed", "failed", "skipped"))
    return "\n".join([*lines, "", f"{totals}, {sum(r.seconds for r in results):.0f} s"])


def heading(result: Result, width: int) -> str:
    """A step's name, verdict and time, and the reason if it did not pass."""
    verdict = result.verdict.upper() if result.verdict == "failed" else result.verdict
    reason = f"  {result.reason}" if result.reason else ""
    return f"{result.name:<{width}}  {verdict:<7} {result.seconds:7.1f} s{reason}"
