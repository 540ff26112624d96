"""Imports point down only, and names that are private or move with every Triton release are imported in one place.

    gluon_attn -> channels -> triton        gluon_cpu -> triton, torch, numpy, ml_dtypes

Read from the syntax trees of all files: nothing is imported, so neither a GPU nor Triton is needed.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

# What a package may import besides itself and the standard library. Other folders may import anything that
# NEVER_IMPORTED and MOVING leave.
MAY_IMPORT = {
    "channels": {"triton"},
    # ml_dtypes, numpy's bf16 and fp8: for what inline assembly computes, told to gluon_cpu.
    "gluon_attn": {"channels", "triton", "torch", "numpy", "ml_dtypes"},
    "gluon_cpu": {"triton", "torch", "numpy", "ml_dtypes"},
}
# Files that may import one thing more. pytest imports the first itself; nothing of ours imports hf.py.
BY_FILE = {
    ("gluon_cpu/pytest_plugin.py", "pytest"),
    ("gluon_attn/hf.py", "transformers"),
    ("gluon_attn/hf_masks.py", "transformers"),
}
# The one file of gluon_attn that may import gluon_cpu, inside a function: who has a GPU never pays for it.
CPU_FILE = "gluon_attn/cpu.py"
# The one file that draws, with a library that not everybody has: inside a function.
PICTURES = "gluon_cpu/timeline.py"
# Users of the packages. Tests import bench, too; nothing but tests imports tests.
NEVER_IMPORTED = {"tests", "bench"}
# Parts of Triton that move between releases. So does whatever is named with an underscore. A package has one file for
# them; of the users, each folder may have one.
MOVING = ("experimental", "runtime", "backends", "compiler", "language.core")
COMPAT_FILE = "compat.py"
COMPAT_FILES = {
    "channels": "channels/compat.py",
    "gluon_attn": "gluon_attn/runtime/compat.py",
    "gluon_cpu": "gluon_cpu/compat.py",
}
# What such a file has besides: in channels, what stands for a name that a minor release lacks, and the table of these.
BESIDE_NAMES = {
    "channels/compat.py": {
        *("T", "aggregate", "Minor", "MINORS", "minor_of", "MINOR", "reinterpret"),
        *("load_by_adding", "atomic_load", "atomic_poll"),
    },
    "proving/compat.py": {"compile_launch"},
}
# Its kernels show what a user of the packages writes, who has no such file.
EXAMPLES = "docs"
# Folders at the top that .gitignore names.
NOT_OURS = {"build", "dist", "scratch"}


class Import(NamedTuple):
    name: str  # dotted, absolute
    line: int
    lazy: bool  # runs when a function is called, not when the file is imported


class ImportReader(ast.NodeVisitor):
    """Collects the imports of a file, those by `importlib` and the uses of Triton's modules through attributes too."""

    def __init__(self, package: tuple[str, ...]) -> None:
        self.package = package
        self.depth = 0
        self.modules: dict[str, str] = {}  # local name -> the module it is bound to
        self.found: list[Import] = []

    def add(self, name: str, node: ast.AST) -> None:
        self.found.append(Import(name, getattr(node, "lineno", 0), self.depth > 0))

    def visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        # Decorators, defaults and annotations are evaluated where the function is defined.
        for outside in (*node.decorator_list, node.args, *([node.returns] if node.returns else [])):
            self.visit(outside)
        self.depth += 1
        for statement in node.body:
            self.visit(statement)
        self.depth -= 1

    visit_FunctionDef = visit_function
    visit_AsyncFunctionDef = visit_function

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name, node)
            top = alias.name.partition(".")[0]
            self.modules[alias.asname or top] = alias.name if alias.asname else top

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        above = self.package[: len(self.package) - node.level + 1] if node.level else ()
        module = ".".join((*above, *([node.module] if node.module else [])))
        for alias in node.names:
            name = f"{module}.{alias.name}"
            self.add(name, node)
            self.modules[alias.asname or alias.name] = name

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func).rpartition(".")[2]
        if called in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
            self.add(str(node.args[0].value), node)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        first, _, rest = ast.unparse(node).partition(".")
        name = f"{self.modules.get(first, '')}.{rest}"
        if name.startswith("triton."):
            self.add(name, node)
        else:
            self.generic_visit(node)


def is_moving(name: str) -> bool:
    """`triton.runtime.jit`, `triton._C`, but not `triton.language` or `triton.__version__`."""
    top, _, rest = name.partition(".")
    if top != "triton":
        return False
    private = any(part.startswith("_") and not part.endswith("__") for part in rest.split("."))
    return private or any(rest == part or rest.startswith(part + ".") for part in MOVING)


def complaints(file: str, source: str) -> Iterator[str]:
    """What is wrong with the imports of `file` (its path from the top of the repository, with slashes)."""
    parts = Path(file).parts
    package = parts[0] if len(parts) > 1 else ""
    reader = ImportReader(parts[:-1])
    reader.visit(ast.parse(source, file))
    for name, line, lazy in dict.fromkeys(reader.found):
        top = name.partition(".")[0]
        where = f"{file}:{line}: {name}: "
        if top in NEVER_IMPORTED and package not in {top, "tests"}:
            yield where + f"nothing imports {top}"
        elif package == "gluon_attn" and top == "gluon_cpu":
            if file != CPU_FILE:
                yield where + f"only {CPU_FILE} may import gluon_cpu"
            elif not lazy:
                yield where + f"{CPU_FILE} must import gluon_cpu inside a function"
        elif (file, top) in BY_FILE or (file, top, lazy) == (PICTURES, "matplotlib", True):
            continue
        elif package in MAY_IMPORT and top not in MAY_IMPORT[package] | {package} | sys.stdlib_module_names:
            yield where + f"{package} may import {', '.join(sorted(MAY_IMPORT[package]))} only"
        compat = COMPAT_FILES.get(package, f"{package or '<package>'}/{COMPAT_FILE}")
        allowed = file == compat or (package in NEVER_IMPORTED and parts[-1] == COMPAT_FILE)
        allowed = allowed or package == EXAMPLES
        if is_moving(name) and not allowed:
            yield where + f"private or moving, belongs into {compat}"


def python_files(root: Path) -> list[Path]:
    """All .py files except in hidden folders (.venv, caches) and what .gitignore names."""
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(f for f in files if f.parts[0] not in NOT_OURS and not any(p.startswith(".") for p in f.parts))


def complaints_of_tree(root: Path) -> list[str]:
    return [c for f in python_files(root) for c in complaints(f.as_posix(), (root / f).read_text(encoding="utf-8"))]


def test_imports_point_down():
    assert Path(__file__).relative_to(ROOT) in python_files(ROOT), "the walk over the tree misses files"
    assert complaints_of_tree(ROOT) == []


PLANTED = {
    "gluon_attn imports transformers": (
        "gluon_attn/api.py",
        "def f():\n    import transformers",
        "gluon_attn may import",
    ),
    "channels imports gluon_attn": ("channels/ring.py", "import gluon_attn", "channels may import triton only"),
    "channels imports torch": ("channels/ring.py", "from torch import nn", "channels may import triton only"),
    "channels imports torch late": (
        "channels/ring.py",
        "def f():\n    import torch",
        "channels may import triton only",
    ),
    "channels imports gluon_cpu": ("channels/ring.py", "import gluon_cpu", "channels may import triton only"),
    "gluon_attn imports a stranger": ("gluon_attn/api.py", "import einops", "gluon_attn may import"),
    "gluon_attn imports proving": ("gluon_attn/api.py", "import proving.ptx", "gluon_attn may import"),
    "gluon_attn imports gluon_cpu": (
        "gluon_attn/api.py",
        "def f():\n    import gluon_cpu",
        "only gluon_attn/cpu.py may import gluon_cpu",
    ),
    "cpu.py of another folder": (
        "gluon_attn/kernels/cpu.py",
        "def f():\n    import gluon_cpu",
        "only gluon_attn/cpu.py may import gluon_cpu",
    ),
    "gluon_cpu not lazy": ("gluon_attn/cpu.py", "from gluon_cpu import run", "inside a function"),
    "gluon_cpu as a default": ("gluon_attn/cpu.py", "def f(x=__import__('gluon_cpu')):\n    pass", "inside a function"),
    "gluon_cpu by importlib": (
        "gluon_attn/api.py",
        "import importlib\nimportlib.import_module('gluon_cpu')",
        "only gluon_attn/cpu.py may import gluon_cpu",
    ),
    "gluon_cpu imports channels": ("gluon_cpu/run.py", "from channels.ring import Ring", "gluon_cpu may import"),
    "matplotlib not lazy": ("gluon_cpu/timeline.py", "import matplotlib", "gluon_cpu may import"),
    "matplotlib elsewhere": ("gluon_cpu/run.py", "def f():\n    import matplotlib", "gluon_cpu may import"),
    "gluon_cpu imports gluon_attn": ("gluon_cpu/run.py", "import gluon_attn", "gluon_cpu may import"),
    "a package imports tests": ("gluon_attn/api.py", "from tests.gpu import helper", "nothing imports tests"),
    "a package imports bench": ("channels/ring.py", "import bench", "nothing imports bench"),
    "bench imports tests": ("bench/sweep.py", "from tests.gpu import helper", "nothing imports tests"),
    "bench imports tests late": ("bench/sweep.py", "def f():\n    import tests.gpu", "nothing imports tests"),
    "docs import bench": ("docs/step1.py", "import bench.plot", "nothing imports bench"),
    "a file at the top imports tests": ("setup.py", "import tests", "nothing imports tests"),
    "private": ("channels/ring.py", "import triton._C.libtriton", "private or moving, belongs into channels/compat.py"),
    "private name": ("gluon_attn/api.py", "from triton import _utils", "belongs into gluon_attn/runtime/compat.py"),
    "private deeper": (
        "gluon_attn/api.py",
        "from triton.testing import _f",
        "belongs into gluon_attn/runtime/compat.py",
    ),
    "experimental": ("channels/ring.py", "from triton.experimental import gluon", "belongs into channels/compat.py"),
    "experimental, as a name": ("channels/ring.py", "from triton import experimental", "private or moving"),
    "runtime": ("gluon_attn/device.py", "from triton.runtime import driver", "private or moving"),
    "runtime, by attribute": (
        "gluon_attn/device.py",
        "import triton\ntriton.runtime.driver.active",
        "private or moving",
    ),
    "backends": ("gluon_cpu/run.py", "import triton.backends.nvidia", "belongs into gluon_cpu/compat.py"),
    "compiler": ("gluon_attn/device.py", "from triton.compiler import ASTSource", "private or moving"),
    "language.core": ("channels/ring.py", "from triton.language.core import tensor", "private or moving"),
    "language.core, by name": ("channels/ring.py", "from triton.language import core", "private or moving"),
    "language.core, by attribute": (
        "channels/ring.py",
        "import triton.language as tl\ntl.core.tensor",
        "private or moving",
    ),
    "tests too": ("tests/gpu/test_x.py", "from triton.experimental import gluon", "belongs into tests/compat.py"),
    "compat.py of a folder below": (
        "gluon_attn/kernels/compat.py",
        "from triton.experimental import gluon",
        "belongs into gluon_attn/runtime/compat.py",
    ),
    "two dots too few": ("gluon_attn/kernels/hopper/layouts.py", "from ....gluon_cpu import run", "may import"),
}

ALLOWED = {
    "down": ("gluon_attn/api.py", "import math\n\nimport torch\nimport numpy as np\n\nfrom channels.compat import gl"),
    "public triton": ("channels/ring.py", "import triton\nimport triton.language as tl\ntriton.__version__\ntl.dot"),
    "own package": ("channels/tma.py", "from .compat import gl\nfrom . import ring\nfrom channels.ring import Ring"),
    "relative, deep": (
        "gluon_attn/kernels/hopper/layouts.py",
        "from ...problem import Problem\nfrom ..common import x",
    ),
    "compat": ("channels/compat.py", "from triton.experimental import gluon\nfrom triton._C import libtriton"),
    "gluon_cpu, lazily": ("gluon_attn/cpu.py", "def run():\n    from gluon_cpu import run\n    return run"),
    "gluon_cpu": ("gluon_cpu/run.py", "import triton, torch, numpy, ml_dtypes"),
    "transformers": ("gluon_attn/hf.py", "from transformers import AttentionInterface"),
    "matplotlib, lazily": ("gluon_cpu/timeline.py", "def f():\n    import matplotlib"),
    "tests import anything": ("tests/bench/test_x.py", "import gluon_cpu, gluon_attn, bench, channels.ring, pytest"),
    "another runtime": ("gluon_attn/api.py", "import torch\ntorch.runtime._x\nself.triton.runtime"),
}


def beside_names(source: str) -> set[str]:
    """What a file defines, or calls for its effect, that is no import, docstring or list of names."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Module(body=body) | ast.If(body=body):
                for statement in (*body, *getattr(node, "orelse", [])):
                    match statement:
                        case ast.Assign(targets=targets):
                            found |= {name.id for t in targets for name in ast.walk(t) if isinstance(name, ast.Name)}
                        case ast.Expr(value=ast.Call()) | ast.For() | ast.While() | ast.With():
                            found.add(ast.unparse(statement))
    return found - {"__all__"}


def test_a_file_of_moving_names_has_nothing_else():
    for file in (*COMPAT_FILES.values(), "proving/compat.py"):
        found = beside_names((ROOT / file).read_text(encoding="utf-8"))
        assert found == BESIDE_NAMES.get(file, set()), file


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""Names."""\nimport triton\nfrom triton import jit\n__all__ = ["jit"]', set()),
        ("import atexit\natexit.register(print)", {"atexit.register(print)"}),
        ("def f():\n    x = 1", {"f"}),
        ("if 1:\n    a, b = 1, 2\nelse:\n    class C: pass", {"a", "b", "C"}),
    ],
)
def test_what_is_no_name_is_seen(source, found):
    assert beside_names(source) == found


def plant(root: Path, file: str, source: str) -> None:
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(source, encoding="utf-8")


@pytest.mark.parametrize(("file", "source", "complaint"), PLANTED.values(), ids=PLANTED.keys())
def test_planted_violation_is_caught(tmp_path, file, source, complaint):
    plant(tmp_path, file, source)
    found = complaints_of_tree(tmp_path)
    assert found
    assert any(complaint in one for one in found), found
    assert all(one.startswith(f"{file}:") for one in found)


@pytest.mark.parametrize(("file", "source"), ALLOWED.values(), ids=ALLOWED.keys())
def test_allowed_import_passes(tmp_path, file, source):
    plant(tmp_path, file, source)
    assert complaints_of_tree(tmp_path) == []


@pytest.mark.parametrize("folder", [".venv/lib", "build/lib", "scratch"])
def test_ignored_folders_are_not_ours(tmp_path, folder):
    plant(tmp_path, f"{folder}/x.py", "import tests")
    assert complaints_of_tree(tmp_path) == []
