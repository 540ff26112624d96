"""What Gluon offers to kernels, read from the installed Triton, and what the source of a test makes use of."""

import ast
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.compat import ConstexprFunction, JITFunction, gl, libdevice

HERE = Path(__file__).parent
# Those first from which kernels import: an operation that several modules offer is named by the first.
FIRST = ("", "nvidia.ampere", "nvidia.hopper", "nvidia.blackwell", "nvidia.rubin")
OTHER_VENDORS = ("amd",)
# The frontend's own: what kernels cannot reach, or reach by another name.
INTERNAL = ("_core", "_layouts", "_math", "_semantic", "_standard")
OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.BitAnd: "and", ast.BitOr: "or", ast.BitXor: "xor", ast.LShift: "lshift", ast.RShift: "rshift",
    ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
    ast.USub: "neg", ast.Invert: "invert", ast.Not: "not",
}  # fmt: skip
ONE_SIDE = ("neg", "invert", "not")


def is_operation(x: Any) -> bool:
    """Whether kernels call it: a builtin, a function that Gluon compiles, or one that it runs while compiling."""
    if inspect.isfunction(x) and x.__module__ == libdevice.__name__:
        return True  # by name only: each target has its own
    if isinstance(x, (JITFunction, ConstexprFunction)) or getattr(x, "__triton_builtin__", False):
        return True
    return inspect.isfunction(x) and "_semantic" in inspect.signature(x).parameters


def modules() -> list[tuple[str, ModuleType]]:
    """(name below `gl`, module) of all that kernels may import, the first of `FIRST` first."""
    prefix = gl.__name__ + "."
    names = [m.name.removeprefix(prefix) for m in pkgutil.walk_packages(gl.__path__, prefix)]
    names = [n for n in names if n.split(".")[0] not in (*OTHER_VENDORS, *INTERNAL)]

    def rank(name: str) -> int:
        return max((i for i, first in enumerate(FIRST) if name.startswith(first)), default=0)

    found = [("", gl), *((n, importlib.import_module(prefix + n)) for n in sorted(names, key=lambda n: (rank(n), n)))]
    return [*found, ("extra.libdevice", libdevice)]


def public(module: ModuleType) -> dict[str, Any]:
    """What a module offers: its `__all__`, and every operation that lies in it without an underscore."""
    listed = getattr(module, "__all__", None)
    if listed is None:
        listed = [n for n in vars(module) if not n.startswith("_")] if module is gl else []
    found = {n: getattr(module, n) for n in listed if not inspect.ismodule(getattr(module, n))}
    # An experimental module may forget one in its list.
    return found | {n: x for n, x in vars(module).items() if not n.startswith("_") and is_operation(x)}


def methods(kind: type) -> dict[str, Any]:
    """The operations among a class's members; `__add__` and its like too."""
    every = {n: inspect.getattr_static(kind, n) for n in dir(kind)}
    every = {n: getattr(x, "__func__", x) for n, x in every.items() if n.startswith("__") or not n.startswith("_")}
    # Of what kernels hold, a plain function is an operation too.
    values = issubclass(kind, gl.base_value) and kind is not gl.constexpr
    return {n: x for n, x in every.items() if is_operation(x) or (values and is_plain(n, x))}


def is_plain(name: str, x: Any) -> bool:
    return inspect.isfunction(x) and not name.startswith("_")


@functools.cache
def offered() -> tuple[dict[str, Any], dict[str, Any]]:
    """(operations, all else that is public) by name: `gl.load`, `gl.tensor.sum`, `gl.nvidia.hopper.tma.async_load`."""
    operations: dict[str, Any] = {}
    others: dict[str, Any] = {}
    seen: set[int] = set()
    for place, module in modules():
        for name, x in sorted(public(module).items()):
            full = ".".join(p for p in ("gl", place, name) if p)
            if id(x) in seen and not isinstance(x, (int, str, float)):
                continue
            seen.add(id(x))
            if is_operation(x) or inspect.isfunction(x):
                operations[full] = x
            else:
                others[full] = x
            if inspect.isclass(x):
                operations |= {f"{full}.{n}": m for n, m in methods(x).items()}
    return operations, others


# What the source of a test uses


@functools.cache
def tree(file: Path) -> dict[str, ast.AST]:
    """The statements at the top of a file by the names they define."""
    found: dict[str, ast.AST] = {}
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            found[statement.name] = statement
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found |= {t.id: statement for target in targets for t in ast.walk(target) if isinstance(t, ast.Name)}
        elif isinstance(statement, ast.ImportFrom):
            found |= {a.asname or a.name: statement for a in statement.names}
    return found


def module_of(file: Path) -> ModuleType:
    return importlib.import_module(f"tests.gluon_cpu.{file.stem}")


def reached(file: Path, name: str) -> Iterator[tuple[Path, ast.AST]]:
    """The definition of a name, and so on of every name of these tests that it mentions."""
    waiting, seen = [(file, name)], set()
    while waiting:
        at = waiting.pop()
        if at in seen or at[1] not in tree(at[0]):
            continue
        seen.add(at)
        statement = tree(at[0])[at[1]]
        if isinstance(statement, ast.ImportFrom):
            if (statement.module or "").startswith("tests.gluon_cpu."):
                waiting.append((HERE / f"{(statement.module or '').split('.')[-1]}.py", at[1]))
            continue
        yield at[0], statement
        waiting += [(at[0], n.id) for n in ast.walk(statement) if isinstance(n, ast.Name)]


def value_of(node: ast.AST, names: dict[str, Any]) -> Any:
    """What `a.b.c` is, if `a` is a name of the file; None if not."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(value_of(node.value, names), node.attr, None)
    return None


def is_device_code(statement: ast.AST) -> bool:
    """A function or class that Gluon compiles, not one that Python runs, whose `x.exp()` may be torch's."""
    decorators = getattr(statement, "decorator_list", [])
    return any(n.id in ("jit", "aggregate") for d in decorators for n in ast.walk(d) if isinstance(n, ast.Name))


def uses(file: Path, test: str) -> tuple[list[Any], set[str]]:
    """(objects that a test's source names, itself or through its kernels; names of methods and operators there)."""
    objects: list[Any] = []
    called: set[str] = set()
    for where, statement in reached(file, test):
        names = vars(module_of(where))
        on_device = is_device_code(statement)
        for node in ast.walk(statement):
            if isinstance(node, (ast.Attribute, ast.Name)) and (x := value_of(node, names)) is not None:
                objects.append(x)
            elif not on_device:
                continue
            elif isinstance(node, ast.Attribute):
                called.add(node.attr)
            elif type(node) in OPERATORS:
                word = OPERATORS[type(node)]
                called |= {f"__{word}__"} if word in ONE_SIDE else {f"__{word}__", f"__r{word}__"}
            elif isinstance(node, ast.Subscript):
                called.add("__getitem__")
    return objects, called


# Classes whose methods are called on values, which only the compiler can tell apart: what makes such a value.
MAKERS = {
    "gl.shared_memory_descriptor": "gl.allocate_shared_memory",
    "gl.nvidia.blackwell.tensor_memory_descriptor": "gl.nvidia.blackwell.allocate_tensor_memory",
    "gl.nvidia.blackwell.clc.clc_result": "gl.nvidia.blackwell.clc.load_result",
}


def is_used(name: str, operation: Any, objects: list[Any], called: set[str]) -> bool:
    """Whether a test with these objects and calls uses an operation."""
    if any(x is operation for x in objects):
        return True
    owner, _, method = name.rpartition(".")
    maker = offered()[0].get(MAKERS.get(owner, ""))
    return owner in offered()[1] and method in called and (maker is None or any(x is maker for x in objects))
