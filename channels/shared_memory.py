"""Channels whose slots are in shared memory."""

from .arrivals import commit_arrivals, filled_arrivals, freed_arrivals, handover_arrivals
from .barriers import close_barriers, init_barriers
from .compat import aggregate, blackwell, constexpr_function, fence_async_shared, gl, jit, mbarrier, reinterpret
from .ring import Ring, ring_start


@jit
def as_tuple(one_or_more):
    if isinstance(one_or_more, gl.tuple):
        return one_or_more
    else:
        return (one_or_more,)


@constexpr_function
def are_alike(descs):
    """Whether tiles of these descriptors can lie in one ring: of one dtype, shape and layout."""
    kinds = [(desc.dtype, list(desc.block_shape), desc.layout) for desc in descs]
    return all(kind == kinds[0] for kind in kinds)


@constexpr_function
def wrong_slots(SLOTS):
    """What is wrong with the number of slots, or None."""
    right = isinstance(SLOTS, int) and not isinstance(SLOTS, bool) and SLOTS >= 1
    return None if right else f"SLOTS: expected an int of at least 1, got {SLOTS}"


@constexpr_function
def wrong_part(i, PARTS):
    """What is wrong with the index of a part, or None. An index that is known at run time only is not looked at."""
    right = not isinstance(i, int) or 0 <= i < PARTS
    return None if right else f"i: expected a part from 0 to {PARTS - 1}, as the slot has {PARTS}, got {i}"


@jit
def allocate(descs, SLOTS):
    """The memory of a channel, see `SharedMemoryChannel.tiles`."""
    if are_alike(descs):
        SHAPE: gl.constexpr = [SLOTS * len(descs)] + descs[0].block_shape
        tiles = (gl.allocate_shared_memory(descs[0].dtype, SHAPE, descs[0].layout),)
    else:
        tiles = ()
        for i in gl.static_range(len(descs)):
            ring = gl.allocate_shared_memory(descs[i].dtype, [SLOTS] + descs[i].block_shape, descs[i].layout)
            tiles = tiles + (ring,)
    return tiles


@aggregate
class SharedMemoryChannel:
    """A ring of slots in shared memory, filled by TMA or by one role, read by one or more roles of each CTA.

    A slot is one or more parts, each a tile, that are filled and freed together. They may differ in dtype, shape and
    layout, as the A and the B of a product. If MULTICAST, one load issued by one CTA fills the same slot in other CTAs
    of the cluster too, and the slot counts as free once all of them have freed it.

    Who frees a slot: CONSUMERS roles, each by `release`, or, if CONSUMERS is 0, the tensor cores of Blackwell, by
    `release_after_products`. If TWO_CTAS, the slots feed products that the lead of a pair issues for both CTAs, and it
    waits until both are filled.
    """

    tiles: gl.tuple  # parts alike: one [SLOTS * PARTS, *tile shape]; unlike: for each part one [SLOTS, *tile shape]
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
        descs,
        SLOTS: gl.constexpr,
        CONSUMERS: gl.constexpr,
        MULTICAST: gl.constexpr = False,
        TWO_CTAS: gl.constexpr = False,
    ):
        """A channel for tiles of a TMA descriptor: its dtype, block shape and layout. A tuple of descriptors: a slot
        has a part for each."""
        gl.static_assert(wrong_slots(SLOTS) is None, wrong_slots(SLOTS))
        tiles = allocate(as_tuple(descs), SLOTS)
        return SharedMemoryChannel.over(tiles, SLOTS, CONSUMERS, MULTICAST, TWO_CTAS)

    @jit
    def over(
        tiles,
        SLOTS: gl.constexpr,
        CONSUMERS: gl.constexpr,
        MULTICAST: gl.constexpr = False,
        TWO_CTAS: gl.constexpr = False,
    ):
        """A channel for tiles in memory that is allocated: [SLOTS * parts, *tile shape], a slot's parts side by side;
        or, for parts that are not alike, a tuple of [SLOTS, *tile shape]."""
        gl.static_assert(wrong_slots(SLOTS) is None, wrong_slots(SLOTS))
        rings = as_tuple(tiles)
        PARTS: gl.constexpr = len(rings) if len(rings) > 1 else rings[0].shape[0] // SLOTS
        HANDOVER: gl.constexpr = MULTICAST and CONSUMERS > 0
        filled = mbarrier.allocate_mbarrier(batch=SLOTS, two_ctas=TWO_CTAS)
        freed = mbarrier.allocate_mbarrier(batch=SLOTS)
        handover = mbarrier.allocate_mbarrier(batch=SLOTS, two_ctas=True) if HANDOVER else freed
        return SharedMemoryChannel(
            rings, filled, freed, handover, SLOTS, PARTS, CONSUMERS, MULTICAST, TWO_CTAS, HANDOVER
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
        first = index * self.PARTS if len(self.tiles) == 1 else index
        return Slot(self.tiles, first, self.filled.index(index), self.freed.index(index), self.PARTS, self.MULTICAST)

    @jit
    def wait_until_free(self, at):
        """Wait until the slot at ring position `at` is free, in every CTA that a load into it reaches."""
        mbarrier.wait(self.freed.index(at.slot()), at.previous_lap())
        if self.HANDOVER:
            # Our own CTA's slot is free. The lead issues the load for both CTAs, so it must know that of its peer too;
            # the compiler lets only the lead wait here. The peer cannot run ahead: its own `freed` holds it back.
            mbarrier.arrive(self.handover.index(at.slot()))
            mbarrier.wait(self.handover.index(at.slot()), at.this_lap())

    @jit
    def wait_until_filled(self, at):
        """Wait until the slot at ring position `at` is filled, in both CTAs of a pair if TWO_CTAS."""
        mbarrier.wait(self.filled.index(at.slot()), at.this_lap())

    @jit
    def close(self):
        close_barriers(self.filled)
        close_barriers(self.freed)
        if self.HANDOVER:
            close_barriers(self.handover)


@aggregate
class Slot:
    """An acquired slot: its parts, and the two barriers through which it is filled and freed."""

    tiles: gl.tuple  # as the channel's
    first: gl.tensor  # where the slot's parts begin in them
    filled: gl.shared_memory_descriptor
    freed: gl.shared_memory_descriptor
    PARTS: gl.constexpr
    MULTICAST: gl.constexpr

    @jit
    def part(self, i):
        """The tile of part i, [*tile shape]. If the parts are alike, i may be known at run time only."""
        gl.static_assert(wrong_part(i, self.PARTS) is None, wrong_part(i, self.PARTS))
        if len(self.tiles) == 1:
            return self.tiles[0].index(self.first + i)
        else:
            return self.tiles[i].index(self.first)

    @jit
    def view(self, SHAPE: gl.constexpr, part=0):
        """Tile `part` reinterpreted in another shape of as many elements, for example without its leading ones."""
        return self.part(part).reshape(SHAPE)

    @jit
    def tile_of(self, desc, part=0):
        """Tile `part` as a tile of `desc`, which may be laid out otherwise than the one that the channel is made for.

        Two kinds of tile can so alternate in one ring, as long as a CTA's share of each is equally large.
        """
        return reinterpret(self.part(part), desc.dtype, desc.block_shape, desc.layout)

    @jit
    def publish(self):
        """The filling role has written the slot with its own stores; what reads it is TMA or the tensor cores."""
        fence_async_shared()  # the role's writes (generic proxy) before the engine's reads (async proxy)
        mbarrier.arrive(self.filled)

    @jit
    def release(self):
        """A consumer is done: an engine read the slot for it, and it has waited for that engine."""
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
            PARTS: gl.constexpr = self.PARTS
            parts = ()
            for i in gl.static_range(PARTS):
                parts = parts + (self.part(i),)
            blackwell.tcgen05_commit(self.freed, descs=parts)
        else:
            blackwell.tcgen05_commit(self.freed)


@aggregate
class SharedMemoryProducer:
    """The end of the role that fills slots."""

    channel: SharedMemoryChannel
    ring: Ring

    @jit
    def acquire(self):
        """Wait until the next slot is free, in every CTA that a load into it reaches. Returns (slot, next end)."""
        at = self.ring
        self.channel.wait_until_free(at)
        return self.channel.slot(at.slot()), SharedMemoryProducer(self.channel, at.next())

    @jit
    def borrow(self):
        """Wait until the next slot is free, and use its memory without filling it: nothing is to be published. The end
        stays where it is, and `acquire` gives the same slot; whatever reads the memory must be done by then."""
        self.channel.wait_until_free(self.ring)
        return self.channel.slot(self.ring.slot())

    @jit
    def drain(self):
        """Wait until every slot is free again. Where tensor cores free the slots, nobody else waits for the last
        arrivals, and the barriers must outlive them. The end is of no use afterwards."""
        SLOTS: gl.constexpr = self.channel.SLOTS
        at = self.ring
        for _ in gl.static_range(SLOTS):
            self.channel.wait_until_free(at)
            at = at.next()


@aggregate
class SharedMemoryConsumer:
    """The end of a role that reads slots."""

    channel: SharedMemoryChannel
    ring: Ring

    @jit
    def acquire(self):
        """Wait until the next slot is filled. Returns (slot, next end)."""
        at = self.ring
        self.channel.wait_until_filled(at)
        return self.channel.slot(at.slot()), SharedMemoryConsumer(self.channel, at.next())

    @jit
    def wait(self):
        """Wait until the next slot is filled, and leave it there: `acquire` then passes at once. The end stays."""
        self.channel.wait_until_filled(self.ring)

    @jit
    def in_step_with(self, other):
        """This end where `other` is, the end of a ring of as many slots: for a role that acquires and releases both
        equally often, and so has to carry one position only."""
        gl.static_assert(
            self.channel.SLOTS == other.channel.SLOTS, "in_step_with: expected two channels of equally many slots"
        )
        return SharedMemoryConsumer(self.channel, other.ring)

    @jit
    def wait_again(self):
        """Wait once more for the slot that this end's `acquire` has returned; it must not have been released.

        It passes at once. It serves who wants a wait at a certain place of the code, as the assembler moves little
        past one.
        """
        self.channel.wait_until_filled(self.ring)
