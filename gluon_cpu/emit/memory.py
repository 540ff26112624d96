"""Shared memory: allocations, views, loads and stores."""

import math
from typing import Any

from ..generate import Emitter, handles, unsupported
from ..ir.layouts import layout_rank, shared_buffer
from ..ir.locations import buffer_name
from ..ir.parse import Op
from ..ir.text import int_array, int_attr
from ..ir.types import MemDesc, Type
from ..memory import Pattern, pattern, slice_offset


def memdesc(op: Op, t: Type) -> MemDesc:
    if not isinstance(t, MemDesc):
        raise unsupported(op)
    return t


def view_pattern(e: Emitter, m: MemDesc) -> Pattern:
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
    info = e.info(
        op, f"initialises {buffer_name(op.site)}", offset=offset, bytes=size, stride=stride,
        name=unique_name(e, buffer_name(op.site), op), pattern=view_pattern(e, m),
    )  # fmt: skip
    data = f", {e.full(e.use(op.operands[0]))}" if op.operands else ""
    if data:
        require_same_shards(e, op, m, e.use(op.operands[0]).type)
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
        code = f"({code}) ^ {xor << 40}"
    if code == source.code:
        e.alias(op.results[0], source, target)
    else:
        e.set(op.results[0], code, target)


@handles("ttg.local_load")
def local_load(e: Emitter, op: Op) -> None:
    source = e.use(op.operands[0])
    m = memdesc(op, source.type)
    kind = op.result_types[0]
    info = e.info(op, "local load", pattern=view_pattern(e, m))
    e.emit("yield")
    code = f"A.local_load({info}, {source.code})"
    require_same_shards(e, op, m, kind)
    e.set(op.results[0], code, kind, e.local(kind), array=True)


def require_same_shards(e: Emitter, op: Op, m: MemDesc, t: Type) -> None:
    """That each CTA's registers and its shared memory hold the same part of the tensor."""
    local = tuple(view_pattern(e, m).shape)
    if local != e.local(t):
        raise unsupported(op, f"{local} elements per CTA in shared memory, {e.local(t)} in registers")
    shard = shared_buffer(m, e.num_ctas).shard
    if m.shape == m.alloc_shape == shard.shape and shard != e.shard(t):
        raise unsupported(op, "shared memory and registers spread over the CTAs in different ways")


@handles("ttg.local_store")
def local_store(e: Emitter, op: Op) -> None:
    data, target = e.operands(op)
    m = memdesc(op, target.type)
    info = e.info(op, "local store", pattern=view_pattern(e, m))
    require_same_shards(e, op, m, data.type)
    e.emit("yield")
    e.emit(f"A.local_store({info}, {target.code}, {e.full(data)})")


def over_ctas(e: Emitter, op: Op, m: MemDesc, t: Type) -> dict[str, Any]:
    """How elements are found by their coordinates, if the CTAs share the buffer: those of tensor `t` that this CTA has,
    and who has which of the buffer."""
    target = shared_buffer(m, e.num_ctas).shard
    if not target.cta_bits:
        return {"source_shard": None, "target_shard": None}
    if not m.shape == target.shape == m.alloc_shape[-len(m.shape) :]:
        raise unsupported(op, "a part of a buffer that the CTAs share")
    return {"source_shard": e.shard(t), "target_shard": target}


@handles("ttg.local_gather")
def local_gather(e: Emitter, op: Op) -> None:
    source, index = (e.use(op.operands[i]) for i in (0, 1))
    m = memdesc(op, source.type)
    kind = op.result_types[0]
    info = e.info(op, "local gather", pattern=view_pattern(e, m), **over_ctas(e, op, m, kind))
    e.emit("yield")
    code = f"A.local_gather({info}, {source.code}, {e.full(index)}, {int_attr(op.attrs['axis'])})"
    e.set(op.results[0], code, kind, e.local(kind), array=True)


@handles("ttg.local_scatter")
def local_scatter(e: Emitter, op: Op) -> None:
    """`%memory[%indices], %values`"""
    target, index, data = e.operands(op)
    m = memdesc(op, target.type)
    info = e.info(op, "local scatter", pattern=view_pattern(e, m), **over_ctas(e, op, m, data.type))
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
    info = e.info(op, f"atomic {kind}", pattern=view_pattern(e, m), kind=kind, **over_ctas(e, op, m, data.type))
    mask = f", {e.full(e.use(op.operands[3]))}" if len(op.operands) == 4 else ""
    e.emit("yield")
    axis = int_attr(op.attrs["axis"])
    code = f"A.local_atomic({info}, {target.code}, {e.full(data)}, {e.full(index)}, {axis}{mask})"
    if op.results:
        e.set(op.results[0], code, data.type, e.local(data.type), array=True)
    else:
        e.emit(code)
