"""Hopper's warpgroup products: types, operands in registers and shared memory, and the queue of asynchronous ones."""

import pytest
import torch

from gluon_attn.kernels.hopper.inline_asm import wait_apart
from tests.compat import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    jit,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from tests.gluon_cpu.layouts import MATRIX
from tests.gluon_cpu.support import descriptor, load_tile, normal, poisoned, same, small_integers, store_matrix


@jit
def multiply(a_desc, b_desc, out_ptr, B_TRANSPOSED: gl.constexpr):
    """C [64, N] = A [64, K] B [K, N]; B may come as [N, K]."""
    a, b = load_tile(a_desc), load_tile(b_desc)
    if B_TRANSPOSED:
        b = b.permute((1, 0))
    K_STEP: gl.constexpr = 256 // a.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, b.shape[1], K_STEP])
    acc = gl.zeros([64, b.shape[1]], out_ptr.dtype.element_ty, LAYOUT)
    acc = warpgroup_mma(a, b, acc, use_acc=False)
    store_matrix(out_ptr, acc)


def whole(*tensors: torch.Tensor) -> list[TensorDescriptor]:
    """A descriptor of each tensor, all of it one box."""
    return [descriptor(t, list(t.shape)) for t in tensors]


def exact_case(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A [64, 64] and B as [32, 64], integers, so that the order of the sums does not matter."""
    return small_integers(64, 64, dtype=dtype, seed=1), small_integers(32, 64, dtype=dtype, seed=2)


@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float8_e4m3fn, torch.float32),
        (torch.float8_e5m2, torch.float32),
        (torch.int8, torch.int32),
    ],
    ids=str,
)
def test_types(launch, dtype, result):
    a, b = exact_case(dtype)
    out = poisoned(64, 32, dtype=result)
    launch(multiply, (1,), *whole(a, b), out, B_TRANSPOSED=True)
    same(out.float(), a.float() @ b.float().T)


def test_b_by_rows(launch):
    a, b = exact_case(torch.bfloat16)
    b = b.T.contiguous()
    out = poisoned(64, 32)
    launch(multiply, (1,), *whole(a, b), out, B_TRANSPOSED=False)
    same(out, a.float() @ b.float())


def test_tf32_drops_mantissa_bits(launch):
    """10 bits of mantissa are left: within its error, and not as good as fp32."""
    a, b = normal(64, 32, seed=1), normal(32, 32, seed=2)
    out = poisoned(64, 32)
    launch(multiply, (1,), *whole(a, b), out, B_TRANSPOSED=True)
    error = (out.double() - a.double() @ b.double().T).abs().max()
    assert 1e-5 < error < 32 * 2.0**-10 * float(a.abs().max() * b.abs().max())
    integers = small_integers(64, 32, seed=1), small_integers(32, 32, seed=2)
    launch(multiply, (1,), *whole(*integers), out, B_TRANSPOSED=True)
    same(out, integers[0] @ integers[1].T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_accumulate_in_fp32(launch, dtype):
    a, b = normal(64, 64, dtype=dtype, seed=1), normal(32, 64, dtype=dtype, seed=2)
    out = poisoned(64, 32)
    launch(multiply, (1,), *whole(a, b), out, B_TRANSPOSED=True)
    torch.testing.assert_close(out.double(), a.double() @ b.double().T, rtol=0, atol=1e-4)


@jit
def register_operand(a_desc, b_desc, out_ptr):
    """A from registers, in the layout of a dot operand; C += twice."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    a = load_tile(a_desc).load(gl.DotOperandLayout(0, ACC, 2))
    b = load_tile(b_desc).permute((1, 0))
    acc = gl.full([64, 32], 100.0, gl.float32, ACC)
    acc = warpgroup_mma(a, b, acc)
    acc = warpgroup_mma(a * 2, b, acc)
    store_matrix(out_ptr, acc)


def test_left_operand_in_registers(launch):
    a, b = exact_case(torch.bfloat16)
    out = poisoned(64, 32)
    launch(register_operand, (1,), *whole(a, b), out)
    same(out, 3 * (a.float() @ b.float().T) + 100)


@jit
def queue(a_desc, b_desc, out_ptr, INLINE: gl.constexpr):
    """Three products in flight; a wait for all but n leaves the n newest running. INLINE: waits by inline assembly."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    a, b = load_tile(a_desc), load_tile(b_desc).permute((1, 0))
    first = warpgroup_mma(a, b, gl.zeros([64, 32], gl.float32, ACC), use_acc=False, is_async=True)
    second = warpgroup_mma(a, b, gl.full([64, 32], 1.0, gl.float32, ACC), is_async=True)
    third = warpgroup_mma(a, b, gl.full([64, 32], 2.0, gl.float32, ACC), is_async=True)
    if INLINE:
        first = wait_apart(first, 2)
    else:
        first = warpgroup_mma_wait(2, deps=[first])
    store_matrix(out_ptr, first)
    if INLINE:
        second = wait_apart(second, 1)
        third = wait_apart(third, 0)
    else:
        second, third = warpgroup_mma_wait(0, deps=[second, third])
    store_matrix(out_ptr + 2048, second)
    store_matrix(out_ptr + 4096, third)


@pytest.mark.parametrize("inline", [False, True])
def test_queue_completes_in_order(launch, inline):
    a, b = exact_case(torch.bfloat16)
    out = poisoned(3, 64, 32)
    launch(queue, (1,), *whole(a, b), out, INLINE=inline)
    product = a.float() @ b.float().T
    same(out, torch.stack([product, product + 1, product + 2]))


@jit
def from_an_accumulator(a_desc, b_desc, out_ptr):
    """An accumulator made of a tensor, so that a loop may start with it."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    a, b = load_tile(a_desc), load_tile(b_desc).permute((1, 0))
    acc = warpgroup_mma_init(gl.full([64, 32], 3.0, gl.float32, ACC))
    for _ in range(2):
        acc = warpgroup_mma(a, b, acc, is_async=True)
    store_matrix(out_ptr, warpgroup_mma_wait(0, deps=[acc]))


def test_accumulator_of_a_loop(launch):
    a, b = exact_case(torch.bfloat16)
    out = poisoned(64, 32)
    launch(from_an_accumulator, (1,), *whole(a, b), out)
    same(out, 2 * (a.float() @ b.float().T) + 3)


@jit
def chained(a_desc, b_desc, out_ptr, steps):
    """An asynchronous accumulator carried through a loop, one product left in flight at each step."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    a, b = load_tile(a_desc), load_tile(b_desc).permute((1, 0))
    acc = gl.zeros([64, 32], gl.float32, ACC)
    for step in range(steps):
        acc = warpgroup_mma(a, b, acc, use_acc=step != 0, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    store_matrix(out_ptr, acc)


@pytest.mark.parametrize("steps", [1, 3])
def test_use_acc_decided_at_run_time(launch, steps):
    a, b = exact_case(torch.bfloat16)
    out = poisoned(64, 32)
    launch(chained, (1,), *whole(a, b), out, steps)
    same(out, steps * (a.float() @ b.float().T))


@jit
def operand_written_by_the_role(x_desc, out_ptr):
    """The probabilities' way: a product's result, converted, stored in shared memory, the operand of the next."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    x = load_tile(x_desc)
    scores = warpgroup_mma(x, x.permute((1, 0)), gl.zeros([64, 64], gl.float32, ACC), use_acc=False)
    p = gl.allocate_shared_memory(gl.bfloat16, [64, 64], x.layout)
    p.store((scores * 0.125).to(gl.bfloat16))
    fence_async_shared()
    store_matrix(out_ptr, warpgroup_mma(p, x, gl.zeros([64, 64], gl.float32, ACC), use_acc=False))


def test_operand_stored_by_the_role_and_fenced(launch):
    x = small_integers(64, 64, dtype=torch.bfloat16, largest=1)
    out = poisoned(64, 64)
    launch(operand_written_by_the_role, (1,), *whole(x), out)
    p = ((x.float() @ x.float().T) * 0.125).to(torch.bfloat16)
    same(out, p.float() @ x.float())


@jit
def eight_warps(a_desc, b_desc, out_ptr):
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 32, 16])
    a, b = load_tile(a_desc), load_tile(b_desc).permute((1, 0))
    store_matrix(out_ptr, warpgroup_mma(a, b, gl.zeros([128, 32], gl.float32, ACC)))


def test_two_warpgroups_of_one_role(launch):
    a, b = small_integers(128, 64, dtype=torch.bfloat16), small_integers(32, 64, dtype=torch.bfloat16, seed=2)
    out = poisoned(128, 32)
    launch(eight_warps, (1,), *whole(a, b), out, num_warps=8)
    same(out, a.float() @ b.float().T)


@jit
def sharded(a_desc, b_desc, out_ptr):
    """Rows of A and C over two CTAs, B in both."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16], [[1, 0]])
    a, b = load_tile(a_desc), load_tile(b_desc).permute((1, 0))
    store_matrix(out_ptr, warpgroup_mma(a, b, gl.zeros([128, 32], gl.float32, ACC)))


def test_two_ctas_each_with_its_rows(launch):
    a, b = small_integers(128, 64, dtype=torch.bfloat16), small_integers(32, 64, dtype=torch.bfloat16, seed=2)
    out = poisoned(128, 32)
    descriptors = descriptor(a, [128, 64], cga=[[1, 0]]), descriptor(b, [32, 64], cga=[[0, 0]])
    launch(sharded, (1,), *descriptors, out, num_ctas=2)
    same(out, a.float() @ b.float().T)


@jit
def mma_v2_kernel(a_ptr, b_ptr, out_ptr):
    """The older product, from registers, which Hopper also has."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    rows = gl.arange(0, 64, gl.SliceLayout(1, MATRIX))
    columns = gl.arange(0, 32, gl.SliceLayout(0, MATRIX))
    k_rows = gl.arange(0, 32, gl.SliceLayout(1, MATRIX))
    a = gl.load(a_ptr + rows[:, None] * 32 + columns[None, :])
    b = gl.load(b_ptr + k_rows[:, None] * 32 + columns[None, :])
    a = gl.convert_layout(a, gl.DotOperandLayout(0, ACC, 2))
    b = gl.convert_layout(b, gl.DotOperandLayout(1, ACC, 2))
    acc = gl.full([64, 32], 5.0, gl.float32, ACC)
    store_matrix(out_ptr, gl.nvidia.hopper.mma_v2(a, b, acc))


def test_mma_v2(launch):
    a, b = small_integers(64, 32, dtype=torch.bfloat16, seed=1), small_integers(32, 32, dtype=torch.bfloat16, seed=2)
    out = poisoned(64, 32)
    launch(mma_v2_kernel, (1,), a, b, out)
    same(out, a.float() @ b.float() + 5)
