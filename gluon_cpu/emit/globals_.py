"""Pointers, program numbers, prints and assertions."""

import json

from ..generate import Emitter, handles, unsupported
from ..hooks import BREAKPOINT
from ..ir.parse import Op
from ..ir.types import BITS, Scalar, Tensor, Type
from .arith import joint_shape


@handles("tt.get_program_id")
def program_id(e: Emitter, op: Op) -> None:
    e.set(op.results[0], f"A.cluster.program[{'xyz'.index(op.body.strip())}]", op.operand_types[0])


@handles("tt.get_num_programs")
def num_programs(e: Emitter, op: Op) -> None:
    e.set(op.results[0], f"A.cluster.machine.grid[{'xyz'.index(op.body.strip())}]", op.operand_types[0])


def pointee_bytes(op: Op, t: Type) -> int:
    element = t if isinstance(t, Scalar) else t.element  # type: ignore[union-attr]
    name = element.pointee
    if name not in BITS:
        if name.startswith("!tt.ptr"):
            return 8
        raise unsupported(op, f"a pointer to {name}")
    return max(1, BITS[name] // 8)


@handles("tt.addptr")
def addptr(e: Emitter, op: Op) -> None:
    pointer, offset = e.operands(op)
    size = pointee_bytes(op, op.operand_types[0])
    array = pointer.is_array or offset.is_array
    step = f"{offset.code}.astype(D_i64) * {size}" if offset.is_array else f"{offset.code} * {size}"
    e.set(op.results[0], f"{pointer.code} + {step}", op.operand_types[0], joint_shape(pointer, offset), array=array)


def element_dtype(e: Emitter, op: Op, t: Type) -> object:
    from ..values import DTYPES

    element = t if isinstance(t, Scalar) else t.element  # type: ignore[union-attr]
    name = "ptr" if element.pointee.startswith("!tt.ptr") else element.pointee
    if name not in DTYPES:
        raise unsupported(op, f"a pointer to {name}")
    return DTYPES[name]


def is_owner(e: Emitter, t: Type) -> int:
    """CTA bits over which a tensor of pointers is replicated: those CTAs that have a bit set write nothing."""
    if e.num_ctas == 1:
        return 0
    bits = e.shard(t).cta_bits if isinstance(t, Tensor) else 0
    return (e.num_ctas - 1) & ~bits


@handles("tt.load")
def load(e: Emitter, op: Op) -> None:
    values = e.operands(op)
    pointers = values[0]
    kind = op.operand_types[0]
    info = e.info(op, "load", dtype=element_dtype(e, op, kind), shape=e.local(kind))
    result = result_of_pointer(e, kind)
    e.emit("yield")
    rest = "".join(f", {v.code}" for v in values[1:])
    e.set(
        op.results[0], f"A.global_load({info}, {pointers.code}{rest})", result, e.local(result),
        array=isinstance(result, Tensor),
    )  # fmt: skip


def result_of_pointer(e: Emitter, kind: Type) -> Type:
    element = kind if isinstance(kind, Scalar) else kind.element  # type: ignore[union-attr]
    inner = e.module.types.parse(element.pointee)
    assert isinstance(inner, Scalar)
    return Tensor(kind.shape, inner, kind.layout) if isinstance(kind, Tensor) else inner


@handles("tt.store")
def store(e: Emitter, op: Op) -> None:
    values = e.operands(op)
    kind = op.operand_types[0]
    info = e.info(op, "store", dtype=element_dtype(e, op, kind), shape=e.local(kind))
    owner = is_owner(e, kind)
    e.emit("yield")
    if owner:
        e.emit(f"if not A.cta.number & {owner}:")
        e.indent += 1
    e.emit(f"A.global_store({info}, {', '.join(v.code for v in values)})")
    if owner:
        e.indent -= 1


@handles("tt.assert")
def assert_(e: Emitter, op: Op) -> None:
    condition = e.use(op.operands[0])
    message = op.body[op.body.index('"') + 1 : op.body.rindex('"')] if '"' in op.body else ""
    e.emit(f"A.device_assert({e.info(op, 'assert', message=message)}, {condition.code})")


@handles("llvm.intr.assume")
def assume(e: Emitter, op: Op) -> None:
    e.emit(f"A.assume({e.info(op, 'assume')}, {e.use(op.operands[0]).code})")


@handles("tt.print")
def print_(e: Emitter, op: Op) -> None:
    start = op.body.index('"') + 1
    message = op.body[start : op.body.index('"', start)]
    values = e.operands(op)
    # No step of its own: it must not change which interleaving a seed plays.
    if BREAKPOINT in message:
        payload = json.loads(bytes.fromhex(message.split(":")[1].strip()))
        info = e.info(op, "breakpoint", names=payload["names"], constants=payload["constants"])
        e.emit(f"A.breakpoint({info}{''.join(', ' + e.full(v) for v in values)})")
        return
    info = e.info(op, "print", message=message)
    e.emit(f"A.device_print({info}{''.join(', ' + e.full(v) for v in values)})")


@handles("tt.grid_dependency_wait", "tt.grid_dependency_launch_dependents")
def order_of_launches(e: Emitter, op: Op) -> None:
    method = op.name.removeprefix("tt.")
    e.emit(f"A.{method}({e.info(op, method)})")


@handles("ttg.global_scratch_none")
def nothing(e: Emitter, op: Op) -> None:
    """No memory is asked for."""
