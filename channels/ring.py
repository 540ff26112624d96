"""A position in a ring of slots. All slot and phase arithmetic of the project is in this file.

The convention. A ring of SLOTS slots is walked lap after lap; `lap` is the parity of the current lap, 0 on the first.
An mbarrier completes its phase number n (n = 0, 1, ...) when lap n is done with it, and a wait names the *parity* of
the phase it needs complete. Hence:

  wait for `this_lap()`       what this lap fills: the first wait blocks until somebody fills the slot.
  wait for `previous_lap()`   what the previous lap left: on the first lap there is none, and a fresh barrier lets a
                              wait for parity 1 pass. So a producer never blocks on the first lap, and needs no priming.
"""

from .compat import aggregate, gl, jit


@aggregate
class Ring:
    """A position in a ring: slot index and lap parity, both int32 scalars. Immutable: `next()` returns the next one."""

    slot: gl.tensor
    lap: gl.tensor
    SLOTS: gl.constexpr

    @jit
    def this_lap(self):
        return self.lap

    @jit
    def previous_lap(self):
        return self.lap ^ 1

    @jit
    def back(self):
        """One lap earlier at the same slot: from the start, the position whose wait a fresh barrier lets pass."""
        return Ring(self.slot, self.lap ^ 1, self.SLOTS)

    @jit
    def next(self):
        if self.SLOTS == 1:
            return Ring(self.slot, self.lap ^ 1, self.SLOTS)
        else:
            following = self.slot + 1
            wraps = following == self.SLOTS
            return Ring(gl.where(wraps, 0, following), self.lap ^ wraps.to(gl.int32), self.SLOTS)


@jit
def ring_start(SLOTS: gl.constexpr):
    """The position every end of a channel starts from: slot 0, first lap."""
    return Ring(gl.to_tensor(0), gl.to_tensor(0), SLOTS)
