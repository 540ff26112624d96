"""Items of work that the hardware hands out: Blackwell's cluster launch control.

A grid has a cluster for every item. A cluster that runs asks for one that has not been started yet, and if it is given
one, does that one's work in its stead: so items are taken in the order of the grid, by whoever is free.
"""

from .arrivals import filled_arrivals, freed_arrivals
from .barriers import close_barriers, init_barriers
from .compat import MBarrierLayout, aggregate, clc, constexpr_function, fence_async_shared, gl, jit, mbarrier
from .ring import Ring, ring_start


@constexpr_function
def whole_cluster(num_ctas):
    """The CGA layout of what is one for all CTAs of a cluster."""
    return [[0]] * (num_ctas.bit_length() - 1)


@aggregate
class WorkChannel:
    """A ring of answers in shared memory: the load role of CTA 0 asks, every role of every CTA reads the answer."""

    answers: gl.shared_memory_descriptor  # [SLOTS, 2] int64, the same in every CTA
    filled: gl.shared_memory_descriptor  # [SLOTS] mbarriers, one per CTA
    freed: gl.shared_memory_descriptor  # [SLOTS] mbarriers, one for the whole cluster, in CTA 0
    SLOTS: gl.constexpr
    ROLES: gl.constexpr

    @jit
    def alloc(SLOTS: gl.constexpr, ROLES: gl.constexpr):
        WHOLE: gl.constexpr = whole_cluster(gl.num_ctas())
        LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], WHOLE)
        answers = gl.allocate_shared_memory(gl.int64, [SLOTS, 2], LAYOUT)
        freed = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], MBarrierLayout(WHOLE))
        return WorkChannel(answers, mbarrier.allocate_mbarrier(batch=SLOTS), freed, SLOTS, ROLES)

    @jit
    def init(self):
        init_barriers(self.filled, filled_arrivals(filling_roles=1))
        init_barriers(self.freed, freed_arrivals(self.ROLES))

    @jit
    def producer(self):
        return WorkProducer(self, ring_start(self.SLOTS))

    @jit
    def consumer(self):
        return WorkConsumer(self, ring_start(self.SLOTS))

    @jit
    def close(self):
        close_barriers(self.filled)
        close_barriers(self.freed)


@aggregate
class WorkProducer:
    """The end of the role that asks."""

    channel: WorkChannel
    ring: Ring

    @jit
    def ask(self):
        """Ask for another item, once every role of the cluster has read the answer before. Returns the next end."""
        slot, filled = self.ring.slot(), self.channel.filled.index(self.ring.slot())
        mbarrier.wait(self.channel.freed.index(slot), self.ring.previous_lap())
        mbarrier.expect(filled, 16, from_cta=0)  # CTA 0, which asks, announces the answer to all
        clc.try_cancel(self.channel.answers.index(slot), filled)
        return WorkProducer(self.channel, self.ring.next())


@aggregate
class WorkConsumer:
    """The end of a role that does the items."""

    channel: WorkChannel
    ring: Ring

    @jit
    def acquire(self, none):
        """Wait for the answer. Returns (the item, or `none` if there is no more, next end)."""
        slot = self.ring.slot()
        mbarrier.wait(self.channel.filled.index(slot), self.ring.this_lap())
        answer = clc.load_result(self.channel.answers.index(slot))
        item = gl.where(answer.is_canceled(), answer.program_id(0), none)
        fence_async_shared()  # this role's read (generic proxy) before the next answer is written (async proxy)
        mbarrier.arrive(self.channel.freed.index(slot))
        return item, WorkConsumer(self.channel, self.ring.next())
