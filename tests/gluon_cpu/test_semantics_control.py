"""Control flow, calls, programs, global memory and atomics."""

import numpy as np
import pytest
import torch

import gluon_cpu
from tests.compat import aggregate, constexpr_function, gl, jit, mbarrier
from tests.gluon_cpu.layouts import MATRIX, PLAIN, ROW
from tests.gluon_cpu.support import load_matrix, normal, poisoned, same, small_integers


@jit
def gcd_kernel(a, b, out_ptr):
    steps = 0
    while b != 0:
        a, b = b, a % b
        steps += 1
    gl.store(out_ptr, a)
    gl.store(out_ptr + 1, steps)


def test_while_loop_on_scalars(launch):
    out = poisoned(2, dtype=torch.int32)
    launch(gcd_kernel, (1,), 1071, 462, out)
    assert out.tolist() == [21, 3]


@jit
def halve_until_small(x_ptr, out_ptr):
    x = gl.load(x_ptr + gl.arange(0, 128, ROW))
    steps = 0
    while gl.max(x, axis=0) > 1.0:
        x = x * 0.5
        steps += 1
    gl.store(out_ptr + gl.arange(0, 128, ROW), x + steps)


def test_while_loop_that_carries_a_tensor(launch):
    x, out = normal(128), poisoned(128)
    x[5] = 100.0
    launch(halve_until_small, (1,), x, out)
    same(out, x / 128 + 7)


@jit
def branches(x_ptr, out_ptr, which):
    x = gl.load(x_ptr + gl.arange(0, 128, ROW))
    if which == 0:
        y = x + 1
        n = 1
    elif which > 3:
        y = x * 2
        n = 2
        if which > 10:
            n = 3
    else:
        y = -x
        n = 4
    gl.store(out_ptr + gl.arange(0, 128, ROW), y * 10 + n)


@pytest.mark.parametrize("which", [0, 2, 5, 11])
def test_if_yields_values(launch, which):
    x, out = small_integers(128), poisoned(128)
    launch(branches, (1,), x, out, which)
    y, n = {0: (x + 1, 1), 2: (-x, 4), 5: (x * 2, 2), 11: (x * 2, 3)}[which]
    same(out, y * 10 + n)


@jit
def leave_early(out_ptr, length):
    pid = gl.program_id(0)
    if pid >= length:
        return
    gl.store(out_ptr + pid, pid + 100)


def test_early_return(launch):
    out = poisoned(8, dtype=torch.int32)
    launch(leave_early, (8,), out, 5, outputs=[])
    assert out.tolist() == [100, 101, 102, 103, 104, 113, 113, 113]


@jit(noinline=True)
def collatz_steps(n):
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps, n


@jit(noinline=True)
def scale_row(x_ptr, out_ptr, factor):
    i = gl.arange(0, 128, ROW)
    gl.store(out_ptr + i, gl.load(x_ptr + i) * factor + 1.0)


@jit
def calls(x_ptr, out_ptr, count_ptr):
    steps, last = collatz_steps(gl.program_id(0) + 27)
    gl.store(count_ptr, steps)
    gl.store(count_ptr + 1, collatz_steps(gl.program_id(0) + 6)[0] + last)
    scale_row(x_ptr, out_ptr, count_ptr.dtype.element_ty.primitive_bitwidth / 16.0)
    scale_row(x_ptr, out_ptr + 128, 3.0)


def test_noinline_calls(launch):
    x, out, count = small_integers(128), poisoned(2, 128), poisoned(2, dtype=torch.int32)
    launch(calls, (1,), x, out, count)
    assert count.tolist() == [111, 9]
    same(out, torch.stack([x * 2 + 1, x * 3 + 1]))


@jit
def loops(out_ptr, n):
    total = 0
    for i in range(n, -1, -2):
        total = total * 10 + i
    for _i in range(0):
        total = -1
    for i in gl.static_range(3):
        total += i
    for _i in range(2):
        for j in range(n - 5, n):
            total += j
    gl.store(out_ptr, total)


def test_for_loops(launch):
    out = poisoned(1, dtype=torch.int32)
    launch(loops, (1,), out, 7)
    assert out.item() == 7531 + 3 + 2 * (2 + 3 + 4 + 5 + 6)


@jit
def grid_kernel(out_ptr):
    x, y, z = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    linear = (z * gl.num_programs(1) + y) * gl.num_programs(0) + x
    gl.store(out_ptr + linear, x + 10 * y + 100 * z)


def test_grid_of_three_dimensions(launch):
    out = poisoned(2, 3, 4, dtype=torch.int32)
    launch(grid_kernel, (4, 3, 2), out)
    z, y, x = np.indices((2, 3, 4))
    same(out, torch.from_numpy(x + 10 * y + 100 * z).to(torch.int32))


@aggregate
class Counter:
    count: gl.tensor
    STEP: gl.constexpr

    @jit
    def next(self):
        return Counter(self.count + self.STEP, self.STEP)


@constexpr_function
def squares(n):
    return [i * i for i in range(n)]


@jit
def aggregates(out_ptr, n):
    counter = Counter(gl.to_tensor(0), 3)
    for _ in range(n):
        counter = counter.next()
    counter = gl.aggregate_replace(counter, count=counter.count * 2)
    SQUARES: gl.constexpr = squares(5)
    gl.store(out_ptr, counter.count)
    gl.store(out_ptr + 1, SQUARES[4])


def test_aggregates_and_compile_time_functions(launch):
    out = poisoned(2, dtype=torch.int32)
    launch(aggregates, (1,), out, 5)
    assert out.tolist() == [30, 16]


@jit
def masked(x_ptr, out_ptr, length):
    i = gl.arange(0, 128, ROW)
    x = gl.load(x_ptr + i, mask=i < length, other=-1.0)
    gl.store(out_ptr + i, x, mask=i % 2 == 0)


def test_masks_and_other(launch):
    x, out = normal(100), poisoned(128)
    launch(masked, (1,), x, out, 100, outputs=[])
    want = torch.cat([x, torch.full((28,), -1.0)])
    want[1::2] = float("nan")
    same(out, want)


@jit
def wide_offsets(x_ptr, out_ptr, stride):
    """64-bit address arithmetic from 32-bit parts."""
    i = gl.arange(0, 128, ROW).to(gl.int64) * stride
    gl.store(out_ptr + gl.arange(0, 128, ROW), gl.load(x_ptr + i) + gl.load(x_ptr))


def test_strided_global_loads(launch):
    x, out = normal(128 * 17), poisoned(128)
    launch(wide_offsets, (1,), x, out, 17)
    same(out, x[::17] + x[0])


# ---------------------------------------------------------------------------------------------------------------------
# Atomics
# ---------------------------------------------------------------------------------------------------------------------


@jit
def atomics(counters_ptr, old_ptr):
    """Every program contributes to the same words; the values before are a permutation of 0 ... n - 1."""
    pid = gl.program_id(0)
    gl.store(old_ptr + pid, gl.atomic_add(counters_ptr, 1))
    gl.atomic_max(counters_ptr + 1, pid * 7 % 16)
    gl.atomic_min(counters_ptr + 2, pid - 20)
    gl.atomic_or(counters_ptr + 3, 1 << pid)
    gl.atomic_and(counters_ptr + 4, ~(1 << pid))
    gl.atomic_xor(counters_ptr + 5, pid)
    gl.atomic_xchg(counters_ptr + 6, 1000 + pid * 0)
    gl.atomic_cas(counters_ptr + 7, 0, pid + 1)


def test_integer_atomics(launch):
    counters, old = torch.zeros(8, dtype=torch.int32), poisoned(16, dtype=torch.int32)
    counters[4] = -1
    launch(atomics, (16,), counters, old)
    assert sorted(old.tolist()) == list(range(16))
    assert counters[:7].tolist() == [16, 15, -20, 2**16 - 1, -(2**16), 0, 1000]
    assert 1 <= counters[7] <= 16


@jit
def tensor_atomics(bins_ptr, index_ptr, value_ptr, half_ptr):
    i = gl.arange(0, 128, ROW)
    index, value = gl.load(index_ptr + i), gl.load(value_ptr + i)
    gl.atomic_add(bins_ptr + index, value, mask=i < 100)
    gl.atomic_add(half_ptr + index, value.to(gl.bfloat16))


def test_atomic_add_of_tensors_with_collisions(launch):
    index = torch.randint(0, 8, (128,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    value = small_integers(128, largest=1)
    bins, half = torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16)
    launch(tensor_atomics, (2,), bins, index, value, half)
    same(bins, 2 * torch.zeros(8).index_add(0, index[:100], value[:100]))
    same(half.float(), 2 * torch.zeros(8).index_add(0, index, value))


@jit
def last_one_sums(parts_ptr, counter_ptr, out_ptr):
    """The classic: everyone writes a part; the last to count (acquire and release) reads them all."""
    pid, programs = gl.program_id(0), gl.num_programs(0)
    gl.store(parts_ptr + pid, pid * pid)
    before = gl.atomic_add(counter_ptr, 1, sem="acq_rel")
    if before == programs - 1:
        total = 0
        for i in range(programs):
            total += gl.load(parts_ptr + i)
        gl.store(out_ptr, total)


def test_message_passing_by_atomics(launch):
    out = poisoned(1, dtype=torch.int32)
    launch(last_one_sums, (9,), poisoned(9, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), out)
    assert out.item() == sum(i * i for i in range(9))


# ---------------------------------------------------------------------------------------------------------------------
# What talks to the host
# ---------------------------------------------------------------------------------------------------------------------


@jit
def chatty(x_ptr):
    gl.device_print("program", gl.program_id(0))
    gl.device_print("row", gl.load(x_ptr + gl.arange(0, 128, ROW)))


def test_device_print(launch, capsys):
    launch(chatty, (2,), torch.arange(128, dtype=torch.int32) + 5000)
    printed = capsys.readouterr().out
    assert "program" in printed
    assert "row" in printed
    assert "5127" in printed


@jit
def checked(x_ptr, limit):
    gl.device_assert(gl.load(x_ptr) < limit, "x is below the limit")


def test_device_assert(launch):
    x = torch.tensor([5], dtype=torch.int32)
    launch(checked, (1,), x, 6, debug=True)
    with pytest.raises(Exception, match="x is below the limit") as caught:
        launch(checked, (1,), x, 5, debug=True)
    assert "checked" in str(caught.value)


@jit
def assembly(x_ptr, out_ptr, ASM: gl.constexpr):
    i = gl.arange(0, 128, ROW)
    x = gl.load(x_ptr + i)
    y = gl.inline_asm_elementwise(ASM, "=r,r,r", [x, x + 1], dtype=gl.int32, is_pure=True, pack=1)
    gl.store(out_ptr + i, y)


def test_inline_assembly_runs_its_registered_twin(launch):
    x, out = small_integers(128, dtype=torch.int32, largest=1000), poisoned(128, dtype=torch.int32)
    gluon_cpu.register_asm("lop3.b32 $0, $1, $2, $1, 0x3c;", lambda a, b: a ^ b)
    launch(assembly, (1,), x, out, ASM="lop3.b32 $0, $1, $2, $1, 0x3c;")
    same(out, x ^ (x + 1))


@jit
def approximate(x_ptr, out_ptr, ASM: gl.constexpr):
    i = gl.arange(0, 128, ROW)
    x = gl.load(x_ptr + i)
    gl.store(out_ptr + i, gl.inline_asm_elementwise(ASM, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("ex2.approx.ftz", torch.exp2),
        ("lg2.approx", torch.log2),
        ("rcp.approx.ftz", torch.reciprocal),
        ("rsqrt.approx", torch.rsqrt),
        ("sqrt.approx.ftz", torch.sqrt),
        ("sin.approx", torch.sin),
        ("cos.approx.ftz", torch.cos),
        ("tanh.approx", torch.tanh),
    ],
)
def test_approximate_functions_as_inline_assembly(launch, name, function):
    x, out = normal(128).abs() + 0.1, poisoned(128)
    launch(approximate, (1,), x, out, ASM=f"{name}.f32 $0, $1;")
    torch.testing.assert_close(out, function(x))


def test_inline_assembly_may_name_special_registers(launch):
    x, out = small_integers(128, dtype=torch.int32), poisoned(128, dtype=torch.int32)
    gluon_cpu.register_asm("mov.u32 $0, %clock;", lambda a, b: b - a)
    launch(assembly, (1,), x, out, ASM="mov.u32 $0, %clock;")
    same(out, torch.ones_like(out))


def test_inline_assembly_without_a_twin_is_an_error(launch):
    x, out = small_integers(128, dtype=torch.int32), poisoned(128, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="prmt") as caught:
        launch(assembly, (1,), x, out, ASM="prmt.b32 $0, $1, $2, 0x5410;")
    assert "test_semantics_control.py" in str(caught.value)


FMA_PAIR = """
{
    .reg .b64 a, b, c, d;
    mov.b64 a, {$2, $3};
    mov.b64 b, {$4, $5};
    mov.b64 c, {$6, $7};
    fma.rn.f32x2 d, a, b, c;
    mov.b64 {$0, $1}, d;
}
"""


@jit
def assembly_on_pairs(x_ptr, out_ptr, ASM: gl.constexpr, PAIRS: gl.constexpr):
    i = gl.arange(0, 256, PAIRS)
    x = gl.load(x_ptr + i)
    y = gl.inline_asm_elementwise(ASM, "=r,=r,r,r,r,r,r,r", [x, x, x + 1.0], dtype=gl.float32, is_pure=True, pack=2)
    z = gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    gl.store(out_ptr + i, y)
    gl.store(out_ptr + 256 + i, z)


def test_inline_assembly_on_several_elements_at_a_time(launch):
    """Which ones it takes together depends on the layout, so its twin must be said to treat each for itself."""
    x, out = small_integers(256), poisoned(2, 256)
    pairs = gl.BlockedLayout([2], [32], [4], [0])
    gluon_cpu.register_asm(FMA_PAIR, lambda a, b, c: a * b + c)
    with pytest.raises(NotImplementedError, match="2 elements at a time") as caught:
        launch(assembly_on_pairs, (1,), x, out, ASM=FMA_PAIR, PAIRS=pairs)
    assert "test_semantics_control.py" in str(caught.value)
    gluon_cpu.register_asm(FMA_PAIR, lambda a, b, c: a * b + c, elementwise=True)
    launch(assembly_on_pairs, (1,), x, out, ASM=FMA_PAIR, PAIRS=pairs)
    same(out, torch.stack([x * x + x + 1, torch.exp2(x)]))


@jit
def barrier_only(out_ptr):
    tile = gl.allocate_shared_memory(gl.int32, [128], PLAIN)
    for i in range(3):
        tile.store(gl.arange(0, 128, ROW) + i)
        gl.barrier()
        gl.store(out_ptr + i * 128 + gl.arange(0, 128, ROW), tile.load(ROW))
        gl.barrier()


def test_barriers_within_a_loop(launch):
    out = poisoned(3, 128, dtype=torch.int32)
    launch(barrier_only, (1,), out)
    same(out, torch.arange(128, dtype=torch.int32) + torch.arange(3, dtype=torch.int32)[:, None])


@jit
def assumes(x_ptr, out_ptr, n):
    gl.assume(n > 2)
    x = gl.load(x_ptr + gl.arange(0, 128, ROW))
    gl.store(out_ptr + gl.arange(0, 128, ROW), x * n)


def test_an_assumption_that_holds_changes_nothing(launch):
    x, out = normal(128), poisoned(128)
    launch(assumes, (1,), x, out, 3)
    same(out, x * 3)


def test_a_false_assumption_is_a_finding(launch):
    with pytest.raises(gluon_cpu.DeviceAssert, match=r"false assumption(.|\n)*gl\.assume\(n > 2\)"):
        launch(assumes, (1,), normal(128), poisoned(128), 2)


@jit
def arrive_at_the_slot_before(out_ptr, steps, PREDICATED: gl.constexpr):
    ring = mbarrier.allocate_mbarrier(batch=2)
    for i in gl.static_range(2):
        mbarrier.init(ring.index(i), count=1)
    for i in range(steps):
        mbarrier.arrive(ring.index(i - 1), count=1, pred=i >= 1 or not PREDICATED)
    for i in gl.static_range(2):
        mbarrier.wait(ring.index(i), 0)
    gl.store(out_ptr, steps)


def test_a_view_of_no_slot_is_no_access(launch):
    out = poisoned(1, dtype=torch.int32)
    launch(arrive_at_the_slot_before, (1,), out, 3, PREDICATED=True)
    assert out.tolist() == [3]


def test_an_arrival_at_no_slot_is_a_finding(launch):
    with pytest.raises(gluon_cpu.OutOfBounds, match=r"index -1 into ring, which has 2 slots(.|\n)*mbarrier\.arrive"):
        launch(arrive_at_the_slot_before, (1,), poisoned(1, dtype=torch.int32), 3, PREDICATED=False)


PAIR_OF_SCALARS = gl.constexpr(gl.SliceLayout(0, gl.BlockedLayout([1, 2], [1, 32], [1, 4], [1, 0])))


@jit
def add_as_a_tensor(a, b, c, d):
    first = gl.arange(0, 2, PAIR_OF_SCALARS) == 0
    return gl.split(gl.where(first, a, b) + gl.where(first, c, d))


@jit
def sum_in_pairs(x_ptr, y_ptr, out_ptr):
    x, y = load_matrix(x_ptr, 32, 16, MATRIX), load_matrix(y_ptr, 32, 16, MATRIX)
    x_sums, y_sums = gl.reduce((x, y), axis=1, combine_fn=add_as_a_tensor)
    rows = gl.arange(0, 32, gl.SliceLayout(1, MATRIX))
    gl.store(out_ptr + rows, x_sums)
    gl.store(out_ptr + 32 + rows, y_sums)


def test_a_combine_function_may_make_a_tensor_of_its_scalars(launch):
    x, y, out = small_integers(32, 16), small_integers(32, 16), poisoned(64)
    launch(sum_in_pairs, (1,), x, y, out)
    same(out, torch.cat([x.sum(1), y.sum(1)]))
