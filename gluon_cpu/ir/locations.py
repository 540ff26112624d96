"""Where an operation comes from: file, line and variable, in the kernel's own words."""

import ast
import functools
import linecache
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    column: int = 0

    @property
    def function(self) -> str:
        return function_at(self.file, self.line)[0]


@dataclass(frozen=True)
class Site:
    """Where an operation stands: frames from the innermost call outwards; `name` is the variable it is assigned to."""

    frames: tuple[Frame, ...]
    name: str = ""

    @property
    def where(self) -> str:
        """`channels/shared_memory.py:142 in acquire, called at forward/softmax.py:83`, the form that messages use."""
        if not self.frames:
            return "an operation that the compiler added"
        first, callers = self.frames[0], self.callers
        chain = f" in {first.function}" if first.function else ""
        return f"{short(first.file)}:{first.line}{chain}" + (f", called at {', '.join(callers[:3])}" if callers else "")

    @property
    def place(self) -> str:
        """The same within a line of several: `channels/shared_memory.py:142 from forward/softmax.py:83`."""
        if not self.frames:
            return "an operation that the compiler added"
        first, callers = self.frames[0], self.callers
        return f"{short(first.file)}:{first.line}" + (f" from {callers[0]}" if callers else "")

    @property
    def callers(self) -> list[str]:
        return [f"{short(f.file)}:{f.line}" for f in self.frames[1:] if not is_definition(f)]

    @property
    def source(self) -> str:
        return linecache.getline(self.frames[0].file, self.frames[0].line).strip() if self.frames else ""

    @property
    def own(self) -> tuple[Frame, ...]:
        """The frames that are not in Triton's own library."""
        return tuple(f for f in self.frames if "/triton/" not in f.file)

    @property
    def key(self) -> tuple[str, int]:
        return (self.frames[0].file, self.frames[0].line) if self.frames else ("", 0)


NOWHERE = Site(())


def short(file: str) -> str:
    """The last two parts of a path: enough to find the file, short enough to read."""
    return "/".join(file.split("/")[-2:])


@functools.lru_cache(maxsize=256)
def _functions(file: str) -> tuple[tuple[int, int, str, int], ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    return tuple(
        (min([n.lineno, *(d.lineno for d in n.decorator_list)]), n.end_lineno or n.lineno, n.name, n.lineno)
        for n in found
    )


@functools.lru_cache(maxsize=4096)
def function_at(file: str, line: int) -> tuple[str, int]:
    """(name, line of its `def`) of the innermost function around a line; ('', 0) if there is none."""
    around = [f for f in _functions(file) if f[0] <= line <= f[1]]
    if not around:
        return "", 0
    inner = max(around, key=lambda f: f[0])
    return inner[2], inner[3]


def is_definition(frame: Frame) -> bool:
    """Whether the frame is the `def` of a function itself: how the frontend marks a kernel or a partition's entry."""
    name, line = function_at(frame.file, frame.line)
    return bool(name) and frame.line <= line


def at_call(site: Site, called: str) -> Site:
    """The line of a call for which the frontend gives but the `def` around it; as given, if there are several calls."""
    if not site.frames or not is_definition(site.frames[0]):
        return site
    file = site.frames[0].file
    lines = lines_of_calls(file, function_at(file, site.frames[0].line)[1], called)
    return Site((Frame(file, lines[0]), *site.frames[1:]), site.name) if len(lines) == 1 else site


@functools.lru_cache(maxsize=256)
def lines_of_calls(file: str, definition: int, called: str) -> list[int]:
    tree = ast.parse("".join(linecache.getlines(file)))
    function = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.lineno == definition)
    calls = [n for n in ast.walk(function) if isinstance(n, ast.Call)]
    return [n.lineno for n in calls if ast.unparse(n.func).split(".")[-1] == called]


@functools.lru_cache(maxsize=4096)
def assigned_name(file: str, line: int, column: int) -> str:
    """The variable that the expression at a place is assigned to, '' if it is no simple assignment."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and node.lineno <= line <= (node.end_lineno or node.lineno):
            return target_name(node.targets[0], node.value, line, column)
        if isinstance(node, ast.AnnAssign) and node.lineno <= line <= (node.end_lineno or node.lineno):
            return ast.unparse(node.target)
    return ""


def target_name(target: ast.expr, value: ast.expr, line: int, column: int) -> str:
    """The name of what is at a place within `value`; as `wires.keys`, if `Wires(keys=...)` is assigned to `wires`."""
    if isinstance(target, ast.Name | ast.Attribute):
        within = [k.arg for k in getattr(value, "keywords", ()) if k.arg and is_within(k.value, line, column)]
        return ".".join([ast.unparse(target), *within])
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for t, v in zip(target.elts, value.elts, strict=True):
            if is_within(v, line, column):
                return target_name(t, v, line, column)
    return ""


def is_within(node: ast.expr, line: int, column: int) -> bool:
    start, end = (
        (node.lineno, node.col_offset),
        (node.end_lineno or node.lineno, node.end_col_offset or node.col_offset),
    )
    return start <= (line, column - 1) < end


def buffer_name(site: Site) -> str:
    """What the kernel calls a buffer: the variables assigned along the chain of calls, as in `queries.tiles`."""
    names: list[str] = []
    for frame in reversed(site.own):
        name = "" if is_definition(frame) else assigned_name(frame.file, frame.line, frame.column)
        if name and (not names or names[-1] != name):
            names.append(name)
    if not names and site.name:
        names.append(site.name)
    return ".".join(n for n in names if n != "self") or "buffer"


class LocationTable:
    """The `#locN = loc(...)` lines of a printed module."""

    def __init__(self) -> None:
        self.raw: dict[str, str] = {}
        self.sites: dict[str, Site] = {}

    def site(self, text: str) -> Site:
        if text not in self.sites:
            self.sites[text] = self._parse(text)
        return self.sites[text]

    def _parse(self, text: str) -> Site:
        text = text.strip()
        if text.startswith("#"):
            return self.site(self.raw[text]) if text in self.raw else NOWHERE
        if text in ("unknown", ""):
            return NOWHERE
        if text.startswith("callsite("):
            inside = text[len("callsite(") : -1]
            callee, caller = _split_at(inside)
            a, b = self.site(callee), self.site(caller)
            return Site(a.frames + b.frames, a.name)
        if text.startswith("fused"):
            inside = text[text.index("[") + 1 : text.rindex("]")]
            parts = [self.site(p.strip()) for p in inside.split(",")]
            return next((p for p in parts if p.frames), NOWHERE)
        position = re.fullmatch(r'"([^"]*)":(\d+):(\d+)(?: to .*)?', text)
        if position:
            return Site((Frame(position[1], int(position[2]), int(position[3])),))
        named = re.fullmatch(r'"([^"]*)"(?:\((.*)\))?', text)
        if named:
            inner = self.site(named[2]) if named[2] else NOWHERE
            return Site(inner.frames, named[1])
        return NOWHERE


def _split_at(text: str) -> tuple[str, str]:
    depth = 0
    for i, ch in enumerate(text):
        depth += (ch == "(") - (ch == ")")
        if depth == 0 and text.startswith(" at ", i):
            return text[:i], text[i + 4 :]
    raise ValueError(f"no caller in location {text!r}")
