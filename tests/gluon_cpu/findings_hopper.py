"""Kernels for Hopper with one bug each, switched on by BUG. A line that a report must name ends in a marker comment."""

from gluon_attn.kernels.hopper.inline_asm import wait_apart
from tests.compat import (
    async_store,
    cluster,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tests.gluon_cpu.layouts import MATRIX, MATRIX_COPIES, PLAIN, ROW, ROW_1
from tests.gluon_cpu.support import new_barrier, store_matrix

COLUMNS = gl.constexpr(gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1]))
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))


@jit
def sync():
    if gl.num_ctas() > 1:
        cluster.barrier()
    else:
        gl.barrier()


@jit
def two_barriers(COUNT: gl.constexpr):
    filled, freed = new_barrier(COUNT), new_barrier(1)
    sync()
    return filled, freed


# ---------------------------------------------------------------------------------------------------------------------
# Shared memory between roles
# ---------------------------------------------------------------------------------------------------------------------


@jit
def writer(tile, filled, freed, steps):
    for step in range(steps):
        mbarrier.wait(freed, (step + 1) & 1)
        tile.store(gl.full([128], 1, gl.int32, ROW_1) * step)  # <- writer writes
        mbarrier.arrive(filled)


@jit
def reader_that_does_not_wait(tile, filled, out_ptr, BUG: gl.constexpr):
    if not BUG:
        mbarrier.wait(filled, 0)
    gl.store(out_ptr + gl.arange(0, 128, ROW), tile.load(ROW))  # <- unsynchronised read


@jit
def no_wait(out_ptr, BUG: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.int32, [128], PLAIN, gl.full([128], 0, gl.int32, ROW))
    filled, freed = two_barriers(1)
    gl.warp_specialize(
        [(reader_that_does_not_wait, (tile, filled, out_ptr, BUG)), (writer, (tile, filled, freed, 1))], [1]
    )


@jit
def reader_that_frees_early(tile, filled, freed, out_ptr, steps, BUG: gl.constexpr):
    for step in range(steps):
        mbarrier.wait(filled, step & 1)
        if BUG:
            mbarrier.arrive(freed)
        value = tile.load(ROW)  # <- read after free
        if not BUG:
            mbarrier.arrive(freed)
        gl.store(out_ptr + step * 128 + gl.arange(0, 128, ROW), value)


@jit
def freed_too_early(out_ptr, BUG: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.int32, [128], PLAIN)
    filled, freed = two_barriers(1)
    gl.warp_specialize(
        [(reader_that_frees_early, (tile, filled, freed, out_ptr, 3, BUG)), (writer, (tile, filled, freed, 3))], [1]
    )


@jit
def reader_of_the_wrong_phase(tile, filled, out_ptr, BUG: gl.constexpr):
    mbarrier.wait(filled, 1 if BUG else 0)
    gl.store(out_ptr + gl.arange(0, 128, ROW), tile.load(ROW))  # <- read a phase early


@jit
def wrong_phase(out_ptr, BUG: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.int32, [128], PLAIN, gl.full([128], 0, gl.int32, ROW))
    filled, freed = two_barriers(1)
    gl.warp_specialize(
        [(reader_of_the_wrong_phase, (tile, filled, out_ptr, BUG)), (writer, (tile, filled, freed, 1))], [1]
    )


@jit
def half_writer(tile, ready, HALF: gl.constexpr, BUG: gl.constexpr):
    FIRST: gl.constexpr = 0 if BUG else HALF * 64
    view = tile.slice(FIRST, 64, dim=0)
    LAYOUT: gl.constexpr = ROW if HALF == 0 else ROW_1
    view.store(gl.full([64], HALF, gl.int32, LAYOUT))  # <- write of a half
    mbarrier.arrive(ready)


@jit
def overlapping_halves(out_ptr, BUG: gl.constexpr):
    """Two roles write halves of a tile: right, until the halves overlap."""
    tile = gl.allocate_shared_memory(gl.int32, [128], PLAIN, gl.full([128], 0, gl.int32, ROW))
    ready = new_barrier(2)
    sync()
    gl.warp_specialize([(half_writer, (tile, ready, 0, BUG)), (half_writer, (tile, ready, 1, BUG))], [1])
    mbarrier.wait(ready, 0)
    gl.store(out_ptr + gl.arange(0, 128, ROW), tile.load(ROW))


# ---------------------------------------------------------------------------------------------------------------------
# Memory that the compiler takes for its own use
# ---------------------------------------------------------------------------------------------------------------------


@jit
def signals(ready):
    mbarrier.arrive(ready)


@jit
def waits(out_ptr, ready):
    mbarrier.wait(ready, 0)
    gl.store(out_ptr, 1)


@jit
def captures_over_a_barrier(out_ptr, BUG: gl.constexpr):
    first = new_barrier(1)
    gl.barrier()
    mbarrier.arrive(first)
    mbarrier.wait(first, 0)
    if not BUG:
        mbarrier.invalidate(first)
    ready = new_barrier(1)
    gl.barrier()
    gl.warp_specialize([(waits, (out_ptr, ready)), (signals, (ready,))], [1])  # <- captures of the roles


@jit
def scratch_over_a_store(desc, x_ptr, out_ptr, HOW: gl.constexpr, BUG: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout, gl.full([32, 32], 1.0, gl.float32, MATRIX))
    fence_async_shared()
    tma.async_store(desc, [0, 0], tile)  # <- store of a tile used no more
    if not BUG:
        tma.store_wait(0)
    if HOW == "reduce":
        gl.store(out_ptr, gl.sum(gl.load(x_ptr + gl.arange(0, 128, ROW)), 0))  # <- sum over the warps
    elif HOW == "convert_layout":
        x = gl.arange(0, 32, gl.SliceLayout(1, MATRIX))[:, None] + gl.arange(0, 32, gl.SliceLayout(0, MATRIX))[None, :]
        store_matrix(out_ptr, gl.convert_layout(x, COLUMNS).to(gl.float32))
    elif HOW == "gather":
        x = gl.load(x_ptr + gl.arange(0, 128, ROW))
        gl.store(out_ptr + gl.arange(0, 128, ROW), gl.gather(x, 127 - gl.arange(0, 128, ROW), axis=0))
    elif HOW == "histogram":
        counts = gl.histogram(gl.arange(0, 128, ROW) % 4, 128, layout=ROW)
        gl.store(out_ptr + gl.arange(0, 128, ROW), counts.to(gl.float32))
    else:
        gl.store(out_ptr, gl.atomic_add(x_ptr, 1.0) + 1.0)
    tma.store_wait(0)


# ---------------------------------------------------------------------------------------------------------------------
# Warpgroup products
# ---------------------------------------------------------------------------------------------------------------------


@jit
def operands(a_desc, b_desc):
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_shape, b_desc.layout)
    loaded = new_barrier(1)
    gl.barrier()
    mbarrier.expect(loaded, a.nbytes_per_cta + b.nbytes_per_cta)
    tma.async_load(a_desc, [0, 0], loaded, a)
    tma.async_load(b_desc, [0, 0], loaded, b)
    mbarrier.wait(loaded, 0)
    mbarrier.invalidate(loaded)  # its bytes go to others from here on
    return a, b


@jit
def result_before_its_wait(a_desc, b_desc, out_ptr, BUG: gl.constexpr):
    a, b = operands(a_desc, b_desc)
    zero = gl.zeros([64, 32], gl.float32, ACC)
    first = warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)
    second = warpgroup_mma(a, b.permute((1, 0)), zero + 1.0, is_async=True)  # <- product in flight
    first, second = warpgroup_mma_wait(1 if BUG else 0, deps=[first, second])
    store_matrix(out_ptr, first)
    total = first + second  # <- result used
    first, second = warpgroup_mma_wait(0, deps=[first, second])
    store_matrix(out_ptr + 64 * 32, total)


@jit
def operand_overwritten(a_desc, b_desc, out_ptr, BUG: gl.constexpr):
    a, b = operands(a_desc, b_desc)
    acc = gl.zeros([64, 32], gl.float32, ACC)
    acc = warpgroup_mma(a, b.permute((1, 0)), acc, is_async=True)  # <- product reads its operand
    if not BUG:
        acc = warpgroup_mma_wait(0, deps=[acc])
    b.store(gl.full([32, 64], 0.0, gl.bfloat16, MATRIX))  # <- operand overwritten
    acc = warpgroup_mma_wait(0, deps=[acc])
    store_matrix(out_ptr, acc)


@jit
def result_before_its_inline_wait(a_desc, b_desc, out_ptr, BUG: gl.constexpr):
    """The wait is inline assembly, `wgmma.wait_group`, and with BUG lets the newest product go on."""
    a, b = operands(a_desc, b_desc)
    zero = gl.zeros([64, 32], gl.float32, ACC)
    first = warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)
    second = warpgroup_mma(a, b.permute((1, 0)), zero + 1.0, is_async=True)  # <- product in flight past an inline wait
    first = wait_apart(first, 1)
    store_matrix(out_ptr, first)  # of the first the wait does
    second = wait_apart(second, 1 if BUG else 0)
    store_matrix(out_ptr + 64 * 32, first + second)  # <- result used after an inline wait


@jit
def operand_overwritten_past_an_inline_wait(a_desc, b_desc, out_ptr, BUG: gl.constexpr):
    a, b = operands(a_desc, b_desc)
    acc = gl.zeros([64, 32], gl.float32, ACC)
    acc = warpgroup_mma(a, b.permute((1, 0)), acc, is_async=True)  # <- product reads past an inline wait
    wait_apart(acc, 1 if BUG else 0)
    b.store(gl.full([32, 64], 0.0, gl.bfloat16, MATRIX))  # <- operand overwritten after an inline wait
    store_matrix(out_ptr, warpgroup_mma_wait(0, deps=[acc]))


@jit
def multiply_role(a, tile, filled, freed, out_ptr, steps, BUG: gl.constexpr):
    acc = gl.zeros([64, 32], gl.float32, ACC)
    for step in range(steps):
        mbarrier.wait(filled, step & 1)
        acc = warpgroup_mma(a, tile.permute((1, 0)), acc, is_async=True)  # <- product of a slot
        if BUG:
            mbarrier.arrive(freed)
        acc = warpgroup_mma_wait(0, deps=[acc])
        if not BUG:
            mbarrier.arrive(freed)
    store_matrix(out_ptr, acc)


@jit
def load_role(desc, tile, filled, freed, steps):
    for step in range(steps):
        mbarrier.wait(freed, (step + 1) & 1)
        mbarrier.expect(filled, tile.nbytes_per_cta)
        tma.async_load(desc, [0, 0], filled, tile)  # <- load into a slot


@jit
def slot_freed_before_the_product(a_desc, b_desc, out_ptr, BUG: gl.constexpr):
    a, tile = operands(a_desc, b_desc)
    filled, freed = two_barriers(1)
    gl.warp_specialize(
        [(multiply_role, (a, tile, filled, freed, out_ptr, 3, BUG)), (load_role, (b_desc, tile, filled, freed, 3))], [1]
    )


@jit
def operand_role(tile, staged, BUG: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    tile.store(gl.full([32, 64], 1.0, gl.bfloat16, LAYOUT))  # <- operand written
    if not BUG:
        fence_async_shared()
    mbarrier.arrive(staged)


@jit
def product_role(a, tile, staged, out_ptr):
    mbarrier.wait(staged, 0)
    acc = gl.zeros([64, 32], gl.float32, ACC)
    store_matrix(out_ptr, warpgroup_mma(a, tile.permute((1, 0)), acc))  # <- tensor core reads


@jit
def operand_not_fenced(a_desc, b_desc, out_ptr, BUG: gl.constexpr):
    a, _ = operands(a_desc, b_desc)
    tile = gl.allocate_shared_memory(gl.bfloat16, [32, 64], b_desc.layout)
    staged = new_barrier(1)
    gl.barrier()
    gl.warp_specialize([(product_role, (a, tile, staged, out_ptr)), (operand_role, (tile, staged, BUG))], [4])


# ---------------------------------------------------------------------------------------------------------------------
# Two CTAs
# ---------------------------------------------------------------------------------------------------------------------


@jit
def multicast_over_the_peer(desc, out_ptr, BUG: gl.constexpr):
    """The lead fills both slots again; it must know that its peer has read its own."""
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout)
    loaded = mbarrier.allocate_mbarrier(batch=2)
    for step in gl.static_range(2):
        mbarrier.init(loaded.index(step), count=1)
    cluster.barrier()
    for step in gl.static_range(2):
        mbarrier.expect(loaded.index(step), 4096)
    cluster.barrier()
    for step in range(2):
        tma.async_load(desc, [step * 32, 0], loaded.index(step), tile, multicast=True)  # <- multicast
        mbarrier.wait(loaded.index(step), 0)
        total = gl.sum(tile.load(MATRIX_COPIES), axis=1)  # <- peer reads its slot
        gl.store(out_ptr + step * 32 + gl.arange(0, 32, total.type.layout), total)
        if not BUG:
            cluster.barrier()
    cluster.barrier()


@jit
def store_to_one_peer(out_ptr, BUG: gl.constexpr):
    """Each of four CTAs fills one tile: CTA 1 that of CTA 2, CTA 2 that of CTA 1, the others their own."""
    FROM: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], [[1, 0], [2, 0]])
    TO: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], [[2, 0], [1, 0]])
    THERE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0], [[2, 0], [1, 0]])
    x = gl.arange(0, 64, gl.SliceLayout(1, FROM))[:, None] * 32 + gl.arange(0, 32, gl.SliceLayout(0, FROM))[None, :]
    tile = gl.allocate_shared_memory(gl.int32, [64, 32], THERE, gl.full([64, 32], 0, gl.int32, TO))
    arrived = new_barrier(1)
    cluster.barrier()
    mbarrier.expect(arrived, tile.nbytes_per_cta)
    async_store(tile, x, arrived)  # <- store into a peer
    if not BUG:
        mbarrier.wait(arrived, 0)
    store_matrix(out_ptr, tile.load(TO))  # <- read of a store from a peer
    mbarrier.wait(arrived, 0)
    cluster.barrier()


@jit
def invalidated_before_the_peer_arrives(out_ptr, BUG: gl.constexpr):
    """CTA 1 arrives on the barrier in CTA 0, which does not wait for it."""
    both = mbarrier.allocate_mbarrier(two_ctas=True)
    mbarrier.init(both, count=1)
    cluster.barrier()
    mbarrier.arrive(both)  # <- remote arrival
    if not BUG:
        mbarrier.wait(both, 0)
    mbarrier.invalidate(both)  # <- barrier taken from the peer


@jit
def exit_before_the_peer_arrives(out_ptr):
    """Nobody waits for the last arrival, which comes from the peer: the compiler ends a cluster with a barrier."""
    both = mbarrier.allocate_mbarrier(two_ctas=True)
    mbarrier.init(both, count=1)
    cluster.barrier()
    mbarrier.arrive(both)


@jit
def init_without_a_cluster_barrier(out_ptr):
    """The peer may arrive before the lead has initialised the barrier: the compiler puts a cluster barrier between."""
    both = mbarrier.allocate_mbarrier(two_ctas=True)
    mbarrier.init(both, count=1)
    mbarrier.arrive(both)
    mbarrier.wait(both, 0)
