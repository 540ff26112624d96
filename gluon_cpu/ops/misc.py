"""Assertions, prints and breakpoints of the kernel, the order of launches, and values that cross CTAs."""

import ast
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..clocks import ORDER
from ..findings import DeviceAssert
from ..programmatic_launch import everything_before
from ..shadow import EARLIER
from .base import AgentBase


class MiscOps(AgentBase):
    def grid_dependency_wait(self, info: Any) -> None:
        """Know all that the launch before did."""
        self.at = info
        self.cluster.machine.has_waited = True
        if not self.knows_launch_before():
            self.foreign.append(everything_before(self.slot, self.t))
            self.tick()

    def grid_dependency_launch_dependents(self, info: Any) -> None:
        """The next launch may start; if nobody has waited here, before the one before this one ends, too."""
        self.at = info
        self.cluster.machine.lets_next_start = True
        self.cluster.machine.lets_it_too_early |= not self.knows_launch_before()

    def knows_launch_before(self) -> bool:
        return any(a.cluster == EARLIER and self.clk[ORDER, a.slot] >= a.time for a in self.foreign)

    def device_assert(self, info: Any, condition: Any) -> None:
        self.must_hold(info, condition, f"assertion failed: {info.message}")

    def assume(self, info: Any, condition: Any) -> None:
        self.must_hold(info, condition, "false assumption: the compiler was told that this holds")

    def must_hold(self, info: Any, condition: Any, otherwise: str) -> None:
        self.at = info
        if not np.all(condition):
            where = f"    at {info.site.where}\n      {info.site.source}"
            self.cluster.machine.found(DeviceAssert(f"{otherwise} ({self.who})\n{where}", (info.site,)))

    def device_print(self, info: Any, *values: Any) -> None:
        self.at = info
        shown = ", ".join(np.array2string(np.asarray(v), threshold=64, precision=5) for v in values)
        print(f"[{self.who} {info.site.where.split(',')[0]}] {info.message}{shown}")

    def breakpoint(self, info: Any, *values: Any) -> None:
        """Stop in a frame that stands at the kernel's line and has the kernel's names."""
        self.at = info
        scope: dict[str, Any] = {}
        for name, text in info.constants.items():
            place(scope, name, literal(text))
        for name, value in zip(info.names, values, strict=True):
            place(scope, name, value)
        frame = info.site.frames[0]
        scope["role"] = self.who
        code = compile("\n" * (frame.line - 1) + "breakpoint()", frame.file, "exec")
        exec(code, {"np": np, "__builtins__": __builtins__}, scope)


def place(scope: dict[str, Any], name: str, value: Any) -> None:
    """A value under its dotted name: fields of aggregates become attributes."""
    first, *rest = name.split(".")
    if not rest:
        scope[first] = value
        return
    holder = scope.setdefault(first, SimpleNamespace())
    for part in rest[:-1]:
        if not hasattr(holder, part):
            setattr(holder, part, SimpleNamespace())
        holder = getattr(holder, part)
    if isinstance(holder, SimpleNamespace):
        setattr(holder, rest[-1], value)


def literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def assemble(info: Any, parts: dict[int, Any]) -> Any:
    """The whole tensor, from every CTA's shard."""
    shard = info.source_shard
    first = parts[0]
    whole = np.empty(shard.shape, first.dtype)
    for c, part in parts.items():
        whole[np.ix_(*(shard.coordinates(d, c) for d in range(len(shard.shape))))] = part
    return whole


def part_of(shard: Any, whole: Any, cta: int) -> Any:
    return whole[np.ix_(*(shard.coordinates(d, cta) for d in range(len(shard.shape))))]
