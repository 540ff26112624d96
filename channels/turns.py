"""Turns: roles that share a unit of the processor use it one after the other, in a ring."""

from .compat import aggregate, gl, jit
from .signals import SignalConsumer, SignalProducer


@aggregate
class Turn:
    """A role's place in a ring of turns. Immutable: `take()` returns the next. No-op unless TAKE_TURNS."""

    mine: SignalConsumer
    following: SignalProducer
    TAKE_TURNS: gl.constexpr

    @jit
    def take(self):
        if self.TAKE_TURNS:
            return Turn(self.mine.acquire(), self.following, self.TAKE_TURNS)
        else:
            return self

    @jit
    def pass_on(self):
        if self.TAKE_TURNS:
            self.following.release()


@jit
def turn_of(turns, ROLE: gl.constexpr, TAKE_TURNS: gl.constexpr):
    """The place of role ROLE in the ring of the SignalChannel `turns`; role 0 has the first turn."""
    mine = turns.consumer(ROLE, FIRST_IS_FREE=ROLE == 0)
    following = turns.producer((ROLE + 1) % turns.SIGNALS)
    return Turn(mine, following, TAKE_TURNS)
