"""tcgen05, tensor memory, cluster launch control."""

import math
import re
from typing import Any

import numpy as np

from ..generate import Emitter, Value, handles, unsupported
from ..ir.layouts import shared_buffer
from ..ir.locations import buffer_name
from ..ir.parse import Op
from ..ir.tensor_memory import (
    COLUMN_BYTES,
    fp4_containers,
    is_padded_fp4,
    tensor_memory_offsets,
    tensor_memory_shard,
)
from ..ir.text import int_attr
from ..ir.types import MemDesc
from ..memory import Pattern
from .arith import joint_shape
from .hopper import by_type, multiplier, token
from .memory import memdesc, unique_name, view_pattern, zero_bits
from .sync import guarded

_PATTERNS: dict[Any, Pattern] = {}


def tensor_pattern(e: Emitter, m: MemDesc) -> Pattern:
    key = (m, e.num_ctas)
    if key not in _PATTERNS:
        offsets, stride = tensor_memory_offsets(m, e.num_ctas)
        lead = m.shape[:-2]
        if lead:
            steps = np.arange(math.prod(lead)) * stride
            offsets = steps.reshape(*lead, 1, 1) + offsets
        _PATTERNS[key] = Pattern(offsets, m.element.bytes, e.dtype(m))
    return _PATTERNS[key]


@handles("ttng.tmem_alloc")
def tmem_alloc(e: Emitter, op: Op) -> None:
    m = memdesc(op, (op.result_types or op.operand_types)[0])
    _, stride = tensor_memory_offsets(m, e.num_ctas)
    size = stride * math.prod(m.shape[:-2])
    if "tensor_memory_col_offset" in op.attrs:
        offset = int_attr(op.attrs["tensor_memory_col_offset"]) * COLUMN_BYTES
        offset += int_attr(op.attrs.get("tensor_memory_row_offset", "0")) * 4
    else:
        offset = e.tmem_bump
        e.tmem_bump += size
    if offset + size > 512 * COLUMN_BYTES:
        raise unsupported(op, "more than the 512 columns of tensor memory")
    info = e.info(
        op, f"initialises {buffer_name(op.site)}", offset=offset, bytes=size, stride=stride,
        name=unique_name(e, buffer_name(op.site), op), pattern=tensor_pattern(e, m),
    )  # fmt: skip
    data = f", {e.full(e.use(op.operands[0]))}" if op.operands else ""
    e.set(op.results[0], f"A.tmem_alloc({info}{data})", m)
    for extra in op.results[1:]:
        e.env[extra] = Value("None", e.module.types.parse("!ttg.async.token"))


def tensor_index(e: Emitter, op: Op, source: Value, index: Value, m: MemDesc, target: MemDesc) -> None:
    _, stride = tensor_memory_offsets(m, e.num_ctas)
    for size in m.shape[1:-2]:
        stride *= size
    info = e.info(op, "index", count=m.shape[0], stride=stride)
    e.set(op.results[0], f"A.tmem_index({info}, {source.code}, {index.code})", target)


def tensor_slice(e: Emitter, op: Op, source: Value, starts: tuple[int, ...], m: MemDesc, target: MemDesc) -> None:
    """A slice of the last two dimensions is an offset in columns and lanes."""
    whole = MemDesc(m.alloc_shape, m.element, m.layout, m.space, m.alloc_shape)
    offsets, stride = tensor_memory_offsets(whole, e.num_ctas)
    lead, tail = starts[:-2], starts[-2:]
    add, step = 0, stride
    for size, at in zip(reversed(m.alloc_shape[: len(lead)]), reversed(lead), strict=True):
        add, step = add + at * step, step * size
    local = tensor_memory_shard(m, e.num_ctas).local_shape
    add += int(offsets[tail[0] % local[0], tail[1] % local[1]])
    if add:
        e.set(op.results[0], f"{source.code} + {add}", target)
    else:
        e.alias(op.results[0], source, target)


@handles("ttng.tmem_subslice")
def tmem_subslice(e: Emitter, op: Op) -> None:
    source = e.use(op.operands[0])
    m = memdesc(op, source.type)
    # The printed type of a slice of a slice keeps the first allocation's shape; offsets are those of the source.
    dim = int_attr(op.attrs["dim"]) if "dim" in op.attrs else len(m.shape) - 1
    starts = [0] * len(m.shape)
    starts[dim] = int_attr(op.attrs.get("offset", op.attrs.get("N", "0")))
    tensor_slice(e, op, source, tuple(starts), m, memdesc(op, op.result_types[0]))


@handles("ttng.tmem_load")
def tmem_load(e: Emitter, op: Op) -> None:
    source = e.use(op.operands[0])
    m = memdesc(op, source.type)
    kinds = [t for t in op.result_types if hasattr(t, "layout")]
    values = [r for r, t in zip(op.results, op.result_types, strict=True) if hasattr(t, "layout")]
    p = tensor_pattern(e, m)
    if p.shape != e.local(kinds[0]):
        raise unsupported(op, f"a load of {p.shape} into {e.local(kinds[0])} elements per CTA")
    reduction = op.attrs.get("redOp", "")
    info = e.info(
        op, "tensor memory load", pattern=p, largest="max" in reduction,
        absolute=bool(int_attr(op.attrs.get("abs", "false"))), propagate_nan=op.attrs.get("NaN", "") in ("true", "all"),
    )  # fmt: skip
    e.emit("yield")
    if reduction:
        out = e.fresh("loaded")
        e.emit(f"{out} = A.tmem_load_reduce({info}, {source.code})")
        for i, (r, t) in enumerate(zip(values, kinds, strict=True)):
            e.set(r, f"{out}[{i}]", t, e.local(t), array=True)
    else:
        e.set(values[0], f"A.tmem_load({info}, {source.code})", kinds[0], e.local(kinds[0]), array=True)
    for r in op.results:
        if r not in values:
            e.env[r] = Value("None", e.module.types.parse("!ttg.async.token"))


@handles("ttng.tmem_store")
def tmem_store(e: Emitter, op: Op) -> None:
    values = e.operands(op)
    target = next(v for v in values if isinstance(v.type, MemDesc))
    data = next(v for v in values if hasattr(v.type, "shape") and not isinstance(v.type, MemDesc))
    wanted = next((v for v in values if getattr(v.type, "name", "") == "i1"), None)
    m = memdesc(op, target.type)
    info = e.info(op, "tensor memory store", pattern=tensor_pattern(e, m))
    if info and tensor_pattern(e, m).shape != e.local(data.type):
        raise unsupported(op, f"a store of {e.local(data.type)} into {tensor_pattern(e, m).shape} elements per CTA")
    condition = None if wanted is None or wanted.const else wanted
    guarded(e, condition, ["yield", f"A.tmem_store({info}, {target.code}, {e.full(data)})"])
    token(e, op)


@handles("ttng.tmem_wait")
def tmem_wait(e: Emitter, op: Op) -> None:
    """Loads and stores of tensor memory are done when issued here."""


def two_ctas(e: Emitter) -> bool:
    return e.num_ctas > 1 and e.module.attrs.get("ttng.two-ctas") == "true"


@handles("ttng.tc_gen5_mma", "ttng.tc_gen5_mma_scaled")
def tc_gen5_mma(e: Emitter, op: Op) -> None:
    scaled = op.name.endswith("scaled")
    parts = [p.strip() for p in split_operands(op.body)]
    a, b, acc = (e.use(strip_token(p)) for p in parts[:3])
    n = 5 if scaled else 3
    scales = [e.use(strip_token(p)) for p in parts[3:5]] if scaled else []
    use_acc, predicate = e.use(parts[n]), e.use(parts[n + 1].split(" ")[0])
    barriers = parts[n + 2 :]
    pair = "two_ctas" in op.attrs
    am, bm, accm = memdesc(op, a.type), memdesc(op, b.type), memdesc(op, acc.type)
    a_padded = am.space == "tensor" and is_padded_fp4(am)
    am = fp4_containers(am) if a_padded else am
    patterns: dict[str, Any] = {}
    for name, m in (("a", am), ("b", bm)):
        in_tensor = m.space == "tensor"
        patterns[f"{name}_pattern"] = tensor_pattern(e, m) if in_tensor else view_pattern(e, m)
        patterns[f"{name}_tensor"] = in_tensor
    packed = {"a_packed": False, "b_packed": False}
    element = am.element.name
    if scaled:
        kinds = re.findall(r"(?:lhs|rhs) = (\w+)", op.body)
        packed = {"a_packed": kinds[0] == "e2m1" and not a_padded, "b_packed": kinds[1] == "e2m1"}
        patterns["a_scale_pattern"] = tensor_pattern(e, memdesc(op, scales[0].type))
        patterns["b_scale_pattern"] = tensor_pattern(e, memdesc(op, scales[1].type))
        element = "f8E4M3FN"
    elif am.element.name == "i8" and accm.element.name != "i32":
        raise unsupported(op, "packed operands")
    b_split = pair and bool(b_shard_bits(e, bm) & 1)
    check_shapes(e, op, patterns, tensor_pattern(e, accm), pair and b_split, packed)
    smem = [m for m in (am, bm) if m.space == "shared"]
    shared_over = [zero_bits(e, m) for m in smem] if "multicast" in op.attrs else []
    info = e.info(
        op, "tcgen05.mma", two_ctas=pair, b_split=b_split, acc_pattern=tensor_pattern(e, accm),
        multiply=multiplier(op, element, accm.element.name, ""), a_padded=a_padded, **patterns, **packed,
    )  # fmt: skip
    signals = []
    for text in barriers:
        found = re.match(r"(%[\w.$\-]+(?:#\d+)?)(?:\[(%[\w.$\-]+(?:#\d+)?)\])?", text)
        if not found:
            continue
        barrier = e.use(found[1])
        signal = e.info(
            op, "tcgen05.mma completes", zero=zero_bits(e, memdesc(op, barrier.type)), two_ctas=pair,
            shared_over=shared_over,
        )  # fmt: skip
        signals.append(f"({signal}, {barrier.code}, {e.use(found[2]).code if found[2] else True})")
    tail = f", ({', '.join(signals)},)" if signals else ""
    if scales:
        tail += f", scales=({scales[0].code}, {scales[1].code})"
    condition = None if predicate.const is not None and predicate.const else predicate
    guarded(e, condition, ["yield", f"A.mma({info}, {a.code}, {b.code}, {acc.code}, {use_acc.code}{tail})"])
    token(e, op)


def split_operands(body: str) -> list[str]:
    from ..ir.text import split_top

    return split_top(body)


def strip_token(text: str) -> str:
    """`%acc[%token]` or `%acc[]` without the brackets."""
    return text.split("[")[0].strip()


def b_shard_bits(e: Emitter, m: MemDesc) -> int:
    """CTA bits that split the columns of a right operand."""
    shard = shared_buffer(m, e.num_ctas).shard if m.space == "shared" else tensor_memory_shard(m, e.num_ctas)
    return sum(1 << c for _, c in shard.bits[-1])


def check_shapes(e: Emitter, op: Op, patterns: dict[str, Any], acc: Pattern, doubled: bool, packed: Any) -> None:
    m, k = patterns["a_pattern"].shape[-2:]
    k2, n = patterns["b_pattern"].shape[-2:]
    k *= 2 if packed["a_packed"] else 1
    k2 *= 2 if packed["b_packed"] else 1
    if acc.shape[-2:] != (m, 2 * n if doubled else n) or k != k2:
        raise unsupported(op, "operands split over CTAs in a way that does not give the accumulator's parts")


@handles("ttng.tc_gen5_commit")
def tc_gen5_commit(e: Emitter, op: Op) -> None:
    values = e.operands(op)
    barrier = values[0]
    wanted = next((v for v in values[1:] if getattr(v.type, "name", "") == "i1"), None)
    operands = [memdesc(op, v.type) for v in values[1:] if isinstance(v.type, MemDesc)]
    pair = two_ctas(e)
    info = e.info(
        op, "tcgen05.commit", zero=zero_bits(e, memdesc(op, barrier.type)), two_ctas=pair,
        shared_over=[zero_bits(e, m) for m in operands if m.space == "shared"],
    )  # fmt: skip
    condition = None if wanted is None or wanted.const else wanted
    guarded(e, condition, ["yield", f"A.commit({info}, {barrier.code})"])


@handles("ttng.tmem_copy")
def tmem_copy(e: Emitter, op: Op) -> None:
    source, target = by_type(e, op, MemDesc)[:2]
    sm, tm = memdesc(op, source.type), memdesc(op, target.type)
    sp, tp = view_pattern(e, sm), tensor_pattern(e, tm)
    if sp.shape != tp.shape or len(op.operands) > 2:
        raise unsupported(op, f"a copy of {sp.shape} into {tp.shape} elements per CTA")
    info = e.info(op, "tcgen05.cp", source_pattern=sp, target_pattern=tp, two_ctas=two_ctas(e))
    e.emit("yield")
    e.emit(f"A.tmem_copy({info}, {source.code}, {target.code})")


PACKED = {"add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "min": "np.fmin({}, {})", "max": "np.fmax({}, {})",
          "fma": "fma({}, {}, {})"}  # fmt: skip


@handles("ttng.packed_arith")
def packed_arith(e: Emitter, op: Op) -> None:
    values = e.operands(op)
    kind = op.result_types[0]
    name = op.body.split()[0]
    if name not in PACKED or any(e.dtype(v.type) != e.dtype(kind) for v in values) or e.dtype(kind).itemsize == 1:
        raise unsupported(op, "packed arithmetic of fp8 or fp4, which Rubin has")
    if e.dtype(kind).itemsize == 4 and "cuda:90" in e.module.attrs.get("ttg.target", ""):
        raise unsupported(op, "packed arithmetic of fp32, which Hopper has not")
    code = PACKED[name].format(*(v.code for v in values))
    e.set(op.results[0], code, kind, joint_shape(*values), array=any(v.is_array for v in values))


@handles("ttng.clc_try_cancel")
def clc_try_cancel(e: Emitter, op: Op) -> None:
    result, barrier = (e.use(op.operands[i]) for i in (0, 1))
    m = memdesc(op, result.type)
    info = e.info(
        op, "CLC answer", pattern=view_pattern(e, m), bytes=16, zero=zero_bits(e, memdesc(op, barrier.type)),
    )  # fmt: skip
    e.emit("yield")
    e.emit(f"A.clc_try_cancel({info}, {result.code}, {barrier.code})")


@handles("ttng.clc_load_result")
def clc_load_result(e: Emitter, op: Op) -> None:
    source = e.use(op.operands[0])
    info = e.info(op, "CLC answer", pattern=view_pattern(e, memdesc(op, source.type)), spread=None)
    e.emit("yield")
    e.set(op.results[0], f"A.clc_load({info}, {source.code})", e.module.types.parse("!ttng.clc_result"))


@handles("ttng.clc_is_canceled")
def clc_is_canceled(e: Emitter, op: Op) -> None:
    e.set(op.results[0], f"clc_cancelled({e.use(op.operands[0]).code})", op.result_types[0])


@handles("ttng.clc_get_program_id")
def clc_get_program_id(e: Emitter, op: Op) -> None:
    dim = "xyz".index(op.body.split(",")[1].strip())
    e.set(op.results[0], f"clc_program({e.use(op.operands[0]).code}, {dim})", op.result_types[0])
