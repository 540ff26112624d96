"""Control flow: loops, conditions, calls, roles."""

from ..generate import Emitter, Role, Value, handles, role_name, unsupported
from ..ir.parse import Op, Region
from ..ir.text import int_attr, matching, split_top
from ..ir.types import Tensor, Type
from .spinning import may_wait


def assign_all(e: Emitter, targets: list[str], values: list[str]) -> None:
    """A parallel assignment."""
    pairs = [(t, v) for t, v in zip(targets, values, strict=True) if t != v]
    if pairs:
        e.emit(f"{', '.join(t for t, _ in pairs)} = {', '.join(v for _, v in pairs)}")


def declare(e: Emitter, names: list[str], types: list[Type]) -> list[str]:
    """Variables for values that several places assign; whole arrays, if tensors."""
    variables = []
    for name, kind in zip(names, types, strict=True):
        variable = e.fresh(name)
        variables.append(variable)
        e.env[name] = Value(variable, kind, e.local(kind), None, isinstance(kind, Tensor))
    return variables


@handles("scf.for")
def for_loop(e: Emitter, op: Op) -> None:
    body = op.body
    counter, low, high, step = op.operands[:4]
    initial: list[str] = []
    carried: list[str] = []
    if "iter_args(" in body:
        start = body.index("iter_args(") + len("iter_args")
        inside = body[start + 1 : matching(body, start)]
        for part in split_top(inside):
            name, _, value = part.partition(" = ")
            carried.append(name.strip())
            initial.append(value.strip())
    types = op.result_types
    if carried and not types:
        raise unsupported(op)
    sources = [e.full(e.use(v)) for v in initial]
    variables = declare(e, carried, types)
    assign_all(e, variables, sources)
    i = e.fresh(counter)
    e.env[counter] = Value(i, e.use(low).type)
    bounds = (e.use(low).code, e.use(high).code, e.use(step).code)
    if "unsigned" in op.attrs:
        mask = 0xFFFFFFFF
        bounds = (f"{bounds[0]} & {mask}", f"{bounds[1]} & {mask}", bounds[2])
    e.emit(f"for {i} in range({', '.join(bounds)}):")
    e.indent += 1
    e.yield_targets.append(variables)
    e.region_inline(op.regions[0])
    e.yield_targets.pop()
    e.indent -= 1
    for name, variable, kind in zip(op.results, variables, types, strict=True):
        e.env[name] = Value(variable, kind, e.local(kind), None, isinstance(kind, Tensor))
    # The results keep their value though the loop may run again: inside an outer loop they are assigned anew.


@handles("scf.yield")
def yield_(e: Emitter, op: Op) -> None:
    assign_all(e, e.yield_targets[-1], [e.full(e.use(v)) for v in op.operands])


@handles("scf.if")
def if_(e: Emitter, op: Op) -> None:
    condition = e.use(op.operands[0])
    variables = declare(e, op.results, op.result_types)
    e.yield_targets.append(variables)
    e.emit(f"if {condition.code}:")
    e.indent += 1
    e.region_inline(op.regions[0])
    e.indent -= 1
    if len(op.regions) > 1:
        e.emit("else:")
        e.indent += 1
        e.region_inline(op.regions[1])
        e.indent -= 1
    e.yield_targets.pop()


@handles("scf.while")
def while_loop(e: Emitter, op: Op) -> None:
    header = op.body
    inside = header[header.index("(") + 1 : matching(header, header.index("("))] if header.startswith("(") else ""
    names, initial = [], []
    for part in split_top(inside):
        name, _, value = part.partition(" = ")
        names.append(name.strip())
        initial.append(value.strip())
    types = [e.use(v).type for v in initial]
    sources = [e.full(e.use(v)) for v in initial]
    variables = declare(e, names, types)
    assign_all(e, variables, sources)
    after = op.regions[1].blocks[0]
    results = declare(e, op.results, op.result_types)
    waits = may_wait(e, op)
    e.emit("while True:")
    e.indent += 1
    if waits:
        carried, carried_before = f"({''.join(f'{v}, ' for v in variables)})", e.fresh("carried")
        e.emit(f"A.writes_before, {carried_before} = None, {carried}")
    before = op.regions[0].blocks[0]
    for inner in before.ops[:-1]:
        e.op(inner)
    condition = before.ops[-1]
    if condition.name != "scf.condition":
        raise unsupported(condition)
    passed = [e.use(v) for v in condition.operands[1:]]
    codes = [e.full(v) for v in passed]
    e.emit(f"if not {e.use(condition.operands[0]).code}:")
    e.indent += 1
    assign_all(e, results, codes)
    e.emit("break")
    e.indent -= 1
    inner_variables = declare(e, after.args, after.arg_types)
    assign_all(e, inner_variables, codes)
    e.yield_targets.append(variables)
    for inner in after.ops:
        e.op(inner)
    e.yield_targets.pop()
    if waits:
        e.emit(f"if A.will_find_the_same({carried_before}, {carried}): yield A.until_written()")
    e.indent -= 1


@handles("scf.execute_region")
def execute_region(e: Emitter, op: Op) -> None:
    e.yield_targets.append(declare(e, op.results, op.result_types))
    e.region_inline(op.regions[0])
    e.yield_targets.pop()


@handles("tt.return")
def return_(e: Emitter, op: Op) -> None:
    values = [e.full(e.use(v)) for v in op.operands]
    e.emit(f"return {', '.join(values)}{',' if len(values) == 1 else ''}" if values else "return")


@handles("tt.call")
def call(e: Emitter, op: Op) -> None:
    start = op.body.index("@") + 1
    callee = op.body[start : op.body.index("(", start)].strip('"')
    function = e.module.functions[callee]
    # One copy for each place that the compiler gives the callee's shared memory; in fast mode one for each call, as
    # every buffer there has its own place.
    frame = e.frame + int_attr(op.attrs.get("allocation.offset", "0")) if e.lowered else len(e.functions)
    if (callee, frame) not in e.functions:
        python_name = e.functions[callee, frame] = f"call_{len(e.functions)}"

        def build() -> None:
            e.function(python_name, function.args, function.arg_types, function.body, function.site, frame)

        e.pending_functions.append(build)
    arguments = [e.full(e.use(v)) for v in op.operands]
    out = e.fresh("returned")
    e.emit(f"{out} = yield from {e.functions[callee, frame]}({', '.join(['A', 'K', *arguments])})")
    for i, (name, t) in enumerate(zip(op.results, op.result_types, strict=True)):
        e.set(name, f"{out}[{i}]", t, e.local(t), array=isinstance(t, Tensor))


@handles("ttg.warp_specialize")
def warp_specialize(e: Emitter, op: Op) -> None:
    captures = [e.use(v) for v in op.operands]
    starts = []
    numbers = []
    default: Region | None = None
    for region in op.regions:
        if region.label == "default":
            default = region
            continue
        if all(inner.name == "ttg.warp_return" for inner in region.blocks[0].ops):
            continue  # warps that the compiler adds to fill a group
        number = len(e.roles)
        name = e.fresh(f"role_{number}")
        e.roles.append(Role(number, role_name(region, e.kernel_function) or region.label, name))
        numbers.append(number)
        block = region.blocks[0]
        arguments = [e.full(v) for v in captures]
        starts.append((number, name, arguments))

        def build(name: str = name, region: Region = region, frame: int = e.frame) -> None:
            block = region.blocks[0]
            e.function(name, block.args, block.arg_types, region, op.site, frame)

        e.pending_functions.append(build)
        assert len(block.args) == len(captures)
    info = e.info(op, "warp_specialize", roles=numbers)
    parts = [
        f"({number}, {info}.role_names[{i}], {name}, ({', '.join(arguments)}{',' if arguments else ''}))"
        for i, (number, name, arguments) in enumerate(starts)
    ]
    e.emit("yield")
    e.emit(f"A.spawn({info}, [{', '.join(parts)}])")
    assert default is not None
    e.yield_targets.append(declare(e, op.results, op.result_types))
    e.region_inline(default)
    e.yield_targets.pop()
    blocked = e.fresh("blocked")
    e.emit(f"while ({blocked} := A.joined({info})) is not None: yield {blocked}")


@handles("ttg.warp_yield")
def warp_yield(e: Emitter, op: Op) -> None:
    assign_all(e, e.yield_targets[-1], [e.full(e.use(v)) for v in op.operands])


@handles("ttg.warp_return")
def warp_return(e: Emitter, op: Op) -> None:
    e.emit("return")


def block_loop(e: Emitter, region: Region) -> None:
    """Blocks with branches between them, as an early return leaves them: a loop over the number of the block."""
    numbers = {b.label: i for i, b in enumerate(region.blocks)}
    state = e.fresh("block")
    variables = {}
    for b in region.blocks[1:]:
        variables[b.label] = declare(e, b.args, b.arg_types)
    e.emit(f"{state} = 0")
    e.emit("while True:")
    e.indent += 1

    def jump(successor: tuple[str, list[str]]) -> None:
        label, values = successor
        assign_all(e, variables.get(label, []), [e.full(e.use(v)) for v in values])
        e.emit(f"{state} = {numbers[label]}")

    for i, block in enumerate(region.blocks):
        e.emit(f"{'if' if i == 0 else 'elif'} {state} == {i}:")
        e.indent += 1
        before = len(e.lines)
        for op in block.ops:
            e.site = op.site
            if op.name == "cf.br":
                jump(op.successors[0])
            elif op.name == "cf.cond_br":
                e.emit(f"if {e.use(op.operands[0]).code}:")
                e.indent += 1
                jump(op.successors[0])
                e.indent -= 1
                e.emit("else:")
                e.indent += 1
                jump(op.successors[1])
                e.indent -= 1
            else:
                e.op(op)
        if len(e.lines) == before:
            e.emit("pass")
        e.indent -= 1
    e.indent -= 1
