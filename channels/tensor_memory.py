"""Channels whose slots are in tensor memory, where Blackwell's tensor cores accumulate."""

from .arrivals import commit_arrivals, freed_arrivals
from .barriers import close_barriers, init_barriers
from .compat import aggregate, allocate_tensor_memory, gl, jit, mbarrier, tensor_memory_descriptor
from .ring import Ring, ring_start


@aggregate
class TensorMemoryChannel:
    """LANES independent slots in tensor memory, each from the role that issues products to one other role.

    A slot is filled when the products that were given `slot.filled` as their barrier are done. Its consumer may leave
    something in it before it releases it: the products' role then finds that in the slot it acquires. If TWO_CTAS, the
    lead of a pair issues the products for both CTAs, and waits until both have freed the slot.
    """

    memory: tensor_memory_descriptor  # [LANES, *SHAPE]
    filled: gl.shared_memory_descriptor  # [LANES] mbarriers, one per CTA
    freed: gl.shared_memory_descriptor  # [LANES] mbarriers, one per CTA, or one per pair if TWO_CTAS

    @jit
    def alloc(dtype: gl.constexpr, LANES: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        memory = allocate_tensor_memory(dtype, [LANES] + SHAPE, LAYOUT)
        filled = mbarrier.allocate_mbarrier(batch=LANES)
        freed = mbarrier.allocate_mbarrier(batch=LANES, two_ctas=LAYOUT.two_ctas)
        return TensorMemoryChannel(memory, filled, freed)

    @jit
    def init(self):
        init_barriers(self.filled, commit_arrivals(gl.num_ctas(), self.memory.layout.two_ctas, multicast=False))
        init_barriers(self.freed, freed_arrivals(consuming_roles=1))

    @jit
    def slot(self, LANE: gl.constexpr):
        return TensorMemorySlot(self.memory.index(LANE), self.filled.index(LANE), self.freed.index(LANE))

    @jit
    def producer(self, LANE: gl.constexpr):
        return TensorMemoryProducer(self.slot(LANE), ring_start(1))

    @jit
    def consumer(self, LANE: gl.constexpr):
        return TensorMemoryConsumer(self.slot(LANE), ring_start(1))

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
    def release(self):
        """The consumer is done with what was filled in, and what it leaves in the slot is written."""
        mbarrier.arrive(self.freed)


@aggregate
class TensorMemoryProducer:
    """The end of the role that issues the products."""

    slot: TensorMemorySlot
    ring: Ring

    @jit
    def acquire(self):
        """Wait until the slot is free. Returns (slot, next end)."""
        mbarrier.wait(self.slot.freed, self.ring.previous_lap())
        return self.slot, TensorMemoryProducer(self.slot, self.ring.next())


@aggregate
class TensorMemoryConsumer:
    """The end of the role that takes over what the products have accumulated."""

    slot: TensorMemorySlot
    ring: Ring

    @jit
    def acquire(self):
        """Wait until the slot is filled. Returns (slot, next end)."""
        mbarrier.wait(self.slot.filled, self.ring.this_lap())
        return self.slot, TensorMemoryConsumer(self.slot, self.ring.next())
