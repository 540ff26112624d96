"""Conflicts and misuses in the kernel's own words."""

from typing import Any

from . import findings
from .shadow import Access, Conflict

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
    if conflict.kind == "reuse":
        return findings.ReuseRace(
            f"memory reused too early: {place}:\n"
            f"  allocated by {earlier.who}\n    at {earlier.info.site.where}\n"
            f"  in bytes that are still read by {describe(later)}\n"
            f"  Missing order: {missing_order(conflict)}",
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
    missing = missing_order(conflict)
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
        "  After a buffer's last use the compiler may give its bytes to another: call mbarrier.invalidate after the "
        "last use of the barrier.",
        (conflict.later.info.site, conflict.earlier.info.site),
    )


def missing_order(conflict: Conflict) -> str:
    earlier, later = conflict.earlier, conflict.later
    a, b = earlier.who, later.who
    if earlier.atomic and later.atomic:
        return "both are atomic, but scope='cta' is so only among the roles of one CTA: use scope='gpu'."
    if earlier.cluster != later.cluster:
        return (
            "the two belong to different programs of the grid. Only an atomic with release by the one and one with "
            "acquire by the other could order them, both with scope='gpu' or 'sys'."
        )
    if is_store_of(later, a):  # issued before, though it reads after
        return f"nothing makes {a} wait until the store has read its tile: store_wait() must come first."
    if earlier.info.what.startswith("TMA store"):
        return f"nothing makes {b} wait until the store has read its tile: store_wait() must come first."
    if earlier.info.what.startswith("wgmma"):
        return (
            f"nothing makes {b} wait until this product has read its operands: warpgroup_mma_wait() must come before "
            "the signal that lets it go on."
        )
    who, before = (issuer(b), "issuing this") if issuer(b) != b else (b, "its access")
    if earlier.info.what.startswith("tcgen05"):
        done = "read its operands" if conflict.kind == "read-write" else "written its result"
        return (
            f"nothing makes {who} wait until this product has {done}: before {before} it must wait for the barrier of "
            "a tcgen05_commit that follows the product."
        )
    if earlier.is_async:
        return f"{who} does not wait, directly or through others, for the barrier that this operation completes."
    if conflict.kind == "read-write":
        return f"{a} must signal that it has finished reading, and {who} must wait for that before {before}."
    return f"{a} must signal after its write, and {who} must wait for that signal before {before}."


def issuer(who: str) -> str:
    """The role behind an engine's work: of `TMA load for loader`, the loader."""
    return who.split(" for ", 1)[1] if " for " in who else who


def slot_name(name: str, start: int, offset: int, stride: int, count: int) -> str:
    return f"{name}[{(offset - start) // stride}]" if count > 1 and stride else name
