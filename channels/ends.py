"""Are the ends of channels used as they must be? Read from the source of a kernel: nothing is compiled or run.

An end is a value. `slot, end = end.acquire()` returns the next one, and the old one is spent: who acquires from it
again waits for a phase that is over, and walks over the same slot. Python cannot forbid that, but the source shows it.
"""

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from .compat import JITFunction

MOVING = {"acquire", "take", "ask"}  # methods of this package that return the next end
WAITING_AGAIN = {"wait_again"}  # made for an end that is spent
MAKING = {"producer", "consumer"}  # methods of this package that return a first end
Path = tuple[str, ...]  # ("ends", "keys") is `ends.keys`


@dataclass(frozen=True, order=True)
class Misuse:
    """A place where an end, or what was acquired from it, is not used as it must be."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


def check_ends(kernel: Any) -> list[Misuse]:
    """What is wrong with the ends of channels in `kernel`, a Gluon function, and in all functions that it reaches.

    Reported are: an `acquire` whose result is dropped; a slot that is acquired and never used; an end that is used
    again after its `acquire`, directly or in an aggregate; an end that is made anew in every round of a loop. Followed
    are names, fields and calls, but not an end under a second name (`same = end`).

    Raises TypeError if `kernel` is no Gluon function.
    """
    if not isinstance(kernel, JITFunction):
        raise TypeError(f"kernel: expected a function under @gluon.jit, got {type(kernel).__name__}")
    functions, methods = reachable(kernel)
    found: set[Misuse] = set()
    summaries: dict[Any, Summary] = {}

    def summary(function: Any) -> Summary:
        if function not in summaries:
            summaries[function] = Summary()  # of one that calls itself: nothing
            reader = Reader(function, summary, methods)
            reader.run()
            summaries[function] = reader.summary
            found.update(reader.found)
        return summaries[function]

    for function in functions:
        summary(function)
    return sorted(found)


def reachable(kernel: Any) -> tuple[list[Any], dict[str, list[Any]]]:
    """(the Gluon functions that `kernel` reaches, but for those of this package; among them methods, by name)."""
    functions: dict[Any, None] = {}
    methods: dict[str, list[Any]] = {}
    seen: set[int] = set()
    waiting: list[Any] = [kernel]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or is_ours(thing):
            continue
        seen.add(id(thing))
        if isinstance(thing, JITFunction):
            functions[thing] = None
            waiting += named_in(thing)
            # Whose methods are called on parameters, whose type no name in the function tells.
            waiting += filter(is_aggregate, vars(sys.modules[thing.fn.__module__]).values())
        elif is_aggregate(thing):
            for name, member in vars(thing).items():
                if isinstance(member, JITFunction):
                    methods.setdefault(name, []).append(member)
                    waiting.append(member)
            waiting += vars(thing).get("__annotations__", {}).values()
    return list(functions), methods


def is_aggregate(thing: Any) -> bool:
    return isinstance(thing, type) and getattr(thing, "__triton_aggregate__", False)


def is_ours(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


def named_in(function: Any) -> Iterator[Any]:
    """What the names in a function's source stand for, if they are global or of a function around it."""
    for node in ast.walk(definition(function)[0]):
        if isinstance(node, ast.Name | ast.Attribute):
            yield global_value(function, path_of(node))


def global_value(function: Any, path: Path | None) -> Any:
    """The object that `path` names outside of the function, through modules; else None."""
    if not path:
        return None
    outside = inspect.getclosurevars(function.fn)
    value = {**outside.globals, **outside.nonlocals}.get(path[0])
    for name in path[1:]:
        if not isinstance(value, ModuleType):
            return None
        value = getattr(value, name, None)
    return value


@functools.cache
def definition(function: Any) -> tuple[ast.FunctionDef, str, int]:
    """(syntax tree, file, what to add to its line numbers)."""
    lines, first = inspect.getsourcelines(function.fn)
    tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    return tree, inspect.getsourcefile(function.fn) or "?", first - 1


def path_of(node: ast.AST) -> Path | None:
    """`ends.keys` as ("ends", "keys"); None for what is no chain of names."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        above = path_of(node.value)
        return (*above, node.attr) if above else None
    return None


@dataclass
class Summary:
    """What a function does with its parameters."""

    moves: set[Path] = field(default_factory=set)  # ends that it acquires from: (parameter, *fields)
    reads: set[Path] = field(default_factory=set)
    returns: bool = False


@dataclass
class State:
    """What is known at one point of a function."""

    spent: dict[Path, int] = field(default_factory=dict)  # old ends, and the line that acquired from them
    untouched: dict[str, int] = field(default_factory=dict)  # slots not used so far, and the line that acquired them
    parameters: set[str] = field(default_factory=set)  # names that may still stand for what the caller passed

    def copy(self) -> "State":
        return State(dict(self.spent), dict(self.untouched), set(self.parameters))


def join(states: Iterable[State | None]) -> State | None:
    """After branches; None is a branch that never gets there."""
    alive = [state for state in states if state]
    if not alive:
        return None
    joined = alive[0].copy()
    for state in alive[1:]:
        joined.spent |= state.spent
        joined.parameters |= state.parameters
        joined.untouched = {k: v for k, v in joined.untouched.items() if k in state.untouched}
    return joined


class Reader:
    """Walks through one function in the order in which it runs."""

    def __init__(self, function: Any, summary: Callable[[Any], Summary], methods: dict[str, list[Any]]) -> None:
        self.function, self.summary_of, self.methods = function, summary, methods
        self.tree, self.file, self.offset = definition(function)
        self.summary = Summary()
        self.found: list[Misuse] = []
        self.loops = 0

    def run(self) -> None:
        arguments = self.tree.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        self.block(self.tree.body, State(parameters=set(names)))
        used = {n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        for node in ast.walk(self.tree):
            slot = acquired_slot(node)
            if slot and slot.id not in used:
                self.report(slot, f"`{slot.id}`, acquired here, is never used: a slot must be filled or released")

    def report(self, node: ast.expr, message: str) -> None:
        self.found.append(Misuse(self.file, node.lineno + self.offset, message))

    def block(self, statements: list[ast.stmt], state: State | None) -> State | None:
        for statement in statements:
            if state is None:
                return None
            state = self.statement(statement, state)
        return state

    def statement(self, node: ast.stmt, state: State) -> State | None:
        match node:
            case ast.Expr(value=ast.Call() as call):
                if self.moves(call):
                    self.report(call, f"`{ast.unparse(call)}`: its result is dropped, and with it the next end")
                self.expression(call, state)
            case ast.Assign(targets=targets, value=value):
                self.expression(value, state)
                for target in targets:
                    self.bind(target, state)
                    slot = acquired_slot(node)
                    if slot:
                        state.untouched[slot.id] = slot.lineno + self.offset
            case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
                if isinstance(node, ast.AugAssign):
                    self.read(path_of(target), target, state)
                if node.value:
                    self.expression(node.value, state)
                self.bind(target, state)
            case ast.Return(value=value):
                if value:
                    self.summary.returns = True
                    self.expression(value, state)
                return None
            case ast.If(test=test, body=body, orelse=orelse):
                self.expression(test, state)
                return join([self.block(body, state.copy()), self.block(orelse, state.copy())])
            case ast.For(iter=over, target=target, body=body):
                self.expression(over, state)
                return self.loop(body, state, target)
            case ast.While(test=test, body=body):
                return self.loop([ast.copy_location(ast.Expr(test), test), *body], state)
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self.expression(child, state)
        return state

    def loop(self, body: list[ast.stmt], state: State, target: ast.expr | None = None) -> State | None:
        """Twice, so that the second round sees what the first has spent."""
        self.loops += 1
        after: State | None = state
        for _ in range(2):
            inside = join([state, after])
            assert inside
            if target:
                self.bind(target, inside)
            after = self.block(body, inside)
        self.loops -= 1
        return join([state, after])

    def bind(self, target: ast.expr, state: State) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                if node.id in state.untouched:
                    line = state.untouched.pop(node.id)
                    message = f"`{node.id}`, acquired here, is never used: a slot must be filled or released"
                    self.found.append(Misuse(self.file, line, message))
                state.spent = {path: line for path, line in state.spent.items() if path[0] != node.id}
                state.parameters.discard(node.id)

    def expression(self, node: ast.expr, state: State) -> None:
        path = path_of(node)
        if path:
            self.read(path, node, state)
        elif isinstance(node, ast.Call):
            self.call(node, state)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self.expression(child, state)
                elif isinstance(child, ast.comprehension):
                    self.expression(child.iter, state)

    def read(self, path: Path | None, node: ast.expr, state: State, again: bool = False) -> None:
        """A use of `path`; again: one that is made for a spent end."""
        if not path:
            return
        state.untouched.pop(path[0], None)
        if path[0] in state.parameters:
            self.summary.reads.add(path)
        for spent, line in state.spent.items():
            if related(path, spent) and not again:
                name = ".".join(spent)
                self.report(
                    node,
                    f"`{name}` was acquired from in line {line} and is used again: go on with the end that came back",
                )

    def call(self, node: ast.Call, state: State) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        receiver = node.func.value if isinstance(node.func, ast.Attribute) else None
        if name == "aggregate_replace" and node.args:
            self.replace(node, state)
            return
        primitive = name in MOVING | WAITING_AGAIN
        callees = [] if primitive else self.callees(node)
        if receiver is not None and not callees:
            path = path_of(receiver)
            if path and self.is_module(path):
                pass
            elif path:
                self.read(path, receiver, state, again=name in WAITING_AGAIN)
            else:
                self.expression(receiver, state)
            if name in MOVING:
                self.spend(path, receiver, state)
        arguments = self.arguments(node, callees)
        for _, argument in arguments:
            if not (callees and path_of(argument)):
                self.expression(argument, state)
        if callees:
            self.known_call(arguments, [self.summary_of(callee) for callee in callees], state)

    def replace(self, node: ast.Call, state: State) -> None:
        """`gl.aggregate_replace(ends, keys=keys)` uses of `ends` what it keeps."""
        for keyword in node.keywords:
            self.expression(keyword.value, state)
        whole = path_of(node.args[0])
        if whole is None:
            self.expression(node.args[0], state)
            return
        replaced = {(*whole, keyword.arg) for keyword in node.keywords}
        kept = state.copy()
        kept.spent = {path: line for path, line in state.spent.items() if path[: len(whole) + 1] not in replaced}
        self.read(whole, node.args[0], kept)
        state.untouched = kept.untouched

    def known_call(self, arguments: list[tuple[str, ast.expr]], summaries: list[Summary], state: State) -> None:
        """What the functions that this call may mean all do with the arguments."""
        reads = set.intersection(*(s.reads for s in summaries))
        moves = set.intersection(*(s.moves for s in summaries))
        for parameter, argument in arguments:
            path = path_of(argument)
            if not path:
                continue
            state.untouched.pop(path[0], None)
            for used in sorted(reads | moves):
                if used[0] == parameter:
                    self.read(path + used[1:], argument, state)
        for parameter, argument in arguments:
            for moved in sorted(moves):
                path = path_of(argument)
                if path and moved[0] == parameter:
                    self.spend(path + moved[1:], argument, state)

    def arguments(self, node: ast.Call, callees: list[Any]) -> list[tuple[str, ast.expr]]:
        """(parameter, argument); parameters have names if it is known what is called."""
        given = [a.value if isinstance(a, ast.Starred) else a for a in node.args]
        names: list[str] = []
        if callees:
            names = list(callees[0].arg_names)
            if isinstance(node.func, ast.Attribute) and not self.is_module(path_of(node.func.value)):
                given = [node.func.value, *given]
        names += [""] * len(given)
        return [*zip(names, given, strict=False), *((k.arg or "", k.value) for k in node.keywords)]

    def callees(self, node: ast.Call) -> list[Any]:
        """The functions that a call may mean: one by its name, or every method of that name."""
        function = global_value(self.function, path_of(node.func))
        if isinstance(function, JITFunction) and not is_ours(function):
            return [function]
        if isinstance(node.func, ast.Attribute) and not self.is_module(path_of(node.func.value)):
            return self.methods.get(node.func.attr, [])
        return []

    def is_module(self, path: Path | None) -> bool:
        return isinstance(global_value(self.function, path), ModuleType)

    def moves(self, node: ast.Call) -> bool:
        """Whether a call returns the next of an end that it was given."""
        if isinstance(node.func, ast.Attribute) and node.func.attr in MOVING:
            return True
        summaries = [self.summary_of(callee) for callee in self.callees(node)]
        return bool(summaries) and all(s.moves and s.returns for s in summaries)

    def spend(self, path: Path | None, node: ast.expr, state: State) -> None:
        if path:
            state.spent[path] = node.lineno + self.offset
            if path[0] in state.parameters:
                self.summary.moves.add(path)
        elif self.loops and isinstance(node, ast.Call) and getattr(node.func, "attr", "") in MAKING:
            self.report(node, f"`{ast.unparse(node)}` starts at slot 0 in every round: make the end before the loop")


def related(one: Path, other: Path) -> bool:
    """Whether one of two paths leads to the other, so that a use of one is a use of both."""
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def acquired_slot(node: ast.AST) -> ast.Name | None:
    """`slot` of `slot, end = end.acquire()`."""
    match node:
        case ast.Assign(
            targets=[ast.Tuple(elts=[ast.Name() as slot, _])], value=ast.Call(func=ast.Attribute(attr="acquire"))
        ):
            return slot
    return None
