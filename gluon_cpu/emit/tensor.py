"""Shapes, layouts, reductions, inline assembly."""

import re

import numpy as np

from .. import libdevice
from ..generate import Emitter, Value, handles, log2, unsupported
from ..ir.layouts import Shard
from ..ir.parse import Op, Region
from ..ir.text import int_array, int_attr
from ..ir.types import Scalar, Tensor


def result_tensor(op: Op, i: int = 0) -> Tensor:
    kind = (op.result_types or op.operand_types)[i]
    if not isinstance(kind, Tensor):
        raise unsupported(op)
    return kind


@handles("tt.splat")
def splat(e: Emitter, op: Op) -> None:
    e.alias(op.results[0], e.use(op.operands[0]), op.result_types[0])


@handles("tt.unsplat")
def unsplat(e: Emitter, op: Op) -> None:
    v = e.use(op.operands[0])
    if v.is_array:
        e.set(op.results[0], f"scalar({v.code}.reshape(-1)[0])", v.type.element)  # type: ignore[union-attr]
    else:
        e.alias(op.results[0], v, v.type.element)  # type: ignore[union-attr]


@handles("tt.make_range")
def make_range(e: Emitter, op: Op) -> None:
    kind = op.operand_types[0]
    start = int_attr(op.attrs["start"])
    shard = e.shard(kind)
    per_cta = [(shard.coordinates(0, c) + start).astype(np.int32) for c in range(e.num_ctas)]
    name = e.constant(per_cta, ("range", start, shard))
    e.env[op.results[0]] = Value(name, kind, shard.local_shape, None, True)


@handles("tt.broadcast")
def broadcast(e: Emitter, op: Op) -> None:
    e.alias(op.results[0], e.use(op.operands[0]), op.result_types[0])


@handles("tt.expand_dims")
def expand_dims(e: Emitter, op: Op) -> None:
    v, kind = e.use(op.operands[0]), result_tensor(op)
    if not v.is_array:
        e.alias(op.results[0], v, kind)
        return
    axis = int_attr(op.attrs["axis"])
    shape = (*v.shape[:axis], 1, *v.shape[axis:])
    key = ("expanded", v.code, shape)
    if v.code.startswith("K") and v.code[1:].isdigit():  # of a constant: a constant too
        per_cta = [a.reshape(shape) for a in e.constants[int(v.code[1:])]]
        e.env[op.results[0]] = Value(e.constant(per_cta, key), kind, shape, None, True)
    else:
        e.set(op.results[0], f"{v.code}.reshape({shape})", kind, shape, array=True)


def flat_bits(shard: Shard) -> tuple[tuple[int, int], ...]:
    """The split bits of a tensor's row-major index, with the CTA bit of each: what a reshape must keep."""
    found = []
    below = 0
    for d in range(len(shard.shape) - 1, -1, -1):
        found += [(b + below, c) for b, c in shard.bits[d]]
        below += log2(shard.shape[d])
    return tuple(sorted(found))


@handles("tt.reshape")
def reshape(e: Emitter, op: Op) -> None:
    v, kind = e.use(op.operands[0]), result_tensor(op)
    if not v.is_array:
        e.alias(op.results[0], v, kind)
        return
    source, target = e.shard(v.type), e.shard(kind)
    shape = target.local_shape
    if flat_bits(source) == flat_bits(target):
        e.set(op.results[0], f"{e.full(v)}.reshape({shape})", kind, shape, array=True)
        return
    through = Shard(kind.shape, ((),) * len(kind.shape))
    whole = e.exchange(op, e.full(v), source, Shard(source.shape, ((),) * len(source.shape)))
    name = e.constant(list(range(e.num_ctas)))
    info = e.info(op, "reshape", target_shard=target, through=through)
    e.set(
        op.results[0], f"part_of({info}.target_shard, {whole}.reshape({kind.shape}), {name})", kind, shape, array=True
    )


@handles("ttg.convert_layout")
def convert_layout(e: Emitter, op: Op) -> None:
    v, kind = e.use(op.operands[0]), result_tensor(op)
    source, target = e.shard(v.type), e.shard(kind)
    if not v.is_array or source == target:
        e.alias(op.results[0], v, kind)
        return
    shape = target.local_shape
    if not source.cta_bits:  # every CTA has all of it: take a part
        info = e.info(op, "convert_layout", target_shard=target)
        code = f"part_of({info}.target_shard, {e.full(v)}, A.cta.number)"
    else:
        code = e.exchange(op, e.full(v), source, target)
    e.set(op.results[0], code, kind, shape, array=True)


@handles("tt.trans")
def transpose(e: Emitter, op: Op) -> None:
    v, kind = e.use(op.operands[0]), result_tensor(op)
    order = int_array(op.attrs["order"])
    if not v.is_array:
        e.alias(op.results[0], v, kind)
        return
    shape = tuple(v.shape[i] for i in order)
    e.set(op.results[0], f"{v.code}.transpose({tuple(order)})", kind, shape, array=True)


@handles("tt.join", "tt.cat")
def join(e: Emitter, op: Op) -> None:
    a, b = (e.full(v) for v in e.operands(op))
    kind = result_tensor(op)
    code = f"np.stack(({a}, {b}), -1)" if op.name == "tt.join" else f"np.concatenate(({a}, {b}))"
    e.set(op.results[0], code, kind, e.local(kind), array=True)


@handles("tt.split")
def split(e: Emitter, op: Op) -> None:
    v, kind = e.use(op.operands[0]), result_tensor(op)
    code = e.full(v)
    for i, r in enumerate(op.results):
        e.set(r, f"{code}[..., {i}]", kind, e.local(kind), array=True)


@handles("tt.gather")
def gather(e: Emitter, op: Op) -> None:
    x, index = e.operands(op)
    axis, kind = int_attr(op.attrs["axis"]), result_tensor(op)
    shard = e.shard(x.type)
    if shard.bits[axis]:
        # Triton 3.9 compiles it to a write to, and reads of, the CTA's own shared memory, with nothing in between.
        raise unsupported(op, "across CTAs, where the compiler's code reads each CTA's own part alone")
    code = f"np.take_along_axis({e.full(x)}, {e.full(index)}.astype(np.int64), {axis})"
    e.set(op.results[0], code, kind, e.local(kind), array=True)


@handles("tt.histogram")
def histogram(e: Emitter, op: Op) -> None:
    x, kind = e.use(op.operands[0]), result_tensor(op)
    wholes = []
    for v in (x, *(e.use(name) for name in op.operands[1:])):
        code, shard = e.full(v), e.shard(v.type)
        if shard.cta_bits:
            name = e.fresh("gathered")
            e.emit(f"{name} = {e.exchange(op, code, shard, Shard(shard.shape, ((),) * len(shard.shape)))}")
            code = name
        wholes.append(code)
    values = "[".join(wholes) + "]" * (len(wholes) - 1)
    code = (
        f"np.bincount({values}.reshape(-1), minlength={kind.shape[0]})[:{kind.shape[0]}].astype({e.dtype_code(kind)})"
    )
    if e.shard(kind).cta_bits:
        info = e.info(op, "histogram", target_shard=e.shard(kind))
        code = f"part_of({info}.target_shard, {code}, A.cta.number)"
    e.set(op.results[0], code, kind, e.local(kind), array=True)


SIMPLE = {
    "arith.addf": "np.add", "arith.addi": "np.add", "arith.maxsi": "np.maximum", "arith.minsi": "np.minimum",
    "arith.mulf": "np.multiply", "arith.muli": "np.multiply", "arith.maximumf": "np.maximum",
    "arith.minimumf": "np.minimum", "arith.maxnumf": "np.fmax", "arith.minnumf": "np.fmin",
    "arith.andi": "np.bitwise_and", "arith.ori": "np.bitwise_or", "arith.xori": "np.bitwise_xor",
}  # fmt: skip


def simple_combiner(region: Region) -> str | None:
    """numpy's function for a region of one operation on its two arguments."""
    block = region.blocks[0]
    if len(block.ops) == 2 and len(block.args) == 2 and sorted(block.ops[0].operands) == sorted(block.args):
        return SIMPLE.get(block.ops[0].name)
    return None


def region_function(e: Emitter, region: Region, hint: str) -> str:
    """A nested function of arrays that does what a region says; returns a tuple."""
    block = region.blocks[0]
    name = e.fresh(hint)
    saved = dict(e.env)
    args = []
    for arg, kind in zip(block.args, block.arg_types, strict=True):
        variable = e.fresh(arg)
        args.append(variable)
        e.env[arg] = Value(variable, kind, (0,), None, True)  # extents unknown; only elementwise operations follow
    e.emit(f"def {name}({', '.join(args)}):")
    e.indent += 1
    e.lifted += 1
    for op in block.ops:
        if op.name.endswith(".return"):
            e.emit(f"return ({', '.join(e.use(v).code for v in op.operands)},)")
        else:
            e.op(op)
    e.lifted -= 1
    e.indent -= 1
    e.env = saved
    return name


@handles("tt.reduce")
def reduce(e: Emitter, op: Op) -> None:
    axis = int_attr(op.attrs["axis"])
    sources = e.operands(op)
    kind = sources[0].type
    assert isinstance(kind, Tensor)
    shard = e.shard(kind)
    codes = [e.full(v) for v in sources]
    if shard.bits[axis]:
        whole_axis = Shard(shard.shape, tuple(() if d == axis else b for d, b in enumerate(shard.bits)))
        gathered = []
        for code in codes:
            name = e.fresh("gathered")
            e.emit(f"{name} = {e.exchange(op, code, shard, whole_axis)}")
            gathered.append(name)
        codes = gathered
    types = op.result_types
    simple = simple_combiner(op.regions[0]) if len(sources) == 1 else None
    results = []
    if simple is not None:
        code = codes[0]
        if simple == "np.fmax":
            results = [f"row_max({code}, {axis})"]
        elif simple == "np.add" and kind.element.is_float:
            results = [f"{code}.sum({axis}, dtype={e.dtype_code(kind)})"]
        else:
            results = [f"{simple}.reduce({code}, {axis}, dtype={e.dtype_code(kind)})"]
    else:
        function = combiner(e, op.regions[0])
        out = e.fresh("reduced")
        e.emit(f"{out} = fold({function}, ({', '.join(codes)},), {axis})")
        results = [f"{out}[{i}]" for i in range(len(codes))]
    for name, code, t in zip(op.results, results, types, strict=True):
        if isinstance(t, Scalar):
            e.set(name, f"scalar({code}[()])", t)
        else:
            target = e.local(t)
            e.set(name, code, t, target, array=True)


@handles("tt.scan")
def scan(e: Emitter, op: Op) -> None:
    axis = int_attr(op.attrs["axis"])
    reverse = bool(int_attr(op.attrs.get("reverse", "false")))
    sources = e.operands(op)
    shard = e.shard(sources[0].type)
    if shard.bits[axis]:
        raise unsupported(op, "a scan across CTAs")
    function = combiner(e, op.regions[0])
    out = e.fresh("scanned")
    codes = ", ".join(e.full(v) for v in sources)
    e.emit(f"{out} = accumulate({function}, ({codes},), {axis}, {reverse})")
    for i, (name, t) in enumerate(zip(op.results, op.result_types, strict=True)):
        e.set(name, f"{out}[{i}]", t, e.local(t), array=True)


def has_control_flow(region: Region) -> bool:
    return len(region.blocks) > 1 or any(op.regions for op in region.blocks[0].ops)


def scalar_function(e: Emitter, region: Region, hint: str) -> str:
    """A nested function of scalars: for regions with control flow, which differs from element to element."""
    name = e.fresh(hint)
    saved = dict(e.env)
    first = region.blocks[0]
    args = []
    for arg, kind in zip(first.args, first.arg_types, strict=True):
        variable = e.fresh(arg)
        args.append(variable)
        e.env[arg] = Value(variable, kind)
    e.emit(f"def {name}({', '.join(args)}):")
    e.indent += 1
    if len(region.blocks) == 1:
        e.block(first)
    else:
        from .control import block_loop

        block_loop(e, region)
    e.indent -= 1
    e.env = saved
    return name


def combiner(e: Emitter, region: Region) -> str:
    """A nested function of arrays for the region of a reduction or a scan. One that makes tensors of its scalars, or
    has control flow, is called for each element."""
    makes_tensors = any(isinstance(t, Tensor) for op in region.blocks[0].ops for t in op.result_types)
    if makes_tensors or has_control_flow(region):
        return f"by_element({scalar_function(e, region, 'combine')})"
    return region_function(e, region, "combine")


@handles("tt.map_elementwise.return", "tt.reduce.return", "tt.scan.return")
def region_return(e: Emitter, op: Op) -> None:
    e.emit(f"return ({', '.join(e.use(v).code for v in op.operands)},)")


@handles("tt.map_elementwise")
def map_elementwise(e: Emitter, op: Op) -> None:
    pack = int_attr(op.attrs.get("pack", "1"))
    region = op.regions[0]
    sources = e.operands(op)
    control = has_control_flow(region)
    function = (scalar_function if control else region_function)(e, region, "each")
    out = e.fresh("mapped")
    codes = ", ".join(e.full(v) for v in sources)
    apply = "map_scalars" if control else "map_packed"
    e.emit(f"{out} = {apply}({function}, ({codes},), {pack}, {len(op.results)})")
    for i, (name, t) in enumerate(zip(op.results, op.result_types, strict=True)):
        e.set(name, f"{out}[{i}].astype({e.dtype_code(t)}, copy=False)", t, e.local(t), array=True)


WGMMA_WAIT = re.compile(r"\s*wgmma\.wait_group\.sync\.aligned\s+(\d+)\s*;\s*")


@handles("tt.elementwise_inline_asm", "ttg.inline_asm")
def inline_asm(e: Emitter, op: Op) -> None:
    start = op.body.index('"')
    text = op.body[start + 1 : op.body.rindex('"')].replace("\\0A", "\n").replace("\\09", "\t").replace('\\"', '"')
    from .hopper import wait_for_products

    wait = WGMMA_WAIT.fullmatch(text)
    if wait and len(op.results) == len(op.operands):
        return wait_for_products(e, op, int(wait.group(1)))
    values = e.operands(op)
    info = e.info(
        op, "inline assembly", text=text, results=len(op.results), dtypes=[e.dtype(t) for t in op.result_types],
        pack=int_attr(op.attrs.get("packed_element", "1")),
    )  # fmt: skip
    out = e.fresh("asm")
    e.emit(f"{out} = run_asm({info}, {', '.join(e.typed(v) for v in values)})")
    shape = tuple(np.broadcast_shapes(*(v.shape for v in values)))
    array = any(v.is_array for v in values)
    for i, (name, t) in enumerate(zip(op.results, op.result_types, strict=True)):
        e.set(name, f"{out}[{i}]", t, shape, array=array)


@handles("tt.dot")
def dot(e: Emitter, op: Op) -> None:
    """A product of registers: mma on the tensor cores, or FMA."""
    from .hopper import multiplier

    a, b, c = (e.use(v) for v in op.operands[:3])
    kind = result_tensor(op)
    element = a.type.element.name  # type: ignore[union-attr]
    on_tensor_cores = "nvidia_mma" in kind.layout
    if element in ("f32", "f64") and not (on_tensor_cores and "tf32" in op.body):
        code = f"np.matmul({e.full(a)}, {e.full(b)}) + {e.full(c)}"
    else:
        info = e.info(op, "dot", multiply=multiplier(op, element, kind.element.name, ""))
        parts = [code if element[0] == "i" else f"cast_float({code}, D_f32)" for code in (e.full(a), e.full(b))]
        code = f"{info}.multiply({parts[0]}, {parts[1]}, {e.full(c)})"
    m, n, k = *e.local(kind)[-2:], e.local(a.type)[-1]
    if e.local(a.type)[-2] != m or e.local(b.type)[-2:] != (k, n):
        raise unsupported(op, "a product split over CTAs")
    e.set(op.results[0], code, kind, e.local(kind), array=True)


@handles("tt.extern_elementwise")
def extern(e: Emitter, op: Op) -> None:
    symbol = op.attrs.get("symbol", "").strip('"')
    known = {
        "__nv_fmaf_rn": "fma", "__nv_fmaf": "fma", "__nv_rsqrtf": "rsqrt", "__nv_tanhf": "np.tanh",
        "__nv_expf": "np.exp",
        "__nv_exp2f": "np.exp2", "__nv_log2f": "np.log2", "__nv_logf": "np.log", "__nv_fabsf": "np.abs",
        "__nv_sqrtf": "np.sqrt", "__nv_powf": "np.power", "__nv_floorf": "np.floor", "__nv_ceilf": "np.ceil",
    }  # fmt: skip
    values = e.operands(op)
    kind, shape = op.result_types[0], tuple(np.broadcast_shapes(*(v.shape for v in values)))
    if symbol in known:
        code = f"{known[symbol]}({', '.join(v.code for v in values)})"
    elif libdevice.known(symbol):
        code = f"libdevice({symbol!r}, {e.dtype_code(kind)}, {', '.join(map(e.typed, values))})"
    else:
        raise unsupported(op, f"library function {symbol}")
    e.set(op.results[0], code, kind, shape, array=any(v.is_array for v in values))
