"""What every group of an agent's operations builds on: who it is, what it knows, and how it says what it touches."""

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from ..clocks import FENCED, ORDER, SlotPool
from ..shadow import Access, Acquired

if TYPE_CHECKING:
    from ..cta import Cta
    from ..machine import Cluster


class AgentBase:
    """State shared by the operations; `agent.Agent` fills it in."""

    cta: "Cta"
    cluster: "Cluster"
    role: str
    role_number: int
    who: str
    slot: int
    t: int  # its current step, also in its own column of `clk`
    clk: Any
    foreign: list[Acquired]  # of the whole cluster
    at: Any  # the operation it stands at
    product_slot: int
    store_read_slot: int
    store_write_slot: int
    copy_slot: int
    pipe_slot: int
    load_slots: SlotPool
    products: int
    stores: int
    copies: int
    pipe_count: int
    product_queue: deque[Any]
    products_in_flight: deque[Any]
    stores_in_flight: deque[Any]
    pipe: deque[Any]
    copy_groups: deque[int]
    descriptors: dict[int, Any]
    cluster_round: int
    exchange_round: int
    wanted_phase: int  # of the barrier it last blocked on

    def tick(self) -> None:
        """What comes from here on is not part of what others have been told."""
        self.t += 1
        self.clk[ORDER, self.slot] = self.t

    def async_clk(self) -> Any:
        """The clock that an async operation issued now, or a role started or ended now, passes on."""
        clk = self.clk.copy()
        if self.cluster.machine.fences_own_writes:
            clk[FENCED, self.slot] = self.t
        return clk

    def fence_as_compiled(self, pattern: Any, m: Any) -> None:
        """In fast mode, the proxy fence that the compiler puts before an engine's access to bytes of shared memory.

        It is there if this role touched them itself, and covers all that the role knows, of other roles as well.
        """
        if self.cluster.machine.fences_own_writes and self.cta.checks:
            runs, base = pattern.runs_at(m)
            if self.cta.shadow.touched_unfenced(runs, base, self.slot, self.cluster.number, self.clk):
                np.maximum(self.clk[FENCED], self.clk[ORDER], out=self.clk[FENCED])

    def access(self, info: Any) -> Access:
        return Access(self.slot, self.t, False, info, self.who, self.cluster.number)
