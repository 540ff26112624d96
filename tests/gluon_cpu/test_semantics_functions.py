"""Operations under their names: as functions of `gl`, as methods of a tensor, as operators with a number in front."""

import numpy as np
import pytest
import torch

import gluon_cpu
from tests.compat import MBarrierLayout, blackwell, constexpr_function, fpsan, gl, jit
from tests.gluon_cpu.layouts import MATRIX, MATRIX_COLUMN_HALVES, MATRIX_HALVES, PLAIN, ROW
from tests.gluon_cpu.support import load_matrix, normal, poisoned, same, small_integers, store_matrix

N = 128


@jit
def put(out_ptr, row, value):
    gl.store(out_ptr + row * 128 + gl.arange(0, 128, ROW), value)


@jit
def named_arithmetic(x_ptr, y_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    x, y = gl.load(x_ptr + i), gl.load(y_ptr + i)
    put(out_ptr, 0, gl.add(x, y))
    put(out_ptr, 1, gl.sub(x, y))
    put(out_ptr, 2, gl.mul(x, y))
    put(out_ptr, 3, gl.cast(gl.cast(x, gl.int32), gl.float32))
    put(out_ptr, 4, x.cast(gl.bfloat16).to(gl.float32))
    put(out_ptr, 5, gl.fdiv(x, y))
    put(out_ptr, 6, gl.div_rn(x, y))


def test_arithmetic_by_name(launch):
    x, y = normal(N, seed=1) * 10, normal(N, seed=2)
    out = poisoned(7, N)
    launch(named_arithmetic, (1,), x, y, out)
    same(out, torch.stack([x + y, x - y, x * y, x.trunc(), x.to(torch.bfloat16).float(), x / y, x / y]))


@jit
def number_first(x_ptr, out_ptr):
    seven: gl.constexpr = 7
    x = gl.load(x_ptr + gl.arange(0, 128, ROW))
    put(out_ptr, 0, 1000 + x)
    put(out_ptr, 1, 1000 - x)
    put(out_ptr, 2, 3 * x)
    put(out_ptr, 3, 1000 // x)
    put(out_ptr, 4, 1000 % x)
    put(out_ptr, 5, 12 & x)
    put(out_ptr, 6, 12 | x)
    put(out_ptr, 7, 12 ^ x)
    put(out_ptr, 8, 12 << (x & 7))
    put(out_ptr, 9, -1000 >> (x & 7))
    put(out_ptr, 10, (seven < x).to(gl.int32))
    put(out_ptr, 11, (seven <= x).to(gl.int32))
    put(out_ptr, 12, (seven > x).to(gl.int32))
    put(out_ptr, 13, (seven >= x).to(gl.int32))
    put(out_ptr, 14, (seven == x).to(gl.int32))
    put(out_ptr, 15, (seven != x).to(gl.int32))
    put(out_ptr, 16, (1 / x.to(gl.float32) * 1024).to(gl.int32))


def test_operators_with_a_number_in_front(launch):
    x = torch.arange(1, N + 1, dtype=torch.int32)
    out = poisoned(17, N, dtype=torch.int32)
    launch(number_first, (1,), x, out)
    want = [
        1000 + x, 1000 - x, 3 * x, 1000 // x, 1000 % x, 12 & x, 12 | x, 12 ^ x, 12 << (x & 7), -1000 >> (x & 7),
        x > 7, x >= 7, x < 7, x <= 7, x == 7, x != 7, 1 / x.float() * 1024,
    ]  # fmt: skip
    same(out, torch.stack([w.to(torch.int32) for w in want]))


@jit
def methods(x_ptr, out_ptr):
    x = gl.load(x_ptr + gl.arange(0, 128, ROW))
    put(out_ptr, 0, x.exp())
    put(out_ptr, 1, x.exp2())
    put(out_ptr, 2, x.log())
    put(out_ptr, 3, x.log2())
    put(out_ptr, 4, x.sin())
    put(out_ptr, 5, x.cos())
    put(out_ptr, 6, x.sqrt())
    put(out_ptr, 7, x.rsqrt())
    put(out_ptr, 8, x.erf())
    put(out_ptr, 9, x.abs())
    put(out_ptr, 10, x.floor())
    put(out_ptr, 11, x.ceil())
    put(out_ptr, 12, x.sqrt_rn())
    put(out_ptr, 13, x.sigmoid())


def test_functions_as_methods(launch):
    x = normal(N).abs() + 0.25
    out = poisoned(14, N)
    launch(methods, (1,), x, out)
    want = [
        x.exp(), x.exp2(), x.log(), x.log2(), x.sin(), x.cos(), x.sqrt(), x.rsqrt(), x.erf(), x.abs(), x.floor(),
        x.ceil(), x.sqrt(), x.sigmoid(),
    ]  # fmt: skip
    torch.testing.assert_close(out, torch.stack(want), rtol=1e-6, atol=1e-6)


@jit
def integer_methods(x_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    x = gl.load(x_ptr + i)
    put(out_ptr, 0, x.cdiv(7))
    put(out_ptr, 1, gl.cdiv(x, 7))
    put(out_ptr, 2, (x > 10).logical_and(x < 20).to(gl.int32))
    put(out_ptr, 3, (x < 10).logical_or(x > 20).to(gl.int32))
    put(out_ptr, 4, gl.multiple_of(gl.max_contiguous(gl.max_constancy(x, [1]), [1]), [1]))


def test_integer_methods_and_hints(launch):
    x = torch.arange(N, dtype=torch.int32)
    out = poisoned(5, N, dtype=torch.int32)
    launch(integer_methods, (1,), x, out)
    want = [(x + 6) // 7, (x + 6) // 7, (x > 10) & (x < 20), (x < 10) | (x > 20), x]
    same(out, torch.stack([w.to(torch.int32) for w in want]))


@jit
def reductions(x_ptr, out_ptr):
    x = load_matrix(x_ptr, 32, 32, MATRIX)
    i = gl.arange(0, 32, gl.SliceLayout(1, MATRIX))
    gl.store(out_ptr + i, x.max(1))
    gl.store(out_ptr + 32 + i, x.min(1))
    gl.store(out_ptr + 64 + i, x.sum(1))
    gl.store(out_ptr + 96 + i, gl.xor_sum(x, 1))
    gl.store(out_ptr + 128 + i, x.xor_sum(1))
    gl.store(out_ptr + 160 + i, gl.reduce_or(x, 1))
    gl.store(out_ptr + 192 + i, x.reduce_or(1))
    gl.store(out_ptr + 224 + i, gl.min(x, 1))
    gl.store(out_ptr + 256 + i, x.reduce(1, smaller))


@jit
def smaller(a, b):
    return gl.minimum(a, b)


def test_reductions_as_methods(launch):
    x = small_integers(32, 32, dtype=torch.int32, largest=1000)
    out = poisoned(9, 32, dtype=torch.int32)
    launch(reductions, (1,), x, out)
    xors, ors = torch.zeros(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    for column in x.T:
        xors, ors = xors ^ column, ors | column
    largest, smallest = x.max(1).values, x.min(1).values
    want = [largest, smallest, x.sum(1), xors, xors, ors, ors, smallest, smallest]
    same(out, torch.stack([w.to(torch.int32) for w in want]))


@jit
def scans(x_ptr, out_ptr):
    x = load_matrix(x_ptr, 32, 32, MATRIX)
    store_matrix(out_ptr, x.cumsum(1))
    store_matrix(out_ptr + 1024, x.cumprod(0))
    store_matrix(out_ptr + 2048, x.associative_scan(1, smaller))


def test_scans_as_methods(launch):
    x = small_integers(32, 32, largest=2)
    out = poisoned(3, 32, 32)
    launch(scans, (1,), x, out)
    same(out, torch.stack([x.cumsum(1), x.cumprod(0), x.cummin(1).values]))


@jit
def shapes(x_ptr, out_ptr, index_ptr):
    x = load_matrix(x_ptr, 32, 32, MATRIX)
    store_matrix(out_ptr, gl.convert_layout(gl.permute(x, (1, 0)), MATRIX))
    store_matrix(out_ptr + 1024, gl.convert_layout(x.trans(1, 0), MATRIX))
    store_matrix(out_ptr + 2048, gl.convert_layout(x.permute((1, 0)), MATRIX))
    store_matrix(out_ptr + 3072, gl.convert_layout(gl.ravel(x).reshape([32, 32]), MATRIX))
    store_matrix(out_ptr + 4096, gl.convert_layout(gl.reshape(x.ravel(), [32, 32]), MATRIX))
    column = gl.load(x_ptr + 32 * gl.arange(0, 32, gl.SliceLayout(1, MATRIX)))
    store_matrix(out_ptr + 5120, column.expand_dims(1).broadcast_to([32, 32]))
    wide, _ = gl.broadcast(gl.expand_dims(column, 1), x)
    store_matrix(out_ptr + 6144, wide)
    a, b = gl.join(x, x + 1.0).split()
    store_matrix(out_ptr + 7168, gl.convert_layout(a * b, MATRIX))
    store_matrix(out_ptr + 8192, x.gather(load_matrix(index_ptr, 32, 32, MATRIX), 1))
    store_matrix(out_ptr + 9216, gl.convert_layout(x.T, MATRIX))


def test_shapes_by_name_and_as_methods(launch):
    x = normal(32, 32)
    index = torch.randint(0, 32, (32, 32), generator=torch.Generator().manual_seed(0))
    out = poisoned(10, 32, 32)
    launch(shapes, (1,), x, out, index.to(torch.int32))
    column = x[:, :1].expand(32, 32)
    same(out, torch.stack([x.T, x.T, x.T, x, x, column, column, x * (x + 1), x.gather(1, index), x.T]))


@jit
def like(x_ptr, out_ptr):
    x = gl.load(x_ptr + gl.arange(0, 128, ROW))
    put(out_ptr, 0, gl.full_like(x, 3.0) + x)
    put(out_ptr, 1, gl.zeros_like(x) + x)
    put(out_ptr, 2, gl.full_like(x, 7, dtype=gl.int32).to(gl.float32))
    put(out_ptr, 3, gl.expect_zero(x, x > 100.0))
    put(out_ptr, 4, gl.clamp(x, -0.5, 0.5))
    put(out_ptr, 5, gl.num_warps() + 10 * gl.num_ctas() + gl.zeros_like(x))


def test_tensors_like_another_and_what_changes_nothing(launch):
    x, out = normal(N), poisoned(6, N)
    launch(like, (1,), x, out)
    same(out, torch.stack([x + 3, x, torch.full_like(x, 7), x, x.clamp(-0.5, 0.5), torch.full_like(x, 14)]))


@jit
def compile_time(x_ptr, out_ptr):
    gl.static_assert(ROW.value.rank == 1, "one dimension")
    gl.static_print("compiled with", gl.num_warps())
    LINEAR: gl.constexpr = gl.to_linear_layout(ROW, [128])
    BARRIERS: gl.constexpr = MBarrierLayout.multicta(1)
    tile = gl.allocate_shared_memory(gl.float32, [128], PLAIN)
    x = gl.load(x_ptr + gl.arange(0, 128, ROW))
    CONFLICTS: gl.constexpr = gl.bank_conflicts(x.type, tile.type)
    gl.static_assert(CONFLICTS == 0)
    gl.static_assert(BARRIERS.order == [0])
    tile.store(x)
    put(out_ptr, 0, gl.convert_layout(tile.load(LINEAR), ROW, assert_trivial=True))


def test_compile_time_operations(launch, capfd):
    x, out = normal(N), poisoned(1, N)
    launch(compile_time, (1,), x, out)
    same(out[0], x)


@jit
def shared_atomics(index_ptr, value_ptr, out_ptr):
    i, slots = gl.arange(0, 128, ROW), gl.arange(0, 32, ROW)
    index, value = gl.load(index_ptr + i), gl.load(value_ptr + i)
    START: gl.constexpr = 0x0F0F0F0F
    cells = gl.allocate_shared_memory(gl.int32, [6, 32], PLAIN)
    for k in gl.static_range(6):
        cells.index(k).store(gl.full([32], START, gl.int32, ROW))
    gl.barrier()
    cells.index(0).atomic_scatter_and(value, index, axis=0)
    cells.index(1).atomic_scatter_or(value, index, axis=0)
    cells.index(2).atomic_scatter_xor(value, index, axis=0)
    cells.index(3).atomic_scatter_min(value, index, axis=0)
    cells.index(4).atomic_scatter_max(value, index, axis=0)
    old = cells.index(5).atomic_scatter_xchg(value, index, axis=0, mask=i < 32)
    gl.barrier()
    for k in gl.static_range(6):
        gl.store(out_ptr + k * 32 + slots, cells.index(k).load(ROW))
    gl.store(out_ptr + 192 + i, old, mask=i < 32)


@pytest.mark.parametrize("mode", ["fast", "lowered"])
def test_every_shared_atomic(launch, mode):
    index = torch.cat([torch.randperm(32), torch.randint(0, 32, (96,))]).to(torch.int32)
    value = torch.randint(-(2**31), 2**31, (N,)).to(torch.int32)
    out = poisoned(224, dtype=torch.int32)
    launch(shared_atomics, (1,), index, value, out, mode=mode)
    start = 0x0F0F0F0F
    want = torch.full((6, 32), start, dtype=torch.int32)
    for n, (i, v) in enumerate(zip(index.tolist(), value.tolist(), strict=True)):
        want[0, i] &= v
        want[1, i] |= v
        want[2, i] ^= v
        want[3, i] = min(int(want[3, i]), v)
        want[4, i] = max(int(want[4, i]), v)
        want[5, i] = v if n < 32 else want[5, i]
    same(out[:192].reshape(6, 32), want)
    same(out[192:], torch.full((32,), start, dtype=torch.int32))


@jit
def atomic_methods(cells_ptr, old_ptr):
    i = gl.arange(0, 128, ROW)
    cells = cells_ptr + i
    put(old_ptr, 0, cells.atomic_add(1))
    put(old_ptr, 1, (cells + 128).atomic_and(i))
    put(old_ptr, 2, (cells + 256).atomic_or(i))
    put(old_ptr, 3, (cells + 384).atomic_xor(i))
    put(old_ptr, 4, (cells + 512).atomic_max(i))
    put(old_ptr, 5, (cells + 640).atomic_min(i))
    put(old_ptr, 6, (cells + 768).atomic_xchg(i))
    put(old_ptr, 7, (cells + 896).atomic_cas(gl.full_like(i, 64), i))
    (cells + 1024).atomic_store(i)
    put(old_ptr, 8, (cells + 1152).atomic_load())


def test_atomics_as_methods(launch):
    i = torch.arange(N, dtype=torch.int32)
    cells = torch.full((10, N), 64, dtype=torch.int32)
    old = poisoned(9, N, dtype=torch.int32)
    launch(atomic_methods, (1,), cells, old)
    c = torch.full((N,), 64, dtype=torch.int32)
    same(cells, torch.stack([c + 1, c & i, c | i, c ^ i, c.maximum(i), c.minimum(i), i, i, i, c]))
    same(old, c.expand(9, N).contiguous())


@jit
def pointer_method(out_ptr):
    i = gl.arange(0, 128, ROW)
    (out_ptr + i).store(i * 2)


def test_a_store_as_a_method(launch):
    out = poisoned(N, dtype=torch.int32)
    launch(pointer_method, (1,), out)
    same(out, 2 * torch.arange(N, dtype=torch.int32))


@jit
def packed_extremes(x_ptr, y_ptr, out_ptr):
    x, y = load_matrix(x_ptr, 32, 32, MATRIX), load_matrix(y_ptr, 32, 32, MATRIX)
    store_matrix(out_ptr, blackwell.min2(x, y))
    store_matrix(out_ptr + 1024, blackwell.max2(x, y))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_packed_minimum_and_maximum(blackwell_launch, dtype):
    x, y = normal(32, 32, dtype=dtype, seed=1), normal(32, 32, dtype=dtype, seed=2)
    out = poisoned(2, 32, 32, dtype=dtype)
    blackwell_launch(packed_extremes, (1,), x, y, out)
    same(out, torch.stack([x.minimum(y), x.maximum(y)]))


@jit
def upper_halves(x_ptr, y_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    x, y = gl.load(x_ptr + i).to(gl.uint64, bitcast=True), gl.load(y_ptr + i).to(gl.uint64, bitcast=True)
    gl.store(out_ptr + i, gl.umulhi(x, y).to(gl.int64, bitcast=True))


def test_umulhi_of_64_bits(launch):
    bits = np.random.default_rng(0).integers(0, 2**64, (2, N), dtype=np.uint64)
    bits[:, :2] = [[2**64 - 1, 0], [2**64 - 1, 5]]
    out = poisoned(N, dtype=torch.int64)
    launch(upper_halves, (1,), *(torch.from_numpy(b.view(np.int64)) for b in bits), out)
    want = [(int(a) * int(b)) >> 64 for a, b in bits.T]
    same(out, torch.from_numpy(np.array(want, np.uint64).view(np.int64)))


@jit
def fp4_along(x_ptr, out_ptr, AXIS: gl.constexpr, DTYPE: gl.constexpr, LAYOUT: gl.constexpr = MATRIX):
    x = load_matrix(x_ptr, 32, 32, LAYOUT)
    y = gl.fp4_to_fp(x, DTYPE, AXIS)
    store_matrix(out_ptr, gl.convert_layout(y, LAYOUT))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("name", "dtype"), [(gl.float16, torch.float16), (gl.bfloat16, torch.bfloat16)], ids=str)
def test_fp4_to_fp(launch, axis, name, dtype):
    """Two e2m1 values to a byte, the lower half first."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).to(dtype)
    x = torch.randint(0, 256, (32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    out = poisoned(*((64, 32) if axis == 0 else (32, 64)), dtype=dtype)
    low, high = values[(x & 15).int()], values[(x >> 4).int()]
    want = torch.stack([low, high], axis + 1).flatten(axis, axis + 1)
    launch(fp4_along, (1,), x, out, AXIS=axis, DTYPE=name)
    same(out, want)
    # Along rows that are split the compiler refuses it, and along the others of a tensor so split.
    for halves in (MATRIX_HALVES, MATRIX_COLUMN_HALVES) if axis == 1 else ():
        out.zero_()
        launch(fp4_along, (1,), x, out, AXIS=axis, DTYPE=name, LAYOUT=halves, num_ctas=2)
        same(out, want)


@jit
def towards_zero(x_ptr, out_ptr, DTYPE: gl.constexpr):
    i = gl.arange(0, 128, ROW)
    gl.store(out_ptr + i, gl.load(x_ptr + i).to(DTYPE, fp_downcast_rounding="rtz"))


@pytest.mark.parametrize(("name", "dtype"), [(gl.float16, torch.float16), (gl.bfloat16, torch.bfloat16)], ids=str)
def test_rounding_towards_zero(launch, name, dtype):
    x = torch.cat([normal(120), torch.tensor([0.0, -0.0, 1e30, -1e30, 3.4e38, float("inf"), 1e-40, 1e-7])])
    out = poisoned(N, dtype=dtype)
    launch(towards_zero, (1,), x, out, DTYPE=name)
    if dtype == torch.bfloat16:
        want = (x.view(torch.int32) & -65536).view(torch.float32).to(dtype)  # the lower half cut off
    else:
        near = x.to(dtype)
        want = torch.where(near.double().abs() > x.double().abs(), near.nextafter(torch.zeros_like(near)), near)
    same(out, want)


@constexpr_function
def twice_each(outputs, inputs):
    return "\n".join(f"add.f32 {to}, {x}, {x};" for to, x in zip(outputs[0], inputs[0], strict=True))


gluon_cpu.register_asm("add.f32 $0, $2, $2;\nadd.f32 $1, $3, $3;", lambda x: x + x, elementwise=True)
PAIRS = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))


@jit
def assembly_of_registers(x_ptr, out_ptr):
    """Two elements for each thread."""
    i = gl.arange(0, 256, PAIRS)
    x = gl.load(x_ptr + i)
    gl.store(out_ptr + i, gl.inline_asm(twice_each, ("=f", "f"), [x], x.type, is_pure=True))


def test_inline_asm_of_all_registers(launch):
    x, out = normal(256), poisoned(256)
    launch(assembly_of_registers, (1,), x, out)
    same(out, 2 * x)


@jit
def into_the_ring(x_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    gl.store(out_ptr + i, fpsan.embed(gl.load(x_ptr + i)))


@jit
def out_of_the_ring(x_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    x = gl.load(x_ptr + i)
    gl.store(out_ptr + i, fpsan.unembed(x, out_ptr.dtype.element_ty))


@pytest.mark.parametrize(
    ("dtype", "integer"),
    [(torch.float32, torch.int32), (torch.float16, torch.int16), (torch.bfloat16, torch.int16),
     (torch.float64, torch.int64)],
    ids=str,
)  # fmt: skip
def test_fpsan_ring(launch, dtype, integer):
    """One to one; 0, 1 and -1 are themselves."""
    x = torch.cat([torch.tensor([0.0, 1.0, -1.0, -0.0, 2.0]), normal(123)]).to(dtype)
    ring, back = poisoned(N, dtype=integer), poisoned(N, dtype=dtype)
    launch(into_the_ring, (1,), x, ring)
    assert ring[:4].tolist() == [0, 1, -1, torch.iinfo(integer).min]
    assert len(set(ring.tolist())) == len(set(x.view(integer).tolist()))
    launch(out_of_the_ring, (1,), ring, back)
    same(back.view(integer), x.view(integer))


def test_fpsan_ring_as_compiled(launch):
    """Taken from the code that Triton makes of it."""
    x, ring = torch.full((N,), 2.0), poisoned(N, dtype=torch.int32)
    launch(into_the_ring, (1,), x, ring)
    bits = 0x40000000
    y = bits * 14940041 & 0xFFFFFFFF
    same(ring, torch.full((N,), (y ^ (y >> 23 & 255)) * 199934151 & 0x7FFFFFFF, dtype=torch.int32))


@jit
def turn_and_take(x_ptr, out_ptr):
    x = gl.load(x_ptr + gl.arange(0, 128, ROW))
    put(out_ptr, 0, x.flip())
    put(out_ptr, 1, gl.load(x_ptr + 5 + gl.arange(0, 1, ROW)).item() + gl.zeros_like(x))


def test_flip_and_item(launch):
    x, out = normal(N), poisoned(2, N)
    launch(turn_and_take, (1,), x, out)
    same(out, torch.stack([x.flip(0), x[5].expand(N)]))
