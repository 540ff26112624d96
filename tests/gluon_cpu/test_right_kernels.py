"""Kernels that are right and were once found at fault, each with its wrong twin; and what messages call things."""

import pytest
import torch

import gluon_cpu
from gluon_cpu.front import errors_in
from tests.compat import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    async_copy,
    clc,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tests.gluon_cpu.layouts import MATRIX, PLAIN, ROW
from tests.gluon_cpu.support import descriptor, new_barrier, normal, poisoned, same

POLICIES = pytest.mark.parametrize("policy", gluon_cpu.POLICIES)
MODES = pytest.mark.parametrize("mode", ["fast", "lowered"])
SQUARE = gl.constexpr(gl.NVMMASharedLayout.get_default_for([128, 128], gl.float16))
SQUARE_32 = gl.constexpr(gl.NVMMASharedLayout.get_default_for([128, 128], gl.float32))
ROWS = gl.constexpr(gl.BlockedLayout([1, 128], [32, 1], [4, 1], [0, 1]))
COLUMNS = gl.constexpr(TensorMemoryLayout([128, 128], col_stride=1))


# Two copies into one place: PTX gives no two cp.async an order, of one group or of two, before a wait for the first.


@jit
def two_copies(x_ptr, out_ptr, COMMIT: gl.constexpr, WAIT: gl.constexpr, OTHER_THREADS: gl.constexpr):
    SECOND: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0]) if OTHER_THREADS else ROW
    tile = gl.allocate_shared_memory(gl.int32, [1024], PLAIN)
    async_copy.async_load(tile, x_ptr + gl.arange(0, 1024, ROW))
    if COMMIT or WAIT:
        async_copy.commit_group()
    if WAIT:
        async_copy.wait_group(0)
        gl.barrier()
    async_copy.async_load(tile, x_ptr + 1024 + gl.arange(0, 1024, SECOND))
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.barrier()
    i = gl.arange(0, 1024, ROW)
    gl.store(out_ptr + i, tile.load(ROW))


@MODES
@pytest.mark.parametrize("other", [False, True], ids=["same threads", "other threads"])
def test_two_copies_into_one_place(mode, other):
    x, out = torch.arange(2048, dtype=torch.int32), poisoned(1024, dtype=torch.int32)
    for commit in (False, True):
        with pytest.raises(gluon_cpu.DataRace, match=r"without waiting for this cp\.async: async_copy\.wait_group\(\)"):
            gluon_cpu.launch(two_copies, (1,), x, out, commit, False, other, mode=mode)
    gluon_cpu.launch(two_copies, (1,), x, out, True, True, other, mode=mode)
    same(out, x[1024:])


@jit
def ring_of_copies(x_ptr, out_ptr):
    """Three slots, two groups in flight, as every pipelined loop with cp.async has it."""
    i = gl.arange(0, 128, ROW)
    ring = gl.allocate_shared_memory(gl.int32, [3, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for k in gl.static_range(2):
        async_copy.async_load(ring.index(k), x_ptr + k * 128 + i)
        async_copy.commit_group()
    for k in range(8):
        async_copy.wait_group(1)
        gl.barrier()
        async_copy.async_load(ring.index((k + 2) % 3), x_ptr + (k + 2) * 128 + i, mask=(i < 128) & (k + 2 < 8))
        async_copy.commit_group()
        gl.store(out_ptr + k * 128 + i, ring.index(k % 3).load(ROW))
    async_copy.wait_group(0)


@POLICIES
def test_a_ring_of_copies(policy):
    x, out = torch.arange(1024, dtype=torch.int32), poisoned(1024, dtype=torch.int32)
    gluon_cpu.launch(ring_of_copies, (1,), x, out, schedule=gluon_cpu.Schedule(policy, 0))
    same(out, x)


# Tensor memory allocated in a loop.


@jit
def accumulator_of_a_loop(out_ptr, n, BUG: gl.constexpr):
    """Only one role's queue touches it, which works in order. BUG: but the threads write it too, without a wait."""
    a = gl.allocate_shared_memory(gl.float16, [128, 128], SQUARE, gl.full([128, 128], 1.0, gl.float16, ROWS))
    start = gl.allocate_shared_memory(gl.float32, [128, 128], SQUARE_32, gl.full([128, 128], 1.0, gl.float32, ROWS))
    fence_async_shared()
    done = new_barrier(1)
    gl.barrier()
    for _ in range(n):
        acc = allocate_tensor_memory(gl.float32, [128, 128], COLUMNS)
        if BUG:
            acc.store(gl.full([128, 128], 1.0, gl.float32, ROWS))
        else:
            tcgen05_copy(start, acc)
        tcgen05_mma(a, a, acc, use_acc=True)
    tcgen05_commit(done)
    mbarrier.wait(done, 0)
    mbarrier.invalidate(done)
    gl.store(out_ptr, 1)


@POLICIES
@MODES
def test_an_accumulator_of_a_loop(policy, mode):
    options = {"target": "sm_100a", "schedule": gluon_cpu.Schedule(policy, 0), "mode": mode}
    gluon_cpu.launch(accumulator_of_a_loop, (1,), poisoned(1, dtype=torch.int32), 3, False, **options)
    with pytest.raises(gluon_cpu.DataRace, match="acc, tensor memory of CTA 0"):
        gluon_cpu.launch(accumulator_of_a_loop, (1,), poisoned(1, dtype=torch.int32), 3, True, **options)


# A fence of the compiler's.


@jit
def reads_answers(out_ptr, answer, full, empty, n, FENCE: gl.constexpr):
    for i in range(n):
        mbarrier.wait(full, i & 1)
        gl.store(out_ptr + i, clc.load_result(answer).is_canceled().to(gl.int32))
        if FENCE:
            fence_async_shared()
        mbarrier.arrive(empty)


@jit
def asks(answer, full, empty, n, READS: gl.constexpr):
    for i in range(n):
        mbarrier.wait(empty, (i + 1) & 1)
        mbarrier.expect(full, 16)
        clc.try_cancel(answer, full)
        mbarrier.wait(full, i & 1)
        if READS:
            gl.device_assert(clc.load_result(answer).program_id(0) >= 0)


@jit
def answers(out_ptr, n, READS: gl.constexpr, FENCE: gl.constexpr):
    answer = gl.allocate_shared_memory(gl.int64, [2], PLAIN)
    full, empty = new_barrier(1), new_barrier(1)
    gl.barrier()
    gl.warp_specialize(
        [(reads_answers, (out_ptr, answer, full, empty, n, FENCE)), (asks, (answer, full, empty, n, READS))], [1]
    )


@MODES
@pytest.mark.parametrize(("reads", "fence"), [(True, False), (False, True), (False, False)])
def test_both_modes_know_the_fences_of_the_compiler(mode, reads, fence):
    """A role that reads an answer itself has the compiler's fence before it asks again, for the other reader too."""

    def run():
        out = poisoned(3, dtype=torch.int32)
        gluon_cpu.launch(answers, (1,), out, 3, reads, fence, target="sm_100a", mode=mode)

    if reads or fence:
        run()
    else:
        with pytest.raises(gluon_cpu.MissingFence, match="CLC answer for asks") as caught:
            run()
        assert "TMA load" not in str(caught.value)


# A reduction by TMA into a part of a tensor.


@jit
def add_to_a_part(desc, value):
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout, gl.full([32, 32], 1.0, gl.float32, MATRIX))
    fence_async_shared()
    tma.async_atomic_add(desc, [0, 0], tile)
    tma.store_wait(0)


def test_a_reduction_into_a_part_of_a_tensor():
    out = poisoned(64, 32)
    out[:32] = 5.0
    gluon_cpu.launch(add_to_a_part, (1,), descriptor(out, [32, 32]), 1.0)
    assert (out[:32] == 6).all()
    with pytest.raises(gluon_cpu.OutputError):
        gluon_cpu.launch(add_to_a_part, (1,), desc := descriptor(poisoned(64, 32), [32, 32]), 1.0, outputs=[desc])


# The hint of a race between two engines.


@jit
def load_over_a_product(desc, out_ptr, BUG: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], desc.layout)
    loaded = new_barrier(1)
    gl.barrier()
    mbarrier.expect(loaded, desc.nbytes_per_cta)
    tma.async_load(desc, [0, 0], loaded, tile)
    mbarrier.wait(loaded, 0)
    acc = gl.zeros([64, 64], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
    acc = warpgroup_mma(tile, tile.permute((1, 0)), acc, is_async=True)
    if not BUG:
        acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.expect(loaded, desc.nbytes_per_cta)
    tma.async_load(desc, [64, 0], loaded, tile)
    if BUG:
        acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.wait(loaded, 1)
    mbarrier.invalidate(loaded)  # before the conversion, for which the compiler may take its bytes
    r, c = gl.arange(0, 64, gl.SliceLayout(1, MATRIX)), gl.arange(0, 64, gl.SliceLayout(0, MATRIX))
    gl.store(out_ptr + r[:, None] * 64 + c[None, :], gl.convert_layout(acc, MATRIX))


@POLICIES
def test_the_hint_names_the_wait_for_what_was_issued_first(policy):
    desc, schedule = descriptor(normal(128, 64, dtype=torch.bfloat16), [64, 64]), gluon_cpu.Schedule(policy, 0)
    with pytest.raises(gluon_cpu.DataRace, match=r"without waiting for this wgmma: warpgroup_mma_wait\(\) must come"):
        gluon_cpu.launch(load_over_a_product, (1,), desc, poisoned(64, 64), True, schedule=schedule)
    gluon_cpu.launch(load_over_a_product, (1,), desc, poisoned(64, 64), False, schedule=schedule)


# What the compiler refuses.


@jit
def without_a_layout(out_ptr):
    gl.store(out_ptr + gl.arange(0, 64, gl.AutoLayout()), gl.full([64], 1.0, gl.float32, gl.AutoLayout()))


def test_the_compilers_reason_is_in_the_message():
    with pytest.raises(RuntimeError, match="without_a_layout: the compiler refuses it") as caught:
        gluon_cpu.launch(without_a_layout, (1,), poisoned(64))
    assert "Failed to infer return type" in str(caught.value)
    assert f"{__file__.rsplit('/', 1)[-1]}:" in str(caught.value)


@jit
def of_another_size(out_ptr):
    gl.store(out_ptr + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0])), 1.0)


def test_what_explains_the_compilers_reason_is_in_the_message():
    with pytest.raises(RuntimeError, match="of_another_size: the compiler refuses it") as caught:
        gluon_cpu.launch(of_another_size, (1,), poisoned(128), num_ctas=2)
    assert "Layout has 1 CTAs per CGA, but the context requires 2 CTAs per CGA." in str(caught.value)


PRINTED = """\
k.py:3:9: error: first
    a line of source
    ^
k.py:3:9: note: see current operation: %0 = "tt.load"
  more of the note
k.py:4:9: error: second
its reason
module attributes {} {
  tt.func @k() {
"""


def test_errors_are_told_from_the_rest_that_the_compiler_prints():
    whole = "<unknown>:0: error: Failures have been detected\n"
    expected = ["k.py:3:9: error: first", "    a line of source", "    ^", "k.py:4:9: error: second", "its reason"]
    assert errors_in(PRINTED + whole) == expected
    assert errors_in(whole) == [whole.strip()]
