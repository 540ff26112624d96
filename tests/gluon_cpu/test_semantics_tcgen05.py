"""Blackwell's tensor memory and tensor core queue, with one CTA and with pairs."""

import pytest
import torch

from tests.compat import (
    TensorDescriptor,
    TensorMemoryLayout,
    allocate_tensor_memory,
    blackwell,
    clc,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma,
    tcgen05_mma_scaled,
)
from tests.gluon_cpu.layouts import MATRIX, ROW
from tests.gluon_cpu.support import (
    addresses,
    descriptor,
    load_matrix,
    load_tile,
    new_barrier,
    normal,
    poisoned,
    same,
    small_integers,
    store_matrix,
)

TMEM = gl.constexpr(TensorMemoryLayout((128, 128), col_stride=1))


@jit
def to_registers(x, tmem):
    return gl.convert_layout(x, tmem.get_reg_layout())


@jit
def tensor_memory(x_ptr, out_ptr):
    """Store, load; slices are column offsets; 16-bit values in half of the columns of 32-bit ones."""
    x = load_matrix(x_ptr, 128, 128, MATRIX)
    tmem = allocate_tensor_memory(gl.float32, [128, 128], TMEM)
    tmem.store(to_registers(x, tmem))
    store_matrix(out_ptr, gl.convert_layout(tmem.load(), MATRIX))
    half = tmem.slice(64, 64)
    half.store(to_registers(load_matrix(x_ptr, 128, 64, MATRIX) * 0.0 + 3.0, half))
    store_matrix(out_ptr + 128 * 128, gl.convert_layout(tmem.load(), MATRIX))
    # P [128, 128] bf16 over the first 64 columns of S: the others stay as they are.
    P: gl.constexpr = TensorMemoryLayout((128, 128), col_stride=1)
    p = tmem.slice(0, 64).reinterpret(gl.bfloat16, [128, 128], P)
    p.store(to_registers((x * 2.0).to(gl.bfloat16), p))
    store_matrix(out_ptr + 2 * 128 * 128, gl.convert_layout(p.load().to(gl.float32), MATRIX))
    store_matrix(out_ptr + 3 * 128 * 128, gl.convert_layout(tmem.load(), MATRIX))


def test_tensor_memory_slices_and_aliases(blackwell_launch):
    x = normal(128, 128)
    out = poisoned(4, 128, 128)
    blackwell_launch(tensor_memory, (1,), x, out)
    halved = torch.cat([x[:, :64], torch.full((128, 64), 3.0)], dim=1)
    p = (x * 2).to(torch.bfloat16)
    same(out[:3], torch.stack([x, halved, p.float()]))
    same(out[3, :, 64:], halved[:, 64:])
    same(out[3, :, :64], p.view(torch.float32))


@jit
def initial_value_and_index(x_ptr, out_ptr):
    x = load_matrix(x_ptr, 128, 64, MATRIX)
    tmem = allocate_tensor_memory(gl.float32, [2, 128, 64], TensorMemoryLayout((128, 64), col_stride=1))
    for i in gl.static_range(2):
        tmem.index(i).store(to_registers(x + i, tmem.index(i)))
    store_matrix(out_ptr, gl.convert_layout(tmem.index(1).load(), MATRIX))
    REGISTERS: gl.constexpr = tmem.index(0).get_reg_layout()
    held = allocate_tensor_memory(
        gl.float32, [128, 64], TensorMemoryLayout((128, 64), col_stride=1), gl.convert_layout(x * 2.0, REGISTERS)
    )
    store_matrix(out_ptr + 128 * 64, gl.convert_layout(held.load(), MATRIX))


def test_tensor_memory_index_and_initial_value(blackwell_launch):
    x, out = normal(128, 64), poisoned(2, 128, 64)
    blackwell_launch(initial_value_and_index, (1,), x, out)
    same(out, torch.stack([x + 1, x * 2]))


@jit
def load_with_reduction(x_ptr, out_ptr, row_ptr):
    x = load_matrix(x_ptr, 128, 64, MATRIX)
    tmem = allocate_tensor_memory(gl.float32, [128, 64], TensorMemoryLayout((128, 64), col_stride=1))
    tmem.store(to_registers(x, tmem))
    value, most = tmem.load_max()
    _, least = tmem.load_min(abs=True)
    store_matrix(out_ptr, gl.convert_layout(value, MATRIX))
    gl.store(row_ptr + gl.arange(0, 128, ROW), gl.convert_layout(most, ROW))
    gl.store(row_ptr + 128 + gl.arange(0, 128, ROW), gl.convert_layout(least, ROW))


def test_load_with_reduction(blackwell_launch):
    x, out, rows = normal(128, 64), poisoned(128, 64), poisoned(2, 128)
    blackwell_launch(load_with_reduction, (1,), x, out, rows, target="sm_103a")
    same(out, x)
    same(rows, torch.stack([x.amax(1), x.abs().amin(1)]))


@jit
def multiply(a_desc, b_desc, out_ptr):
    a, b = load_tile(a_desc), load_tile(b_desc).permute((1, 0))
    acc = allocate_tensor_memory(gl.float32, [128, 64], TensorMemoryLayout((128, 64), col_stride=1))
    done = new_barrier(1)
    gl.barrier()
    tcgen05_mma(a, b, acc, use_acc=False)
    tcgen05_mma(a, b, acc, use_acc=True)
    tcgen05_commit(done)  # covers both
    mbarrier.wait(done, 0)
    store_matrix(out_ptr, gl.convert_layout(acc.load(), MATRIX))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32], ids=str
)
def test_mma_types_and_commit(blackwell_launch, dtype):
    k = 32 if dtype == torch.float32 else 64
    a, b = small_integers(128, k, dtype=dtype, seed=1), small_integers(64, k, dtype=dtype, seed=2)
    out = poisoned(128, 64)
    blackwell_launch(multiply, (1,), descriptor(a, [128, k]), descriptor(b, [64, k]), out)
    same(out, 2 * (a.float() @ b.float().T))


@jit
def mma_signals(a_desc, b_desc, out_ptr, wanted):
    """Barriers handed to the product itself, with predicates; a product that is switched off writes nothing."""
    a, b = load_tile(a_desc), load_tile(b_desc).permute((1, 0))
    acc = allocate_tensor_memory(gl.float32, [128, 64], TensorMemoryLayout((128, 64), col_stride=1))
    done, other = new_barrier(1), new_barrier(1)
    gl.barrier()
    tcgen05_mma(a, b, acc, use_acc=False, mbarriers=[done, other], mbarrier_preds=[True, wanted])
    mbarrier.wait(done, 0)
    mbarrier.wait(other, 0, pred=wanted)
    tcgen05_mma(a, b, acc, use_acc=True, pred=wanted, mbarriers=[done])
    mbarrier.wait(done, 1, pred=wanted)
    store_matrix(out_ptr, gl.convert_layout(acc.load(), MATRIX))


@pytest.mark.parametrize("wanted", [True, False])
def test_mma_with_barriers_and_predicates(blackwell_launch, wanted):
    a, b = small_integers(128, 64, dtype=torch.bfloat16, seed=1), small_integers(64, 64, dtype=torch.bfloat16, seed=2)
    out = poisoned(128, 64)
    blackwell_launch(mma_signals, (1,), descriptor(a, [128, 64]), descriptor(b, [64, 64]), out, wanted)
    same(out, (1 + wanted) * (a.float() @ b.float().T))


@jit
def p_in_tensor_memory(x_desc, out_ptr):
    """S = X Xᵀ; P, which aliases S, is the left operand of O = P X."""
    x = load_tile(x_desc)  # [128, 64]
    scores = allocate_tensor_memory(gl.float32, [128, 128], TMEM)
    out = allocate_tensor_memory(gl.float32, [128, 64], TensorMemoryLayout((128, 64), col_stride=1))
    done = new_barrier(1)
    gl.barrier()
    tcgen05_mma(x, x.permute((1, 0)), scores, use_acc=False, mbarriers=[done])
    mbarrier.wait(done, 0)
    s = scores.load()
    p = scores.slice(0, 64).reinterpret(gl.bfloat16, [128, 128], TensorMemoryLayout((128, 128), col_stride=1))
    p.store(to_registers((s * 0.125).to(gl.bfloat16), p))
    tcgen05_mma(p, x, out, use_acc=False, mbarriers=[done])
    mbarrier.wait(done, 1)
    store_matrix(out_ptr, gl.convert_layout(out.load(), MATRIX))


def test_left_operand_in_tensor_memory(blackwell_launch):
    x = small_integers(128, 64, dtype=torch.bfloat16, largest=1)
    out = poisoned(128, 64)
    blackwell_launch(p_in_tensor_memory, (1,), descriptor(x, [128, 64]), out)
    p = (x.float() @ x.float().T * 0.125).to(torch.bfloat16)
    same(out, p.float() @ x.float())


@jit
def mma_role(a, b, acc, ready, free, steps):
    for step in range(steps):
        mbarrier.wait(free, (step + 1) & 1)
        tcgen05_mma(a, b, acc, use_acc=False)
        tcgen05_commit(ready)


@jit
def epilogue_role(acc, ready, free, out_ptr, steps):
    total = gl.zeros([128, 64], gl.float32, acc.get_reg_layout())
    for step in range(steps):
        mbarrier.wait(ready, step & 1)
        total += acc.load() * (step + 1)
        mbarrier.arrive(free)
    store_matrix(out_ptr, gl.convert_layout(total, MATRIX))


@jit
def two_roles(a_desc, b_desc, out_ptr, steps):
    a, b = load_tile(a_desc), load_tile(b_desc).permute((1, 0))
    acc = allocate_tensor_memory(gl.float32, [128, 64], TensorMemoryLayout((128, 64), col_stride=1))
    ready, free = new_barrier(1), new_barrier(1)
    gl.barrier()
    gl.warp_specialize(
        [(epilogue_role, (acc, ready, free, out_ptr, steps)), (mma_role, (a, b, acc, ready, free, steps))], [1], [24]
    )


def test_accumulator_handed_between_roles(blackwell_launch):
    a, b = small_integers(128, 64, dtype=torch.bfloat16, seed=1), small_integers(64, 64, dtype=torch.bfloat16, seed=2)
    out = poisoned(128, 64)
    blackwell_launch(two_roles, (1,), descriptor(a, [128, 64]), descriptor(b, [64, 64]), out, 3)
    same(out, 6 * (a.float() @ b.float().T))


@jit
def copy_to_tensor_memory(x_desc, out_ptr):
    x = load_tile(x_desc)
    tmem = allocate_tensor_memory(gl.float32, [128, 32], TensorMemoryLayout((128, 32), col_stride=1))
    done = new_barrier(1)
    gl.barrier()
    tcgen05_copy(x, tmem)
    tcgen05_commit(done)
    mbarrier.wait(done, 0)
    store_matrix(out_ptr, gl.convert_layout(tmem.load(), MATRIX))


def test_copy_from_shared_to_tensor_memory(blackwell_launch):
    x, out = normal(128, 32), poisoned(128, 32)
    blackwell_launch(copy_to_tensor_memory, (1,), descriptor(x, [128, 32]), out)
    same(out, x)


@jit
def scaled(a_desc, b_desc, a_scale_ptr, b_scale_ptr, out_ptr, GROUPS: gl.constexpr, KIND: gl.constexpr):
    a, b = load_tile(a_desc), load_tile(b_desc).permute((1, 0))
    SCALES: gl.constexpr = blackwell.TensorMemoryScalesLayout()
    a_scale = allocate_tensor_memory(gl.uint8, [128, GROUPS], SCALES)
    b_scale = allocate_tensor_memory(gl.uint8, [64, GROUPS], SCALES)
    a_scale.store(gl.load(addresses(a_scale_ptr, 128, GROUPS, a_scale.get_reg_layout())))
    b_scale.store(gl.load(addresses(b_scale_ptr, 64, GROUPS, b_scale.get_reg_layout())))
    acc = allocate_tensor_memory(gl.float32, [128, 64], TensorMemoryLayout((128, 64), col_stride=1))
    done = new_barrier(1)
    gl.barrier()
    tcgen05_mma_scaled(a, b, acc, a_scale, b_scale, KIND, KIND, use_acc=False, mbarriers=[done])
    mbarrier.wait(done, 0)
    store_matrix(out_ptr, gl.convert_layout(acc.load(), MATRIX))


def test_scaled_mma(blackwell_launch):
    """mxfp8: a power of two for every 32 elements along K, as an exponent with bias 127."""
    a, b = (small_integers(n, 128, dtype=torch.float8_e4m3fn, seed=n) for n in (128, 64))
    scales = [small_integers(n, 4, dtype=torch.int32, seed=n + 1, largest=3) for n in (128, 64)]
    out = poisoned(128, 64)
    exponents = [(s + 127).to(torch.uint8) for s in scales]
    blackwell_launch(
        scaled, (1,), descriptor(a, [128, 128]), descriptor(b, [64, 128]), *exponents, out, GROUPS=4, KIND="e4m3"
    )
    wide = [t.float() * 2.0 ** s.float().repeat_interleave(32, 1) for t, s in zip((a, b), scales, strict=True)]
    same(out, wide[0] @ wide[1].T)


def test_scaled_mma_of_fp4(blackwell_launch):
    """mxfp4: two e2m1 values to a byte, the lower half first."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = [small_integers(n, 256, dtype=torch.int32, seed=n, largest=7) + 8 for n in (128, 64)]
    bytes_ = [(c[:, 0::2] | c[:, 1::2] << 4).to(torch.uint8) for c in codes]
    scales = [small_integers(n, 8, dtype=torch.int32, seed=n + 1, largest=3) for n in (128, 64)]
    out = poisoned(128, 64)
    exponents = [(s + 127).to(torch.uint8) for s in scales]
    descriptors = (descriptor(x, [len(x), 128]) for x in bytes_)
    blackwell_launch(scaled, (1,), *descriptors, *exponents, out, GROUPS=8, KIND="e2m1")
    wide = [values[c] * 2.0 ** s.float().repeat_interleave(32, 1) for c, s in zip(codes, scales, strict=True)]
    same(out, wide[0] @ wide[1].T)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@jit
def ones_as_scales(ROWS: gl.constexpr, GROUPS: gl.constexpr):
    scale = allocate_tensor_memory(gl.uint8, [ROWS, GROUPS], blackwell.TensorMemoryScalesLayout())
    scale.store(gl.full([ROWS, GROUPS], 127, gl.uint8, scale.get_reg_layout()))
    return scale


@jit
def mixed_scaled(a_desc, b_desc, out_ptr):
    """fp8 times fp4: both in containers of a byte, so that TMA spreads the fp4 values."""
    a, b = load_tile(a_desc), load_tile(b_desc).permute((1, 0))
    acc = allocate_tensor_memory(gl.float32, [128, 64], TensorMemoryLayout((128, 64), col_stride=1))
    done = new_barrier(1)
    gl.barrier()
    tcgen05_mma_scaled(
        a, b, acc, ones_as_scales(128, 4), ones_as_scales(64, 4), "e4m3", "e2m1", use_acc=False, mbarriers=[done]
    )
    mbarrier.wait(done, 0)
    store_matrix(out_ptr, gl.convert_layout(acc.load(), MATRIX))


@pytest.mark.parametrize("mode", ["fast", "lowered"])
def test_scaled_mma_of_fp8_and_padded_fp4(blackwell_launch, mode):
    a, codes = small_integers(128, 128, dtype=torch.float8_e4m3fn), small_integers(64, 128, dtype=torch.int32) + 8
    b = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.uint8, fp4_padded=True)
    out = poisoned(128, 64)
    b_desc = TensorDescriptor.from_tensor(b, [64, 64], layout)
    blackwell_launch(mixed_scaled, (1,), descriptor(a, [128, 128]), b_desc, out, mode=mode)
    same(out, a.float() @ E2M1[codes].T)


@jit
def left_operand_padded(a_ptr, b_desc, out_ptr):
    """fp4 in tensor memory beside fp8: a byte for each value, whose bits 2 to 5 count."""
    b = load_tile(b_desc).permute((1, 0))
    bytes_ = allocate_tensor_memory(gl.uint8, [128, 128], TensorMemoryLayout((128, 128), col_stride=1))
    bytes_.store(gl.load(addresses(a_ptr, 128, 128, bytes_.get_reg_layout())))
    a = bytes_.reinterpret(gl.uint8, [128, 64], TensorMemoryLayout((128, 64), col_stride=1, fp4_padded=True))
    acc = allocate_tensor_memory(gl.float32, [128, 64], TensorMemoryLayout((128, 64), col_stride=1))
    done = new_barrier(1)
    gl.barrier()
    tcgen05_mma_scaled(
        a, b, acc, ones_as_scales(128, 4), ones_as_scales(64, 4), "e2m1", "e4m3", use_acc=False, mbarriers=[done]
    )
    mbarrier.wait(done, 0)
    store_matrix(out_ptr, gl.convert_layout(acc.load(), MATRIX))


def test_scaled_mma_of_padded_fp4_in_tensor_memory(blackwell_launch):
    codes, b = small_integers(128, 128, dtype=torch.int32) + 8, small_integers(64, 128, dtype=torch.float8_e4m3fn)
    a = (codes << 2 | 0xC3).to(torch.uint8)  # the other bits do not count
    out = poisoned(128, 64)
    blackwell_launch(left_operand_padded, (1,), a, descriptor(b, [64, 128]), out)
    same(out, E2M1[codes] @ b.float().T)


@jit
def packed(x_ptr, y_ptr, out_ptr):
    x, y = load_matrix(x_ptr, 32, 32, MATRIX), load_matrix(y_ptr, 32, 32, MATRIX)
    store_matrix(out_ptr, blackwell.add2(x, y))
    store_matrix(out_ptr + 1024, blackwell.sub2(x, y))
    store_matrix(out_ptr + 2048, blackwell.mul2(x, y))
    store_matrix(out_ptr + 3072, blackwell.fma2(x, y, x))


def test_packed_arithmetic(blackwell_launch):
    x, y = normal(32, 32, seed=1), normal(32, 32, seed=2)
    out = poisoned(4, 32, 32)
    blackwell_launch(packed, (1,), x, y, out)
    fused = (x.double() * y.double() + x.double()).float()
    same(out, torch.stack([x + y, x - y, x * y, fused]))


@jit
def steal_work(out_ptr, launched_ptr):
    """A program does its own item, then those of the programs that it cancels before they start."""
    response = gl.allocate_shared_memory(gl.int64, [2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    answered = new_barrier(1)
    gl.barrier()
    item = gl.program_id(0)
    gl.store(launched_ptr + item, 1)
    phase = 0
    going = gl.to_tensor(True)
    while going:
        gl.store(out_ptr + item, item * 10)
        mbarrier.expect(answered, 16)
        clc.try_cancel(response, answered)
        mbarrier.wait(answered, phase)
        result = clc.load_result(response)
        phase ^= 1
        going = result.is_canceled()
        item = gl.where(going, result.program_id(0), item)
        fence_async_shared()
        gl.barrier()


def test_cluster_launch_control(blackwell_launch):
    out, launched = poisoned(40, dtype=torch.int32), torch.zeros(40, dtype=torch.int32)
    blackwell_launch(steal_work, (40,), out, launched)
    same(out, 10 * torch.arange(40, dtype=torch.int32))  # every item once, by whoever came first
    assert 1 <= int(launched.sum()) <= 40
