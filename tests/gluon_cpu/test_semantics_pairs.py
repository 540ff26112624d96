"""Blackwell's pairs of CTAs: one issues, both hold operands and accumulators."""

import pytest
import torch

import gluon_cpu
from tests.compat import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    clc,
    cluster,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    tcgen05_mma_barrier_count,
    tma,
)
from tests.gluon_cpu.support import descriptor, new_barrier, poisoned, same, small_integers, store_matrix

PAIR_ROWS = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], [[1, 0]]))


@jit
def multiply_in_pair(a_desc, b_desc, out_ptr, steps, MULTICAST: gl.constexpr):
    """C [256, 128] += A Bᵀ: A and C sharded by rows, B by columns; the even CTA issues, both CTAs accumulate."""
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_shape, b_desc.layout)
    ACC: gl.constexpr = TensorMemoryLayout((128, 128), col_stride=1, cga_layout=((1, 0),), two_ctas=True)
    acc = allocate_tensor_memory(gl.float32, [256, 128], ACC)
    loaded = mbarrier.allocate_mbarrier(two_ctas=True)
    mbarrier.init(loaded, count=1)
    done = mbarrier.allocate_mbarrier()
    mbarrier.init(done, count=tcgen05_mma_barrier_count([a, b], MULTICAST, True))
    cluster.barrier()
    for step in range(steps):
        mbarrier.expect(loaded, a.nbytes_per_cta + b.nbytes_per_cta)
        tma.async_load(a_desc, [0, step * 64], loaded, a)
        tma.async_load(b_desc, [0, step * 64], loaded, b)
        mbarrier.wait(loaded, step & 1)
        tcgen05_mma(a, b.permute((1, 0)), acc, use_acc=step != 0, multicast=MULTICAST, mbarriers=[done])
        mbarrier.wait(done, step & 1)
    store_matrix(out_ptr, gl.convert_layout(acc.load(), PAIR_ROWS))
    cluster.barrier()


@pytest.mark.parametrize("multicast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mma_of_a_pair(blackwell_launch, dtype, multicast):
    a, b = small_integers(256, 192, dtype=dtype, seed=1), small_integers(128, 192, dtype=dtype, seed=2)
    out = poisoned(256, 128)
    descriptors = descriptor(a, [256, 64], cga=[[1, 0]]), descriptor(b, [128, 64], cga=[[1, 0]])
    blackwell_launch(multiply_in_pair, (1,), *descriptors, out, 3, MULTICAST=multicast, num_ctas=2)
    same(out, a.float() @ b.float().T)


@jit
def pair_load(a_desc, b_desc, a, b, loaded, free, steps):
    for step in range(steps):
        mbarrier.wait(free, (step + 1) & 1)
        mbarrier.expect(loaded, a.nbytes_per_cta + b.nbytes_per_cta)
        tma.async_load(a_desc, [0, step * 64], loaded, a)
        tma.async_load(b_desc, [0, step * 64], loaded, b)


@jit
def pair_mma(a, b, acc, loaded, free, done, steps):
    for step in range(steps):
        mbarrier.wait(loaded, step & 1)
        tcgen05_mma(a, b.permute((1, 0)), acc, use_acc=step != 0)
        tcgen05_commit(free)  # arrives in both CTAs of the pair
    tcgen05_commit(done)


@jit
def pair_epilogue(acc, done, out_ptr):
    REGISTERS: gl.constexpr = acc.get_reg_layout()
    mbarrier.wait(done, 0)
    store_matrix(out_ptr, acc.load(REGISTERS))


@jit
def pair_of_roles(a_desc, b_desc, out_ptr, steps):
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_shape, b_desc.layout)
    ACC: gl.constexpr = TensorMemoryLayout((128, 128), col_stride=1, cga_layout=((1, 0),), two_ctas=True)
    acc = allocate_tensor_memory(gl.float32, [256, 128], ACC)
    loaded = mbarrier.allocate_mbarrier(two_ctas=True)
    mbarrier.init(loaded, count=1)
    free, done = new_barrier(1), new_barrier(1)
    cluster.barrier()
    gl.warp_specialize(
        [
            (pair_epilogue, (acc, done, out_ptr)),
            (pair_mma, (a, b, acc, loaded, free, done, steps)),
            (pair_load, (a_desc, b_desc, a, b, loaded, free, steps)),
        ],
        [1, 1],
        [24, 24],
    )
    cluster.barrier()


def test_roles_of_a_pair(blackwell_launch):
    a = small_integers(256, 256, dtype=torch.bfloat16, seed=1)
    b = small_integers(128, 256, dtype=torch.bfloat16, seed=2)
    out = poisoned(256, 128)
    descriptors = descriptor(a, [256, 64], cga=[[1, 0]]), descriptor(b, [128, 64], cga=[[1, 0]])
    blackwell_launch(pair_of_roles, (1,), *descriptors, out, 4, num_ctas=2)
    same(out, a.float() @ b.float().T)


@jit
def multiply_in_two_pairs(a_desc, b_desc, out_ptr):
    """Four CTAs, two pairs: A's rows differ in all, B is the same in both pairs and loaded once, by multicast."""
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_shape, b_desc.layout)
    ACC: gl.constexpr = TensorMemoryLayout((128, 128), col_stride=1, cga_layout=((1, 0), (2, 0)), two_ctas=True)
    acc = allocate_tensor_memory(gl.float32, [512, 128], ACC)
    loaded = mbarrier.allocate_mbarrier(two_ctas=True)
    mbarrier.init(loaded, count=1)
    done = mbarrier.allocate_mbarrier()
    mbarrier.init(done, count=tcgen05_mma_barrier_count([a, b], True, True))
    cluster.barrier()
    mbarrier.expect(loaded, a.nbytes_per_cta + b.nbytes_per_cta)
    tma.async_load(a_desc, [0, 0], loaded, a, multicast=True)
    tma.async_load(b_desc, [0, 0], loaded, b, multicast=True)
    mbarrier.wait(loaded, 0)
    tcgen05_mma(a, b.permute((1, 0)), acc, use_acc=False, multicast=True, mbarriers=[done])
    mbarrier.wait(done, 0)
    OUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], [[1, 0], [2, 0]])
    store_matrix(out_ptr, gl.convert_layout(acc.load(), OUT))
    cluster.barrier()


def test_two_pairs_share_an_operand_by_multicast(blackwell_launch):
    a, b = small_integers(512, 64, dtype=torch.bfloat16, seed=1), small_integers(128, 64, dtype=torch.bfloat16, seed=2)
    out = poisoned(512, 128)
    descriptors = descriptor(a, [512, 64], cga=[[1, 0], [2, 0]]), descriptor(b, [128, 64], cga=[[1, 0], [0, 0]])
    blackwell_launch(multiply_in_two_pairs, (1,), *descriptors, out, num_ctas=4)
    same(out, a.float() @ b.float().T)


@jit
def ask_for_work(response, answered, consumed, out_ptr, rounds, BUG: gl.constexpr):
    """One request for the whole cluster; the answer comes to every CTA of it."""
    for i in range(rounds):
        if not BUG:
            mbarrier.wait(consumed, (i + 1) & 1)
        mbarrier.expect(answered, 16, from_cta=0)  # CTA 0, which asks, announces the answer to all
        clc.try_cancel(response, answered)


@jit
def do_work(response, answered, consumed, out_ptr, rounds, ROWS: gl.constexpr):
    i = gl.arange(0, 128 * gl.num_ctas(), ROWS)
    item = gl.program_id(0)
    for step in range(rounds):
        if item >= 0:
            gl.store(out_ptr + item * 128 * gl.num_ctas() + i, item * 10)
        mbarrier.wait(answered, step & 1)
        result = clc.load_result(response)
        item = gl.where(result.is_canceled(), result.program_id(0), -1)
        fence_async_shared()
        mbarrier.arrive(consumed)  # one barrier for the cluster, in CTA 0, which asks


@jit
def clusters_steal_work(out_ptr, rounds, BUG: gl.constexpr, ROWS: gl.constexpr, WHOLE: gl.constexpr):
    response = gl.allocate_shared_memory(gl.int64, [2], gl.SwizzledSharedLayout(1, 1, 1, [0], WHOLE))
    answered = new_barrier(1)
    consumed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout(WHOLE))
    mbarrier.init(consumed, count=1)
    cluster.barrier()
    gl.warp_specialize(
        [
            (do_work, (response, answered, consumed, out_ptr, rounds, ROWS)),
            (ask_for_work, (response, answered, consumed, out_ptr, rounds, BUG)),
        ],
        [1],
        [24],
    )
    cluster.barrier()


def steal(launch, num_ctas, *, bug):
    bits = num_ctas.bit_length() - 1
    rows = gl.BlockedLayout([1], [32], [4], [0], [[1 << i] for i in range(bits)])
    out = poisoned(12, 128 * num_ctas, dtype=torch.int32)
    options = {"num_ctas": num_ctas, "ROWS": rows, "WHOLE": [[0]] * bits, "resident": 3}
    launch(clusters_steal_work, (12,), out, 12, BUG=bug, **options)
    same(out, 10 * torch.arange(12, dtype=torch.int32)[:, None].expand_as(out))


@pytest.mark.parametrize("num_ctas", [2, 4])
def test_cluster_launch_control_in_clusters(blackwell_launch, num_ctas):
    steal(blackwell_launch, num_ctas, bug=False)
    with pytest.raises((gluon_cpu.RaceError, gluon_cpu.BarrierMisuse)):
        steal(blackwell_launch, num_ctas, bug=True)


def test_barrier_count_is_the_number_of_leaders_that_commit():
    """The compile-time helper, as a table: over the operands' CTA bits that are zero."""

    class Operand:
        def __init__(self, *bases: tuple[int, int]) -> None:
            self.layout = gl.NVMMASharedLayout(128, 16, 2, cga_layout=[list(b) for b in bases])

    sharded, shared_over_pairs = Operand((1, 0), (2, 0)), Operand((0, 1), (0, 0))
    assert tcgen05_mma_barrier_count([sharded, sharded], True, True) == 1
    assert tcgen05_mma_barrier_count([sharded, shared_over_pairs], True, True) == 2
    assert tcgen05_mma_barrier_count([sharded, shared_over_pairs], False, True) == 1
