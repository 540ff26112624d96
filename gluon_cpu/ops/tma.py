"""TMA: copies between global and shared memory by an engine that works on its own, in any order."""

from typing import TYPE_CHECKING, Any

import numpy as np

from ..clocks import ORDER
from ..findings import OutOfBounds
from ..global_memory import Descriptor, Im2colDescriptor
from ..memory import decode, runs_of
from ..shadow import Access, Conflict, Scope
from .base import AgentBase
from .mbarrier import Barrier

if TYPE_CHECKING:
    from ..cta import Cta
    from ..machine import Cluster

NAN_BITS = {1: 0x7F, 2: 0x7FFF, 4: 0x7FFFFFFF, 8: 0x7FFFFFFFFFFFFFFF}


class Task:
    """Work of an engine that is ready to be done, whenever the scheduler pleases."""

    engine = "engine"
    priority: float | None = None

    def __init__(self, agent: Any, info: Any, clk: Any, slot: int, time: int) -> None:
        self.cluster: Cluster = agent.cluster
        self.agent = agent
        self.info = info
        self.clk = clk
        self.slot = slot
        self.time = time
        self.done = False
        self.who = f"{self.engine} for {agent.who}"
        self.foreign = agent.foreign

    def access(self) -> Access:
        issued = int(self.clk[ORDER, self.agent.slot])
        return Access(self.slot, self.time, True, self.info, self.who, self.cluster.number, issued=issued)

    def step(self) -> None:
        if not self.done:
            self.done = True
            self.cluster.machine.at = self
            self.run()

    def run(self) -> None:
        raise NotImplementedError


def inside_of(task: Task, desc: Descriptor, a: tuple[int, ...], b: tuple[int, ...]) -> Any:
    """The raw elements of a box, which a descriptor may promise where there is no memory: then None, if it goes on."""
    found = desc.box(a, b)
    if found is None:
        site = task.info.site
        said = f"{task.who}: the box from {list(a)} to {list(b)} is inside of what the descriptor says, but outside of "
        where = f"{desc.buffer.name}\n    at {site.where}\n      {site.source}"
        task.cluster.machine.found(OutOfBounds(said + where, (site,)))
    return found


def tell_of_base(task: Task, desc: Descriptor, low: tuple[int, ...], extent: tuple[int, ...]) -> None:
    """A load with no element inside touches the descriptor's base, as an H100 has shown; a store does not."""
    site = task.info.site
    end = [x + e for x, e in zip(low, extent, strict=True)]
    said = (
        f"{task.who}: the box from {list(low)} to {end} is wholly outside of the tensor, and the descriptor of "
        f"{desc.buffer.name} begins where there is no memory, at byte {desc.offset} of {desc.buffer.size}. A load that "
        "has no element inside touches the descriptor's first one: on a card, an illegal memory access"
    )
    where = f"\n    at {site.where}\n      {site.source}"
    task.cluster.machine.found(OutOfBounds(said + where, (site,)))


def read_box(task: Task, desc: Descriptor, low: tuple[int, ...], extent: tuple[int, ...]) -> Any:
    """The raw elements of a box; what lies outside of the tensor is zero, or NaN if the descriptor says so."""
    box = desc.clip(low, extent)
    if box is None and not desc.begins_in_memory:
        tell_of_base(task, desc, low, extent)
    inside = None if box is None else inside_of(task, desc, *box)
    if box is not None and inside is not None:
        machine = task.cluster.machine
        if machine.checks:
            runs, base = desc.runs(*box)
            machine.global_read(desc.buffer, runs, base, task.clk, task.access(), task.foreign)
        inside = desc.as_loaded(inside)
        if inside.shape == extent:
            return inside
    data = np.full(extent, NAN_BITS[desc.item] if desc.nan else 0, desc.raw)
    if box is not None and inside is not None:
        a, b = box
        data[tuple(slice(x - lo, y - lo) for x, y, lo in zip(a, b, low, strict=True))] = inside
    return data


def read_pixels(
    task: Task, desc: Im2colDescriptor, start: tuple[int, ...], tap: tuple[int, ...], extent: tuple[int, ...]
) -> Any:
    """The raw elements of an im2col copy: [pixels, channels], filled where there is no pixel or no channel."""
    count, channels = extent
    pixels = desc.pixels(start[:-1], tap, count)
    first, last = max(0, start[-1]), min(desc.shape[-1], start[-1] + channels)
    data = np.full(extent, NAN_BITS[desc.item] if desc.nan else 0, desc.raw)
    rows = ((pixels >= 0) & (pixels < np.array(desc.shape[:-1]))).all(axis=1)
    if first >= last or not rows.any():
        return data
    inside = pixels[rows]
    machine = task.cluster.machine
    if machine.checks:
        runs = desc.pixel_runs(inside, first, last)
        machine.global_read(desc.buffer, runs, 0, task.clk, task.access(), task.foreign)
    data[rows, first - start[-1] : last - start[-1]] = desc.as_loaded(desc.array[tuple(inside.T)][:, first:last])
    return data


# Bits that a filter tap has for each spatial dimension, by their number.
TAP_BITS = {1: 16, 2: 8, 3: 5}


class LoadTask(Task):
    engine = "TMA load"

    def __init__(self, agent: Any, info: Any, clk: Any, slot: int, time: int, fetch: Any, m: int,
                 barrier_m: int, destinations: list[int]) -> None:  # fmt: skip
        super().__init__(agent, info, clk, slot, time)
        self.fetch = fetch
        self.m = m
        self.barrier_m = barrier_m
        self.destinations = destinations

    def run(self) -> None:
        info, cluster = self.info, self.cluster
        data = self.fetch(self)
        access = self.access()
        for d in self.destinations:
            cta = cluster.ctas[d]
            if cta.checks:
                runs, base = info.pattern.runs_at(self.m)
                cta.shadow.write(runs, base, self.clk, access)
                cta.touched[self.slot] = (self.time, self.who, info)
            info.pattern.store(cta.memory, self.m, data.reshape(info.pattern.shape))
            home = cluster.ctas[d & ~info.zero]
            barrier = home.barriers.get(self.barrier_m)
            if barrier is None:
                barrier = home.barriers[self.barrier_m] = Barrier(home, self.barrier_m, home.name_at(self.barrier_m))
            if cta.checks:
                self.check_seen(cta, barrier, access)
            barrier.complete_bytes(self.clk, self.who, info, info.bytes, self.slot, self.time)
            home.note_use(self.barrier_m, self.slot, self.time, self.who, info, remote=True)

    def check_seen(self, cta: "Cta", barrier: Barrier, access: Access) -> None:
        """That the last load into this place was announced, by its barrier, before this one overwrites it.

        Happens-before alone misses it if the same CTA issues both for a peer: to the issuer they are in order.
        """
        last = cta.landed.get(self.m)
        if last is not None and last[0].alive and last[0].phase == last[1] and last[2].slot != self.slot:
            cta.tell(Conflict("write-write", last[2], access, self.m, self.m))
        cta.landed[self.m] = (barrier, barrier.phase, access)


class AnswerTask(LoadTask):
    """What cluster launch control answers, which comes as a load's bytes do."""

    engine = "CLC answer"


class Store:
    """One bulk group of a role's TMA stores: first its tile is read, then global memory is written."""

    __slots__ = ("data", "number", "read", "write")

    def __init__(self, number: int, read: "StoreRead", write: "StoreWrite") -> None:
        self.number = number
        self.read = read
        self.write = write
        self.data: Any = None


class StoreRead(Task):
    engine = "TMA store"
    store: Store

    def __init__(self, agent: Any, info: Any, clk: Any, number: int, m: int) -> None:
        super().__init__(agent, info, clk, agent.store_read_slot, number)
        self.m = m

    def run(self) -> None:
        cta, info = self.agent.cta, self.info
        if cta.checks:
            runs, base = info.pattern.runs_at(self.m)
            cta.shadow.read(runs, base, self.clk, self.access())
            if cta.touched.get(self.slot, (0,))[0] < self.time:
                cta.touched[self.slot] = (self.time, self.who, info)
        self.store.data = info.pattern.load(cta.memory, self.m)
        self.cluster.machine.add_task(self.store.write)


class StoreWrite(Task):
    engine = "TMA store"

    def __init__(self, agent: Any, info: Any, clk: Any, number: int, store: Any, put: Any) -> None:
        super().__init__(agent, info, clk, agent.store_write_slot, number)
        self.put = put
        self.store: Store = store

    def run(self) -> None:
        self.put(self, self.store.data)
        self.store.data = None


def write_box(task: Task, desc: Descriptor, low: tuple[int, ...], extent: tuple[int, ...], data: Any) -> None:
    box = desc.clip(low, extent)
    if box is None:
        return
    a, b = box
    target = inside_of(task, desc, a, b)
    if target is None:
        return
    machine = task.cluster.machine
    if machine.checks:
        runs, base = desc.runs(a, b)
        access = task.access()._replace(
            atomic=Scope(False, task.cluster.number, task.agent.cta.number) if task.info.reduce else None
        )
        machine.global_write(desc.buffer, runs, base, task.clk, access, task.foreign)
        desc.buffer.was_read |= bool(task.info.reduce)  # a reduction reads what it adds to
    raw = data.view(desc.raw)
    inside = raw[tuple(slice(x - lo, y - lo) for x, y, lo in zip(a, b, low, strict=True))]
    if task.info.reduce:
        dtype = task.info.pattern.dtype
        target.view(dtype)[...] = task.info.reduce(target.view(dtype), inside.view(dtype)).astype(dtype)
    else:
        target[...] = inside
    machine.global_memory_changed()


class PeerStore(Task):
    """st.async: elements on their way into another CTA's shared memory."""

    engine = "st.async"

    def __init__(self, agent: Any, info: Any, clk: Any, slot: int, time: int, parts: list[Any], m: int,
                 barrier_m: int) -> None:  # fmt: skip
        super().__init__(agent, info, clk, slot, time)
        self.parts, self.m, self.barrier_m = parts, m, barrier_m

    def run(self) -> None:
        info, cluster = self.info, self.cluster
        start, xor, _ = decode(self.m)
        for number, offsets, values in self.parts:
            cta = cluster.ctas[number]
            flat = (offsets ^ xor) + start
            if cta.checks:
                cta.shadow.write(runs_of(flat, info.item), 0, self.clk, self.access()._replace(is_async=False))
                cta.touched[self.slot] = (self.time, self.who, info)
            view = cta.memory.views[info.item]
            view[flat // info.item] = values.view(view.dtype)
            home = number & ~info.zero
            b = self.agent.barrier_at(home, self.barrier_m)
            b.complete_bytes(self.clk, self.who, info, len(flat) * info.item, self.slot, self.time)
            b.cta.note_use(self.barrier_m, self.slot, self.time, self.who, info, remote=True)


class TmaOps(AgentBase):
    def async_shared_store(self, info: Any, data: Any, m: int, barrier_m: int) -> None:
        self.at = info
        source, target = info.source_shard, info.target_shard
        rank = len(source.shape)
        # Where each of this CTA's elements belongs: a CTA that holds its coordinates, and the place there.
        mine = [source.coordinates(d, self.cta.number) for d in range(rank)]
        parts = []
        for cta in range(self.cluster.num_ctas):
            if cta & ~(source.cta_bits | target.cta_bits) != self.cta.number & ~(source.cta_bits | target.cta_bits):
                continue  # both sides hold copies along this bit: each CTA serves its own
            theirs = [target.coordinates(d, cta) for d in range(rank)]
            common = [np.intersect1d(a, b, return_indices=True) for a, b in zip(mine, theirs, strict=True)]
            if any(len(c[0]) == 0 for c in common):
                continue
            values = np.ascontiguousarray(data[np.ix_(*(c[1] for c in common))]).reshape(-1)
            offsets = info.pattern.offsets[np.ix_(*(c[2] for c in common))].reshape(-1)
            parts.append((cta, offsets, values))
        slot, time = self.load_slots.take(self.clk[ORDER])
        clk = self.async_clk()
        clk[ORDER, slot] = time
        self.tick()
        self.cluster.machine.add_task(PeerStore(self, info, clk, slot, time, parts, m, barrier_m))

    def tma_load(
        self, info: Any, desc: Descriptor, coords: tuple[int, ...], barrier_m: int, m: int, tap: tuple[int, ...] = ()
    ) -> None:
        self.at = info
        c = self.cta.number
        destinations = [c]
        if info.multicast:
            if c & info.data_zero:
                return  # the CTA without these bits issues for all of them
            destinations = [c | x for x in range(self.cluster.num_ctas) if x & ~info.data_zero == 0]
        extent = info.extent
        if isinstance(desc, Im2colDescriptor):
            start, moved = self.im2col_start(info, desc, coords, tap)
            self.issue_load(
                info, lambda task: read_pixels(task, desc, start, moved, extent), m, barrier_m, destinations
            )
            return
        low = tuple(int(x) + o for x, o in zip(coords, info.low[c], strict=True))
        self.issue_load(info, lambda task: read_box(task, desc, low, extent), m, barrier_m, destinations)

    def im2col_start(
        self, info: Any, desc: Im2colDescriptor, coords: tuple[int, ...], tap: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(first pixel and channel of this CTA's part, filter tap), once they are known to be defined."""
        below, channel = info.low[self.cta.number]
        # As compiled: the pixels before this CTA's part are added to the innermost coordinate, not carried over.
        start = (*(int(x) for x in coords[:-2]), int(coords[-2]) + below, int(coords[-1]) + channel)
        where = f"\n    at {info.site.where}\n      {info.site.source}"
        bits, moved = TAP_BITS[len(tap)], tuple(int(x) & 0xFFFF for x in tap)
        if any(x >> bits for x in moved):
            said = f"{self.who}: offsets {[int(x) for x in tap]} of an im2col load; each has {bits} bits and no sign"
            self.cluster.machine.found(OutOfBounds(said + where, (info.site,)))
        if any(not lo <= x <= hi for x, lo, hi in zip(start[1:-1], desc.lower, desc.upper, strict=True)):
            raise NotImplementedError(
                f"{self.who}: an im2col load that starts outside of its window: pixel {list(start[1:-1])} of CTA "
                f"{self.cta.number}, window {list(desc.lower)} to {list(desc.upper)}; what a card does then is not "
                f"documented{where}"
            )
        return start, moved

    def issue_load(
        self, info: Any, fetch: Any, m: int, barrier_m: int, destinations: list[int], kind: type[LoadTask] = LoadTask
    ) -> None:
        self.fence_as_compiled(info.pattern, m)
        slot, time = self.load_slots.take(self.clk[ORDER])
        clk = self.async_clk()
        clk[ORDER, slot] = time
        self.tick()
        self.cluster.machine.add_task(kind(self, info, clk, slot, time, fetch, m, barrier_m, destinations))

    def tma_gather(self, info: Any, desc: Descriptor, rows: Any, column: int, barrier_m: int, m: int) -> None:
        """Rows of a two-dimensional tensor by their numbers."""
        self.at = info
        rows = np.asarray(rows)
        c = self.cta.number
        destinations = [c]
        if info.multicast:
            if c & info.data_zero:
                return
            destinations = [c | x for x in range(self.cluster.num_ctas) if x & ~info.data_zero == 0]
        width = info.extent[1]
        first = column + info.low[c][1]

        def fetch(task: Task) -> Any:
            parts = [read_box(task, desc, (int(r), first), (1, width)) for r in rows.reshape(-1)]
            return np.concatenate(parts, axis=0)

        self.issue_load(info, fetch, m, barrier_m, destinations)

    def tma_store(self, info: Any, desc: Descriptor, coords: tuple[int, ...], m: int) -> None:
        self.at = info
        c = self.cta.number
        low = tuple(int(x) + o for x, o in zip(coords, info.low[c], strict=True))
        extent = info.extent
        self.issue_store(info, m, lambda task, data: write_box(task, desc, low, extent, data.reshape(extent)))

    def tma_scatter(self, info: Any, desc: Descriptor, rows: Any, column: int, m: int) -> None:
        self.at = info
        rows = np.asarray(rows).reshape(-1)
        width = info.extent[1]
        first = column + info.low[self.cta.number][1]

        def put(task: Task, data: Any) -> None:
            for i, r in enumerate(rows):
                write_box(task, desc, (int(r), first), (1, width), data[i : i + 1])

        self.issue_store(info, m, put)

    def issue_store(self, info: Any, m: int, put: Any) -> None:
        self.stores += 1
        number = self.stores
        self.fence_as_compiled(info.pattern, m)
        if self.cta.number & info.data_zero:
            return  # all hold the same data, and one writes it or adds it; the bulk group of the others is empty
        # Neither is ordered after earlier stores of the role, unless it has waited for them.
        clk = self.async_clk()
        read = StoreRead(self, info, clk, number, m)
        write = StoreWrite(self, info, clk, number, None, put)
        read.store = write.store = Store(number, read, write)
        self.stores_in_flight.append(read.store)
        self.tick()
        self.cluster.machine.add_task(read)

    def tma_store_wait(self, info: Any, pendings: int, read_only: bool) -> None:
        self.at = info
        newest = self.stores - pendings
        machine = self.cluster.machine
        for store in self.stores_in_flight:
            if store.number > newest:
                break
            if not store.read.done:
                machine.run_now(store.read)
            if not read_only and not store.write.done:
                machine.run_now(store.write)
        if newest > self.clk[ORDER, self.store_read_slot]:
            self.clk[ORDER, self.store_read_slot] = newest
        if not read_only:
            if newest > self.clk[ORDER, self.store_write_slot]:
                self.clk[ORDER, self.store_write_slot] = newest
            while self.stores_in_flight and self.stores_in_flight[0].number <= newest:
                self.stores_in_flight.popleft()
