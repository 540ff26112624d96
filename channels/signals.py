"""Signals: a channel without data."""

from .arrivals import signal_arrivals
from .barriers import close_barriers, init_barriers
from .compat import aggregate, gl, jit, mbarrier
from .ring import Ring, ring_start


@aggregate
class SignalChannel:
    """SIGNALS independent signals without data, each from one role to one other role.

    There is no "freed" barrier: a role must not signal again before the other has seen the last signal, and it is for
    the wiring to guarantee that, as a ring of turns does by its own order. If TWO_CTAS, the two CTAs of a pair signal
    to the role of their lead together: it waits for both.
    """

    sent: gl.shared_memory_descriptor  # [SIGNALS] mbarriers, one per CTA, or one per pair if TWO_CTAS
    SIGNALS: gl.constexpr

    @jit
    def alloc(SIGNALS: gl.constexpr, TWO_CTAS: gl.constexpr = False):
        return SignalChannel(mbarrier.allocate_mbarrier(batch=SIGNALS, two_ctas=TWO_CTAS), SIGNALS)

    @jit
    def init(self):
        init_barriers(self.sent, signal_arrivals(sending_roles=1))

    @jit
    def producer(self, WHICH: gl.constexpr):
        return SignalProducer(self.sent.index(WHICH))

    @jit
    def consumer(self, WHICH: gl.constexpr, FIRST_IS_FREE: gl.constexpr = False):
        """The waiting end of a signal. FIRST_IS_FREE: the first `acquire` passes as if one had been sent before."""
        return SignalConsumer(self.sent.index(WHICH), ring_start(1, LAP=1 if FIRST_IS_FREE else 0))

    @jit
    def close(self):
        close_barriers(self.sent)


@aggregate
class SignalProducer:
    sent: gl.shared_memory_descriptor

    @jit
    def release(self):
        mbarrier.arrive(self.sent)


@aggregate
class SignalConsumer:
    sent: gl.shared_memory_descriptor
    ring: Ring

    @jit
    def acquire(self):
        """Wait for the next signal. Returns the next end."""
        mbarrier.wait(self.sent, self.ring.this_lap())
        return SignalConsumer(self.sent, self.ring.next())
