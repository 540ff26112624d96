"""Channels: memory or signals handed from one role of a warp-specialised kernel to another.

The life of a channel: `alloc` (memory and barriers) -> `init` (barrier counts, every channel of the kernel, then one
cluster-wide fence) -> `acquire` at a producer's or a consumer's end -> `release` of the acquired slot -> `close`
(barriers invalidated, once no CTA of the cluster can still arrive).

An end is immutable and holds its own position in the ring: `slot, keys = keys.acquire()`. The slot knows its barriers,
so a role touches neither an index, nor a phase, nor a barrier.

A channel whose slots live in tensor memory fits beside SharedMemoryChannel: the same rings and barriers around other
memory.
"""

from .arrivals import filled_arrivals, freed_arrivals, handover_arrivals, signal_arrivals
from .compat import aggregate, cluster, gl, jit, mbarrier
from .ring import Ring, ring_start


@jit
def init_barriers(barriers, SLOTS: gl.constexpr, COUNT: gl.constexpr):
    for slot in gl.static_range(SLOTS):
        mbarrier.init(barriers.index(slot), count=COUNT)


@jit
def close_barriers(barriers, SLOTS: gl.constexpr):
    for slot in gl.static_range(SLOTS):
        mbarrier.invalidate(barriers.index(slot))


@jit
def cluster_fence():
    """Between the inits of all channels and the first arrive, and between the last arrive and the first `close`.

    A peer CTA may arrive on our barriers, or write into our slots, as soon as it runs: it must not before our inits are
    visible to it, and we must not invalidate a barrier, or exit, while it still can. Orders this CTA's threads as well.
    """
    if gl.num_ctas() > 1:
        cluster.barrier()
    else:
        gl.barrier()


@aggregate
class SharedMemoryChannel:
    """A ring of slots in shared memory, filled by TMA, read by one or more roles of each CTA.

    A slot is PARTS tiles of one shape that are filled and freed together. If MULTICAST, one load issued by the lead CTA
    fills the same slot in both CTAs of the cluster, and the slot counts as free once both have released it.
    """

    tiles: gl.shared_memory_descriptor  # [SLOTS * PARTS, *tile shape]
    filled: gl.shared_memory_descriptor  # [SLOTS] mbarriers, one per CTA
    freed: gl.shared_memory_descriptor  # [SLOTS] mbarriers, one per CTA
    handover: gl.shared_memory_descriptor  # [SLOTS] mbarriers, one per pair, held by its lead CTA (if MULTICAST)
    SLOTS: gl.constexpr
    PARTS: gl.constexpr
    CONSUMERS: gl.constexpr
    MULTICAST: gl.constexpr

    @jit
    def alloc(
        desc, SLOTS: gl.constexpr, CONSUMERS: gl.constexpr, PARTS: gl.constexpr = 1, MULTICAST: gl.constexpr = False
    ):
        """A channel for tiles of the TMA descriptor `desc`: its dtype, block shape and layout."""
        tiles = gl.allocate_shared_memory(desc.dtype, [SLOTS * PARTS] + desc.block_shape, desc.layout)
        filled = mbarrier.allocate_mbarrier(batch=SLOTS)
        freed = mbarrier.allocate_mbarrier(batch=SLOTS)
        handover = mbarrier.allocate_mbarrier(batch=SLOTS, two_ctas=True) if MULTICAST else freed
        return SharedMemoryChannel(tiles, filled, freed, handover, SLOTS, PARTS, CONSUMERS, MULTICAST)

    @jit
    def init(self):
        init_barriers(self.filled, self.SLOTS, filled_arrivals(loading_roles=1))
        init_barriers(self.freed, self.SLOTS, freed_arrivals(self.CONSUMERS))
        if self.MULTICAST:
            init_barriers(self.handover, self.SLOTS, handover_arrivals(1, gl.num_ctas(), self.MULTICAST))

    @jit
    def producer(self):
        return SharedMemoryProducer(self, ring_start(self.SLOTS))

    @jit
    def consumer(self):
        return SharedMemoryConsumer(self, ring_start(self.SLOTS))

    @jit
    def slot(self, index):
        return Slot(self.tiles, index * self.PARTS, self.filled.index(index), self.freed.index(index), self.MULTICAST)

    @jit
    def close(self):
        close_barriers(self.filled, self.SLOTS)
        close_barriers(self.freed, self.SLOTS)
        if self.MULTICAST:
            close_barriers(self.handover, self.SLOTS)


@aggregate
class Slot:
    """An acquired slot: its tiles, and the two barriers through which it is filled and freed."""

    tiles: gl.shared_memory_descriptor
    first: gl.tensor
    filled: gl.shared_memory_descriptor
    freed: gl.shared_memory_descriptor
    MULTICAST: gl.constexpr

    @jit
    def part(self, i):
        return self.tiles.index(self.first + i)

    @jit
    def view(self, SHAPE: gl.constexpr, part=0):
        """Tile `part` reinterpreted in another shape of as many elements, for example without its leading ones."""
        return self.part(part).reshape(SHAPE)

    @jit
    def release(self):
        """A consumer is done reading. Its products on the tensor cores must have been waited for."""
        mbarrier.arrive(self.freed)


@aggregate
class SharedMemoryProducer:
    """The end of the role that fills slots."""

    channel: SharedMemoryChannel
    ring: Ring

    @jit
    def acquire(self):
        """Wait until the next slot is free, in every CTA that a load into it reaches. Returns (slot, next end)."""
        at = self.ring
        mbarrier.wait(self.channel.freed.index(at.slot()), at.previous_lap())
        if self.channel.MULTICAST:
            # Our own CTA's slot is free. The lead issues the load for both CTAs, so it must know that of its peer too;
            # the compiler lets only the lead wait here. The peer cannot run ahead: its own `freed` holds it back.
            mbarrier.arrive(self.channel.handover.index(at.slot()))
            mbarrier.wait(self.channel.handover.index(at.slot()), at.this_lap())
        return self.channel.slot(at.slot()), SharedMemoryProducer(self.channel, at.next())


@aggregate
class SharedMemoryConsumer:
    """The end of a role that reads slots."""

    channel: SharedMemoryChannel
    ring: Ring

    @jit
    def acquire(self):
        """Wait until the next slot is filled. Returns (slot, next end)."""
        at = self.ring
        mbarrier.wait(self.channel.filled.index(at.slot()), at.this_lap())
        return self.channel.slot(at.slot()), SharedMemoryConsumer(self.channel, at.next())


@aggregate
class SignalChannel:
    """LANES independent signals without data, each from one role to one other role of the same CTA.

    There is no "freed" barrier: a role must not signal again before the other has seen the last signal, and it is for
    the wiring to guarantee that, as a ring of turns does by its own order.
    """

    sent: gl.shared_memory_descriptor  # [LANES] mbarriers, one per CTA
    LANES: gl.constexpr

    @jit
    def alloc(LANES: gl.constexpr):
        return SignalChannel(mbarrier.allocate_mbarrier(batch=LANES), LANES)

    @jit
    def init(self):
        init_barriers(self.sent, self.LANES, signal_arrivals(sending_roles=1))

    @jit
    def producer(self, LANE: gl.constexpr):
        return SignalProducer(self.sent.index(LANE))

    @jit
    def consumer(self, LANE: gl.constexpr, FIRST_IS_FREE: gl.constexpr = False):
        """The waiting end of a lane. FIRST_IS_FREE: its first `acquire` passes as if a signal had been sent before."""
        return SignalConsumer(self.sent.index(LANE), ring_start(1, LAP=1 if FIRST_IS_FREE else 0))

    @jit
    def close(self):
        close_barriers(self.sent, self.LANES)


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
