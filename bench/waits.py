"""What a trace of the Hopper kernel says about its waits."""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Spans = dict[int, tuple[int, int]]  # by CTA: its first and last ns, from the first CTA's start on


@dataclass(frozen=True, slots=True)
class Wait:
    cta: int
    warp: int
    name: str
    start: float  # cycles since the CTA's first wait
    cycles: float


def cta_of(event: dict[str, Any]) -> int:
    return int(event["pid"].rpartition(" CTA")[2])  # attention_forward Core3 CTA17


def waits_of(trace: dict[str, Any]) -> tuple[list[Wait], Spans]:
    """From the trace of one launch, as the profiler writes it."""
    by_cta = defaultdict(list)
    for event in trace["traceEvents"]:
        by_cta[cta_of(event)].append(event)
    begin = min(events[0]["args"]["Init Time (ns)"] for events in by_cta.values())
    waits, spans = [], {}
    for cta, events in sorted(by_cta.items()):
        first = min(event["ts"] for event in events)
        for event in events:
            warp = int(event["tid"].split()[1])  # warp 4 (line 0)
            waits.append(Wait(cta, warp, event["name"], (event["ts"] - first) * 1e3, event["dur"] * 1e3))
        clocks = events[0]["args"]
        end = clocks["Post Final Time (ns)"] - clocks["Finalization Time (ns)"]
        spans[cta] = (clocks["Init Time (ns)"] - begin, end - begin)
    return waits, spans


def summarise(waits: Iterable[Wait], warps: dict[str, int]) -> dict[str, dict[str, Any]]:
    """By role: its cycles from its first wait to the end of its last, summed over CTAs; and of these, by what is waited
    for: how often, cycles, their share, the longest. Raises ValueError if there is nothing of a role."""
    by_warp: dict[int, list[Wait]] = defaultdict(list)
    for wait in waits:
        by_warp[wait.warp].append(wait)
    found: dict[str, dict[str, Any]] = {}
    for role, warp in warps.items():
        if warp not in by_warp:
            raise ValueError(f"trace: expected waits of {role} in warp {warp}, got some of warps {sorted(by_warp)}")
        by_cta: dict[int, list[Wait]] = defaultdict(list)
        by_name: dict[str, list[float]] = defaultdict(list)
        for wait in by_warp[warp]:
            by_cta[wait.cta].append(wait)
            by_name[wait.name].append(wait.cycles)
        total = sum(max(w.start + w.cycles for w in ws) - min(w.start for w in ws) for ws in by_cta.values())
        kinds = {
            name: {"number": len(c), "cycles": sum(c), "share": sum(c) / total, "longest": max(c)}
            for name, c in sorted(by_name.items(), key=lambda item: -sum(item[1]))
        }
        found[role] = {"ctas": len(by_cta), "cycles": total, "waits": kinds}
    return found


def spread(spans: Spans) -> dict[str, dict[str, float]]:
    """Microseconds at which CTAs begin and end."""
    times = {"begin": [begin / 1e3 for begin, _ in spans.values()], "end": [end / 1e3 for _, end in spans.values()]}
    return {what: {"min": min(t), "median": statistics.median(t), "max": max(t)} for what, t in times.items()}
