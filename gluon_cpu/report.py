"""Conflicts and misuses in the kernel's own words."""

from typing import Any

from . import findings
from .advice import missing_order
from .shadow import Access, Conflict, Unwritten

WRITE_FIRST = "  Missing: a write before it. If another role or an engine makes that write, wait for its signal first."


def describe(access: Access) -> str:
    """One access: who, doing what, where, and the line itself."""
    info = access.info
    source = info.site.source
    line = f"\n      {source}" if source else ""
    return f"{doing(access.who, info)}\n    at {info.site.where}{line}"


def doing(who: str, info: Any) -> str:
    """Who, and what, unless that is in the name: `TMA load for loader`."""
    return who if who.startswith(info.what.split(".")[0]) else f"{who}: {info.what}"


def unwritten(e: Unwritten, what: str) -> findings.Finding:
    return findings.UninitialisedRead(f"{what}:\n  {describe(e.access)}\n{WRITE_FIRST}", (e.access.info.site,))


def race(conflict: Conflict, place: str, hint: str = "") -> findings.Finding:
    """The finding for two unordered accesses to `place`."""
    earlier, later = conflict.earlier, conflict.later
    sites = (later.info.site, earlier.info.site)
    if conflict.kind == "fence" and "global memory" in place:
        return findings.MissingFence(
            f"missing proxy fence on {place}:\n"
            f"  written by {describe(earlier)}\n"
            f"  then used through the async proxy by {describe(later)}\n"
            "  The write went through the generic proxy. fence_async_shared() covers shared memory only, and Gluon has "
            "no fence for global memory: write with a TMA store and store_wait(0, read_only=False), or in an earlier "
            "launch.",
            sites,
        )
    if conflict.kind == "fence":
        return findings.MissingFence(
            f"missing proxy fence on {place}:\n"
            f"  written by {describe(earlier)}\n"
            f"  then used through the async proxy by {describe(later)}\n"
            "  The write went through the generic proxy, and no fence_async_shared() lies between it and the async "
            "access: the writing role must call fence_async_shared() after the write and before it signals.",
            sites,
        )
    if conflict.kind == "read-fence":
        return findings.MissingFence(
            f"missing proxy fence on {place}:\n"
            f"  read by {describe(earlier)}\n"
            f"  then overwritten through the async proxy by {describe(later)}\n"
            "  The read went through the generic proxy, and no fence_async_shared() lies between it and the async "
            "write, which may overtake it: the reading role must call fence_async_shared() after the read and before "
            "it signals.",
            sites,
        )
    first, second = {"write-read": ("writes", "reads"), "read-write": ("reads", "writes"), "write-write": (
        "writes", "writes")}[conflict.kind]  # fmt: skip
    kind: type[findings.Finding] = findings.DataRace
    store_reads = {
        "read-write": earlier.info.what.startswith("TMA store"),
        "write-read": is_store_of(later, earlier.who),
    }
    if store_reads.get(conflict.kind):
        kind = findings.ReuseRace
    elif "global" in place and conflict.kind == "write-write":
        kind = findings.OutputRace
    missing = missing_order(conflict, "global memory" in place)
    return kind(
        f"data race on {place}:\n"
        f"  {first}: {describe(earlier)}\n"
        f"  {second}: {describe(later)}\n"
        f"  Missing order: {missing}{hint}",
        sites,
    )


def is_store_of(access: Access, who: str) -> bool:
    return access.who == f"TMA store for {who}"


def barrier_as_data(conflict: Conflict, barrier: str) -> findings.Finding:
    """The finding for data in the memory of a barrier that has not ended."""
    return findings.BarrierMisuse(
        f"the memory of {barrier} is used for data, but the barrier was never invalidated:\n"
        f"  initialised by {conflict.earlier.who}\n    at {conflict.earlier.info.site.where}\n"
        f"  data: {describe(conflict.later)}\n"
        "  After a buffer's last use the compiler may give its bytes to another, or use them itself: call "
        "mbarrier.invalidate after the last use of the barrier.",
        (conflict.later.info.site, conflict.earlier.info.site),
    )


def slot_name(name: str, start: int, offset: int, stride: int, count: int) -> str:
    return f"{name}[{(offset - start) // stride}]" if count > 1 and stride else name
