"""What would have ordered two accesses: the last lines of a report."""

from .shadow import EARLIER, Access, Conflict


def missing_order(conflict: Conflict, in_global_memory: bool = False) -> str:
    earlier, later = conflict.earlier, conflict.later
    if earlier.atomic and later.atomic:
        return "both are atomic, but scope='cta' is so only among the roles of one CTA: use scope='gpu'."
    if earlier.cluster == EARLIER:
        act = {"write-read": "read", "read-write": "write", "write-write": "write"}[conflict.kind]
        return (
            f"the kernel may start before the one launched before it ends: {issuer(later.who)} calls gdc_wait(), or "
            f"waits for a role that has, before {'it issues the ' + name(later) if is_engine(later) else 'its ' + act}."
        )
    if earlier.cluster != later.cluster:
        who = "the two belong to different programs of the grid."
        atomics = "an atomic with release by the one and one with acquire by the other"
        if conflict.kind == "write-write":  # seldom meant to be in an order
            how = f"Either each should write bytes of its own, or {atomics} should order them"
        else:
            how = f"Only {atomics} could order them"
        return f"{who} {how}, both with scope='gpu' or 'sys'."
    if issuer(earlier.who) == issuer(later.who):
        # Of one role, so one of them is the work of an engine, and the other came after it was issued. Of two engines
        # the one that was given its work first may well have been the later.
        engines = sorted((a for a in (earlier, later) if is_engine(a)), key=lambda a: a.issued)
        engine = engines[0] if engines else earlier
        end = end_of(engine, in_global_memory)
        first = end if end.endswith(")") else f"a wait for {end}"
        return f"{issuer(engine.who)} goes on without waiting for this {name(engine)}: {first} must come first."
    acts = {"write-read": ("write", "read"), "read-write": ("read", "write"), "write-write": ("write", "write")}[
        conflict.kind
    ]
    pairs = (earlier, acts[0]), (later, acts[1])
    first, second = (one_after_the_other(*pairs[i], *pairs[1 - i], in_global_memory) for i in (0, 1))
    return f"nothing orders the two. Either {first}; or {second}."


def one_after_the_other(first: Access, act: str, second: Access, second_act: str, in_global_memory: bool) -> str:
    before = f"before it issues the {name(second)}" if is_engine(second) else f"before its {second_act}"
    if not is_engine(first):
        signal = f"{first.who} signals after its {act}"
    elif name(first) in ("wgmma", "TMA store", "cp.async"):
        signal = f"{issuer(first.who)} signals after {end_of(first, in_global_memory)}"
    else:
        return f"{issuer(second.who)} waits for {end_of(first, in_global_memory)} {before}"
    return f"{signal}, and {issuer(second.who)} waits for that {before}"


def end_of(access: Access, in_global_memory: bool) -> str:
    """What says that an engine is done with this."""
    kind = name(access)
    if kind == "wgmma":
        return "warpgroup_mma_wait()"
    if kind == "tcgen05":
        return "the barrier of a tcgen05_commit after the product"
    if kind == "TMA store":
        return "store_wait(0, read_only=False)" if in_global_memory else "store_wait()"
    if kind == "cp.async":
        return "async_copy.wait_group()"
    return f"the barrier that the {kind} completes"


def is_engine(access: Access) -> bool:
    return " for " in access.who or access.info.what.startswith("wgmma")


def name(access: Access) -> str:
    """The engine: of `TMA load for loader`, TMA load. A role's own products go by the role."""
    return access.who.split(" for ", 1)[0] if " for " in access.who else access.info.what


def issuer(who: str) -> str:
    """The role behind an engine's work: of `TMA load for loader`, the loader."""
    return who.split(" for ", 1)[1] if " for " in who else who
