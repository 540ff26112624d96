"""Shared memory as the threads of a role see it: loads, stores, gathers and scatters."""

from typing import Any

import numpy as np

from ..findings import OutOfBounds
from ..memory import OFFSET_MASK, runs_of
from ..poison import plain
from ..reductions import combine
from ..shadow import Scope
from .base import AgentBase


class NoSlot:
    """The start of a slot that does not exist. A view is no access: it is a finding as soon as it is used."""

    def __init__(self, finding: OutOfBounds) -> None:
        self.finding = finding

    def used(self, *_: object) -> Any:
        raise self.finding

    __add__ = __radd__ = __sub__ = __and__ = __rand__ = __or__ = __xor__ = __rxor__ = __rshift__ = __lshift__ = used
    __int__ = __index__ = __hash__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = used


class SharedOps(AgentBase):
    def index(self, info: Any, m: Any, i: int) -> Any:
        """Start of the i-th of `info.count` buffers of `info.stride` bytes."""
        if isinstance(m, NoSlot):
            return m
        if not 0 <= i < info.count:
            return NoSlot(
                OutOfBounds(
                    f"{self.who}: index {i} into {self.cta.name_at(m & OFFSET_MASK).split('[')[0]}, "
                    f"which has {info.count} slots\n"
                    f"    at {info.site.where}\n      {info.site.source}",
                    (info.site,),
                )
            )
        return m + int(i) * int(info.stride)

    def local_alloc(self, info: Any, data: Any = None) -> int:
        self.at = info
        cta = self.cta
        cta.enter_allocation(info, self.access(info))
        if data is not None:
            self.local_store(info, info.offset, data)
        return int(info.offset)

    def scratch(self, info: Any) -> None:
        """Memory that the compiler takes for its own use in an operation: what is written there is read at once."""
        cta = self.cta
        if cta.checks:
            cta.shadow.write(((info.offset, info.offset + info.bytes),), 0, self.clk, self.access(info))
        cta.memory.poison(info.offset, info.bytes)

    def local_load(self, info: Any, m: int) -> Any:
        self.at = info
        cta = self.cta
        if cta.checks:
            runs, base = info.pattern.runs_at(m)
            cta.shadow.read(runs, base, self.clk, self.access(info))
        return info.pattern.load(cta.memory, m)

    def local_store(self, info: Any, m: int, data: Any) -> None:
        self.at = info
        cta = self.cta
        if cta.checks:
            runs, base = info.pattern.runs_at(m)
            cta.shadow.write(runs, base, self.clk, self.access(info))
        info.pattern.store(cta.memory, m, plain(data))

    def element_offsets(self, info: Any, m: int, indices: Any, axis: int) -> Any:
        """Byte offsets in shared memory of elements whose coordinate along `axis` is given by `indices`."""
        offsets, start = info.pattern.offsets_at(m)
        if np.any((indices < 0) | (indices >= offsets.shape[axis])):
            bad = indices[(indices < 0) | (indices >= offsets.shape[axis])].flat[0]
            message = (
                f"{self.who}: index {bad} along dimension {axis} of {self.cta.name_at(m & OFFSET_MASK)}, which has "
                f"{offsets.shape[axis]} there\n    at {info.site.where}"
            )
            self.cluster.machine.found(OutOfBounds(message, (info.site,)))
            indices = np.clip(indices, 0, offsets.shape[axis] - 1)
        coordinates = list(np.indices(indices.shape, sparse=True))
        coordinates[axis] = indices
        return offsets[tuple(coordinates)] + start

    def local_gather(self, info: Any, m: int, indices: Any, axis: int) -> Any:
        self.at = info
        cta, p = self.cta, info.pattern
        offsets = self.element_offsets(info, m, indices, axis)
        if cta.checks:
            cta.shadow.read(runs_of(offsets, p.element_bytes), 0, self.clk, self.access(info))
        return cta.memory.views[p.element_bytes].take(offsets // p.element_bytes).view(p.dtype)

    def local_scatter(self, info: Any, m: int, data: Any, indices: Any, axis: int) -> None:
        self.at = info
        cta, p = self.cta, info.pattern
        offsets = self.element_offsets(info, m, indices, axis)
        if cta.checks:
            cta.shadow.write(runs_of(offsets, p.element_bytes), 0, self.clk, self.access(info))
        view = cta.memory.views[p.element_bytes]
        view[(offsets // p.element_bytes).reshape(-1)] = np.ascontiguousarray(data).reshape(-1).view(view.dtype)

    def local_atomic(self, info: Any, m: int, data: Any, indices: Any, axis: int, mask: Any = None) -> Any:
        self.at = info
        cta, p = self.cta, info.pattern
        offsets = self.element_offsets(info, m, indices, axis)
        wanted = np.ones(offsets.shape, np.bool_) if mask is None else mask
        if cta.checks:
            access = self.access(info)._replace(atomic=Scope(True, self.cluster.number, cta.number))
            cta.shadow.read(runs_of(offsets[wanted], p.element_bytes), 0, self.clk, access)
            cta.shadow.write(runs_of(offsets[wanted], p.element_bytes), 0, self.clk, access)
        view = cta.memory.views[p.element_bytes].view(p.dtype)
        old = np.zeros(offsets.shape, p.dtype)
        cells = (offsets // p.element_bytes).reshape(-1).tolist()
        values, keep, flat = np.broadcast_to(data, offsets.shape).reshape(-1), wanted.reshape(-1), old.reshape(-1)
        for i, cell in enumerate(cells):
            if keep[i]:
                flat[i] = view[cell]
                view[cell : cell + 1] = combine(info.kind, view[cell : cell + 1].copy(), values[i : i + 1])
        return old

    def fence_async(self, info: Any) -> None:
        """Everything known to have been written through the generic proxy is visible to the async one from here on."""
        self.at = info
        np.maximum(self.clk[1], self.clk[0], out=self.clk[1])
        self.tick()
