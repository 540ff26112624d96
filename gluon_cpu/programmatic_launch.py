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
    """What the launch of `kernel` did to global memory. touched: of each buffer its address, and who did what there.
    older: that of the launch before it, if it let the next one start without having waited for that.
    """

    kernel: str
    touched: list[tuple[int, Shadow]]
    older: "Footprint | None"

    def before(self, buffer: GlobalBuffer) -> None:
        """Have it known of a buffer of this launch."""
        if self.older is not None:
            self.older.before(buffer)
        for address, shadow in self.touched:
            for segment in shadow.by_start.values():
                start, end = (
                    max(0, min(buffer.size, x + address - buffer.address)) for x in (segment.start, segment.end)
                )
                if start < end:
                    self.note(buffer, start, end, segment.write, list(segment.reads.values()))

    def note(self, buffer: GlobalBuffer, start: int, end: int, write: Access | None, reads: list[Access]) -> None:
        own_reads = [r for r in reads if r.cluster != EARLIER]
        for s in buffer.shadow.cover(start, end):
            if write is not None and write.cluster != EARLIER:
                s.write = self.renamed(write)
            if own_reads:  # one stands for all: they are ordered or not together
                s.reads[(EARLIER, 0)] = self.renamed(own_reads[0])

    def renamed(self, access: Access) -> Access:
        # Async: between kernels no proxy fence is needed.
        who = f"{access.who} in {self.kernel}, launched before"
        return access._replace(slot=0, time=1, cluster=EARLIER, who=who, is_async=True, atomic=None)


LAST: ContextVar[Footprint | None] = ContextVar("gluon_cpu_last_launch", default=None)  # if it let the next one start


def footprint(kernel: str, buffers: list[GlobalBuffer], older: Footprint | None) -> Footprint:
    used = [b for b in buffers if b.size and not b.scratch and (b.written or b.was_read)]
    return Footprint(kernel, [(b.address, b.shadow) for b in used], older)


def everything_before(slot: int, time: int) -> Acquired:
    """What an agent knows from its step `time` on, having waited."""
    return Acquired(slot, time, EARLIER, ALL)
