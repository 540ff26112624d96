"""What the CTAs of a cluster do together: barriers, and values exchanged through each other's shared memory."""

from typing import Any

from ..clocks import join
from .base import AgentBase


class Meeting:
    """A point that all CTAs of a cluster pass together, round after round."""

    def __init__(self, name: str, expected: int, machine: Any) -> None:
        self.name = name
        self.expected = expected
        self.machine = machine
        self.waiters: list[Any] = []
        self.round = 0
        self.arrived: list[int] = []
        self.gathered: Any = None
        self.done: Any = None
        self.values: dict[int, Any] = {}
        self.results: dict[int, Any] = {}

    def describe(self) -> str:
        missing = sorted(set(range(self.expected)) - set(self.arrived))
        return f"{self.name}: CTA {', '.join(map(str, missing))} has not come"

    def arrive(self, cta: int, clk: Any, value: Any = None) -> None:
        self.arrived.append(cta)
        self.values[cta] = value
        if clk is not None:
            if self.gathered is None:
                self.gathered = clk.copy()
            else:
                join(self.gathered, clk)
        if len(self.arrived) == self.expected:
            self.round += 1
            self.arrived = []
            self.done, self.gathered = self.gathered, None
            self.results, self.values = self.values, {}
            self.machine.wake(self)


class ClusterOps(AgentBase):
    def meeting(self, key: Any, name: str) -> Meeting:
        meetings = self.cluster.meetings
        if key not in meetings:
            meetings[key] = Meeting(name, self.cluster.num_ctas, self.cluster.machine)
        return meetings[key]

    def cluster_arrive(self, info: Any, relaxed: bool) -> None:
        self.at = info
        m = self.meeting(("barrier", self.role_number), f"cluster barrier of {self.role}")
        self.cluster_round = m.round
        m.arrive(self.cta.number, None if relaxed else self.clk)
        if m.round != self.cluster_round:
            self.publish_inits()
        self.tick()

    def publish_inits(self) -> None:
        """All CTAs have come: barriers whose init was followed by its fence may be used by everybody."""
        for cta in self.cluster.ctas:
            for b in cta.barriers.values():
                if b.alive and cta.init_fence is not None and cta.init_fence[0, b.init_slot] >= b.init_time:
                    b.published = True

    def fence_init(self, info: Any) -> None:
        self.cta.init_fence = self.clk.copy()
        self.tick()

    def cluster_wait(self, info: Any) -> Meeting | None:
        self.at = info
        m = self.meeting(("barrier", self.role_number), f"cluster barrier of {self.role}")
        if m.round == self.cluster_round:
            return m
        if m.done is not None:
            join(self.clk, m.done)
        return None

    def give(self, info: Any, value: Any) -> None:
        """Hand a value to the same operation of the other CTAs."""
        self.at = info
        m = self.meeting((info.key, self.role_number), f"exchange between CTAs at {info.site.where}")
        self.exchange_round = m.round
        m.arrive(self.cta.number, self.clk, value)
        self.tick()

    def take_all(self, info: Any) -> Any:
        """The meeting to block on as long as a CTA is missing, else every CTA's value, by its number."""
        m = self.meeting((info.key, self.role_number), "")
        if m.round == self.exchange_round:
            return m
        join(self.clk, m.done)
        if info.scratch is not None and self.cta.checks:
            self.read_scratch(info)
        return m.results

    def read_scratch(self, info: Any) -> None:
        """The values lie in each CTA's scratch: it must stay as it is until the others have read theirs. If one has it
        for others, which have bits of `info.zero` in their number, they read that one's."""
        start, size = info.scratch
        givers = [self.cluster.ctas[self.cta.number & ~info.zero]] if info.zero else self.cluster.ctas
        for cta in givers:
            if cta is not self.cta:
                cta.shadow.read(((start, start + size),), 0, self.clk, self.access(info))
                cta.touched[self.slot] = (self.t, self.who, info)
