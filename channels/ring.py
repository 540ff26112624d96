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
    """A position in a ring of SLOTS slots. Immutable: `next()` returns the next one.

    One int32 scalar holds it, 0 ... 2 * SLOTS - 1, through two laps: a role carries it through all its loops, where
    every register counts.
    """

    position: gl.tensor
    SLOTS: gl.constexpr

    @jit
    def slot(self):
        if self.SLOTS == 1:
            return gl.to_tensor(0)
        else:
            return gl.where(self.position < self.SLOTS, self.position, self.position - self.SLOTS)

    @jit
    def this_lap(self):
        return (self.position >= self.SLOTS).to(gl.int32)

    @jit
    def previous_lap(self):
        return (self.position < self.SLOTS).to(gl.int32)

    @jit
    def next(self):
        following = self.position + 1
        return Ring(gl.where(following == 2 * self.SLOTS, 0, following), self.SLOTS)


@jit
def ring_start(SLOTS: gl.constexpr, LAP: gl.constexpr = 0):
    """Where every end starts: slot 0, first lap. LAP=1: a lap ahead, where `this_lap` passes on a fresh barrier."""
    return Ring(gl.to_tensor(LAP * SLOTS), SLOTS)
