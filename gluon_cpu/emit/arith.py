"""arith and math: scalars as Python integers that wrap and numpy floats, tensors as numpy arrays."""

import re
from typing import Any

import numpy as np

from ..generate import Emitter, Value, handles, unsupported
from ..ir.parse import Op
from ..ir.types import BITS, Scalar, Tensor, Type
from ..values import DTYPES


def element_of(t: Type) -> Scalar:
    return t if isinstance(t, Scalar) else t.element  # type: ignore[union-attr]


def bits_of(t: Type) -> int:
    return BITS.get(element_of(t).name, 64)


def wrap(code: str, bits: int) -> str:
    """Two's complement of a Python integer."""
    if bits == 1:
        return f"bool(({code}) & 1)"
    half = 1 << (bits - 1)
    return f"((({code}) + {half}) & {(1 << bits) - 1}) - {half}"


def joint_shape(*values: Value) -> tuple[int, ...]:
    return tuple(np.broadcast_shapes(*(v.shape for v in values)))


def put(e: Emitter, op: Op, code: str, kind: Type, values: list[Value], const: Any = None) -> None:
    """Set the result of an elementwise operation."""
    array = any(v.is_array for v in values)
    e.set(op.results[0], code, kind, joint_shape(*values), array=array, const=const)


@handles("arith.constant")
def constant(e: Emitter, op: Op) -> None:
    text = op.body
    kind = op.operand_types[0] if op.operand_types else e.module.types.parse("i1")
    if not isinstance(kind, Tensor):
        value = parse_number(text, element_of(kind))
        code = e.scalar_literal(value, kind)
        e.env[op.results[0]] = Value(f"({code})" if code.startswith("-") else code, kind, (), value)
        return
    inside = text[text.index("<") + 1 : text.rindex(">")].strip()
    element = kind.element
    if inside.startswith('"0x'):
        raw = np.frombuffer(bytes.fromhex(inside[3:-1]), DTYPES[element.name] if element.name != "i1" else np.uint8)
        array = np.broadcast_to(
            raw.astype(DTYPES[element.name]).reshape(kind.shape if raw.size > 1 else ()), kind.shape
        )
    elif inside.startswith("["):
        numbers = [parse_number(t, element) for t in re.findall(r"[^\s,\[\]]+", inside)]
        array = np.array(numbers, DTYPES[element.name]).reshape(kind.shape)
    else:
        value = parse_number(inside, element)
        code = e.scalar_literal(value, kind)
        e.env[op.results[0]] = Value(f"({code})" if code.startswith("-") else code, kind, (), value)
        return
    shard = e.shard(kind)
    from ..ops.misc import part_of

    name = e.constant([part_of(shard, array, c) for c in range(e.num_ctas)])
    e.env[op.results[0]] = Value(name, kind, shard.local_shape, None, True)


def parse_number(text: str, element: Scalar) -> Any:
    text = text.split(" : ")[0].strip()
    if text in ("true", "false"):
        return text == "true"
    if not element.is_float:
        return int(text, 0)
    dtype = DTYPES[element.name]
    if text.startswith(("0x", "0X")):
        bits = np.array([int(text, 16)], {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.itemsize])
        return bits.view(dtype)[0]
    return dtype.type(float(text))


INT_BINARY = {"addi": "+", "subi": "-", "muli": "*", "andi": "&", "ori": "|", "xori": "^"}


@handles(*(f"arith.{n}" for n in INT_BINARY))
def int_binary(e: Emitter, op: Op) -> None:
    a, b = e.operands(op)
    kind = op.operand_types[0]
    symbol = INT_BINARY[op.name.split(".")[1]]
    code = f"{a.code} {symbol} {b.code}"
    if not (a.is_array or b.is_array):
        if bits_of(kind) == 1:
            code = f"bool({code})" if symbol in "&|^" else f"bool(({code}) & 1)"
        elif symbol in "+-*":
            code = wrap(code, bits_of(kind))
    elif bits_of(kind) == 1 and symbol in "+-*":
        code = f"({a.code} {'&' if symbol == '*' else '^'} {b.code})"
    put(e, op, code, kind, [a, b])


@handles("arith.divsi", "arith.remsi", "arith.divui", "arith.remui", "arith.ceildivsi", "arith.floordivsi")
def int_division(e: Emitter, op: Op) -> None:
    a, b = e.operands(op)
    kind = op.operand_types[0]
    name = op.name.split(".")[1]
    if name in ("divsi", "remsi"):
        code = f"{'sdiv' if name == 'divsi' else 'srem'}({a.code}, {b.code})"
    elif name in ("divui", "remui"):
        x, y = unsigned(e, a), unsigned(e, b)
        code = signed_result(e, f"{'floordiv' if name == 'divui' else 'mod'}({x}, {y})", kind, a.is_array or b.is_array)
    else:
        code = f"-floordiv(-{a.code}, {b.code})" if name == "ceildivsi" else f"floordiv({a.code}, {b.code})"
    put(e, op, code, kind, [a, b])


def unsigned(e: Emitter, v: Value) -> str:
    bits = bits_of(v.type)
    if bits == 1:
        return v.code
    if not v.is_array:
        return f"({v.code} & {(1 << bits) - 1})"
    return f"{v.code}.view(U{bits // 8})"


def signed_result(e: Emitter, code: str, kind: Type, array: bool) -> str:
    return f"({code}).view({e.dtype_code(kind)})" if array else wrap(code, bits_of(kind))


@handles("arith.shli", "arith.shrsi", "arith.shrui")
def shift(e: Emitter, op: Op) -> None:
    a, b = e.operands(op)
    kind, bits, name = op.operand_types[0], bits_of(op.operand_types[0]), op.name.split(".")[1]
    if not (a.is_array or b.is_array):
        if name == "shli":
            code = f"({wrap(f'{a.code} << {b.code}', bits)} if 0 <= {b.code} < {bits} else 0)"
        elif name == "shrsi":
            code = f"({a.code} >> ({b.code} if 0 <= {b.code} < {bits} else {bits - 1}))"
        else:
            code = f"({wrap(f'{unsigned(e, a)} >> {b.code}', bits)} if 0 <= {b.code} < {bits} else 0)"
    elif b.const is not None and 0 <= b.const < bits:
        code = f"{a.code} {'<<' if name == 'shli' else '>>'} {b.code}"
        if name == "shrui":
            code = f"({unsigned(e, a)} >> {b.code}).view({e.dtype_code(kind)})"
    else:
        x, y = (c if v.is_array else f"np.asarray({e.typed(v)})" for v, c in ((a, a.code), (b, b.code)))
        code = f"shift_{name}({x}, {y}, {bits})"
    put(e, op, code, kind, [a, b])


FLOAT_BINARY = {"addf": "+", "subf": "-", "mulf": "*", "divf": "/"}


@handles(*(f"arith.{n}" for n in FLOAT_BINARY), "tt.approx_divf", "tt.precise_divf")
def float_binary(e: Emitter, op: Op) -> None:
    a, b = e.operands(op)
    symbol = FLOAT_BINARY.get(op.name.split(".")[1], "/")
    put(e, op, f"{a.code} {symbol} {b.code}", op.operand_types[0], [a, b])


@handles("arith.remf")
def float_remainder(e: Emitter, op: Op) -> None:
    a, b = e.operands(op)
    put(e, op, f"np.fmod({a.code}, {b.code})", op.operand_types[0], [a, b])


MIN_MAX = {
    "arith.maxnumf": "np.fmax", "arith.minnumf": "np.fmin", "arith.maximumf": "np.maximum",
    "arith.minimumf": "np.minimum", "arith.maxsi": "max", "arith.minsi": "min",
    "arith.maxui": "max", "arith.minui": "min",
}  # fmt: skip


@handles(*MIN_MAX)
def min_max(e: Emitter, op: Op) -> None:
    a, b = e.operands(op)
    kind, name = op.operand_types[0], MIN_MAX[op.name]
    if op.name.endswith("f"):
        code = f"{name}({a.code}, {b.code})"
    elif op.name.endswith("ui"):
        if a.is_array or b.is_array:
            x, y = (unsigned(e, v) if v.is_array else f"{v.code} & {(1 << bits_of(kind)) - 1}" for v in (a, b))
            code = f"np.{name}imum({x}, {y}).view({e.dtype_code(kind)})"
        else:
            code = f"{name}({a.code}, {b.code}, key=lambda x: x & {(1 << bits_of(kind)) - 1})"
    else:
        code = f"np.{name}imum({a.code}, {b.code})" if a.is_array or b.is_array else f"{name}({a.code}, {b.code})"
    put(e, op, code, kind, [a, b])


@handles("tt.clampf")
def clamp(e: Emitter, op: Op) -> None:
    x, low, high = e.operands(op)
    if "all" in op.attrs.get("propagateNan", "") or "propagateNan = all" in op.body:
        code = f"np.minimum(np.maximum({x.code}, {low.code}), {high.code})"
    else:
        code = f"np.fmin(np.fmax({x.code}, {low.code}), {high.code})"
    put(e, op, code, op.operand_types[0], [x, low, high])


COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def i1_like(e: Emitter, t: Type) -> Type:
    i1 = Scalar("i1")
    return Tensor(t.shape, i1, t.layout) if isinstance(t, Tensor) else i1


@handles("arith.cmpi")
def compare_int(e: Emitter, op: Op) -> None:
    a, b = e.operands(op)
    predicate = op.body.split(",")[0].strip()
    kind = op.operand_types[0]
    array = a.is_array or b.is_array
    if predicate in ("eq", "ne"):
        code = f"{a.code} {COMPARE[predicate]} {b.code}"
    elif predicate[0] == "s":
        code = f"{a.code} {COMPARE[predicate[1:]]} {b.code}"
    else:
        code = f"{unsigned(e, a)} {COMPARE[predicate[1:]]} {unsigned(e, b)}"
    put(e, op, code if array else f"bool({code})", i1_like(e, kind), [a, b])


@handles("arith.cmpf")
def compare_float(e: Emitter, op: Op) -> None:
    a, b = e.operands(op)
    predicate = op.body.split(",")[0].strip().split(" ")[0]
    array = a.is_array or b.is_array
    if predicate in ("ord", "uno"):
        code = f"np.isnan({a.code}) | np.isnan({b.code})"
        if predicate == "ord":
            code = f"~({code})" if array else f"not ({code})"
    elif predicate in ("true", "false"):
        code = str(predicate == "true")
        array = False
    elif predicate == "one":
        code = f"({a.code} < {b.code}) | ({a.code} > {b.code})"
    elif predicate == "une":
        code = f"{a.code} != {b.code}"
    elif predicate == "ueq":
        code = f"np.logical_not(({a.code} < {b.code}) | ({a.code} > {b.code}))"
    elif predicate[0] == "o":
        code = f"{a.code} {COMPARE[predicate[1:]]} {b.code}"
    else:
        inverse = {"ult": ">=", "ule": ">", "ugt": "<=", "uge": "<"}[predicate]
        code = f"np.logical_not({a.code} {inverse} {b.code})"
    put(e, op, code if array else f"bool({code})", i1_like(e, op.operand_types[0]), [a, b])


@handles("arith.select")
def select(e: Emitter, op: Op) -> None:
    c, a, b = e.operands(op)
    kind = op.operand_types[-1]
    if not c.is_array:
        if isinstance(kind, Tensor) and (a.is_array or b.is_array):
            a_code, b_code = e.full(a), e.full(b)
            shape = e.local(kind)
            e.set(op.results[0], f"{a_code} if {c.code} else {b_code}", kind, shape, array=True)
        else:
            e.set(op.results[0], f"{a.code} if {c.code} else {b.code}", kind)
        return
    if not isinstance(kind, Tensor) and not e.lifted:
        raise unsupported(op)
    put(e, op, f"np.where({c.code}, {e.typed(a)}, {e.typed(b)})", kind, [c, a, b])


UNARY = {
    "exp2": "np.exp2", "exp": "np.exp", "log2": "np.log2", "log": "np.log", "sqrt": "np.sqrt", "sin": "np.sin",
    "cos": "np.cos", "floor": "np.floor", "ceil": "np.ceil", "absf": "np.abs", "absi": "np.abs", "tanh": "np.tanh",
}  # fmt: skip


@handles(*(f"math.{n}" for n in UNARY), "tt.precise_sqrt", "arith.negf", "math.rsqrt", "math.erf")
def unary(e: Emitter, op: Op) -> None:
    (a,) = e.operands(op)
    name = op.name.split(".")[1]
    kind = op.operand_types[0]
    if name == "negf":
        code = f"-{a.code}"
    elif name == "rsqrt":
        code = f"{e.scalar_literal(1.0, element_of(kind))} / np.sqrt({a.code})"
    elif name == "erf":
        code = f"erf({a.code})"
    elif name == "exp2" and element_of(kind).name == "f32":
        code = f"exp2({a.code})"
    else:
        code = f"{UNARY.get(name, 'np.sqrt')}({a.code})"
    if name == "absi" and not a.is_array:
        code = f"abs({a.code})"
    put(e, op, code, kind, [a])


@handles("math.fma")
def fma(e: Emitter, op: Op) -> None:
    a, b, c = e.operands(op)
    put(e, op, f"fma({a.code}, {b.code}, {c.code})", op.operand_types[0], [a, b, c])


@handles("tt.mulhiui")
def mulhiui(e: Emitter, op: Op) -> None:
    a, b = e.operands(op)
    kind, bits = op.operand_types[0], bits_of(op.operand_types[0])
    if a.is_array or b.is_array:
        x, y = (f"{unsigned(e, v)}.astype(np.uint64)" if v.is_array else f"np.uint64({unsigned(e, v)})" for v in (a, b))
        code = f"upper_half({x}, {y}, {bits}).view({e.dtype_code(kind)})"
    else:
        code = wrap(f"({unsigned(e, a)} * {unsigned(e, b)}) >> {bits}", bits)
    put(e, op, code, kind, [a, b])


@handles("arith.mulsi_extended", "arith.mului_extended")
def extended(e: Emitter, op: Op) -> None:
    raise unsupported(op)


@handles("ub.poison")
def poison(e: Emitter, op: Op) -> None:
    kind = op.operand_types[0]
    e.env[op.results[0]] = Value(e.scalar_literal(0, kind), kind, (), 0)
