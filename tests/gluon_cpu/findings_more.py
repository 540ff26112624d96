"""Kernels with one bug each: barriers, memory, outputs, and Blackwell. As findings_hopper.py."""

from tests.compat import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    gl,
    jit,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    tma,
)
from tests.gluon_cpu.findings_hopper import operands
from tests.gluon_cpu.layouts import MATRIX, PLAIN, ROW
from tests.gluon_cpu.support import new_barrier, store_matrix

# ---------------------------------------------------------------------------------------------------------------------
# Barriers
# ---------------------------------------------------------------------------------------------------------------------


@jit
def left_role(ping, pong, BUG: gl.constexpr):
    mbarrier.wait(pong, 0)  # <- left waits
    mbarrier.arrive(ping)


@jit
def right_role(ping, pong, BUG: gl.constexpr):
    if not BUG:
        mbarrier.arrive(pong)
    mbarrier.wait(ping, 0)  # <- right waits
    if BUG:
        mbarrier.arrive(pong)


@jit
def each_waits_for_the_other(out_ptr, BUG: gl.constexpr):
    ping, pong = new_barrier(1), new_barrier(1)
    gl.barrier()
    gl.warp_specialize([(left_role, (ping, pong, BUG)), (right_role, (ping, pong, BUG))], [1])
    gl.store(out_ptr, 1)


@jit
def too_many_arrivals(out_ptr, BUG: gl.constexpr):
    barrier = new_barrier(1)
    gl.barrier()
    mbarrier.arrive(barrier, count=2 if BUG else 1)  # <- one arrival too many
    gl.store(out_ptr, 1)


@jit
def too_few_arrivals(out_ptr, BUG: gl.constexpr):
    barrier = new_barrier(2)
    gl.barrier()
    mbarrier.arrive(barrier)
    if not BUG:
        mbarrier.arrive(barrier)
    mbarrier.wait(barrier, 0)  # <- one arrival too few
    gl.store(out_ptr, 1)


@jit
def wrong_bytes(desc, out_ptr, BYTES: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout)
    loaded = new_barrier(1)
    gl.barrier()
    mbarrier.expect(loaded, BYTES)
    tma.async_load(desc, [0, 0], loaded, tile)
    mbarrier.wait(loaded, 0)  # <- wait for bytes
    store_matrix(out_ptr, tile.load(MATRIX))


@jit
def fast_role(barrier, back, steps, BUG: gl.constexpr):
    for step in range(steps):
        if not BUG:
            mbarrier.wait(back, (step + 1) & 1)
        mbarrier.arrive(barrier)


@jit
def slow_role(barrier, back, out_ptr, steps, BUG: gl.constexpr):
    for step in range(steps):
        mbarrier.wait(barrier, step & 1)  # <- lapped wait
        mbarrier.arrive(back)
    gl.store(out_ptr, 1)


@jit
def lapped(out_ptr, BUG: gl.constexpr):
    barrier, back = new_barrier(1), new_barrier(1)
    gl.barrier()
    gl.warp_specialize([(slow_role, (barrier, back, out_ptr, 4, BUG)), (fast_role, (barrier, back, 4, BUG))], [1])


@jit
def used_before_init(out_ptr, BUG: gl.constexpr):
    barrier = mbarrier.allocate_mbarrier()
    if not BUG:
        mbarrier.init(barrier, count=1)
        gl.barrier()
    mbarrier.arrive(barrier)  # <- arrive before init
    gl.store(out_ptr, 1)


@jit
def used_after_invalidate(out_ptr, BUG: gl.constexpr):
    barrier = new_barrier(1)
    gl.barrier()
    mbarrier.arrive(barrier)
    mbarrier.wait(barrier, 0)
    gl.barrier()
    mbarrier.invalidate(barrier)
    if BUG:
        mbarrier.arrive(barrier)  # <- arrive after invalidate
    gl.store(out_ptr, 1)


@jit
def initialised_twice(out_ptr, BUG: gl.constexpr):
    barrier = new_barrier(1)
    gl.barrier()
    mbarrier.arrive(barrier)
    mbarrier.wait(barrier, 0)
    gl.barrier()
    if not BUG:
        mbarrier.invalidate(barrier)
        gl.barrier()
    mbarrier.init(barrier, count=1)  # <- second init
    gl.store(out_ptr, 1)


@jit
def arriving_role(barrier):
    mbarrier.arrive(barrier)  # <- late arrival


@jit
def closing_role(out_ptr, barrier, BUG: gl.constexpr):
    if not BUG:
        mbarrier.wait(barrier, 0)
    mbarrier.invalidate(barrier)  # <- early invalidate
    gl.store(out_ptr, 1)


@jit
def invalidated_too_early(out_ptr, BUG: gl.constexpr):
    barrier = new_barrier(1)
    gl.barrier()
    gl.warp_specialize([(closing_role, (out_ptr, barrier, BUG)), (arriving_role, (barrier,))], [1])


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------


@jit
def index_out_of_bounds(out_ptr, BUG: gl.constexpr, slots):
    tiles = gl.allocate_shared_memory(gl.int32, [2, 128], PLAIN)
    for slot in range(slots + BUG):
        tiles.index(slot).store(gl.arange(0, 128, ROW))  # <- slot 2 of 2
    gl.store(out_ptr + gl.arange(0, 128, ROW), tiles.index(1).load(ROW))


@jit
def load_out_of_bounds(x_ptr, out_ptr, length, BUG: gl.constexpr):
    i = gl.arange(0, 128, ROW)
    x = gl.load(x_ptr + i, mask=(i < length) | BUG, other=0.0)  # <- load over the end
    gl.store(out_ptr + i, x)


@jit
def store_out_of_bounds(out_ptr, length, BUG: gl.constexpr):
    i = gl.arange(0, 128, ROW)
    gl.store(out_ptr + i, i.to(gl.float32), mask=(i < length) | BUG)  # <- store over the end


@jit
def unwritten_shared(out_ptr, BUG: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.int32, [128], PLAIN)
    if not BUG:
        tile.store(gl.arange(0, 128, ROW))
    gl.store(out_ptr + gl.arange(0, 128, ROW), tile.load(ROW))  # <- read of nothing


@jit
def half_written(out_ptr, BUG: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.int32, [128], PLAIN)
    tile.slice(0, 64, dim=0).store(gl.arange(0, 64, ROW))
    if not BUG:
        tile.slice(64, 64, dim=0).store(gl.arange(0, 64, ROW))
    gl.store(out_ptr + gl.arange(0, 128, ROW), tile.load(ROW))  # <- half of it is nothing


@jit
def message_without_order(parts_ptr, counter_ptr, out_ptr, BUG: gl.constexpr):
    pid, programs = gl.program_id(0), gl.num_programs(0)
    gl.store(parts_ptr + pid, pid * pid)  # <- part written
    before = gl.atomic_add(counter_ptr, 1, sem="relaxed" if BUG else "acq_rel")
    if before == programs - 1:
        total = 0
        for i in range(programs):
            total += gl.load(parts_ptr + i)  # <- part read
        gl.store(out_ptr, total)


@jit
def one_output_of_two_programs(out_ptr, BUG: gl.constexpr):
    row = gl.program_id(0) // 2 if BUG else gl.program_id(0)
    gl.store(out_ptr + row * 128 + gl.arange(0, 128, ROW), 1.0)  # <- row written twice


@jit
def rows_of_an_output(out_ptr, ROWS: gl.constexpr):
    if gl.program_id(0) < ROWS:
        gl.store(out_ptr + gl.program_id(0) * 128 + gl.arange(0, 128, ROW), 1.0)


# ---------------------------------------------------------------------------------------------------------------------
# Blackwell
# ---------------------------------------------------------------------------------------------------------------------

TMEM = gl.constexpr(TensorMemoryLayout((64, 32), col_stride=1))


@jit
def unwritten_tensor_memory(out_ptr, BUG: gl.constexpr):
    tmem = allocate_tensor_memory(gl.float32, [64, 32], TMEM)
    if not BUG:
        tmem.store(gl.zeros([64, 32], gl.float32, tmem.get_reg_layout()))
    store_matrix(out_ptr, gl.convert_layout(tmem.load(), MATRIX))  # <- tensor memory of nothing


@jit
def accumulator_not_awaited(a_desc, b_desc, out_ptr, BUG: gl.constexpr):
    a, b = operands(a_desc, b_desc)
    acc = allocate_tensor_memory(gl.float32, [64, 32], TMEM)
    acc.store(gl.zeros([64, 32], gl.float32, acc.get_reg_layout()))
    done = new_barrier(1)
    gl.barrier()
    tcgen05_mma(a, b.permute((1, 0)), acc, mbarriers=[done])  # <- mma in flight
    if not BUG:
        mbarrier.wait(done, 0)
    store_matrix(out_ptr, gl.convert_layout(acc.load(), MATRIX))  # <- accumulator read
    mbarrier.wait(done, 0)


@jit
def commit_too_early(a_desc, b_desc, out_ptr, BUG: gl.constexpr):
    a, b = operands(a_desc, b_desc)
    acc = allocate_tensor_memory(gl.float32, [64, 32], TMEM)
    done, last = new_barrier(1), new_barrier(1)
    gl.barrier()
    tcgen05_mma(a, b.permute((1, 0)), acc, use_acc=False)
    if BUG:
        tcgen05_commit(done)
    tcgen05_mma(a, b.permute((1, 0)), acc)  # <- not covered by the commit
    if not BUG:
        tcgen05_commit(done)
    mbarrier.wait(done, 0)
    store_matrix(out_ptr, gl.convert_layout(acc.load(), MATRIX))  # <- read after the wrong commit
    tcgen05_commit(last)
    mbarrier.wait(last, 0)


@jit
def mma_operand_overwritten(a_desc, b_desc, out_ptr, BUG: gl.constexpr):
    a, b = operands(a_desc, b_desc)
    acc = allocate_tensor_memory(gl.float32, [64, 32], TMEM)
    done, loaded = new_barrier(1), new_barrier(1)
    gl.barrier()
    tcgen05_mma(a, b.permute((1, 0)), acc, use_acc=False, mbarriers=[done])  # <- mma reads its operand
    if not BUG:
        mbarrier.wait(done, 0)
    mbarrier.expect(loaded, b.nbytes_per_cta)
    tma.async_load(b_desc, [0, 0], loaded, b)  # <- load over an operand
    mbarrier.wait(loaded, 0)
    mbarrier.wait(done, 0)
    store_matrix(out_ptr, gl.convert_layout(acc.load(), MATRIX))


@jit
def alias_overwritten(a_desc, b_desc, out_ptr, BUG: gl.constexpr):
    """P lies in the columns of S: written too early, it is overwritten by the product that still computes S."""
    a, b = operands(a_desc, b_desc)
    scores = allocate_tensor_memory(gl.float32, [64, 32], TMEM)
    done = new_barrier(1)
    gl.barrier()
    tcgen05_mma(a, b.permute((1, 0)), scores, use_acc=False, mbarriers=[done])  # <- mma writes S
    if not BUG:
        mbarrier.wait(done, 0)
    p = scores.slice(0, 16).reinterpret(gl.bfloat16, [64, 32], TMEM)
    p.store(gl.zeros([64, 32], gl.bfloat16, p.get_reg_layout()))  # <- P over S
    mbarrier.wait(done, 0)
    store_matrix(out_ptr, gl.convert_layout(p.load().to(gl.float32), MATRIX))
