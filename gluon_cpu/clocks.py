"""Vector clocks.

A clock is an array of two rows. Row 0, *order*: for every agent and engine, up to which of its steps everything
happened before. Row 1, *fenced*: up to which of its steps its generic writes are visible to the async proxy as well,
because a proxy fence lies on the way. Both rows are joined together, at every synchronisation.

Columns are slots. An agent has one. An engine that works in order (wgmma, tcgen05, the reads of TMA stores) has one, as
to know its step n is to know all before. TMA loads end in any order, so each takes a slot of its own; a slot is used
again once the issuer knows that its last user is done, which makes the reuse itself ordered.
"""

from typing import Any

import numpy as np

ORDER, FENCED = 0, 1


class Clocks:
    """The slots of one cluster."""

    def __init__(self, capacity: int = 96) -> None:
        self.capacity = capacity
        self.names: list[str] = []

    def slot(self, name: str) -> int:
        if len(self.names) == self.capacity:
            raise NotImplementedError(f"more than {self.capacity} agents and loads in flight in one cluster")
        self.names.append(name)
        return len(self.names) - 1

    def zeros(self) -> Any:
        return np.zeros((2, self.capacity), np.int64)


def join(into: Any, other: Any) -> None:
    np.maximum(into, other, out=into)


class SlotPool:
    """Slots for one agent's TMA loads."""

    def __init__(self, clocks: Clocks, name: str) -> None:
        self.clocks = clocks
        self.name = name
        self.slots: list[int] = []
        self.times: dict[int, int] = {}

    def take(self, known: Any) -> tuple[int, int]:
        """(slot, time) for a new load issued by an agent whose order row is `known`."""
        times = self.times
        for slot in self.slots:
            if known[slot] >= times[slot]:
                times[slot] += 1
                return slot, times[slot]
        slot = self.clocks.slot(self.name)
        self.slots.append(slot)
        times[slot] = 1
        return slot, 1
