"""Shared memory as the threads of a role see it: loads, stores, gathers and scatters."""

from typing import TYPE_CHECKING, Any

import numpy as np

from ..findings import OutOfBounds
from ..memory import OFFSET_MASK, runs_of
from ..poison import plain
from ..reductions import combine
from ..shadow import Access, Scope
from .base import AgentBase

if TYPE_CHECKING:
    from ..cta import Cta


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

    def places(self, info: Any, m: int, indices: Any, axis: int) -> list[tuple["Cta", Any, Any]]:
        """Where elements lie whose coordinate along `axis` is given by `indices`: for each CTA that has some of them,
        (it, which of them by their number, their byte offsets in its shared memory)."""
        offsets, start = info.pattern.offsets_at(m)
        target = info.target_shard
        size = offsets.shape[axis] if target is None else target.shape[axis]
        if np.any((indices < 0) | (indices >= size)):
            bad = indices[(indices < 0) | (indices >= size)].flat[0]
            message = (
                f"{self.who}: index {bad} along dimension {axis} of {self.cta.name_at(m & OFFSET_MASK)}, which has "
                f"{size} there\n    at {info.site.where}"
            )
            self.cluster.machine.found(OutOfBounds(message, (info.site,)))
            indices = np.clip(indices, 0, size - 1)
        if target is None:
            coordinates = list(np.indices(indices.shape, sparse=True))
            coordinates[axis] = indices
            return [(self.cta, slice(None), (offsets[tuple(coordinates)] + start).reshape(-1))]
        mine = [info.source_shard.coordinates(d, self.cta.number) for d in range(indices.ndim)]
        coordinates = [np.broadcast_to(c, indices.shape).reshape(-1) for c in np.ix_(*mine)]
        coordinates[axis] = indices.reshape(-1)
        # Copies over the other bits: each CTA uses those of its own.
        owners = np.full(indices.size, self.cta.number & ~target.cta_bits)
        for c, bits in zip(coordinates, target.bits, strict=True):
            for bit, cta_bit in bits:
                owners |= (c >> bit & 1) << cta_bit
        found = []
        for number in np.unique(owners).tolist():
            chosen = np.flatnonzero(owners == number)
            local = [np.searchsorted(target.coordinates(d, number), c[chosen]) for d, c in enumerate(coordinates)]
            found.append((self.cluster.ctas[number], chosen, offsets[tuple(local)] + start))
        return found

    def touch(self, info: Any, cta: "Cta", offsets: Any, access: Access, how: str) -> None:
        """Tell the CTA whose shared memory it is, if it wants to know."""
        if cta.checks:
            getattr(cta.shadow, how)(runs_of(offsets, info.pattern.element_bytes), 0, self.clk, access)
            if cta is not self.cta:
                cta.touched[self.slot] = (self.t, self.who, info)

    def local_gather(self, info: Any, m: int, indices: Any, axis: int) -> Any:
        self.at = info
        p = info.pattern
        out = np.empty(indices.size, p.dtype)
        for cta, chosen, offsets in self.places(info, m, indices, axis):
            self.touch(info, cta, offsets, self.access(info), "read")
            out[chosen] = cta.memory.views[p.element_bytes].take(offsets // p.element_bytes).view(p.dtype)
        return out.reshape(indices.shape)

    def local_scatter(self, info: Any, m: int, data: Any, indices: Any, axis: int) -> None:
        self.at = info
        p = info.pattern
        for cta, chosen, offsets in self.places(info, m, indices, axis):
            self.touch(info, cta, offsets, self.access(info), "write")
            view = cta.memory.views[p.element_bytes]
            view[offsets // p.element_bytes] = np.ascontiguousarray(data).reshape(-1).view(view.dtype)[chosen]

    def local_atomic(self, info: Any, m: int, data: Any, indices: Any, axis: int, mask: Any = None) -> Any:
        self.at = info
        p = info.pattern
        values, old = np.broadcast_to(data, indices.shape).reshape(-1), np.zeros(indices.size, p.dtype)
        wanted = np.ones(indices.size, np.bool_) if mask is None else mask.reshape(-1)
        for cta, chosen, offsets in self.places(info, m, indices, axis):
            keep = wanted[chosen]
            # Between CTAs they are atomic too, if the CTAs share the buffer.
            scope = Scope(info.target_shard is None, self.cluster.number, self.cta.number)
            access = self.access(info)._replace(atomic=scope)
            for how in ("read", "write"):
                self.touch(info, cta, offsets[keep], access, how)
            view = cta.memory.views[p.element_bytes].view(p.dtype)
            cells = (offsets // p.element_bytes)[keep].tolist()
            numbers = np.arange(indices.size)[chosen][keep].tolist()
            for i, cell in zip(numbers, cells, strict=True):
                old[i] = view[cell]
                view[cell : cell + 1] = combine(info.kind, view[cell : cell + 1].copy(), values[i : i + 1])
        return old.reshape(indices.shape)

    def fence_async(self, info: Any) -> None:
        """Everything known to have been written through the generic proxy is visible to the async one from here on."""
        self.at = info
        np.maximum(self.clk[1], self.clk[0], out=self.clk[1])
        self.tick()
