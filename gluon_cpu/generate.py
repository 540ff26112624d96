"""Operations to Python: one generator function per role, that stops before everything others can see.

Tensors become numpy arrays of the part that a CTA holds. A splat stays a scalar and a broadcast stays narrow for as
long as numpy's own broadcasting will do; `Value.shape` is what an array really has at run time.
"""

import keyword
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .ir.layouts import Shard, tensor_shard
from .ir.locations import NOWHERE, Site, is_definition
from .ir.parse import Block, Module, Op, Region
from .ir.text import int_attr
from .ir.types import Scalar, Tensor, Type
from .runtime import namespace
from .values import DTYPES


@dataclass
class Value:
    """What an SSA value is in generated code. shape: () for a scalar or a tensor of one value throughout."""

    code: str
    type: Type
    shape: tuple[int, ...] = ()
    const: Any = None

    @property
    def uniform(self) -> bool:
        return self.shape == () and not self.is_array

    is_array: bool = False


class Info:
    """What the machine knows about one operation: `site`, `what` it does in words, and what its kind needs."""

    site: Site
    what: str

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@dataclass
class Role:
    number: int
    name: str
    function: str


@dataclass
class Generated:
    """What compiling leaves: all of it can be stored on disk."""

    name: str
    source: str
    infos: list[Info]
    constants: list[list[Any]]  # per CTA
    lines: list[Site]  # of each line of the source
    names: dict[int, dict[str, str]]  # at a breakpoint's line: the kernel's name -> generated variable
    smem_bytes: int
    num_ctas: int
    roles: list[Role]
    main_role: str
    entry: str
    arguments: list[Type] = field(default_factory=list)
    target: str = ""
    lowered: bool = False
    files: dict[str, str] = field(default_factory=dict)  # source files behind the lines above, and their hashes


Handler = Callable[["Emitter", Op], None]
HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    def register(function: Handler) -> Handler:
        for name in names:
            HANDLERS[name] = function
        return function

    return register


class Unsupported(NotImplementedError):
    """A construct of the kernel that the machine does not know."""


def unsupported(op: Op, why: str = "") -> Unsupported:
    text = re.sub(r"\s*loc\(.*\)$", "", op.text)
    return Unsupported(
        f"gluon_cpu does not know this operation{': ' + why if why else ''}\n  {text[:600]}\n    at {op.site.where}\n"
        f"      {op.site.source}"
    )


class Emitter:
    """The state of generating one module."""

    def __init__(self, module: Module, lowered: bool) -> None:
        self.module = module
        self.lowered = lowered
        self.num_ctas = int_attr(module.attrs.get("ttg.num-ctas", "1"))
        self.lines: list[str] = []
        self.sites: list[Site] = []
        self.infos: list[Info] = []
        self.constants: list[list[Any]] = []  # per constant, per CTA
        self.constant_keys: dict[Any, str] = {}
        self.names: dict[int, dict[str, str]] = {}
        self.indent = 0
        self.env: dict[str, Value] = {}
        self.used_names: set[str] = set()
        self.site = NOWHERE
        self.smem_bytes = int_attr(module.attrs.get("ttg.shared", "0"))
        self.bump = 0
        self.tmem_bump = 0
        self.threads = 32 * int_attr(module.attrs.get("ttg.num-warps", "4"))
        self.roles: list[Role] = []
        self.functions: dict[tuple[str, int], str] = {}
        self.frame = 0  # where the shared memory of the function at hand starts; its own offsets count from there
        self.pending_functions: list[Callable[[], None]] = []
        self.yield_targets: list[list[str]] = []
        self.allocation_names: dict[str, int] = {}
        self.lifted = 0
        self.kernel_function = ""

    # Output

    def emit(self, line: str) -> None:
        self.lines.append("    " * self.indent + line)
        self.sites.append(self.site)

    def fresh(self, hint: str) -> str:
        base = re.sub(r"\W", "_", hint.lstrip("%")).strip("_") or "v"
        if base[0].isdigit():
            base = "v" + base
        if keyword.iskeyword(base) or base in RESERVED or re.fullmatch(r"[IK]\d+", base):
            base += "_"
        name, n = base, 1
        while name in self.used_names:
            n += 1
            name = f"{base}__{n}"
        self.used_names.add(name)
        return name

    def info(self, op: Op, what: str, **extra: Any) -> str:
        extra.setdefault("zero", 0)
        self.infos.append(Info(site=op.site, what=what, op=op.name, key=len(self.infos), **extra))
        return f"I{len(self.infos) - 1}"

    def constant(self, per_cta: list[Any], key: Any = None) -> str:
        if key is not None and key in self.constant_keys:
            return self.constant_keys[key]
        name = f"K{len(self.constants)}"
        self.constants.append(per_cta)
        if key is not None:
            self.constant_keys[key] = name
        return name

    def same_constant(self, value: Any, key: Any = None) -> str:
        return self.constant([value] * self.num_ctas, key)

    # Values

    def use(self, name: str) -> Value:
        return self.env[name]

    def operands(self, op: Op) -> list[Value]:
        return [self.env[n] for n in op.operands]

    def set(
        self, name: str, code: str, kind: Type, shape: tuple[int, ...] = (), *, array: bool = False, const: Any = None
    ) -> None:
        """Assign an expression to the variable of an SSA result."""
        variable = self.fresh(name)
        self.emit(f"{variable} = {code}")
        self.env[name] = Value(variable, kind, shape, const, array)

    def alias(self, name: str, value: Value, kind: Type | None = None) -> None:
        self.env[name] = Value(value.code, kind or value.type, value.shape, value.const, value.is_array)

    def shard(self, t: Type) -> Shard:
        assert isinstance(t, Tensor)
        return tensor_shard(t, self.num_ctas)

    def local(self, t: Type) -> tuple[int, ...]:
        return self.shard(t).local_shape if isinstance(t, Tensor) else ()

    def dtype(self, t: Type) -> Any:
        element = t if isinstance(t, Scalar) else t.element  # type: ignore[union-attr]
        return DTYPES[element.name]

    def dtype_code(self, t: Type) -> str:
        return "D_" + (t.name if isinstance(t, Scalar) else t.element.name)  # type: ignore[union-attr]

    def scalar_literal(self, value: Any, t: Type) -> str:
        """Code for a constant scalar of an element type."""
        element = t if isinstance(t, Scalar) else t.element  # type: ignore[union-attr]
        if not element.is_float:
            return repr(bool(value) if element.name == "i1" else int(value))
        typed = DTYPES[element.name].type(value)
        return self.same_constant(typed, ("scalar", element.name, typed.tobytes()))

    def full(self, v: Value) -> str:
        """Code for the whole local array of a tensor value."""
        if not isinstance(v.type, Tensor):
            return v.code
        shape = self.local(v.type)
        if v.is_array and v.shape == shape:
            return v.code
        if v.const is not None:
            dtype = self.dtype(v.type)
            array = np.full(shape, v.const, dtype)
            array.flags.writeable = False
            return self.same_constant(array, ("full", shape, dtype.str, array.flat[0].tobytes() if array.size else b""))
        return f"full({v.code}, {shape}, {self.dtype_code(v.type)})"

    def typed(self, v: Value) -> str:
        """Code whose numpy dtype is the element type even for a scalar."""
        if v.is_array:
            return v.code
        element = v.type if isinstance(v.type, Scalar) else v.type.element  # type: ignore[union-attr]
        return v.code if element.is_float else f"{self.dtype_code(v.type)}.type({v.code})"

    # Structure

    def block(self, block: Block) -> None:
        for op in block.ops:
            self.op(op)

    def op(self, op: Op) -> None:
        handler = HANDLERS.get(op.name)
        if handler is None:
            raise unsupported(op)
        previous, self.site = self.site, op.site
        try:
            # Atomics hand their result on later: they say when.
            if not op.name.startswith(("tt.atomic_", "ttg.local_atomic")):
                self.scratch(op)
            handler(self, op)
        except Unsupported:
            raise
        except NotImplementedError as e:
            raise unsupported(op, str(e)) from e
        except Exception as e:  # a form of it that nobody thought of; the line says more than a traceback of ours
            raise unsupported(op, f"{type(e).__name__}: {e}") from e
        self.site = previous

    def scratch_bytes(self, op: Op) -> tuple[int, int] | None:
        """(offset, size) of the shared memory that the compiler takes for its own use in an operation.

        A call has it too, for all that the callee takes: the operations in there say so themselves.
        """
        if "allocation.size" not in op.attrs or op.name == "tt.call":
            return None
        return self.frame + int_attr(op.attrs["allocation.offset"]), int_attr(op.attrs["allocation.size"])

    def scratch(self, op: Op) -> None:
        taken = self.scratch_bytes(op)
        if taken is None:
            return
        name = op.name.split(".")[1]
        what = f"captures of {name}" if name == "warp_specialize" else f"scratch of {name}"
        info = self.info(op, what, offset=taken[0], bytes=taken[1])
        self.infos[-1].site = Site(op.site.own, op.site.name)  # the line of gl.sum(...), not one inside of Triton
        self.emit(f"A.scratch({info})")

    def region_inline(self, region: Region) -> None:
        before = len(self.lines)
        self.block(region.blocks[0])
        if len(self.lines) == before:
            self.emit("pass")

    def function(
        self, python_name: str, args: list[str], types: list[Type], region: Region, site: Site, frame: int = 0
    ) -> None:
        """A generator function for a role, the kernel, or a function that is not inlined."""
        threads, outer_frame, self.frame = self.threads, self.frame, frame
        if region.num_warps:
            self.threads = 32 * region.num_warps
        outer = self.env, self.used_names, self.indent, self.site, self.lines, self.sites
        self.env, self.used_names, self.indent, self.site = {}, set(), 0, site
        self.lines, self.sites = [], []
        parameters = []
        for name, kind in zip(args, types, strict=True):
            variable = self.fresh(name)
            parameters.append(variable)
            self.env[name] = self.argument(variable, kind)
        self.indent = 1
        if len(region.blocks) == 1:
            self.block(region.blocks[0])
        else:
            from .emit.control import block_loop

            block_loop(self, region)
        self.indent = 0
        body, body_sites = self.lines, self.sites
        used = sorted({m for line in body for m in re.findall(r"\bK\d+\b", line)}, key=lambda k: int(k[1:]))
        head = [f"def {python_name}(A, K, {', '.join(parameters)}):" if parameters else f"def {python_name}(A, K):"]
        head += [f"    {k} = K[{k[1:]}]" for k in used]
        head.append("    if False: yield")
        self.env, self.used_names, self.indent, self.site, self.lines, self.sites = outer
        self.threads, self.frame = threads, outer_frame
        self.finished_functions.append((head + body, [site] * len(head) + body_sites))

    finished_functions: list[tuple[list[str], list[Site]]]

    def argument(self, variable: str, kind: Type) -> Value:
        shape = self.local(kind)
        return Value(variable, kind, shape, None, isinstance(kind, Tensor))

    def exchange(self, op: Op, value: str, source: Shard, target: Shard) -> str:
        """Code for this CTA's part of a tensor of which each CTA gives its own."""
        info = self.info(
            op, "exchange between CTAs", source_shard=source, target_shard=target, scratch=self.scratch_bytes(op)
        )
        got = self.fresh("parts")
        self.emit("yield")
        self.emit(f"A.give({info}, {value})")
        self.emit(f"while isinstance({got} := A.take_all({info}), Meeting): yield {got}")
        return f"part_of({info}.target_shard, assemble({info}, {got}), A.cta.number)"


RESERVED = {"A", "K", "I", "max", "min", "abs", "bool", "int", "isinstance", "range", *namespace()}


def generate(module: Module, lowered: bool) -> Generated:
    from . import emit  # noqa: F401  (registers the handlers)

    e = Emitter(module, lowered)
    e.finished_functions = []
    kernel = module.kernel
    entry = e.fresh(kernel.name)
    e.kernel_function = kernel.name
    e.roles.append(Role(0, role_name(kernel.body, kernel.name) or kernel.name, entry))
    e.function(entry, kernel.args, kernel.arg_types, kernel.body, kernel.site)
    while e.pending_functions:
        e.pending_functions.pop(0)()
    number_roles(e.roles)
    lines: list[str] = []
    sites: list[Site] = []
    for text, where in e.finished_functions:
        lines += [*text, "", ""]
        sites += [*where, NOWHERE, NOWHERE]
    constants = [[k[c] for k in e.constants] for c in range(e.num_ctas)]
    result = Generated(
        kernel.name, "\n".join(lines), e.infos, constants, sites, e.names, max(e.smem_bytes, e.bump, 16), e.num_ctas,
        e.roles, e.roles[0].name, entry, kernel.arg_types,
        module.attrs.get("ttg.target", "").strip('"'), lowered,
    )  # fmt: skip
    for info in e.infos:  # the names of roles were not known yet
        roles = getattr(info, "roles", None)
        if roles is not None:
            info.__dict__["role_names"] = [e.roles[n].name for n in roles]
    return result


def role_name(region: Region, kernel: str) -> str:
    """The kernel's function that a role runs: what most of its operations are called from, outermost."""
    counts: dict[str, int] = {}

    def walk(region: Region, top: bool) -> None:
        for block in region.blocks:
            for op in block.ops:
                inner = [f for f in op.site.frames if not is_definition(f)]
                if inner and inner[-1].function and inner[-1].function != kernel:
                    counts[inner[-1].function] = counts.get(inner[-1].function, 0) + 1
                for r in op.regions:
                    if r.label in ("", "default"):
                        walk(r, False)

    # The kernel's own role, if it specialises: what its default region runs.
    for block in region.blocks:
        for op in block.ops:
            for r in op.regions:
                if r.label == "default":
                    return role_name(r, kernel) or "default"
    walk(region, True)
    return max(counts, key=lambda k: counts[k]) if counts else ""


def number_roles(roles: list[Role]) -> None:
    """Roles that run the same function are told apart by a number: softmax 0, softmax 1."""
    names = [r.name for r in roles]
    seen: dict[str, int] = {}
    for r in roles:
        if names.count(r.name) > 1:
            seen[r.name] = seen.get(r.name, -1) + 1
            r.name = f"{r.name} {seen[r.name]}"


def log2(n: int) -> int:
    return n.bit_length() - 1
