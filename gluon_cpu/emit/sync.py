"""Barriers and fences."""

from ..generate import Emitter, Value, handles, unsupported
from ..ir.parse import Op
from ..ir.text import int_attr
from ..ir.types import MemDesc
from .memory import zero_bits


def barrier_operand(e: Emitter, op: Op, index: int = 0) -> tuple[Value, int]:
    v = e.use(op.operands[index])
    assert isinstance(v.type, MemDesc)
    return v, zero_bits(e, v.type)


def literal(op: Op, position: int) -> int:
    """The number at a comma-separated position of the body."""
    return int(op.body.split(",")[position].strip().split()[0])


def predicate(e: Emitter, op: Op) -> Value | None:
    """The i1 operand, None if it is always true or missing."""
    for name in op.operands[1:]:
        v = e.use(name)
        if getattr(v.type, "name", "") == "i1":
            return None if v.const is not None and bool(v.const) else v
    return None


def guarded(e: Emitter, condition: Value | None, lines: list[str]) -> None:
    if condition is not None:
        e.emit(f"if {condition.code}:")
        e.indent += 1
    for line in lines:
        e.emit(line)
    if condition is not None:
        e.indent -= 1


@handles("ttng.init_barrier")
def init_barrier(e: Emitter, op: Op) -> None:
    v, zero = barrier_operand(e, op)
    info = e.info(op, "mbarrier.init", zero=zero)
    e.emit("yield")
    e.emit(f"A.init_barrier({info}, {v.code}, {literal(op, 1)})")


@handles("ttng.inval_barrier")
def inval_barrier(e: Emitter, op: Op) -> None:
    v, zero = barrier_operand(e, op)
    e.emit("yield")
    e.emit(f"A.inval_barrier({e.info(op, 'mbarrier.invalidate', zero=zero)}, {v.code})")


def routing(e: Emitter, op: Op) -> int:
    """CTA bits that an arrival spreads over: those that from_cta does not keep."""
    for key in ("fromCTA", "from_cta", "fromCta"):
        if key in op.attrs:
            return (e.num_ctas - 1) & ~int_attr(op.attrs[key])
    return 0


def check_attrs(op: Op, *known: str) -> None:
    for key in op.attrs:
        if key not in known and not key.startswith(("ttg.", "allocation.", "tt.", "loop.", "async_task", "ttng.")):
            raise unsupported(op, f"attribute {key}")


ROUTES = ("fromCTA", "from_cta", "fromCta", "multicastCta", "multicastCTA")


def multicast_zero(op: Op) -> None:
    for key in ("multicastCta", "multicastCTA"):
        if int_attr(op.attrs.get(key, "0")):
            raise unsupported(op, f"attribute {key}")


@handles("ttng.arrive_barrier")
def arrive_barrier(e: Emitter, op: Op) -> None:
    check_attrs(op, "perThread", *ROUTES)
    if "perThread" in op.attrs:
        raise unsupported(op, "arrivals per thread")
    multicast_zero(op)
    v, zero = barrier_operand(e, op)
    info = e.info(op, "arrives", zero=zero, others=routing(e, op))
    guarded(e, predicate(e, op), ["yield", f"A.arrive({info}, {v.code}, {literal(op, 1)})"])


@handles("ttng.barrier_expect")
def barrier_expect(e: Emitter, op: Op) -> None:
    check_attrs(op, *ROUTES)
    multicast_zero(op)
    v, zero = barrier_operand(e, op)
    info = e.info(op, "expects bytes", zero=zero, others=routing(e, op))
    guarded(e, predicate(e, op), ["yield", f"A.arrive({info}, {v.code}, 1, {literal(op, 1)})"])


@handles("ttng.wait_barrier")
def wait_barrier(e: Emitter, op: Op) -> None:
    check_attrs(op)
    v, zero = barrier_operand(e, op)
    phase = e.use(op.operands[1])
    info = e.info(op, "waits", zero=zero)
    blocked = e.fresh("blocked")
    guarded(
        e, predicate(e, op),
        ["yield", f"while ({blocked} := A.wait({info}, {v.code}, {phase.code})) is not None: yield {blocked}"],
    )  # fmt: skip


@handles("ttng.fence_mbarrier_init_release_cluster")
def fence_init(e: Emitter, op: Op) -> None:
    e.emit(f"A.fence_init({e.info(op, 'fence.mbarrier_init')})")


@handles("ttg.barrier", "gpu.barrier", "ttg.warp_barrier")
def within_role(e: Emitter, op: Op) -> None:
    """Between the warps of one role: an agent is a whole role."""


@handles("ttng.cluster_barrier")
def cluster_barrier(e: Emitter, op: Op) -> None:
    check_attrs(op, "relaxed")
    relaxed = "relaxed" in op.attrs and op.attrs["relaxed"] in ("", "true")
    info = e.info(op, "cluster barrier")
    e.emit("yield")
    if e.num_ctas == 1:
        return
    blocked = e.fresh("blocked")
    e.emit(f"A.cluster_arrive({info}, {relaxed})")
    e.emit(f"while ({blocked} := A.cluster_wait({info})) is not None: yield {blocked}")


@handles("ttng.cluster_arrive")
def cluster_arrive(e: Emitter, op: Op) -> None:
    relaxed = "relaxed" in op.attrs and op.attrs["relaxed"] in ("", "true", "1 : i1")
    e.emit("yield")
    if e.num_ctas > 1:
        e.emit(f"A.cluster_arrive({e.info(op, 'cluster arrive')}, {relaxed})")


@handles("ttng.cluster_wait")
def cluster_wait(e: Emitter, op: Op) -> None:
    e.emit("yield")
    if e.num_ctas > 1:
        blocked = e.fresh("blocked")
        e.emit(f"while ({blocked} := A.cluster_wait({e.info(op, 'cluster wait')})) is not None: yield {blocked}")


@handles("ttng.fence_async_shared", "ttng.fence_async")
def fence_async(e: Emitter, op: Op) -> None:
    e.emit(f"A.fence_async({e.info(op, 'fence_async_shared')})")
