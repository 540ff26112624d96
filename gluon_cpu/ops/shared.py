"""Shared memory as the threads of a role see it: loads, stores, gathers and scatters."""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..findings import OutOfBounds
from ..memory import OFFSET_MASK, decode, runs_of
from ..poison import plain
from ..reductions import combine
from ..shadow import Access, Scope
from .base import AgentBase

if TYPE_CHECKING:
    from ..cta import Cta


class Place(NamedTuple):
    """Some elements of a tensor: in whose shared memory, which ones by their number, their byte offsets there."""

    cta: "Cta"
    chosen: Any
    offsets: Any


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
        if info.spread is not None:
            shape = info.source_shard.local_shape
            return self.gathered(info, self.places(info, m, shape), shape)
        cta = self.cta
        if cta.checks:
            runs, base = info.pattern.runs_at(m)
            cta.shadow.read(runs, base, self.clk, self.access(info))
        return info.pattern.load(cta.memory, m)

    def local_store(self, info: Any, m: int, data: Any) -> None:
        self.at = info
        if info.spread is not None:
            self.scattered(info, self.places(info, m, info.source_shard.local_shape), plain(data))
            return
        cta = self.cta
        if cta.checks:
            runs, base = info.pattern.runs_at(m)
            cta.shadow.write(runs, base, self.clk, self.access(info))
        info.pattern.store(cta.memory, m, plain(data))

    def places(self, info: Any, m: int, shape: tuple[int, ...], indices: Any = None, axis: int = 0) -> list[Place]:
        """Where the elements of this CTA's part of a tensor lie. indices: their coordinates along `axis`, if these are
        not those that they have in the tensor."""
        start, xor, first = decode(m)
        spread = info.spread
        if indices is not None:
            size = info.pattern.shape[axis] if spread is None else info.shape[axis]
            wrong = (indices < 0) | (indices >= size)
            if np.any(wrong):
                message = (
                    f"{self.who}: index {indices[wrong].flat[0]} along dimension {axis} of {self.cta.name_at(start)}, "
                    f"which has {size} there\n    at {info.site.where}"
                )
                self.cluster.machine.found(OutOfBounds(message, (info.site,)))
                indices = np.clip(indices, 0, size - 1)
        mine: list[Any] = list(np.indices(shape, sparse=True))
        if spread is not None:
            mine = list(np.ix_(*(info.source_shard.coordinates(d, self.cta.number) for d in range(len(shape)))))
        if indices is not None:
            mine[axis] = indices
        table = info.pattern.offsets if spread is None else spread.offsets
        offsets = np.broadcast_to((table[tuple(mine)] ^ xor) + start, shape).reshape(-1)
        if spread is None:
            return [Place(self.cta, slice(None), offsets)]
        # Copies over the other bits: each CTA uses those of its own.
        owners = spread.owners[tuple(mine)] ^ first | self.cta.number & spread.zero_bits
        owners = np.broadcast_to(owners, shape).reshape(-1)
        found = []
        for number in np.unique(owners).tolist():
            chosen = np.flatnonzero(owners == number)
            found.append(Place(self.cluster.ctas[number], chosen, offsets[chosen]))
        return found

    def touch(self, info: Any, cta: "Cta", offsets: Any, access: Access, how: str) -> None:
        """Tell the CTA whose shared memory it is, if it wants to know."""
        if cta.checks:
            getattr(cta.shadow, how)(runs_of(offsets, info.pattern.element_bytes), 0, self.clk, access)
            if cta is not self.cta:
                cta.touched[self.slot] = (self.t, self.who, info)

    def gathered(self, info: Any, places: list[Place], shape: tuple[int, ...]) -> Any:
        p = info.pattern
        out = np.empty(math.prod(shape), p.dtype)
        for cta, chosen, offsets in places:
            self.touch(info, cta, offsets, self.access(info), "read")
            out[chosen] = cta.memory.views[p.element_bytes].take(offsets // p.element_bytes).view(p.dtype)
        return out.reshape(shape)

    def scattered(self, info: Any, places: list[Place], data: Any) -> None:
        p = info.pattern
        access = self.access(info)
        if info.spread is not None and info.copies:
            # Each CTA that holds a copy of a value writes it, to the same place: no race among them.
            access = access._replace(atomic=Scope(False, self.cluster.number, self.cta.number))
        for cta, chosen, offsets in places:
            self.touch(info, cta, offsets, access, "write")
            view = cta.memory.views[p.element_bytes]
            view[offsets // p.element_bytes] = np.ascontiguousarray(data).reshape(-1).view(view.dtype)[chosen]

    def local_gather(self, info: Any, m: int, indices: Any, axis: int) -> Any:
        self.at = info
        return self.gathered(info, self.places(info, m, indices.shape, indices, axis), indices.shape)

    def local_scatter(self, info: Any, m: int, data: Any, indices: Any, axis: int) -> None:
        self.at = info
        self.scattered(info, self.places(info, m, indices.shape, indices, axis), data)

    def local_atomic(self, info: Any, m: int, data: Any, indices: Any, axis: int, mask: Any = None) -> Any:
        self.at = info
        p = info.pattern
        values, old = np.broadcast_to(data, indices.shape).reshape(-1), np.zeros(indices.size, p.dtype)
        wanted = np.ones(indices.size, np.bool_) if mask is None else mask.reshape(-1)
        for cta, chosen, offsets in self.places(info, m, indices.shape, indices, axis):
            keep = wanted[chosen]
            # Between CTAs they are atomic too, if the CTAs share the buffer.
            scope = Scope(info.spread is None, self.cluster.number, self.cta.number)
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
