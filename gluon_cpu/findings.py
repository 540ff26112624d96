"""What the machine can find. Every finding names the lines involved and carries the schedule that replays it."""

from typing import Any


class Finding(Exception):
    """A defect of the kernel, as opposed to one of the machine.

    `schedule` replays it: pass it to `launch` or `machine`, together with `mode` where there is one. `sites` are the
    places involved, the offending one first.
    """

    schedule: Any = None
    mode: str | None = None  # where it is not what the launch takes by itself
    kernel: str = ""

    def __init__(self, message: str, sites: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.sites = sites

    def __str__(self) -> str:
        tail = ""
        if self.kernel:
            tail += f"\n  kernel: {self.kernel}"
        if self.schedule is not None:
            tail += f"\n  replay: schedule={self.schedule!r}" + (f", mode={self.mode!r}" if self.mode else "")
        return f"{self.message}{tail}"


class RaceError(Finding):
    """Two accesses without an order between them; the base of every ordering error."""


class DataRace(RaceError):
    """Two accesses to the same memory, at least one a write, and nothing orders them."""


class MissingFence(RaceError):
    """A generic write that an async engine uses, or a generic read of what it overwrites without a proxy fence."""


class Deadlock(Finding):
    """Nobody can go on."""


class BarrierMisuse(Finding):
    """An mbarrier used against its rules: count, bytes, phase or lifetime."""


class OutOfBounds(Finding):
    """An access outside of a buffer or of a tensor."""


class UninitialisedRead(Finding):
    """A read of memory that nobody has written."""


class LifetimeError(Finding):
    """Memory or a barrier of a CTA that ends, or is reused, while somebody can still touch it."""


class OutputError(Finding):
    """An output element that two agents write, or none."""


class DeviceAssert(Finding):
    """A `gl.device_assert` that failed, or a `gl.assume` that is false."""


class DivisionByZero(Finding):
    """What an integer division by zero left, used: in an address, a mask, a branch or an output."""


class ReuseRace(DataRace, LifetimeError):
    """Shared memory written again while a TMA store may still be reading it."""


class OutputRace(DataRace, OutputError):
    """Two agents write the same output element, in no order."""


class BytesNeverCome(Deadlock, BarrierMisuse):
    """A deadlock on a barrier that expects bytes that nobody will deliver."""


class TooFewArrivals(Deadlock, BarrierMisuse):
    """A deadlock on a barrier of which some, but not all, arrivals have come."""
