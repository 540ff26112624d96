"""Kernels for pairs of Blackwell CTAs with one bug each, switched on by BUG. As findings_hopper.py."""

from tests.compat import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    cluster,
    gl,
    jit,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    tma,
)
from tests.gluon_cpu.support import new_barrier, store_matrix

ACC = gl.constexpr(TensorMemoryLayout((128, 64), col_stride=1, cga_layout=((1, 0),), two_ctas=True))


@jit
def pair_load(a_desc, b_desc, a, b, loaded, free, steps, BUG: gl.constexpr):
    for step in range(steps):
        if not BUG:
            mbarrier.wait(free, (step + 1) & 1)
        mbarrier.expect(loaded, a.nbytes_per_cta + b.nbytes_per_cta)
        tma.async_load(a_desc, [0, step * 64], loaded, a)  # <- load over an operand of the pair
        tma.async_load(b_desc, [0, step * 64], loaded, b)


@jit
def pair_mma(a, b, acc, loaded, free, done, steps):
    for step in range(steps):
        mbarrier.wait(loaded, step & 1)
        tcgen05_mma(a, b.permute((1, 0)), acc, use_acc=step != 0)  # <- mma of the pair
        tcgen05_commit(free)
    tcgen05_commit(done)


@jit
def pair_epilogue(acc, done, out_ptr, BUG: gl.constexpr):
    REGISTERS: gl.constexpr = acc.get_reg_layout()
    if not BUG:
        mbarrier.wait(done, 0)  # <- wait for the pair
    store_matrix(out_ptr, acc.load(REGISTERS))  # <- accumulator of the pair read
    mbarrier.wait(done, 0)


@jit
def pair(a_desc, b_desc, out_ptr, COUNT: gl.constexpr, LOAD_BUG: gl.constexpr, READ_BUG: gl.constexpr):
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_shape, b_desc.layout)
    acc = allocate_tensor_memory(gl.float32, [256, 64], ACC)
    acc.store(gl.zeros([256, 64], gl.float32, acc.get_reg_layout()))
    loaded = mbarrier.allocate_mbarrier(two_ctas=True)
    mbarrier.init(loaded, count=1)
    free = new_barrier(1)
    done = new_barrier(COUNT)
    cluster.barrier()
    gl.warp_specialize(
        [
            (pair_epilogue, (acc, done, out_ptr, READ_BUG)),
            (pair_mma, (a, b, acc, loaded, free, done, 3)),
            (pair_load, (a_desc, b_desc, a, b, loaded, free, 3, LOAD_BUG)),
        ],
        [1, 1],
        [24, 24],
    )
    cluster.barrier()
