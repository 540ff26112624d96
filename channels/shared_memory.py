"""Channels whose slots are in shared memory."""

from .arrivals import commit_arrivals, filled_arrivals, freed_arrivals, handover_arrivals
from .barriers import close_barriers, init_barriers
from .compat import aggregate, fence_async_shared, gl, jit, mbarrier, tcgen05_commit
from .ring import Ring, ring_start


@aggregate
class SharedMemoryChannel:
    """A ring of slots in shared memory, filled by TMA or by one role, read by one or more roles of each CTA.

    A slot is PARTS tiles of one shape that are filled and freed together. If MULTICAST, one load issued by one CTA
    fills the same slot in other CTAs of the cluster too, and the slot counts as free once all of them have freed it.

    Who frees a slot: CONSUMERS roles, each by `release`, or, if CONSUMERS is 0, the tensor cores of Blackwell, by
    `release_after_products`. If TWO_CTAS, the slots feed products that the lead of a pair issues for both CTAs, and it
    waits until both are filled.
    """

    tiles: gl.shared_memory_descriptor  # [SLOTS * PARTS, *tile shape]
    filled: gl.shared_memory_descriptor  # [SLOTS] mbarriers, one per CTA, or one per pair if TWO_CTAS
    freed: gl.shared_memory_descriptor  # [SLOTS] mbarriers, one per CTA
    handover: gl.shared_memory_descriptor  # [SLOTS] mbarriers, one per pair, held by its lead CTA (if HANDOVER)
    SLOTS: gl.constexpr
    PARTS: gl.constexpr
    CONSUMERS: gl.constexpr
    MULTICAST: gl.constexpr
    TWO_CTAS: gl.constexpr
    HANDOVER: gl.constexpr  # roles free the slots, each its own CTA's: then the CTA that loads must hear of the others

    @jit
    def alloc(
        desc,
        SLOTS: gl.constexpr,
        CONSUMERS: gl.constexpr,
        PARTS: gl.constexpr = 1,
        MULTICAST: gl.constexpr = False,
        TWO_CTAS: gl.constexpr = False,
    ):
        """A channel for tiles of the TMA descriptor `desc`: its dtype, block shape and layout."""
        tiles = gl.allocate_shared_memory(desc.dtype, [SLOTS * PARTS] + desc.block_shape, desc.layout)
        return SharedMemoryChannel.over(tiles, SLOTS, CONSUMERS, PARTS, MULTICAST, TWO_CTAS)

    @jit
    def over(
        tiles,
        SLOTS: gl.constexpr,
        CONSUMERS: gl.constexpr,
        PARTS: gl.constexpr = 1,
        MULTICAST: gl.constexpr = False,
        TWO_CTAS: gl.constexpr = False,
    ):
        """A channel for tiles in memory that is allocated: [SLOTS * PARTS, *tile shape]."""
        HANDOVER: gl.constexpr = MULTICAST and CONSUMERS > 0
        filled = mbarrier.allocate_mbarrier(batch=SLOTS, two_ctas=TWO_CTAS)
        freed = mbarrier.allocate_mbarrier(batch=SLOTS)
        handover = mbarrier.allocate_mbarrier(batch=SLOTS, two_ctas=True) if HANDOVER else freed
        return SharedMemoryChannel(
            tiles, filled, freed, handover, SLOTS, PARTS, CONSUMERS, MULTICAST, TWO_CTAS, HANDOVER
        )

    @jit
    def init(self):
        init_barriers(self.filled, filled_arrivals(filling_roles=1))
        if self.CONSUMERS > 0:
            init_barriers(self.freed, freed_arrivals(self.CONSUMERS))
        else:
            init_barriers(self.freed, commit_arrivals(gl.num_ctas(), self.TWO_CTAS, self.MULTICAST))
        if self.HANDOVER:
            init_barriers(self.handover, handover_arrivals(1, gl.num_ctas(), self.MULTICAST))

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
        close_barriers(self.filled)
        close_barriers(self.freed)
        if self.HANDOVER:
            close_barriers(self.handover)


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
    def tile_of(self, desc, part=0):
        """Tile `part` as a tile of `desc`, which may be laid out otherwise than the one that the channel is made for.

        Two kinds of tile can so take turns in one ring, as long as a CTA's share of each is equally large.
        """
        return self.part(part).reinterpret(desc.dtype, desc.block_shape, desc.layout)

    @jit
    def publish(self):
        """A role has written the slot with its own stores, and hands it to TMA."""
        fence_async_shared()  # the role's writes (generic proxy) before the engine's reads (async proxy)
        mbarrier.arrive(self.filled)

    @jit
    def release(self):
        """A consumer's products on Hopper's tensor cores have been waited for, and it is done."""
        mbarrier.arrive(self.freed)

    @jit
    def release_accessed(self):
        """A consumer is done with a slot that it has read or written by its own loads and stores, not by products."""
        fence_async_shared()  # what the role read and wrote (generic proxy) before the next load's writes (async proxy)
        mbarrier.arrive(self.freed)

    @jit
    def release_after_products(self):
        """Free the slot once every product issued so far by this role is done, in every CTA that the slot's load fills.

        For Blackwell, whose tensor cores arrive on barriers themselves.
        """
        if self.MULTICAST:
            tcgen05_commit(self.freed, descs=[self.part(0)])
        else:
            tcgen05_commit(self.freed)


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
        if self.channel.HANDOVER:
            # Our own CTA's slot is free. The lead issues the load for both CTAs, so it must know that of its peer too;
            # the compiler lets only the lead wait here. The peer cannot run ahead: its own `freed` holds it back.
            mbarrier.arrive(self.channel.handover.index(at.slot()))
            mbarrier.wait(self.channel.handover.index(at.slot()), at.this_lap())
        return self.channel.slot(at.slot()), SharedMemoryProducer(self.channel, at.next())

    @jit
    def drain(self):
        """Wait until every slot is free again. Where tensor cores free the slots, nobody else waits for the last
        arrivals, and the barriers must outlive them."""
        SLOTS: gl.constexpr = self.channel.SLOTS
        end = self
        for _ in gl.static_range(SLOTS):
            _, end = end.acquire()


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
