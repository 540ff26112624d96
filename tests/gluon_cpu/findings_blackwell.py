"""A small attention kernel for Blackwell, as findings_hopper.py: one bug, named by BUG, or none.

One CTA, a pair, or two pairs that share keys and values by multicast. Queries are split over all CTAs by rows. The
keys of a pair are split by rows and its values by columns, in one ring. P lies in the first half of the columns of S.
"""

from tests.compat import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    cluster,
    gl,
    jit,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    tcgen05_mma_barrier_count,
    tma,
)
from tests.gluon_cpu.support import store_matrix

STAGES = gl.constexpr(2)


@jit
def load_keys_and_values(q_desc, k_desc, v_desc, q, ring, q_full, full, free, steps, SHARED, BUG: gl.constexpr):
    rows: gl.constexpr = k_desc.block_shape[0]
    mbarrier.expect(q_full, q.nbytes_per_cta)
    tma.async_load(q_desc, [0, 0], q_full, q, multicast=SHARED)
    for i in range(2 * steps):
        slot = ring.index(i % STAGES)
        if BUG != "load without a free slot":
            mbarrier.wait(free.index(i % STAGES), (i // STAGES + 1) & 1)
        mbarrier.expect(full.index(i % STAGES), slot.nbytes_per_cta)
        if i % 2 == 0:
            tma.async_load(
                k_desc, [i // 2 * rows, 0], full.index(i % STAGES), slot, multicast=SHARED
            )  # <- keys of the ring
        else:
            v = slot.reinterpret(v_desc.dtype, v_desc.block_shape, v_desc.layout)
            tma.async_load(
                v_desc, [i // 2 * rows, 0], full.index(i % STAGES), v, multicast=SHARED
            )  # <- values of the ring


@jit
def multiply(q, ring, scores, weights, out, q_full, full, free, s_ready, p_ready, done, v_desc, steps, SHARED,
             BUG: gl.constexpr):  # fmt: skip
    mbarrier.wait(q_full, 0)
    for i in range(steps):
        k_at, v_at = 2 * i % STAGES, (2 * i + 1) % STAGES
        k = ring.index(k_at)
        v = ring.index(v_at).reinterpret(v_desc.dtype, v_desc.block_shape, v_desc.layout)
        mbarrier.wait(full.index(k_at), 2 * i // STAGES & 1)
        tcgen05_mma(q, k.permute((1, 0)), scores, use_acc=False)  # <- scores made
        if SHARED and BUG != "a commit to one pair only":
            tcgen05_commit(free.index(k_at), descs=[k])
        else:
            tcgen05_commit(free.index(k_at))
        tcgen05_commit(s_ready)
        mbarrier.wait(full.index(v_at), (2 * i + 1) // STAGES & 1)
        if BUG != "weights not awaited":
            mbarrier.wait(p_ready, i & 1)
        tcgen05_mma(weights, v, out, use_acc=i != 0)  # <- weights used
        if SHARED and BUG != "a commit to one pair only":
            tcgen05_commit(free.index(v_at), descs=[v])
        else:
            tcgen05_commit(free.index(v_at))
        if BUG == "weights not awaited":
            mbarrier.wait(p_ready, i & 1)
    tcgen05_commit(done)


@jit
def weigh(scores, weights, out, s_ready, p_ready, done, out_ptr, steps, WITH_MAX: gl.constexpr, BUG: gl.constexpr):
    S: gl.constexpr = scores.get_reg_layout()
    P: gl.constexpr = weights.get_reg_layout()
    for i in range(steps):
        if BUG != "scores not awaited":
            mbarrier.wait(s_ready, i & 1)
        if WITH_MAX:
            s, row_max = scores.load_max(S)
            row_max = gl.convert_layout(row_max, gl.SliceLayout(1, S))
        else:
            s = scores.load(S)  # <- scores read
            row_max = gl.max(s, axis=1)
        p = gl.convert_layout((s - row_max[:, None]).to(weights.dtype), P)
        if BUG == "released before the weights are stored":
            mbarrier.arrive(p_ready)
        weights.store(p)  # <- weights stored
        if BUG != "released before the weights are stored":
            mbarrier.arrive(p_ready)
        if BUG == "scores not awaited":
            mbarrier.wait(s_ready, i & 1)
    mbarrier.wait(done, 0)
    store_matrix(out_ptr, out.load(out.get_reg_layout()))


@jit
def small_attention(q_desc, k_desc, v_desc, out_ptr, steps, CGA: gl.constexpr, WITH_MAX: gl.constexpr,
                    BUG: gl.constexpr):  # fmt: skip
    M: gl.constexpr = q_desc.block_shape[0]
    N: gl.constexpr = k_desc.block_shape[0]
    D: gl.constexpr = q_desc.block_shape[1]
    PAIR: gl.constexpr = len(CGA) > 0
    SHARED: gl.constexpr = len(CGA) > 1
    q = gl.allocate_shared_memory(q_desc.dtype, q_desc.block_shape, q_desc.layout)
    ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, N, D], k_desc.layout)
    WIDE: gl.constexpr = TensorMemoryLayout((128, N), col_stride=1, cga_layout=CGA, two_ctas=PAIR)
    OUT: gl.constexpr = TensorMemoryLayout((128, D), col_stride=1, cga_layout=CGA, two_ctas=PAIR)
    scores = allocate_tensor_memory(gl.float32, [M, N], WIDE)
    out = allocate_tensor_memory(gl.float32, [M, D], OUT)
    weights = scores.slice(0, N * v_desc.dtype.primitive_bitwidth // 32).reinterpret(v_desc.dtype, [M, N], WIDE)
    FULL_PAIR: gl.constexpr = PAIR and BUG != "each CTA waits for its own half of the keys"
    q_full = mbarrier.allocate_mbarrier(two_ctas=PAIR)
    full = mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=FULL_PAIR)
    free = mbarrier.allocate_mbarrier(batch=STAGES)
    s_ready = mbarrier.allocate_mbarrier()
    p_ready = mbarrier.allocate_mbarrier(two_ctas=PAIR and BUG != "the peer's weights not awaited")
    done = mbarrier.allocate_mbarrier()
    mbarrier.init(q_full, count=1)
    mbarrier.init(s_ready, count=1)
    mbarrier.init(p_ready, count=1)
    mbarrier.init(done, count=1)
    LEADERS: gl.constexpr = tcgen05_mma_barrier_count([ring], SHARED, PAIR)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1 if BUG == "a commit to one pair only" else LEADERS)
    if PAIR:
        cluster.barrier()
    else:
        gl.barrier()
    gl.warp_specialize(
        [
            (weigh, (scores, weights, out, s_ready, p_ready, done, out_ptr, steps, WITH_MAX, BUG)),
            (
                multiply,
                (q, ring, scores, weights, out, q_full, full, free, s_ready, p_ready, done, v_desc, steps, SHARED, BUG),
            ),
            (
                load_keys_and_values,
                (q_desc, k_desc, v_desc, q, ring, q_full, full, free, steps, SHARED, BUG),
            ),
        ],
        [1, 1],
        [24, 24],
    )
    if PAIR:
        cluster.barrier()
