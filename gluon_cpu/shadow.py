"""Who last touched which bytes: segments of a memory, each with its last write and the reads since.

Segments follow the accesses: a buffer always touched as a whole is one segment, and only a partial overlap splits it.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .clocks import FENCED, ORDER


class Scope(NamedTuple):
    """Of an atomic: by which CTA, and whether it holds among that CTA's agents only (`narrow`) or for all.

    barrier: it is the init of an mbarrier, which data does not go together with at all.
    """

    narrow: bool
    cluster: int
    cta: int
    barrier: bool = False

    def covers(self, other: "Scope") -> bool:
        return not self.narrow or self[1:3] == other[1:3]


BARRIER = Scope(False, 0, 0, barrier=True)
BARRIER_BYTES = 8
EARLIER = -1  # of an access by the launch before, where the number of a cluster would stand


class Access(NamedTuple):
    """One access: by whom (`slot` of cluster `cluster` at step `time`; `who` in messages), where (`info`) and how.

    issued: of an engine's, the step at which its role gave the engine this work.
    """

    slot: int
    time: int
    is_async: bool
    info: Any
    who: str
    cluster: int
    atomic: Scope | None = None
    issued: int = 0


class Acquired(NamedTuple):
    """What an agent (`slot`) learnt of another cluster at its step `time`: whoever knows that step knows this too."""

    slot: int
    time: int
    cluster: int
    clk: Any


class Segment:
    __slots__ = ("allocated", "atomics", "before", "end", "initialised", "reads", "start", "write")

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.write: Access | None = None
        self.reads: dict[tuple[int, int], Access] = {}
        self.atomics: list[Access] = []  # atomic writes before the last one, which is not ordered after them
        self.initialised = False
        self.allocated: Access | None = None  # by whom, as long as nobody has written since
        self.before: tuple[Access, ...] = ()  # who wrote last before that allocation


class Conflict(NamedTuple):
    """Two accesses without an order. kind: 'write-read', 'read-write' or 'write-write', in time order; or, without a
    proxy fence between them, 'fence', of which the earlier is a write, or 'read-fence'.

    Or 'barrier': data where an mbarrier lives, in whatever order.
    """

    kind: str
    earlier: Access
    later: Access
    start: int
    end: int


class Unwritten(NamedTuple):
    """A read of bytes that nobody has written."""

    access: Access
    start: int
    end: int


class Shadow:
    """The segments of one memory. `tell` is told of what is wrong; if it returns, the access counts as a right one.

    initialised: whether it holds data before anybody writes (global memory does). fenceable: whether a proxy fence can
    make ordinary writes visible to engines; that of Gluon covers shared memory only. fence_reads: whether ordinary
    reads need it too, before an engine writes there.
    """

    def __init__(
        self,
        tell: Callable[[Conflict | Unwritten], None],
        *,
        initialised: bool,
        fenceable: bool = True,
        fence_reads: bool = False,
    ) -> None:
        self.tell = tell
        self.default_initialised = initialised
        self.fence_reads = fence_reads
        self.fenceable = fenceable
        self.by_start: dict[int, Segment] = {}
        self.starts: list[int] = []

    def cover(self, a: int, b: int) -> list[Segment]:
        """The segments that make up [a, b), split and created as needed."""
        seg = self.by_start.get(a)
        if seg is not None and seg.end == b:
            return [seg]
        starts, by_start = self.starts, self.by_start
        i = bisect_right(starts, a) - 1
        if i >= 0:
            seg = by_start[starts[i]]
            if seg.start < a < seg.end:
                self.split(seg, a)
                i += 1
            elif seg.end <= a:
                i += 1
        else:
            i = 0
        found: list[Segment] = []
        at = a
        while at < b:
            seg = by_start.get(at)
            if seg is None:
                j = bisect_right(starts, at)
                end = min(b, starts[j]) if j < len(starts) else b
                seg = Segment(at, end)
                seg.initialised = self.default_initialised
                by_start[at] = seg
                starts.insert(j, at)
            elif seg.end > b:
                self.split(seg, b)
            found.append(seg)
            at = seg.end
        return found

    def split(self, seg: Segment, at: int) -> None:
        right = Segment(at, seg.end)
        right.write, right.reads, right.initialised = seg.write, dict(seg.reads), seg.initialised
        right.atomics, right.allocated, right.before = list(seg.atomics), seg.allocated, seg.before
        seg.end = at
        self.by_start[at] = right
        self.starts.insert(bisect_right(self.starts, at), at)

    def read(self, runs: Any, base: int, clock: Any, access: Access, foreign: Sequence[Acquired] = ()) -> None:
        slot, cluster = access.slot, access.cluster
        for a, b in runs:
            a += base
            b += base
            seg = self.by_start.get(a)
            for s in (seg,) if seg is not None and seg.end == b else self.cover(a, b):
                w = s.write
                if w is not None:
                    if w.atomic and w.atomic.barrier:
                        self.check_order("write-read", w, access, clock, foreign, s)
                        self.tell(Conflict("barrier", w, access, s.start, s.end))
                    for earlier in s.atomics:
                        if not (earlier.atomic and access.atomic and together(earlier, access)):
                            self.check_order("write-read", earlier, access, clock, foreign, s)
                    in_order = (w.atomic and access.atomic and together(w, access)) or self.check_order(
                        "write-read", w, access, clock, foreign, s
                    )
                    if access.is_async and not w.is_async and in_order and not self.fenced(w, cluster, clock):
                        self.tell(Conflict("fence", w, access, s.start, s.end))
                elif not s.initialised:
                    if s.before and s.allocated is not None and not ordered(s.allocated, access, clock, foreign):
                        # An engine that is late: it reads what was there before the allocation, as it should. Whoever
                        # writes here next must be ordered after it, which that write checks.
                        for earlier in s.before:
                            self.check_order("write-read", earlier, access, clock, foreign, s)
                    else:
                        self.tell(Unwritten(access, s.start, s.end))
                known = s.reads.get((cluster, slot))
                if known is None or known.time <= access.time:  # reads of TMA stores come in any order
                    s.reads[(cluster, slot)] = access
                if len(s.reads) > 12:
                    self.forget(s, cluster)

    def fenced(self, earlier: Access, cluster: int, clock: Any) -> bool:
        """Whether a fence lies between an ordinary access and an engine with this clock."""
        return self.fenceable and bool(earlier.cluster != cluster or clock[FENCED, earlier.slot] >= earlier.time)

    @staticmethod
    def forget(s: Segment, cluster: int) -> None:
        """Of reads by other clusters one is enough: they are unordered with everything here alike."""
        others = [k for k in s.reads if k[0] not in (cluster, EARLIER)]
        for k in others[:-2]:
            del s.reads[k]

    def write(self, runs: Any, base: int, clock: Any, access: Access, foreign: Sequence[Acquired] = ()) -> None:
        cluster = access.cluster
        for a, b in runs:
            a += base
            b += base
            seg = self.by_start.get(a)
            for s in (seg,) if seg is not None and seg.end == b else self.cover(a, b):
                w = s.write
                if w is not None and w.atomic and access.atomic and together(w, access):
                    for earlier in s.atomics:
                        if not together(earlier, access):
                            self.check_order("write-write", earlier, access, clock, foreign, s)
                    if not ordered(w, access, clock, foreign):
                        s.atomics = [*(a for a in s.atomics if a.slot != w.slot or a.cluster != w.cluster), w][-8:]
                elif w is not None:
                    if w.atomic and w.atomic.barrier:
                        self.check_order("write-write", w, access, clock, foreign, s)
                        self.tell(Conflict("barrier", w, access, s.start, s.end))
                    for earlier in s.atomics:
                        self.check_order("write-write", earlier, access, clock, foreign, s)
                    s.atomics = []
                    in_order = self.check_order("write-write", w, access, clock, foreign, s)
                    if access.is_async and not w.is_async and in_order and not self.fenced(w, cluster, clock):
                        self.tell(Conflict("fence", w, access, s.start, s.end))
                if s.reads:
                    for r in s.reads.values():
                        in_order = (r.atomic and access.atomic and together(r, access)) or self.check_order(
                            "read-write", r, access, clock, foreign, s
                        )
                        if (
                            access.is_async
                            and not r.is_async
                            and in_order
                            and self.fence_reads
                            and not self.fenced(r, cluster, clock)
                        ):
                            self.tell(Conflict("read-fence", r, access, s.start, s.end))
                    s.reads.clear()
                s.write = access
                s.initialised = True

    def fresh(self, a: int, b: int, access: Access) -> None:
        """A new allocation: what was there before is no data of it, though who touched it still counts."""
        for s in self.cover(a, b):
            s.initialised = False
            s.allocated = access
            if s.write is not None and not (s.write.atomic and s.write.atomic.barrier):
                # Kept as a read: a write must still be ordered after it, and a read of it is one of nothing.
                # Marked async: between them and a copy no fence is asked for.
                s.before = (*s.atomics, s.write)
                s.reads |= {(w.cluster, w.slot): w._replace(is_async=True) for w in s.before}
                s.write, s.atomics = None, []

    def check_order(
        self, kind: str, earlier: Access, later: Access, clock: Any, foreign: Sequence[Acquired], s: Segment
    ) -> bool:
        """Whether they are ordered. If not it is told, and no fence is asked for: a fence orders nothing by itself."""
        if ordered(earlier, later, clock, foreign):
            return True
        self.tell(Conflict(kind, earlier, later, s.start, s.end))
        return False

    def touched_unfenced(self, runs: Any, base: int, slot: int, cluster: int, clock: Any) -> bool:
        """Whether an agent itself touched any of these bytes through the generic proxy since it last fenced."""
        known = clock[FENCED, slot]
        for a, b in runs:
            for s in self.cover(a + base, b + base):
                for access in (s.write, s.reads.get((cluster, slot))):
                    if (
                        access is not None
                        and (access.cluster, access.slot) == (cluster, slot)
                        and not access.is_async
                        and access.time > known
                    ):
                        return True
        return False

    def begin_barrier(self, a: int, clock: Any, access: Access) -> None:
        """An mbarrier at byte `a`: what was there before must be over, and no data may come until its end."""
        self.write([(a, a + BARRIER_BYTES)], 0, clock, access)

    def use_barrier(self, a: int, access: Access) -> None:
        """What comes there after the end of the barrier must be ordered after this use too."""
        for s in self.cover(a, a + BARRIER_BYTES):
            s.reads[(access.cluster, access.slot)] = access._replace(is_async=True)  # no fence is asked for

    def end_barrier(self, a: int, access: Access) -> None:
        for s in self.cover(a, a + BARRIER_BYTES):
            s.write = access

    def written_gaps(self, runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The parts of `runs` that nobody has written."""
        gaps: list[tuple[int, int]] = []
        for a, b in runs:
            for s in self.cover(a, b):
                if s.write is None or s.write.cluster == EARLIER:
                    if gaps and gaps[-1][1] == s.start:
                        gaps[-1] = (gaps[-1][0], s.end)
                    else:
                        gaps.append((s.start, s.end))
        return gaps


def together(a: Access, b: Access) -> bool:
    """Whether two atomics are so for each other: each lies within the other's scope."""
    return bool(a.atomic and b.atomic and a.atomic.covers(b.atomic) and b.atomic.covers(a.atomic))


def ordered(earlier: Access, later: Access, clock: Any, foreign: Sequence[Acquired]) -> bool:
    if earlier.cluster == later.cluster:
        return bool(clock[ORDER, earlier.slot] >= earlier.time)
    return any(
        a.cluster == earlier.cluster and clock[ORDER, a.slot] >= a.time and a.clk[ORDER, earlier.slot] >= earlier.time
        for a in foreign
    )
