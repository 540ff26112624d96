"""TMA, wgmma, cp.async."""

import math
from typing import Any

from ..generate import Emitter, Value, handles, unsupported
from ..ir.layouts import Shard, shared_buffer
from ..ir.parse import Op
from ..ir.text import int_attr
from ..ir.types import MemDesc, Tensor, TensorDesc
from .globals_ import pointee_bytes
from .memory import memdesc, touched, view_pattern, zero_bits
from .sync import check_attrs, guarded, predicate


def bracketed(e: Emitter, op: Op, which: int = 0) -> list[str]:
    """The values within the which-th pair of brackets of the body."""
    start = -1
    for _ in range(which + 1):
        start = op.body.index("[", start + 1)
    return [v.strip() for v in op.body[start + 1 : op.body.index("]", start)].split(",")]


# Of one dimension of what a single instruction copies.
MOST_ROWS = 256


def box(e: Emitter, op: Op, m: MemDesc, desc: TensorDesc) -> dict[str, Any]:
    """How a copy through view `m` is cut: the extent of a CTA's box and where it starts."""
    buffer = shared_buffer(m, e.num_ctas)
    shard = buffer.shard
    if not shard.contiguous:
        raise unsupported(op, "a CGA layout whose shards are no boxes")
    p = view_pattern(e, m)
    lead = len(m.shape) - len(shard.shape)
    low = [(0,) * lead + shard.offset(c) for c in range(e.num_ctas)]
    extent = tuple(p.shape)
    more = len(desc.shape) - len(extent)
    if more >= 0 and all(size == 1 for size in desc.shape[:more]):  # as of a batch: one element each
        low, extent = [(0,) * more + start for start in low], (1,) * more + extent
    elif shard.cta_bits or max(desc.shape) > MOST_ROWS:
        raise unsupported(op, "a box with other dimensions than its tile, in parts: the compiler moves wrong ones")
    elif math.prod(desc.shape) != p.count or desc.shape[-1] != extent[-1]:
        raise unsupported(op, "a box with other rows than its tile")
    else:  # the same rows one after the other, counted in other dimensions
        low, extent = [(0,) * len(desc.shape)] * e.num_ctas, desc.shape
    zero = (e.num_ctas - 1) & ~shard.cta_bits
    return {"pattern": p, "low": low, "extent": extent, "bytes": p.bytes, "data_zero": zero}


def by_type(e: Emitter, op: Op, kind: type) -> list[Value]:
    return [v for v in e.operands(op) if isinstance(v.type, kind)]


@handles("ttng.async_tma_copy_global_to_local")
def tma_load(e: Emitter, op: Op) -> None:
    check_attrs(op, "multicast", "isVolatile", "cache", "evict", "i16Offsets", "operandSegmentSizes")
    desc = e.use(op.operands[0])
    assert isinstance(desc.type, TensorDesc)
    coords = [e.use(v).code for v in bracketed(e, op)]
    taps = [e.use(v).code for v in bracketed(e, op, 1)] if op.body.count("[") > 1 else []
    tile, barrier = by_type(e, op, MemDesc)
    m = memdesc(op, tile.type)
    b = memdesc(op, barrier.type)
    multicast = "multicast" in op.attrs and op.attrs["multicast"] != "false"
    info = e.info(op, "TMA load", multicast=multicast, **({"zero": zero_bits(e, b)} | box(e, op, m, desc.type)))
    call = f"A.tma_load({info}, {desc.code}, ({', '.join(coords)},), {barrier.code}, {tile.code})"
    if taps:
        call = f"{call[:-1]}, ({', '.join(taps)},))"
    guarded(e, predicate(e, op), ["yield", call])


@handles("ttng.async_tma_gather")
def tma_gather(e: Emitter, op: Op) -> None:
    check_attrs(op, "multicast")
    desc = e.use(op.operands[0])
    assert isinstance(desc.type, TensorDesc)
    rows, column = (e.use(v) for v in bracketed(e, op))
    tile, barrier = by_type(e, op, MemDesc)
    m, b = memdesc(op, tile.type), memdesc(op, barrier.type)
    parts = box(e, op, m, TensorDesc(m.shape, m.element, m.layout))
    multicast = "multicast" in op.attrs and op.attrs["multicast"] != "false"
    info = e.info(op, "TMA gather", multicast=multicast, **({"zero": zero_bits(e, b)} | parts))
    call = f"A.tma_gather({info}, {desc.code}, {e.full(rows)}, {column.code}, {barrier.code}, {tile.code})"
    guarded(e, predicate(e, op), ["yield", call])


@handles("ttng.async_tma_copy_local_to_global", "ttng.async_tma_reduce")
def tma_store(e: Emitter, op: Op) -> None:
    desc = e.use(op.operands[0])
    assert isinstance(desc.type, TensorDesc)
    coords = [e.use(v).code for v in bracketed(e, op)]
    (tile,) = by_type(e, op, MemDesc)
    parts = box(e, op, memdesc(op, tile.type), desc.type)
    reduce = None
    if op.name.endswith("reduce"):
        from ..reductions import REDUCTIONS

        kind = op.attrs.get("kind") or op.body.split(",")[0].split("%")[0].strip()
        reduce = REDUCTIONS.get(kind.split(":")[0].strip())
        if reduce is None:
            raise unsupported(op, f"TMA reduction {kind}")
    info = e.info(op, "TMA store", reduce=reduce, **parts)
    e.emit("yield")
    e.emit(f"A.tma_store({info}, {desc.code}, ({', '.join(coords)},), {tile.code})")


@handles("ttng.async_tma_scatter")
def tma_scatter(e: Emitter, op: Op) -> None:
    desc = e.use(op.operands[0])
    rows, column = (e.use(v) for v in bracketed(e, op))
    (tile,) = by_type(e, op, MemDesc)
    m = memdesc(op, tile.type)
    parts = box(e, op, m, TensorDesc(m.shape, m.element, m.layout))
    info = e.info(op, "TMA store", reduce=None, **parts)
    e.emit("yield")
    e.emit(f"A.tma_scatter({info}, {desc.code}, {e.full(rows)}, {column.code}, {tile.code})")


@handles("ttng.async_tma_store_wait")
def tma_store_wait(e: Emitter, op: Op) -> None:
    read_only = "read_only" in op.attrs and op.attrs["read_only"] != "false"
    info = e.info(op, "store_wait")
    e.emit("yield")
    e.emit(f"A.tma_store_wait({info}, {int_attr(op.attrs.get('pendings', '0'))}, {read_only})")


@handles("ttng.warp_group_dot")
def warp_group_dot(e: Emitter, op: Op) -> None:
    check_attrs(op, "inputPrecision", "isAsync", "maxNumImpreciseAcc")
    a, b, c = (e.use(v) for v in op.operands[:3])
    use_c = e.use(op.operands[3]) if len(op.operands) > 3 else None
    kind = op.result_types[0]
    assert isinstance(kind, Tensor)
    element = a.type.element.name  # type: ignore[union-attr]
    multiply = multiplier(op, element, kind.element.name, op.attrs.get("inputPrecision", "0"))
    a_pattern = view_pattern(e, a.type) if isinstance(a.type, MemDesc) else None
    b_pattern = view_pattern(e, memdesc(op, b.type))
    m, n = e.local(kind)[-2:]
    k = (a_pattern.shape if a_pattern else e.local(a.type))[-1]
    if b_pattern.shape[-2:] != (k, n) or (a_pattern.shape if a_pattern else e.local(a.type))[-2] != m:
        raise unsupported(op, "a product whose operands are split over CTAs in another way than its result")
    is_async = op.attrs.get("isAsync", "false") != "false"
    info = e.info(
        op, "wgmma", a_pattern=a_pattern, b_pattern=b_pattern, multiply=multiply, is_async=is_async,
    )  # fmt: skip
    a_code = a.code if a_pattern else e.full(a)
    c_code = "None" if use_c is not None and use_c.const is not None and not use_c.const else e.full(c)
    use = "" if use_c is None else f", {use_c.code}"
    e.emit("yield")
    e.set(
        op.results[0], f"A.warp_group_dot({info}, {a_code}, {b.code}, {c_code}{use})", kind, e.local(kind), array=True
    )


def multiplier(op: Op, element: str, result: str, precision: str) -> Any:
    from ..ops import wgmma

    if element in ("i8",):
        return wgmma.multiply_int
    if result == "f16":
        return wgmma.multiply_half
    if element == "f32":
        return wgmma.multiply_tf32
    if element in ("f16", "bf16", "f8E4M3FN", "f8E5M2"):
        return wgmma.multiply_float
    raise unsupported(op, f"a product of {element}")


@handles("ttng.warp_group_dot_wait")
def warp_group_dot_wait(e: Emitter, op: Op) -> None:
    wait_for_products(e, op, int_attr(op.attrs["pendings"]))


def wait_for_products(e: Emitter, op: Op, pendings: int) -> None:
    """Results are the operands, of products that are complete then."""
    values = e.operands(op)
    info = e.info(op, "warpgroup_mma_wait")
    e.emit("yield")
    codes = [e.full(v) if isinstance(v.type, Tensor) else v.code for v in values]
    call = f"A.warp_group_dot_wait({info}, {pendings}{''.join(', ' + c for c in codes)})"
    variables = []
    for name, v in zip(op.results, values, strict=True):
        variable = e.fresh(name)
        variables.append(variable)
        e.env[name] = Value(variable, v.type, e.local(v.type), None, isinstance(v.type, Tensor))
    e.emit(f"{', '.join(variables)} = {call}" if variables else call)


@handles("ttg.async_copy_global_to_local")
def async_copy(e: Emitter, op: Op) -> None:
    pointers = e.use(op.operands[0])
    (tile,) = by_type(e, op, MemDesc)
    m = memdesc(op, tile.type)
    # The printed form names its optional operands: `%pointers, %tile mask %mask other %other`.
    words = op.body.split()
    mask = e.use(words[words.index("mask") + 1].rstrip(",")) if "mask" in words else None
    other = e.use(words[words.index("other") + 1].rstrip(",")) if "other" in words else None
    how = touched(e, m, pointers.type)
    if how["spread"] is not None:
        raise unsupported(op, "into other CTAs' shared memory, which cp.async does not reach")
    info = e.info(op, "cp.async", pattern=how["pattern"], dtype=e.dtype(m), shape=e.local(pointers.type))
    codes = f"{e.full(pointers)}, {tile.code}"
    if mask is not None:
        codes += f", {mask.code}"
    if other is not None:
        codes += f", other={other.code}"
    e.emit("yield")
    e.emit(f"A.async_copy({info}, {codes})")
    token(e, op)


def token(e: Emitter, op: Op) -> None:
    for r in op.results:
        e.env[r] = Value("None", e.module.types.parse("!ttg.async.token"))


@handles("ttg.async_commit_group")
def async_commit_group(e: Emitter, op: Op) -> None:
    e.emit(f"A.async_commit_group({e.info(op, 'commit_group')})")
    token(e, op)


@handles("ttg.async_wait")
def async_wait(e: Emitter, op: Op) -> None:
    e.emit("yield")
    e.emit(f"A.async_wait({e.info(op, 'wait_group')}, {int_attr(op.attrs.get('num', op.attrs.get('pendings', '0')))})")
    token(e, op)


@handles("ttng.async_copy_mbarrier_arrive")
def async_copy_arrive(e: Emitter, op: Op) -> None:
    v = e.use(op.operands[0])
    info = e.info(op, "cp.async arrives", zero=zero_bits(e, memdesc(op, v.type)), threads=e.threads)
    no_increment = "noIncrement" in op.attrs and op.attrs["noIncrement"] != "false"
    e.emit("yield")
    e.emit(f"A.async_copy_arrive({info}, {v.code}, {no_increment})")


@handles("ttng.async_shared_store")
def async_shared_store(e: Emitter, op: Op) -> None:
    """st.async: each CTA's elements go to whichever CTA holds them in shared memory, and complete their bytes there."""
    data = e.use(op.operands[0])
    tile, barrier = by_type(e, op, MemDesc)
    m = memdesc(op, tile.type)
    p = view_pattern(e, m)
    source, whole = e.shard(data.type), shared_buffer(m, e.num_ctas).shard
    if len(m.shape) != len(whole.shape):
        raise unsupported(op, "a store into several buffers at once")
    target = Shard(m.shape, whole.bits)  # of a slice along dimensions that are not split
    info = e.info(
        op, "asynchronous store", pattern=p, source_shard=source, target_shard=target,
        zero=zero_bits(e, memdesc(op, barrier.type)), item=m.element.bytes,
    )  # fmt: skip
    guarded(
        e, predicate(e, op), ["yield", f"A.async_shared_store({info}, {e.full(data)}, {tile.code}, {barrier.code})"]
    )


@handles("ttg.global_scratch_alloc")
def global_scratch_alloc(e: Emitter, op: Op) -> None:
    size = int_attr(op.attrs["nbytes"])
    e.set(op.results[0], f"A.global_scratch({e.info(op, 'scratch', bytes=size)})", op.operand_types[0])


@handles("ttng.tensormap_create")
def tensormap_create(e: Emitter, op: Op) -> None:
    where, address = e.use(op.operands[0]), e.use(op.operands[1])
    sizes, strides = (", ".join(e.use(v).code for v in bracketed(e, op, i) if v) for i in (1, 2))
    item = pointee_bytes(op, address.type)
    info = e.info(op, "makes a descriptor", item=item, nan=int_attr(op.attrs["fill_mode"]) == 1)
    e.emit(f"A.make_descriptor({info}, {where.code}, {address.code}, ({sizes},), ({strides}{',' if strides else ''}))")


@handles("ttng.tensormap_fenceproxy_acquire")
def tensormap_fence(e: Emitter, op: Op) -> None:
    """Orders the making of a descriptor before its use, within the role."""


@handles("ttng.reinterpret_tensor_descriptor")
def reinterpret_descriptor(e: Emitter, op: Op) -> None:
    e.set(op.results[0], f"A.descriptors[{e.use(op.operands[0]).code}]", op.result_types[0])
