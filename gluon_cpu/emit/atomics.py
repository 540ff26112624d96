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
    if e.num_ctas > 1 and is_owner(e, kind):
        raise unsupported(op, "an atomic on pointers that several CTAs hold")
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
    if op.results:
        result = result_of_pointer(e, kind)
        e.set(op.results[0], code, result, e.local(result), array=isinstance(result, Tensor))
    else:
        e.emit(code)


TRIES = 64


@handles("tt.atomic_poll")
def atomic_poll(e: Emitter, op: Op) -> None:
    # There is no time here: a poll with a time limit gives up after some tries.
    limit = TRIES if " timeout " in op.body else None
    _, semantics, scope = manner(op)
    pointers, wanted = e.operands(op)[:2]
    kind = op.operand_types[0]
    if e.num_ctas > 1 and is_owner(e, kind):
        raise unsupported(op, "an atomic on pointers that several CTAs hold")
    info = e.info(
        op, "atomic poll", dtype=element_dtype(e, op, kind), shape=e.local(kind), kind="load", semantics="",
        on_success=semantics, scope=scope, plain=False, limit=limit,
    )  # fmt: skip
    found, tries = e.fresh("found"), e.fresh("tries")
    e.emit("yield")
    e.emit(f"{tries} = 0")
    call = f"A.poll({info}, {pointers.code}, {wanted.code}, {tries})"
    e.emit(f"while ({found} := {call}) is None: {tries} += 1; yield{'' if limit else ' A.until_written()'}")
    for name, t in zip(op.results, op.result_types, strict=True):
        e.set(name, found, t, e.local(t), array=isinstance(t, Tensor))
