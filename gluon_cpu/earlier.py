"""The launch before, as far as a kernel that may start before its end has to know it (programmatic dependent launch).

Such a kernel is launched with launch_pdl=True, and the one before it has called `gdc_launch_dependents`. Until
`gdc_wait` nothing orders what it does after what the launch before did. The two are taken to be neighbours in one
stream, with nothing between them.
"""

from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np

from .global_memory import GlobalBuffer
from .shadow import EARLIER, Access, Acquired, Shadow

ALL = np.full((2, 1), np.iinfo(np.int64).max)  # a clock: everything that an earlier launch did


@dataclass
class Footprint:
    """What the launch of `kernel` did to global memory, by the address of each tensor's storage."""

    kernel: str
    shadows: dict[int, Shadow]

    def before(self, buffer: GlobalBuffer) -> None:
        """Have it known of a buffer of this launch."""

        def renamed(access: Access) -> Access:
            # Async: between kernels no proxy fence is needed.
            who = f"{access.who} in {self.kernel}, launched before"
            return access._replace(slot=0, time=1, cluster=EARLIER, who=who, is_async=True, atomic=None)

        old = self.shadows.get(buffer.address)
        for segment in old.by_start.values() if old is not None else ():
            for s in buffer.shadow.cover(segment.start, segment.end):
                s.write = None if segment.write is None else renamed(segment.write)
                if segment.reads:  # one stands for all: they are ordered or not together
                    s.reads[(EARLIER, 0)] = renamed(next(iter(segment.reads.values())))


LAST: ContextVar[Footprint | None] = ContextVar("gluon_cpu_last_launch", default=None)  # if it let the next one start


def leave(kernel: str, buffers: list[GlobalBuffer], lets_next_start: bool) -> None:
    """For the next launch."""
    found = Footprint(kernel, {b.address: b.shadow for b in buffers if b.written or b.was_read})
    LAST.set(found if lets_next_start else None)


def everything_before(slot: int, time: int) -> Acquired:
    """What an agent knows from its step `time` on, having waited."""
    return Acquired(slot, time, EARLIER, ALL)
