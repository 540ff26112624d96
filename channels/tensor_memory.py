"""Channels whose slots are in tensor memory, where Blackwell's tensor cores accumulate."""

from .arrivals import commit_arrivals, freed_arrivals
from .barriers import close_barriers, init_barriers
from .compat import (
    aggregate,
    allocate_tensor_memory,
    blackwell,
    gl,
    jit,
    mbarrier,
    tensor_memory_descriptor,
)
from .ring import Ring, ring_start


@aggregate
class TensorMemoryChannel:
    """RINGS independent rings of SLOTS slots in tensor memory, each from the role that issues products to others.

    A slot is filled when the products are done that were issued before `slot.publish_after_products()`, or that were
    given `slot.filled` as their barrier. It is freed by CONSUMERS roles, each by `release`. One of them may leave
    something in it before: the products' role then finds that in the slot it acquires. If TWO_CTAS, the lead of a pair
    issues the products for both CTAs, and waits until both have freed the slot.
    """

    memory: tensor_memory_descriptor  # [RINGS * SLOTS, *SHAPE]
    filled: gl.shared_memory_descriptor  # [RINGS * SLOTS] mbarriers, one per CTA
    freed: gl.shared_memory_descriptor  # [RINGS * SLOTS] mbarriers, one per CTA, or one per pair if TWO_CTAS
    SLOTS: gl.constexpr
    CONSUMERS: gl.constexpr

    @jit
    def alloc(
        dtype: gl.constexpr,
        SHAPE: gl.constexpr,
        LAYOUT: gl.constexpr,
        RINGS: gl.constexpr = 1,
        SLOTS: gl.constexpr = 1,
        CONSUMERS: gl.constexpr = 1,
    ):
        """SHAPE, LAYOUT: of one slot. TWO_CTAS is what LAYOUT says."""
        memory = allocate_tensor_memory(dtype, [RINGS * SLOTS] + SHAPE, LAYOUT)
        filled = mbarrier.allocate_mbarrier(batch=RINGS * SLOTS)
        freed = mbarrier.allocate_mbarrier(batch=RINGS * SLOTS, two_ctas=LAYOUT.two_ctas)
        return TensorMemoryChannel(memory, filled, freed, SLOTS, CONSUMERS)

    @jit
    def init(self):
        init_barriers(self.filled, commit_arrivals(gl.num_ctas(), self.memory.layout.two_ctas, multicast=False))
        init_barriers(self.freed, freed_arrivals(self.CONSUMERS))

    @jit
    def slot(self, WHICH: gl.constexpr = 0, index=0):
        at = WHICH * self.SLOTS + index
        return TensorMemorySlot(self.memory.index(at), self.filled.index(at), self.freed.index(at))

    @jit
    def producer(self, WHICH: gl.constexpr = 0):
        return TensorMemoryProducer(slots_of(self, WHICH), ring_start(self.SLOTS), WHICH)

    @jit
    def consumer(self, WHICH: gl.constexpr = 0):
        return TensorMemoryConsumer(slots_of(self, WHICH), ring_start(self.SLOTS), WHICH)

    @jit
    def close(self):
        close_barriers(self.filled)
        close_barriers(self.freed)


@aggregate
class TensorMemorySlot:
    """A slot and the two barriers through which it is filled and freed."""

    memory: tensor_memory_descriptor
    filled: gl.shared_memory_descriptor
    freed: gl.shared_memory_descriptor

    @jit
    def publish_after_products(self):
        """Hand the slot over once every product issued so far by this role is done."""
        blackwell.tcgen05_commit(self.filled)

    @jit
    def release(self):
        """A consumer is done with what was filled in, and what it leaves in the slot is written."""
        mbarrier.arrive(self.freed)


@jit
def slots_of(channel, WHICH: gl.constexpr):
    """What an end of a ring holds: of a ring of one slot, that slot, so that no loop has to find it again."""
    if channel.SLOTS == 1:
        return channel.slot(WHICH)
    else:
        return TensorMemorySlot(channel.memory, channel.filled, channel.freed)


@jit
def slot_at(slots, ring, WHICH: gl.constexpr):
    """slots: as `slots_of` returns it."""
    if ring.SLOTS == 1:
        return slots
    else:
        at = WHICH * ring.SLOTS + ring.slot()
        return TensorMemorySlot(slots.memory.index(at), slots.filled.index(at), slots.freed.index(at))


@aggregate
class TensorMemoryProducer:
    """The end of the role that issues the products."""

    slots: TensorMemorySlot
    ring: Ring
    WHICH: gl.constexpr

    @jit
    def acquire(self):
        """Wait until the next slot is free. Returns (slot, next end)."""
        slot = slot_at(self.slots, self.ring, self.WHICH)
        mbarrier.wait(slot.freed, self.ring.previous_lap())
        return slot, TensorMemoryProducer(self.slots, self.ring.next(), self.WHICH)


@aggregate
class TensorMemoryConsumer:
    """The end of a role that takes over what the products have accumulated."""

    slots: TensorMemorySlot
    ring: Ring
    WHICH: gl.constexpr

    @jit
    def next_slot(self):
        """The slot that the next `acquire` returns, not waited for: for who knows otherwise that it may be touched."""
        return slot_at(self.slots, self.ring, self.WHICH)

    @jit
    def acquire(self):
        """Wait until the next slot is filled. Returns (slot, next end)."""
        slot = self.next_slot()
        mbarrier.wait(slot.filled, self.ring.this_lap())
        return slot, TensorMemoryConsumer(self.slots, self.ring.next(), self.WHICH)
