"""mbarriers, roles and clusters: phases, counts, bytes, and whose barrier an arrival reaches."""

import pytest
import torch

import gluon_cpu
from tests.compat import ampere_mbarrier, async_store, cluster, gl, jit, mbarrier, tma
from tests.gluon_cpu import findings_hopper as hopper
from tests.gluon_cpu.layouts import MATRIX_COLUMN_HALVES, MATRIX_HALVES, PLAIN, ROW, ROW_1, ROW_COPIES, ROW_HALVES
from tests.gluon_cpu.support import descriptor, new_barrier, normal, poisoned, same, store_matrix


@jit
def fresh_barrier(out_ptr):
    barrier = new_barrier(1)
    gl.barrier()
    mbarrier.wait(barrier, 1)  # as if the phase before had completed
    mbarrier.arrive(barrier)
    mbarrier.wait(barrier, 0)
    mbarrier.arrive(barrier)
    mbarrier.wait(barrier, 1)
    mbarrier.invalidate(barrier)
    gl.store(out_ptr, 1)


def test_a_fresh_barrier_passes_parity_one_and_alternates(launch):
    out = poisoned(1, dtype=torch.int32)
    launch(fresh_barrier, (1,), out)
    assert out.item() == 1


@jit
def ampere_barrier(out_ptr):
    """The barriers of before Hopper: an arrival counts one, and there are no bytes."""
    barrier = ampere_mbarrier.allocate_mbarrier()
    ampere_mbarrier.init(barrier, count=2)
    gl.barrier()
    ampere_mbarrier.arrive(barrier)
    ampere_mbarrier.arrive(barrier, pred=False)
    ampere_mbarrier.arrive(barrier)
    ampere_mbarrier.wait(barrier, 0)
    ampere_mbarrier.invalidate(barrier)
    gl.store(out_ptr, 1)


def test_ampere_arrival(launch):
    out = poisoned(1, dtype=torch.int32)
    launch(ampere_barrier, (1,), out)
    assert out.item() == 1


@jit
def counts_and_predicates(out_ptr, yes, no):
    barrier = new_barrier(3)
    gl.barrier()
    mbarrier.arrive(barrier, count=2)
    mbarrier.arrive(barrier, pred=no)
    mbarrier.wait(barrier, 0, pred=no)  # would block: two of three have arrived
    mbarrier.arrive(barrier, pred=yes)
    mbarrier.wait(barrier, 0)
    for _ in range(3):
        mbarrier.arrive(barrier)
    mbarrier.wait(barrier, 1)
    gl.store(out_ptr, 1)


def test_arrival_counts_and_predicates(launch):
    out = poisoned(1, dtype=torch.int32)
    launch(counts_and_predicates, (1,), out, True, False)
    assert out.item() == 1


@jit
def bytes_before_expect(desc, out_ptr):
    """The copy may complete before anybody has announced its bytes: the barrier's bytes go below zero meanwhile."""
    tile = gl.allocate_shared_memory(gl.float32, desc.block_shape, desc.layout)
    loaded = new_barrier(1)
    gl.barrier()
    tma.async_load(desc, [0], loaded, tile)
    mbarrier.expect(loaded, 512)
    mbarrier.wait(loaded, 0)
    gl.store(out_ptr + gl.arange(0, 128, ROW), tile.load(ROW))


def test_bytes_may_complete_before_they_are_expected(launch):
    x, out = normal(128), poisoned(128)
    launch(bytes_before_expect, (1,), descriptor(x, [128]), out)
    same(out, x)


@jit
def expect_counts_as_an_arrival(desc, out_ptr):
    """Two arrivals: one is the expect of all bytes, the other a plain arrive; two copies complete one barrier."""
    tiles = gl.allocate_shared_memory(gl.float32, [2] + desc.block_shape, desc.layout)
    loaded = new_barrier(2)
    gl.barrier()
    mbarrier.expect(loaded, 1024)
    tma.async_load(desc, [0], loaded, tiles.index(0))
    tma.async_load(desc, [128], loaded, tiles.index(1))
    mbarrier.arrive(loaded)
    mbarrier.wait(loaded, 0)
    i = gl.arange(0, 128, ROW)
    gl.store(out_ptr + i, tiles.index(0).load(ROW) + tiles.index(1).load(ROW))


def test_expect_is_an_arrival_and_copies_add_up(launch):
    x, out = normal(256), poisoned(128)
    launch(expect_counts_as_an_arrival, (1,), descriptor(x, [128]), out)
    same(out, x[:128] + x[128:])


@jit
def initialised_again(out_ptr):
    barrier = mbarrier.allocate_mbarrier()
    for COUNT in gl.static_range(1, 4):
        mbarrier.init(barrier, count=COUNT)
        gl.barrier()
        mbarrier.arrive(barrier, count=COUNT)
        mbarrier.wait(barrier, 0)
        gl.barrier()
        mbarrier.invalidate(barrier)
        gl.barrier()
    gl.store(out_ptr, 1)


def test_init_after_invalidate_starts_afresh(launch):
    out = poisoned(1, dtype=torch.int32)
    launch(initialised_again, (1,), out)
    assert out.item() == 1


# ---------------------------------------------------------------------------------------------------------------------
# Roles
# ---------------------------------------------------------------------------------------------------------------------


@jit
def produce(tiles, filled, freed, x_ptr, steps, SLOTS: gl.constexpr):
    for step in range(steps):
        mbarrier.wait(freed.index(step % SLOTS), (step // SLOTS + 1) & 1)
        tiles.index(step % SLOTS).store(gl.load(x_ptr + step * 128 + gl.arange(0, 128, ROW_1)))
        mbarrier.arrive(filled.index(step % SLOTS))


@jit
def consume(tiles, filled, freed, out_ptr, steps, SLOTS: gl.constexpr):
    total = gl.zeros([128], gl.float32, ROW)
    for step in range(steps):
        mbarrier.wait(filled.index(step % SLOTS), (step // SLOTS) & 1)
        total += tiles.index(step % SLOTS).load(ROW)
        mbarrier.arrive(freed.index(step % SLOTS))
    gl.store(out_ptr + gl.arange(0, 128, ROW), total)


@jit
def ring(x_ptr, out_ptr, steps, SLOTS: gl.constexpr):
    tiles = gl.allocate_shared_memory(gl.float32, [SLOTS, 128], PLAIN)
    filled, freed = mbarrier.allocate_mbarrier(batch=SLOTS), mbarrier.allocate_mbarrier(batch=SLOTS)
    for i in gl.static_range(SLOTS):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(freed.index(i), count=1)
    gl.barrier()
    gl.warp_specialize(
        [
            (consume, (tiles, filled, freed, out_ptr, steps, SLOTS)),
            (produce, (tiles, filled, freed, x_ptr, steps, SLOTS)),
        ],
        [1],
        [24],
    )


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_ring_between_two_roles(launch, slots, steps):
    x, out = normal(7, 128), poisoned(128)
    launch(ring, (1,), x, out, steps, SLOTS=slots)
    want = torch.zeros(128)
    for row in x[:steps]:
        want += row
    same(out, want)


@jit
def add_one(tile, barriers, ROLE: gl.constexpr):
    LAYOUT: gl.constexpr = ROW if ROLE % 2 == 0 else ROW_1
    mbarrier.wait(barriers.index(ROLE), 0)
    tile.store(tile.load(LAYOUT) * 2 + ROLE)
    mbarrier.arrive(barriers.index(ROLE + 1))


@jit
def first_role(tile, barriers, scale):
    add_one(tile, barriers, 0)
    return gl.full([128], 0, gl.int32, ROW) + scale, scale + 1


@jit
def five_roles(out_ptr, start):
    """A value passed through five roles of different sizes; the first one returns values to the kernel."""
    tile = gl.allocate_shared_memory(gl.int32, [128], PLAIN, gl.arange(0, 128, ROW))
    barriers = mbarrier.allocate_mbarrier(batch=6)
    for i in gl.static_range(6):
        mbarrier.init(barriers.index(i), count=1)
    gl.barrier()
    mbarrier.arrive(barriers.index(0))
    returned, scalar = gl.warp_specialize(
        [
            (first_role, (tile, barriers, start)),
            (add_one, (tile, barriers, 1)),
            (add_one, (tile, barriers, 2)),
            (add_one, (tile, barriers, 3)),
            (add_one, (tile, barriers, 4)),
        ],
        [1, 4, 1, 4],
        [24, 24, 24, 24],
    )
    mbarrier.wait(barriers.index(5), 0)
    gl.store(out_ptr + gl.arange(0, 128, ROW), tile.load(ROW) + returned * 1000 + scalar * 100000)


def test_five_roles_and_their_results(launch):
    out = poisoned(128, dtype=torch.int32)
    launch(five_roles, (1,), out, 7)
    want = torch.arange(128, dtype=torch.int32)
    for role in range(5):
        want = want * 2 + role
    same(out, want + 7000 + 800000)


@jit
def twice_specialised(out_ptr):
    """Two warp-specialised regions one after the other, with a register tensor carried across."""
    tile = gl.allocate_shared_memory(gl.int32, [128], PLAIN, gl.arange(0, 128, ROW))
    barriers = mbarrier.allocate_mbarrier(batch=6)
    for i in gl.static_range(6):
        mbarrier.init(barriers.index(i), count=1)
    gl.barrier()
    mbarrier.arrive(barriers.index(0))
    gl.warp_specialize([(add_one, (tile, barriers, 0)), (add_one, (tile, barriers, 1))], [1])
    kept = tile.load(ROW)
    gl.barrier()
    gl.warp_specialize([(add_one, (tile, barriers, 2)), (add_one, (tile, barriers, 3))], [1])
    gl.store(out_ptr + gl.arange(0, 128, ROW), tile.load(ROW) + 1000 * kept)


def test_two_specialised_regions(launch):
    out = poisoned(128, dtype=torch.int32)
    launch(twice_specialised, (1,), out)
    first = (torch.arange(128) * 2) * 2 + 1
    same(out, ((first * 2 + 2) * 2 + 3 + 1000 * first).to(torch.int32))


# ---------------------------------------------------------------------------------------------------------------------
# Clusters
# ---------------------------------------------------------------------------------------------------------------------


@jit
def own_barriers(desc, out_ptr):
    """One barrier per CTA: each expects its own bytes, completes its own phase."""
    tile = gl.allocate_shared_memory(gl.float32, desc.block_shape, desc.layout)
    loaded = new_barrier(1)
    cluster.barrier()
    mbarrier.expect(loaded, tile.nbytes_per_cta)
    tma.async_load(desc, [0], loaded, tile)
    mbarrier.wait(loaded, 0)
    gl.store(out_ptr + gl.arange(0, 256, ROW_HALVES), tile.load(ROW_HALVES))


def test_a_barrier_for_each_cta(launch):
    x, out = normal(256), poisoned(256)
    launch(own_barriers, (1,), descriptor(x, [256], cga=[[1]]), out, num_ctas=2)
    same(out, x)


@jit
def pair_barrier(out_ptr):
    """One barrier for the pair, held by CTA 0: `count=1` means one arrival of each; only CTA 0 waits."""
    both = mbarrier.allocate_mbarrier(two_ctas=True)
    mbarrier.init(both, count=1)
    cluster.barrier()
    mbarrier.arrive(both)
    mbarrier.wait(both, 0)
    cluster.barrier()  # CTA 1 waits for nothing else: its second arrival could count for the first phase
    mbarrier.arrive(both)
    mbarrier.wait(both, 1)
    cluster.barrier()
    mbarrier.invalidate(both)
    gl.store(out_ptr + gl.arange(0, 256, ROW_HALVES), gl.full([256], 1, gl.int32, ROW_HALVES))


def test_pair_barrier_takes_both_arrivals(launch):
    out = poisoned(256, dtype=torch.int32)
    launch(pair_barrier, (1,), out, num_ctas=2)
    assert bool((out == 1).all())


@jit
def routed_arrivals(out_ptr, FROM: gl.constexpr, COUNT: gl.constexpr):
    """Each CTA's own barrier is complete only if COUNT arrivals reach it."""
    barrier = new_barrier(COUNT)
    cluster.barrier()
    mbarrier.arrive(barrier, from_cta=FROM)
    mbarrier.wait(barrier, 0)
    cluster.barrier()
    gl.store(out_ptr + gl.arange(0, 512, gl.BlockedLayout([1], [32], [4], [0], [[1], [2]])), 1)


@pytest.mark.parametrize("route", [None, 0, 1, 2, 3])
def test_from_cta_reaches_every_cta_once(launch, route):
    """CTA s takes part if s & ~F == 0, and arrives on every s | x for x within ~F: each barrier gets one arrival."""
    out = poisoned(512, dtype=torch.int32)
    launch(routed_arrivals, (1,), out, FROM=route, COUNT=1, num_ctas=4)
    assert bool((out == 1).all())


@jit
def routed_expect(desc, out_ptr):
    """CTA 0 announces the bytes of both CTAs; each copies its own."""
    tile = gl.allocate_shared_memory(gl.float32, desc.block_shape, desc.layout)
    loaded = new_barrier(1)
    cluster.barrier()
    mbarrier.expect(loaded, tile.nbytes_per_cta, from_cta=0)
    tma.async_load(desc, [0], loaded, tile)
    mbarrier.wait(loaded, 0)
    gl.store(out_ptr + gl.arange(0, 256, ROW_HALVES), tile.load(ROW_HALVES))
    cluster.barrier()


def test_expect_from_cta_0_for_all(launch):
    x, out = normal(256), poisoned(256)
    launch(routed_expect, (1,), descriptor(x, [256], cga=[[1]]), out, num_ctas=2)
    same(out, x)


@jit
def store_to_peers(out_ptr, SLICE: gl.constexpr, WAIT: gl.constexpr):
    """An asynchronous store through the cluster: rows sharded in registers, columns in shared memory."""
    x = gl.arange(0, 32, gl.SliceLayout(1, MATRIX_HALVES))[:, None] * 32
    x += gl.arange(0, 32, gl.SliceLayout(0, MATRIX_HALVES))[None, :]
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0], [[0, 1]])
    tile = gl.allocate_shared_memory(gl.int32, [64 if SLICE else 32, 32], LAYOUT)
    if SLICE:
        tile = tile.slice(32, 32, dim=0)
    arrived = new_barrier(1)
    cluster.barrier()
    mbarrier.expect(arrived, 2048)  # half of the tile
    async_store(tile, x, arrived)
    if WAIT:
        mbarrier.wait(arrived, 0)
    store_matrix(out_ptr, tile.load(MATRIX_COLUMN_HALVES))
    mbarrier.wait(arrived, 0)
    cluster.barrier()


@pytest.mark.parametrize("of_slice", [False, True])
def test_asynchronous_store_into_the_peer(launch, of_slice):
    out = poisoned(32, 32, dtype=torch.int32)
    launch(store_to_peers, (1,), out, SLICE=of_slice, WAIT=True, num_ctas=2)
    same(out, torch.arange(1024, dtype=torch.int32).reshape(32, 32))
    with pytest.raises((gluon_cpu.DataRace, gluon_cpu.UninitialisedRead), match="tile"):
        launch(store_to_peers, (1,), out, SLICE=of_slice, WAIT=False, num_ctas=2)


def test_asynchronous_store_into_one_peer(launch):
    out = poisoned(64, 32, dtype=torch.int32)
    launch(hopper.store_to_one_peer, (1,), out, BUG=False, num_ctas=4)
    same(out, torch.arange(2048, dtype=torch.int32).reshape(64, 32))


@jit
def messages(out_ptr, rounds):
    """Rounds of an exchange between CTAs through a layout conversion, each followed by a cluster barrier."""
    x = gl.arange(0, 256, ROW_HALVES)
    for _ in range(rounds):
        copy = gl.convert_layout(x, ROW_COPIES)
        cluster.barrier()
        x = gl.convert_layout(copy + 1, ROW_HALVES)
    gl.store(out_ptr + gl.arange(0, 256, ROW_HALVES), x)


def test_cluster_barriers_in_a_loop(launch):
    out = poisoned(256, dtype=torch.int32)
    launch(messages, (1,), out, 3, num_ctas=2)
    same(out, torch.arange(256, dtype=torch.int32) + 3)


@jit
def relaxed_barrier(out_ptr):
    gl.barrier(cluster=True)
    cluster.barrier(relaxed=True)
    gl.store(out_ptr + gl.arange(0, 256, ROW_HALVES), gl.arange(0, 256, ROW_HALVES))


def test_barrier_spellings(launch):
    out = poisoned(256, dtype=torch.int32)
    launch(relaxed_barrier, (1,), out, num_ctas=2)
    same(out, torch.arange(256, dtype=torch.int32))
