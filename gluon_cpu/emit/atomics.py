"""Atomics on global memory."""

import re

from ..generate import Emitter, handles, unsupported
from ..ir.parse import Op
from ..ir.types import Tensor
from .globals_ import element_dtype, is_owner, result_of_pointer

MEANINGS = {"acquire": "acq", "release": "rel", "acq_rel": "acqrel", "relaxed": "", "monotonic": ""}


def manner(op: Op) -> tuple[list[str], str, str]:
    """(all words before the operands, which order it makes, its scope)."""
    words = [w for w in re.split(r"[,\s]+", op.body.split("%")[0]) if w]
    semantics = [MEANINGS[w] for w in words if w in MEANINGS]
    scopes = [w for w in words if w in ("cta", "gpu", "sys")]
    if len(semantics) != 1 or len(scopes) != 1:
        raise unsupported(op, "an atomic without its memory order or scope")
    return words, semantics[0], scopes[0]


@handles("tt.atomic_rmw", "tt.atomic_cas", "tt.atomic_load", "tt.atomic_store")
def atomic(e: Emitter, op: Op) -> None:
    words, semantics, scope = manner(op)
    name = op.name.split(".")[1]
    values = e.operands(op)
    kind = op.operand_types[0]
    operation = {"atomic_cas": "cas", "atomic_load": "load", "atomic_store": "exch"}.get(name) or words[0]
    copies = is_owner(e, kind)
    meet_before_release(e, op, semantics)
    info = e.info(
        op, f"atomic {operation}", dtype=element_dtype(e, op, kind), shape=e.local(kind), kind=operation,
        semantics=semantics, scope=scope, plain=name == "atomic_store",
    )  # fmt: skip
    pointers = values[0].code
    if name == "atomic_cas":
        code = f"A.atomic({info}, {pointers}, {values[2].code}, compare={values[1].code})"
    elif name == "atomic_load":
        code = f"A.atomic({info}, {pointers}, 0{', ' + values[1].code if len(values) > 1 else ''})"
    else:
        mask = f", {values[2].code}" if len(values) > 2 else ""
        code = f"A.atomic({info}, {pointers}, {values[1].code}{mask})"
    e.emit("yield")
    result = result_of_pointer(e, kind)
    old = e.fresh("old")
    nothing = f"np.zeros({e.local(kind)}, {e.dtype_code(result)})" if isinstance(result, Tensor) else "0"
    e.emit(f"{old} = {by_one_of(copies, code, nothing)}")
    code = meet_after(e, op, old, copies, "acq" in semantics)
    if op.results:
        e.set(op.results[0], code, result, e.local(result), array=isinstance(result, Tensor))


def by_one_of(copies: int, code: str, others: str) -> str:
    """Of CTAs that hold copies of the pointers, one does it: that with none of these bits in its number."""
    return f"{code} if not A.cta.number & {copies} else {others}" if copies else code


def meet_before_release(e: Emitter, op: Op, semantics: str) -> None:
    """In a cluster, the barrier of its CTAs that the compiler puts before: what all did is released by the one."""
    if e.num_ctas > 1 and "rel" in semantics:
        meet(e, e.info(op, "cluster barrier before a release", scratch=None), "None")


def meet_after(e: Emitter, op: Op, value: str, copies: int, acquires: bool) -> str:
    """What follows an atomic: its result is handed to the other warps once it is there, after what the atomic waits
    for. In a cluster, the barrier that the compiler puts after: all learn what one has acquired, and what it has got,
    if that is used, by way of its scratch. Code for the value."""
    scratch = e.scratch_bytes(op)
    if not copies:
        e.scratch(op)
    elif scratch:
        e.emit(f"if not A.cta.number & {copies}:")
        e.indent += 1
        e.scratch(op)
        e.indent -= 1
    handed = bool(copies and scratch)
    if e.num_ctas == 1 or not (handed or acquires):
        return value
    info = e.info(op, "cluster barrier after an atomic", scratch=scratch if handed else None, zero=copies)
    got = meet(e, info, value if handed else "None")
    return f"{got}[A.cta.number & {~copies}]" if handed else value


def meet(e: Emitter, info: str, value: str) -> str:
    got = e.fresh("met")
    e.emit("yield")
    e.emit(f"A.give({info}, {value})")
    e.emit(f"while isinstance({got} := A.take_all({info}), Meeting): yield {got}")
    return got


TRIES = 64


@handles("tt.atomic_poll")
def atomic_poll(e: Emitter, op: Op) -> None:
    # There is no time here: a poll with a time limit gives up after some tries.
    limit = TRIES if " timeout " in op.body else None
    _, semantics, scope = manner(op)
    pointers, wanted = e.operands(op)[:2]
    kind = op.operand_types[0]
    copies = is_owner(e, kind)
    info = e.info(
        op, "atomic poll", dtype=element_dtype(e, op, kind), shape=e.local(kind), kind="load", semantics="",
        on_success=semantics, scope=scope, plain=False, limit=limit,
    )  # fmt: skip
    found, tries = e.fresh("found"), e.fresh("tries")
    e.emit("yield")
    e.emit(f"{tries} = 0")
    call = f"A.poll({info}, {pointers.code}, {wanted.code}, {tries})"
    (t,) = op.result_types
    e.emit(f"{found} = {f'np.ones({e.local(t)}, bool)' if isinstance(t, Tensor) else 'True'}")
    polls = f"not A.cta.number & {copies} and " if copies else ""
    e.emit(f"while {polls}({found} := {call}) is None: {tries} += 1; yield{'' if limit else ' A.until_written()'}")
    code = meet_after(e, op, found, copies, "acq" in semantics)
    for name, t in zip(op.results, op.result_types, strict=True):
        e.set(name, code, t, e.local(t), array=isinstance(t, Tensor))
