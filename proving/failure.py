"""What the verifier found, in lines for people: where in the source, and between whom."""

from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from .ptx import source_line
from .verifier import Verdict

SHOWN = 6


def describe(ptx: str, verdict: Verdict) -> list[str]:
    """The first findings of a verdict, a line or two each."""
    return [line for finding in verdict.findings[:SHOWN] for line in describe_finding(ptx, finding)]


def describe_finding(ptx: str, finding: dict[str, Any]) -> Iterator[str]:
    if "first" in finding and "second" in finding:
        region = finding.get("region", {})
        yield f"race on {region.get('bytes')} bytes at {region.get('offset')} of {region.get('allocation')}"
        for access in (finding["first"], finding["second"]):
            yield f"  {access.get('mode')} by thread {access.get('actor')} at {where(ptx, access)}"
        return
    yield f"{finding.get('code')}: {finding.get('message', '')}"
    for place in places(finding.get("details", {})):
        yield f"  at {where(ptx, place)}"


def places(details: Any) -> Iterator[dict[str, Any]]:
    """Every part of a finding's details that names a line."""
    if isinstance(details, dict):
        if "ptx_line" in details or isinstance(details.get("location"), dict):
            yield details
        for value in details.values():
            yield from places(value)


def where(ptx: str, place: dict[str, Any]) -> str:
    location = place.get("location", {})
    line = place.get("ptx_line")
    if line is None and str(location.get("file", "")).endswith(".ptx"):
        line = location.get("line")
    if line is not None:
        return f"line {line} of the PTX, {source_line(ptx, line) or 'no line of the source'}"
    return f"{PurePath(str(location.get('file', '?'))).name}:{location.get('line')}"
