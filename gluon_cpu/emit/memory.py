"""Shared memory: allocations, views, loads and stores."""

import math
from typing import Any

from ..generate import Emitter, handles, unsupported
from ..ir.layouts import cuts_split, layout_rank, shared_buffer, spread_of
from ..ir.locations import buffer_name
from ..ir.parse import Op
from ..ir.text import int_array, int_attr
from ..ir.types import MemDesc, Type
from ..memory import Pattern, pattern, slice_offset
from .atomics import by_one_of, meet_after


def memdesc(op: Op, t: Type) -> MemDesc:
    if not isinstance(t, MemDesc):
        raise unsupported(op)
    return t


def view_pattern(e: Emitter, m: MemDesc) -> Pattern:
    if cuts_split(m, e.num_ctas):
        raise NotImplementedError("a slice along a dimension that is split over CTAs, by other than loads and stores")
    return pattern(m, e.num_ctas, e.dtype(m))


def zero_bits(e: Emitter, m: MemDesc) -> int:
    """CTA bits over which a buffer is replicated: for a barrier, those of the CTAs that share it."""
    return shared_buffer(m, e.num_ctas).zero_bits if e.num_ctas > 1 else 0


def buffer_bytes(e: Emitter, m: MemDesc) -> tuple[int, int]:
    """(bytes of the allocation in a CTA, bytes of each of its leading buffers)."""
    b = shared_buffer(m, e.num_ctas)
    return b.stride * math.prod(b.leading), b.stride


@handles("ttg.local_alloc")
def local_alloc(e: Emitter, op: Op) -> None:
    m = memdesc(op, (op.result_types or op.operand_types)[-1])
    size, stride = buffer_bytes(e, m)
    if "allocation.offset" in op.attrs:
        offset = e.frame + int_attr(op.attrs["allocation.offset"])
    else:
        alignment = 1024 if size >= 512 else 16
        offset = (e.bump + alignment - 1) // alignment * alignment
        e.bump = offset + size
    e.smem_bytes = max(e.smem_bytes, offset + size)
    how = touched(e, m, e.use(op.operands[0]).type) if op.operands else {"pattern": view_pattern(e, m), "spread": None}
    info = e.info(
        op, f"initialises {buffer_name(op.site)}", offset=offset, bytes=size, stride=stride,
        name=unique_name(e, buffer_name(op.site), op), **how,
    )  # fmt: skip
    data = f", {e.full(e.use(op.operands[0]))}" if op.operands else ""
    if data:
        e.emit("yield")
    e.set(op.results[0], f"A.local_alloc({info}{data})", m)


def unique_name(e: Emitter, name: str, op: Op) -> str:
    """Two buffers of one name are told apart by the line that allocates them."""
    count = e.allocation_names.get(name, 0)
    e.allocation_names[name] = count + 1
    if not count:
        return name
    return f"{name} (line {op.site.own[0].line if op.site.own else 0})"


@handles("ttg.local_dealloc")
def local_dealloc(e: Emitter, op: Op) -> None:
    pass


@handles("ttg.memdesc_index")
def memdesc_index(e: Emitter, op: Op) -> None:
    source, index = e.operands(op)
    m = memdesc(op, source.type)
    target = memdesc(op, op.result_types[0])
    if m.space == "tensor":
        from .blackwell import tensor_index

        tensor_index(e, op, source, index, m, target)
        return
    _, stride = buffer_bytes(e, m)
    rank = layout_rank(m.layout)
    for size in m.alloc_shape[1 : len(m.alloc_shape) - rank]:
        stride *= size
    if len(m.shape) <= rank:
        raise unsupported(op, "an index into a dimension that the layout describes")
    if index.const is not None and 0 <= index.const < m.shape[0]:
        code = f"{source.code} + {index.const * stride}" if index.const else source.code
    else:
        code = f"A.index({e.info(op, 'index', count=m.shape[0], stride=stride)}, {source.code}, {index.code})"
    if code == source.code:
        e.alias(op.results[0], source, target)
    else:
        e.set(op.results[0], code, target)


@handles("ttg.memdesc_reshape", "ttg.memdesc_trans", "ttg.memdesc_reinterpret")
def reinterpret(e: Emitter, op: Op) -> None:
    source = e.use(op.operands[0])
    target = memdesc(op, op.result_types[0])
    e.alias(op.results[0], source, target)


@handles("ttg.memdesc_subslice")
def subslice(e: Emitter, op: Op) -> None:
    source = e.use(op.operands[0])
    m = memdesc(op, source.type)
    target = memdesc(op, op.result_types[0])
    inside = op.attrs.get("offsets", "") or op.body[op.body.index("[") :]
    starts = tuple(int_array(inside))
    if m.space == "tensor":
        from .blackwell import tensor_slice

        tensor_slice(e, op, source, starts, m, target)
        return
    add, xor = slice_offset(m, starts, e.num_ctas)
    code = source.code
    if add:
        code = f"{code} + {add}"
    if xor:
        code = f"({code}) ^ {xor}"
    if code == source.code:
        e.alias(op.results[0], source, target)
    else:
        e.set(op.results[0], code, target)


def touched(e: Emitter, m: MemDesc, t: Type, by_index: bool = False) -> dict[str, Any]:
    """How the elements of a tensor `t` of registers lie in a view. `pattern`: each CTA's part in its own memory, in the
    order of its registers. Or they are found one by one: `source_shard` has their coordinates, `spread` their places.
    by_index: their coordinate along one dimension is not that of the register."""
    if e.num_ctas == 1:
        return {"pattern": view_pattern(e, m), "spread": None}
    buffer, own = shared_buffer(m, e.num_ctas), e.shard(t)
    rank = len(buffer.shard.shape)
    same = own.bits[-rank:] == buffer.shard.bits and not any(own.bits[:-rank]) and not cuts_split(m, e.num_ctas)
    if same and not (by_index and own.cta_bits):
        return {"pattern": view_pattern(e, m), "spread": None}
    if len(m.shape) != rank:
        raise NotImplementedError("several buffers at once, spread over the CTAs otherwise than the registers")
    whole = MemDesc(m.alloc_shape[-rank:], m.element, m.layout, m.space, m.alloc_shape[-rank:])
    return {
        "pattern": view_pattern(e, whole), "spread": spread_of(m, e.num_ctas), "source_shard": own, "shape": m.shape,
        "copies": (e.num_ctas - 1) & ~own.cta_bits & ~buffer.zero_bits,
    }  # fmt: skip


@handles("ttg.local_load")
def local_load(e: Emitter, op: Op) -> None:
    source = e.use(op.operands[0])
    m = memdesc(op, source.type)
    kind = op.result_types[0]
    info = e.info(op, "local load", **touched(e, m, kind))
    e.emit("yield")
    e.set(op.results[0], f"A.local_load({info}, {source.code})", kind, e.local(kind), array=True)


@handles("ttg.local_store")
def local_store(e: Emitter, op: Op) -> None:
    data, target = e.operands(op)
    m = memdesc(op, target.type)
    info = e.info(op, "local store", **touched(e, m, data.type))
    e.emit("yield")
    e.emit(f"A.local_store({info}, {target.code}, {e.full(data)})")


@handles("ttg.local_gather")
def local_gather(e: Emitter, op: Op) -> None:
    source, index = (e.use(op.operands[i]) for i in (0, 1))
    m = memdesc(op, source.type)
    kind = op.result_types[0]
    info = e.info(op, "local gather", **touched(e, m, kind, by_index=True))
    e.emit("yield")
    code = f"A.local_gather({info}, {source.code}, {e.full(index)}, {int_attr(op.attrs['axis'])})"
    e.set(op.results[0], code, kind, e.local(kind), array=True)


@handles("ttg.local_scatter")
def local_scatter(e: Emitter, op: Op) -> None:
    """`%memory[%indices], %values`"""
    target, index, data = e.operands(op)
    m = memdesc(op, target.type)
    info = e.info(op, "local scatter", **touched(e, m, data.type, by_index=True))
    e.emit("yield")
    axis = int_attr(op.attrs["axis"])
    e.emit(f"A.local_scatter({info}, {target.code}, {e.full(data)}, {e.full(index)}, {axis})")


@handles("ttg.local_atomic_scatter_rmw")
def local_atomic_scatter(e: Emitter, op: Op) -> None:
    """`add, %memory[%indices], %values`: the old values come back."""
    target, index, data = (e.use(v) for v in op.operands[:3])
    m = memdesc(op, target.type)
    if len(op.operands) > 4:
        raise unsupported(op)
    kind = op.body.split(",")[0].strip()
    copies = 0 if e.num_ctas == 1 else (e.num_ctas - 1) & ~e.shard(data.type).cta_bits
    if copies & zero_bits(e, m):
        raise unsupported(op, "on copies in several CTAs, of which the compiler's code changes those of one alone")
    info = e.info(op, f"atomic {kind}", kind=kind, **touched(e, m, data.type, by_index=True))
    mask = f", {e.full(e.use(op.operands[3]))}" if len(op.operands) == 4 else ""
    e.emit("yield")
    axis = int_attr(op.attrs["axis"])
    code = f"A.local_atomic({info}, {target.code}, {e.full(data)}, {e.full(index)}, {axis}{mask})"
    # Not one for each copy: one CTA does it, and hands the old values on to those that want them.
    nothing = f"np.zeros({e.local(data.type)}, {e.dtype_code(data.type)})"
    old = e.fresh("old")
    e.emit(f"{old} = {by_one_of(copies, code, nothing)}")
    if op.results:
        e.set(op.results[0], meet_after(e, op, old, copies, False), data.type, e.local(data.type), array=True)
