"""mbarriers: arrivals, bytes, phases, and the rules for using them.

A barrier counts its completed phases in `phase`; the phase bit of the hardware is its parity. `wait(p)` passes iff the
bit differs from p, that is, iff the newest completed phase has parity p, where the one before phase 0 counts as odd.
"""

from typing import TYPE_CHECKING, Any

from ..clocks import ORDER, join
from ..findings import BarrierMisuse
from ..shadow import BARRIER
from .base import AgentBase

if TYPE_CHECKING:
    from ..cta import Cta


def plural(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def at(info: Any) -> str:
    """The lines that say where an operation stands."""
    return f"    at {info.site.where}" + (f"\n      {info.site.source}" if info.site.source else "")


class Barrier:
    """One mbarrier in the shared memory of `cta`."""

    def __init__(self, cta: "Cta", offset: int, name: str) -> None:
        self.cta = cta
        self.offset = offset
        self.name = name
        self.waiters: list[Any] = []
        self.alive = False
        self.published = False  # the init went through fence.mbarrier_init and a cluster barrier
        self.ended_by: Any = None
        self.init_slot = self.init_time = 0
        self.init_info: Any = None
        self.init_access: Any = None
        self.count = self.pending = self.tx = self.phase = 0
        self.gathered: Any = None
        self.done: Any = None
        self.flips: list[tuple[int, int, str, Any]] = []  # (slot, time, who, info) of whoever completed each phase
        self.waits: dict[Any, tuple[int, int, Any]] = {}  # agent -> (phase it waited for, its step, info)
        self.arrived: list[tuple[str, int, Any]] = []  # in this phase: who, with which count, how
        self.arrivals: list[tuple[int, int, str, Any]] = []  # and bytes of this phase, as in `flips`
        self.previous: list[tuple[int, int, str, Any]] = []  # of the last one

    @property
    def place(self) -> str:
        return f"barrier {self.name} of CTA {self.cta.number}"

    def found(self, message: str, sites: tuple[Any, ...]) -> None:
        """A misuse after which the barrier still works in some way."""
        self.cta.cluster.machine.found(BarrierMisuse(message, sites))

    def describe(self) -> str:
        who = "; ".join(self.arrivals_so_far()) or "nobody"
        return (
            f"{self.place}: phase {self.phase} in progress (parity {self.phase & 1}), {self.pending} of {self.count} "
            f"arrivals pending, {plural(self.tx, 'byte')} outstanding; "
            f"arrived in this phase: {who}"
        )

    def arrivals_so_far(self) -> list[str]:
        """Who has arrived in this phase, and where; those of one place together."""
        places: dict[str, int] = {}
        for who, count, info in self.arrived:
            way = "" if info.what == "arrives" else f" {info.what}"
            place = f"{who}{way} at {info.site.place}"
            places[place] = places.get(place, 0) + count
        return [f"{place} x{n}" if n > 1 else place for place, n in places.items()]

    def init(self, agent: AgentBase, info: Any, count: int) -> None:
        if self.alive:
            raise BarrierMisuse(
                f"{self.place} is initialised again while in use, by {agent.who}\n{at(info)}\n"
                f"  first initialised:\n{at(self.init_info)}\n  Invalidate it first.", (info.site,),
            )  # fmt: skip
        if count < 1:
            raise BarrierMisuse(
                f"{self.place} is initialised with count {count} by {agent.who}\n{at(info)}\n"
                "  The count must be at least 1.", (info.site,),
            )  # fmt: skip
        self.alive = True
        self.published = False
        self.init_slot, self.init_time, self.init_info = agent.slot, agent.t, info
        if self.cta.checks:
            self.init_access = agent.access(info)._replace(atomic=BARRIER)
            self.cta.shadow.begin_barrier(self.offset, agent.clk, self.init_access)
        self.count = self.pending = count
        self.tx = self.phase = 0
        self.done = agent.clk.copy()
        self.gathered = None
        self.flips, self.waits, self.arrived = [], {}, []
        self.arrivals, self.previous = [], []
        # What the loads of an earlier life of this barrier announced is over.
        for cta in self.cta.cluster.ctas:
            cta.landed = {m: last for m, last in cta.landed.items() if last[0] is not self}

    def check_usable(self, clk: Any, who: str, info: Any, verb: str) -> None:
        if not self.alive:
            if self.ended_by is not None:
                raise BarrierMisuse(
                    f"{self.place} is used after it was invalidated: {who} {verb}\n{at(info)}\n"
                    f"  invalidated:\n{at(self.ended_by)}\n  Missing order: the invalidation must come after "
                    "the last use, of all roles and all CTAs.", (info.site, self.ended_by.site),
                )  # fmt: skip
            raise BarrierMisuse(
                f"{self.place} is used before it is initialised: {who} {verb}\n{at(info)}\n"
                f"  Missing order: the barrier's mbarrier.init must come first{self.cluster_hint(who)}.", (info.site,),
            )  # fmt: skip
        if clk[ORDER, self.init_slot] < self.init_time and not self.published:
            self.found(
                f"{self.place} is used by {who}, which {verb},\n{at(info)}\n"
                f"  but its initialisation is not ordered before that:\n{at(self.init_info)}\n"
                f"  Missing order: a barrier between the init and the first use{self.cluster_hint(who)}.",
                (info.site, self.init_info.site),
            )

    def cluster_hint(self, who: str) -> str:
        return " (of the whole cluster, as a peer CTA uses it)" if self.cta.cluster.num_ctas > 1 else ""

    def arrive(self, clk: Any, who: str, info: Any, count: int, tx: int, slot: int, time: int) -> None:
        """`count` arrivals, after announcing `tx` bytes; what is known to `clk` is known to who waits."""
        self.check_usable(clk, who, info, "arrives on it")
        self.check_phase(clk, info, f"an arrival on {self.place}", f"{who} arrives")
        self.tx += tx
        self.gather(clk)
        self.arrivals.append((slot, time, who, info))
        if self.pending < count:
            raise self.too_many(who, info, count)
        self.arrived.append((who, count, info))
        self.pending -= count
        self.settle(slot, time, who, info)

    def complete_bytes(self, clk: Any, who: str, info: Any, count: int, slot: int, time: int) -> None:
        self.check_usable(clk, who, info, f"completes {plural(count, 'byte')} on it")
        self.check_phase(clk, info, f"bytes on {self.place}", f"{who} brings {plural(count, 'byte')}")
        self.tx -= count
        self.gather(clk)
        self.arrivals.append((slot, time, who, info))
        self.settle(slot, time, who, info)

    def too_many(self, who: str, info: Any, count: int) -> BarrierMisuse:
        come = self.count - self.pending
        way = info.what if info.what in ("arrives", "expects bytes") else f"arrives ({info.what})"
        more = f" with count {count}" if count > 1 else ""
        so_far = f"when its phase {self.phase} has had {come} of {self.count} arrivals"
        if come == self.count:
            so_far += f" and the phase waits only for {plural(self.tx, 'more byte')}"
        earlier = "".join(f"\n    {line}" for line in self.arrivals_so_far())
        return BarrierMisuse(
            f"too many arrivals on {self.place}: {who} {way}{more}\n"
            f"{at(info)}\n"
            f"  {so_far}{':' if earlier else '.'}{earlier}\n"
            f"  Its init, for {plural(self.count, 'arrival')} a phase:\n{at(self.init_info)}\n"
            "  That count is too low, or somebody arrives too often, or before the phase is over. "
            "An mbarrier.expect is an arrival too.",
            (info.site, self.init_info.site),
        )

    def check_phase(self, clk: Any, info: Any, what: str, who: str) -> None:
        """That this comes after all that completed the last phase, and could not have been part of it instead."""
        for slot, time, other, other_info in self.previous:
            if clk[ORDER, slot] >= time:
                continue
            self.found(
                f"{what} can count for the wrong phase: {who}\n{at(info)}\n"
                f"  in phase {self.phase}, without any order after what completed phase {self.phase - 1}, by {other}\n"
                f"{at(other_info)}\n  Under another schedule it comes first, and counts for phase "
                f"{self.phase - 1} instead. Missing order: whoever issues it must know that phase {self.phase - 1} is "
                f"over. Or the init count of {self.count} is too low, or somebody arrives too often.",
                (info.site, other_info.site),
            )

    def gather(self, clk: Any) -> None:
        if self.gathered is None:
            self.gathered = clk.copy()
        else:
            join(self.gathered, clk)

    def settle(self, slot: int, time: int, who: str, info: Any) -> None:
        """Complete the phase if everything has come."""
        if self.pending or self.tx > 0:
            return
        if self.tx < 0:
            raise BarrierMisuse(
                f"{plural(-self.tx, 'byte')} too many on {self.place}: {who}\n{at(info)}\n"
                f"  brings more than its phase {self.phase} was told to expect, though no arrival is missing:\n    "
                + "\n    ".join(self.arrivals_so_far())
                + "\n  The byte count of mbarrier.expect is too small, or an expect is missing.",
                (info.site, self.init_info.site),
            )
        done = self.gathered
        known = done[ORDER]
        for agent, (waited, step, wait_info) in self.waits.items():
            if waited == self.phase - 1 and known[agent.slot] < step:
                self.found(
                    f"{self.place} can lap a waiter: its phase {self.phase} completes, last by {who}\n"
                    f"{at(info)}\n  without any order after the wait for phase {self.phase - 1} by {agent.who}\n"
                    f"{at(wait_info)}\n  Under another schedule that wait comes too late and sees the wrong parity. "
                    f"Missing order: {agent.who} must signal after its wait, and {who} must wait for that signal "
                    "before it arrives again.", (wait_info.site, info.site),
                )  # fmt: skip
        self.done = done
        self.flips.append((slot, time, who, info))
        self.phase += 1
        self.pending = self.count
        self.gathered = None
        self.arrived = []
        self.previous, self.arrivals = self.arrivals, []
        if self.waiters:
            self.cta.cluster.machine.wake(self)

    def wanted(self, agent: AgentBase, parity: int) -> int:
        """The phase that an agent waits for: by the parity, the first it does not know to be over, or that before."""
        seen = 0
        known = agent.clk[ORDER]
        for i in range(len(self.flips) - 1, -1, -1):
            slot, time = self.flips[i][:2]
            if known[slot] >= time:
                seen = i + 1
                break
        last = self.waits.get(agent)
        if last is not None:
            seen = max(seen, last[0] + 1)
        return seen if seen & 1 == parity else seen - 1


class BarrierOps(AgentBase):
    """The operations of an agent on mbarriers. `zero` are the CTA bits over which a barrier is shared: its pair."""

    def barrier_at(self, home: int, m: int) -> Barrier:
        cta = self.cluster.ctas[home]
        found = cta.barriers.get(m)
        if found is None:
            found = cta.barriers[m] = Barrier(cta, m, cta.name_at(m))
        return found

    def init_barrier(self, info: Any, m: int, count: int) -> None:
        self.at = info
        zero = info.zero
        if self.cta.number & zero:
            return
        self.barrier_at(self.cta.number, m).init(self, info, count << zero.bit_count())

    def inval_barrier(self, info: Any, m: int) -> None:
        self.at = info
        if self.cta.number & info.zero:
            return
        b = self.barrier_at(self.cta.number, m)
        b.check_usable(self.clk, self.who, info, "invalidates it")
        if b.waiters:
            raise BarrierMisuse(
                f"{b.place} is invalidated by {self.who}\n{at(info)}\n  while "
                f"{', '.join(w.who for w in b.waiters)} waits on it.", (info.site,),
            )  # fmt: skip
        for slot, (time, who, other) in b.cta.uses.pop(b.offset, {}).items():
            if self.clk[ORDER, slot] < time:
                b.found(
                    f"{b.place} is invalidated by {self.who}\n{at(info)}\n  with no order after its use "
                    f"by {who}\n{at(other)}\n  Missing order: {self.before_inval(who)}.", (info.site, other.site),
                )  # fmt: skip
        b.alive = False
        b.ended_by = info
        if b.cta.checks:
            b.cta.shadow.end_barrier(m, self.access(info))

    def before_inval(self, user: str) -> str:
        engine, _, role = user.partition(" for ")
        if role:
            return (
                f"before mbarrier.invalidate somebody must wait for the phase that this {engine} completes: "
                "perhaps a role has too few rounds"
            )
        if self.cluster.num_ctas > 1:
            return "wait for that use, for example through a barrier of the whole cluster, before mbarrier.invalidate"
        return "wait for that use before mbarrier.invalidate, for example until the roles have ended"

    def arrive(self, info: Any, m: int, count: int, tx: int = 0) -> None:
        """Arrive (and expect `tx` bytes), wherever the routing of the operation leads."""
        self.at = info
        c = self.cta.number
        others = info.others  # CTA bits that the operation spreads over
        if c & others:
            return
        targets = [c]
        if others:
            targets = [c | x for x in range(self.cluster.num_ctas) if x & ~others == 0]
        for target in targets:
            home = target & ~info.zero
            b = self.barrier_at(home, m)
            b.arrive(self.clk, self.who, info, count, tx, self.slot, self.t)
            b.cta.note_use(m, self.slot, self.t, self.who, info, remote=home != c)
        self.tick()

    def wait(self, info: Any, m: int, phase: int) -> Barrier | None:
        """None once the wait has passed, else the barrier to block on."""
        self.at = info
        c = self.cta.number
        if c & info.zero:
            return None  # the barrier lives in the pair's leader, which alone waits on it
        b = self.barrier_at(c, m)
        b.check_usable(self.clk, self.who, info, "waits on it")
        parity = phase & 1
        want = b.wanted(self, parity)
        if b.phase > want + 1:
            raise BarrierMisuse(
                f"{self.who} was lapped on {b.place}:\n{at(info)}\n  it waits for phase {want} (parity "
                f"{parity}), but {b.phase} phases are already complete, the last by {b.flips[-1][2]}\n"
                f"{at(b.flips[-1][3])}\n  The wait names the wrong parity, or phase {want + 1} completes before "
                "this wait has seen the one before.", (info.site,),
            )  # fmt: skip
        if b.phase != want + 1:
            self.wanted_phase = want
            return b
        join(self.clk, b.done)
        b.waits[self] = (want, self.t, info)
        b.cta.note_use(m, self.slot, self.t, self.who, info, remote=False)
        return None
