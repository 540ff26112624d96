"""An agent: a role of a CTA, which the scheduler lets go on step by step."""

from collections import deque
from collections.abc import Iterator
from typing import Any

from .clocks import ORDER, SlotPool, join
from .cta import Cta
from .ops.atomics import AtomicOps
from .ops.cluster import ClusterOps
from .ops.misc import MiscOps
from .ops.tcgen05 import Tcgen05Ops
from .ops.wgmma import WgmmaOps


class Agent(AtomicOps, Tcgen05Ops, WgmmaOps, ClusterOps, MiscOps):
    """A role of a CTA: a generator that stops before everything that others can see."""

    priority: float | None = None

    def __init__(self, cta: Cta, role: str, role_number: int, parent: "Agent | None") -> None:
        cluster = cta.cluster
        self.cta = cta
        self.cluster = cluster
        self.role = role
        self.role_number = role_number
        self.number = role_number * cluster.num_ctas + cta.number
        self.who = role
        if cluster.num_ctas > 1:
            self.who += f" (CTA {cta.number})"
        if cluster.machine.programs > 1:
            self.who += f" of program {cluster.number}"
        clocks = cluster.clocks
        self.slot = clocks.slot(self.who)
        self.product_slot = clocks.slot(f"wgmma of {self.who}")
        self.store_read_slot = clocks.slot(f"TMA store of {self.who}")
        self.store_write_slot = clocks.slot(f"TMA store of {self.who}")
        self.copy_slot = clocks.slot(f"cp.async of {self.who}")
        self.pipe_slot = clocks.slot(f"tcgen05 of {self.who}")
        self.pipe = deque()
        self.copy_groups = deque()
        self.pipe_count = 0
        self.descriptors = parent.descriptors if parent is not None else {}
        self.load_slots = SlotPool(clocks, f"TMA load of {self.who}")
        self.clk = clocks.zeros() if parent is None else parent.async_clk()
        self.foreign = cluster.foreign
        self.t = 1
        self.clk[ORDER, self.slot] = 1
        self.at = None
        self.gen: Iterator[Any] = iter(())
        self.blocked: Any = None
        self.finished = False
        self.products = self.stores = self.copies = 0
        self.product_queue = deque()
        self.products_in_flight = deque()
        self.stores_in_flight = deque()
        self.parent = parent
        self.children = 0
        self.waiters: list[Agent] = []
        self.child_clk: Any = None
        cta.agents.append(self)
        cluster.agents.append(self)

    def restart(self, parent: "Agent") -> None:
        """Another run of the same role: it knows what its parent knows."""
        join(self.clk, parent.async_clk())
        self.finished = False
        self.tick()

    def describe(self) -> str:
        return "the other roles to end"

    def step(self) -> None:
        machine = self.cluster.machine
        machine.at = self
        try:
            blocked = next(self.gen)
        except StopIteration:
            self.finish()
            return
        if machine.trace is not None:
            machine.trace.step(self)
        if blocked is None:
            machine.ready_agents.append(self)
        else:
            self.blocked = blocked
            blocked.waiters.append(self)
            if machine.trace is not None:
                machine.trace.block(self, blocked)

    def finish(self) -> None:
        self.finished = True
        self.run_products()
        cluster, cta = self.cluster, self.cta
        if self.products_in_flight:
            last = self.products_in_flight[-1]
            cta.touched[self.product_slot] = (last.number, self.who, last.info)
            self.products_in_flight.clear()
        parent = self.parent
        if parent is not None:
            if parent.child_clk is None:
                parent.child_clk = self.async_clk()
            else:
                join(parent.child_clk, self.async_clk())
            parent.children -= 1
            if parent.children == 0:
                cluster.machine.wake(parent)
        else:
            cta.exit_clk = self.clk
        cluster.running -= 1
        cluster.machine.progress = cluster.machine.steps
        if cluster.machine.trace is not None:
            cluster.machine.trace.finish(self)

    def spawn(self, info: Any, roles: list[tuple[int, str, Any, tuple[Any, ...]]]) -> None:
        """Start the other roles of a warp_specialize: (number, name, generator function, arguments)."""
        self.at = info
        machine = self.cluster.machine
        self.child_clk = None
        self.children = len(roles)
        for number, name, function, arguments in roles:
            agent = next((a for a in self.cta.agents if a.role_number == number), None)
            if agent is None:
                agent = Agent(self.cta, name, number, self)
            else:
                agent.restart(self)
            agent.at = info
            agent.gen = function(agent, machine.constants[self.cta.number], *arguments)
            self.cluster.running += 1
            machine.ready_agents.append(agent)
        self.tick()

    def joined(self, info: Any) -> "Agent | None":
        self.at = info
        if self.children:
            return self
        if self.child_clk is not None:
            join(self.clk, self.child_clk)
        return None
