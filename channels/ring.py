"""A position in a ring of slots. All slot and phase arithmetic of the project is in this file.

The convention. A ring of SLOTS slots is walked lap after lap; `lap` is the parity of the current lap, 0 on the first.
An mbarrier completes its phase number n (n = 0, 1, ...) when lap n is done with it, and a wait names the *parity* of
the phase it needs complete. Hence:

  wait for `this_lap()`       what this lap fills: the first wait blocks until somebody fills the slot.
  wait for `previous_lap()`   what the previous lap left: on the first lap there is none, and a fresh barrier lets a
                              wait for parity 1 pass. So a producer never blocks on the first lap, and needs no priming.
"""

from .compat import aggregate, constexpr_function, gl, jit


@constexpr_function
def is_power_of_two(n):
    return n & (n - 1) == 0


@aggregate
class Ring:
    """A position in a ring of SLOTS slots. Immutable: `next()` returns the next one.

    One int32 scalar holds it, 0 ... 2 * SLOTS - 1, through two laps: a role carries it through all its loops, where
    every register counts. If SLOTS is a power of two, its highest bit is the lap and the others are the slot.
    """

    position: gl.tensor
    SLOTS: gl.constexpr

    @jit
    def slot(self):
        if is_power_of_two(self.SLOTS):
            return self.position & (self.SLOTS - 1)
        else:
            return gl.where(self.position < self.SLOTS, self.position, self.position - self.SLOTS)

    @jit
    def this_lap(self):
        if is_power_of_two(self.SLOTS):
            return self.position // self.SLOTS
        else:
            return (self.position >= self.SLOTS).to(gl.int32)

    @jit
    def previous_lap(self):
        return self.this_lap() ^ 1

    @jit
    def next(self):
        following = self.position + 1
        if is_power_of_two(self.SLOTS):
            return Ring(following & (2 * self.SLOTS - 1), self.SLOTS)
        else:
            return Ring(gl.where(following == 2 * self.SLOTS, 0, following), self.SLOTS)


@jit
def ring_start(SLOTS: gl.constexpr, LAP: gl.constexpr = 0):
    """Where every end starts: slot 0, first lap. LAP=1: a lap ahead, where `this_lap` passes on a fresh barrier."""
    return Ring(gl.to_tensor(LAP * SLOTS), SLOTS)
