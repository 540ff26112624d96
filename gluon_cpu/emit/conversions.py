"""Conversions between element types."""

from ..generate import Emitter, handles, unsupported
from ..ir.parse import Op
from ..ir.text import int_attr
from .arith import bits_of, element_of, put, unsigned, wrap

ROUNDINGS = {"rtne": "cast_float", "rtz": "cast_float_down"}


@handles("arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast", "arith.index_castui")
def int_cast(e: Emitter, op: Op) -> None:
    (a,) = e.operands(op)
    source, target = op.operand_types[0], op.result_types[0]
    name, bits = op.name.split(".")[1], bits_of(source)
    if not a.is_array:
        if name == "trunci":
            code = wrap(a.code, bits_of(target))
        elif bits == 1:
            code = f"-int({a.code})" if name == "extsi" else f"int({a.code})"
        elif name == "extui":
            code = f"{a.code} & {(1 << bits) - 1}"
        else:
            code = a.code
    elif bits == 1:
        code = f"{a.code}.astype({e.dtype_code(target)})"
        code = f"-{code}" if name == "extsi" else code
    elif name == "extui":
        code = f"{unsigned(e, a)}.astype({e.dtype_code(target)})"
    elif bits_of(target) == 1:
        code = f"({a.code} & 1).astype(D_i1)"
    else:
        code = f"{a.code}.astype({e.dtype_code(target)})"
    put(e, op, code, target, [a])


@handles("arith.sitofp", "arith.uitofp")
def int_to_float(e: Emitter, op: Op) -> None:
    (a,) = e.operands(op)
    target = op.result_types[0]
    x = unsigned(e, a) if op.name.endswith("uitofp") else a.code
    if not op.name.endswith("uitofp") and bits_of(op.operand_types[0]) == 1:
        x = f"-{a.code}.astype(D_i8)" if a.is_array else f"-int({a.code})"
    code = f"({x}).astype({e.dtype_code(target)})" if a.is_array else f"{e.dtype_code(target)}.type({x})"
    put(e, op, code, target, [a])


@handles("arith.fptosi", "arith.fptoui")
def float_to_int(e: Emitter, op: Op) -> None:
    (a,) = e.operands(op)
    target = op.result_types[0]
    dtype = e.dtype_code(target)
    if op.name.endswith("ui"):
        code = f"float_to_int({a.code}, np.dtype(U{bits_of(target) // 8})).view({dtype})"
    else:
        code = f"float_to_int({a.code}, {dtype})"
    put(e, op, code if a.is_array else f"int({code})", target, [a])


@handles("arith.extf", "arith.truncf", "tt.fp_to_fp")
def float_cast(e: Emitter, op: Op) -> None:
    (a,) = e.operands(op)
    rounding = op.body.split("rounding = ")[1].split()[0] if "rounding" in op.body else "rtne"
    if rounding not in ROUNDINGS:
        raise unsupported(op, "this rounding mode")
    target = op.result_types[0]
    put(e, op, f"{ROUNDINGS[rounding]}({a.code}, {e.dtype_code(target)})", target, [a])


@handles("ttg.fp4_to_fp")
def fp4_to_fp(e: Emitter, op: Op) -> None:
    """Two values to a byte, the lower half first, along an axis."""
    (a,) = e.operands(op)
    target, axis = op.result_types[0], int_attr(op.attrs["axis"])
    # Each CTA's bytes are the two values that it holds, if the result is split where they are.
    if tuple((bit + 1, cta) for bit, cta in e.shard(a.type).bits[axis]) != e.shard(target).bits[axis]:
        raise unsupported(op, "a result that is split over CTAs otherwise than the bytes")
    code = f"unpack_fp4_to({e.full(a)}, {e.dtype_code(target)}, {axis})"
    e.set(op.results[0], code, target, e.local(target), array=True)


@handles("tti.experimental_fpsan_embed", "tti.experimental_fpsan_unembed")
def fpsan(e: Emitter, op: Op) -> None:
    (a,) = e.operands(op)
    target = op.result_types[0]
    function = op.name.rsplit("_", 1)[1]
    put(e, op, f"{function}({e.typed(a)}, {e.dtype_code(target)})", target, [a])


@handles("arith.bitcast", "tt.bitcast")
def bitcast(e: Emitter, op: Op) -> None:
    (a,) = e.operands(op)
    target = op.result_types[0]
    source = element_of(op.operand_types[0])
    if source.name == element_of(target).name or element_of(target).name == source.name == "ptr":
        e.alias(op.results[0], a, target)
    elif a.is_array:
        put(e, op, f"{a.code}.view({e.dtype_code(target)})", target, [a])
    else:
        code = f"scalar(np.array({e.typed(a)}, {e.dtype_code(op.operand_types[0])}).view({e.dtype_code(target)})[()])"
        put(e, op, code, target, [a])


@handles("tt.int_to_ptr", "tt.ptr_to_int")
def pointer_cast(e: Emitter, op: Op) -> None:
    (a,) = e.operands(op)
    e.alias(op.results[0], a, op.result_types[0])
