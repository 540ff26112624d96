"""Shared memory that the compiler takes for its own use, often in the bytes of a buffer that is not used any more.

test_findings.py has a pair for the captures of warp_specialize and one for the scratch of a sum.
"""

import pytest
import torch

import gluon_cpu
from gluon_cpu import front
from tests.compat import (
    fence_async_shared,
    gl,
    jit,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tests.gluon_cpu.findings_hopper import ACC, operands, scratch_over_a_store, signals, waits
from tests.gluon_cpu.layouts import MATRIX, PLAIN, ROW, ROW_COPIES, ROW_HALVES
from tests.gluon_cpu.support import (
    descriptor,
    line_of,
    new_barrier,
    normal,
    poisoned,
    same,
    small_integers,
    store_matrix,
)


@pytest.fixture(params=gluon_cpu.POLICIES)
def launch(request):
    schedule = gluon_cpu.Schedule(request.param, seed=3)

    def run(kernel, *arguments, **options):
        return gluon_cpu.launch(kernel, (1,), *arguments, **{"mode": "lowered", "schedule": schedule, **options})

    return run


# ---------------------------------------------------------------------------------------------------------------------
# The captures of warp_specialize
# ---------------------------------------------------------------------------------------------------------------------


@jit
def captures_over_a_store(desc, out_ptr, BUG: gl.constexpr):
    ready = new_barrier(1)
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout, gl.full([32, 32], 1.0, gl.float32, MATRIX))
    fence_async_shared()
    tma.async_store(desc, [0, 0], tile)
    if not BUG:
        tma.store_wait(0)
    gl.warp_specialize([(waits, (out_ptr, ready)), (signals, (ready,))], [1])
    tma.store_wait(0)


def test_captures_in_the_bytes_of_a_tile_that_a_store_still_reads(launch):
    def run(bug: bool) -> None:
        launch(captures_over_a_store, descriptor(poisoned(32, 32), [32, 32]), poisoned(1, dtype=torch.int32), BUG=bug)

    with pytest.raises(gluon_cpu.ReuseRace, match=r"race on tile,(.|\n)*captures of warp_specialize(.|\n)*store_wait"):
        run(True)
    run(False)


# ---------------------------------------------------------------------------------------------------------------------
# Scratch of single operations
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["reduce", "convert_layout", "gather", "histogram", "atomic_rmw"])
def test_scratch_in_the_bytes_of_a_tile_that_a_store_still_reads(launch, how):
    def run(bug: bool) -> torch.Tensor:
        stored, out = poisoned(32, 32), poisoned(32, 32)
        launch(scratch_over_a_store, descriptor(stored, [32, 32]), normal(128), out, HOW=how, BUG=bug, outputs=[stored])
        same(stored, torch.ones(32, 32))
        return out

    with pytest.raises(gluon_cpu.ReuseRace, match=rf"race on tile,(.|\n)*writes: \w+: scratch of {how}\n"):
        run(True)
    assert not run(False).isnan().all()


@jit
def scratch_over_an_operand(a_desc, b_desc, out_ptr, BUG: gl.constexpr):
    """The product is waited for by its result: for the compiler, the last use of `b` is where it was issued."""
    a, b = operands(a_desc, b_desc)
    acc = warpgroup_mma(a, b.permute((1, 0)), gl.zeros([64, 32], gl.float32, ACC), use_acc=False, is_async=True)
    if not BUG:
        acc = warpgroup_mma_wait(0, deps=[acc])
    x = gl.arange(0, 64, gl.SliceLayout(1, MATRIX))[:, None] + gl.arange(0, 32, gl.SliceLayout(0, MATRIX))[None, :]
    x = gl.convert_layout(x.to(gl.float32), ACC)
    if BUG:
        acc = warpgroup_mma_wait(0, deps=[acc])
    store_matrix(out_ptr, acc + x)


def test_scratch_in_the_bytes_of_an_operand_in_use(launch):
    a, b = small_integers(64, 64, dtype=torch.bfloat16), small_integers(32, 64, dtype=torch.bfloat16)
    out = poisoned(64, 32)
    arguments = descriptor(a, [64, 64]), descriptor(b, [32, 64]), out
    with pytest.raises(gluon_cpu.DataRace, match=r"scratch of convert_layout(.|\n)*warpgroup_mma_wait"):
        launch(scratch_over_an_operand, *arguments, BUG=True)
    launch(scratch_over_an_operand, *arguments, BUG=False)
    same(out, a.float() @ b.float().T + torch.arange(64)[:, None] + torch.arange(32)[None, :])


def test_values_do_not_outlive_the_compilers_use(launch):
    """Without checks the numbers tell: where the compiler puts its own there is nothing left of the tile's."""
    stored = poisoned(32, 32)
    options = {"HOW": "reduce", "BUG": True, "checks": False, "schedule": gluon_cpu.Schedule("late")}
    launch(scratch_over_a_store, descriptor(stored, [32, 32]), normal(128), poisoned(32, 32), **options)
    assert stored.isnan().any()


def test_fast_mode_gives_every_buffer_its_own_place(launch):
    stored = poisoned(32, 32)
    launch(
        scratch_over_a_store, descriptor(stored, [32, 32]), normal(128), poisoned(32, 32), HOW="reduce", BUG=True,
        mode="fast", outputs=[],
    )  # fmt: skip
    same(stored, torch.ones(32, 32))


# ---------------------------------------------------------------------------------------------------------------------
# Across CTAs: each reads the scratch of the others
# ---------------------------------------------------------------------------------------------------------------------


@jit
def two_exchanges(out_ptr):
    x = gl.arange(0, 256, ROW_HALVES)
    for _ in range(3):
        x = gl.convert_layout(gl.convert_layout(x, ROW_COPIES) + 1, ROW_HALVES)  # <- exchange
    gl.store(out_ptr + gl.arange(0, 256, ROW_HALVES), x + gl.sum(x, 0))


@pytest.fixture
def compiled_without(monkeypatch, tmp_path):
    """Leaves out the first or the last line of the compiler's output that contains a text."""
    monkeypatch.setenv("GLUON_CPU_CACHE", str(tmp_path))
    monkeypatch.setattr(front, "_LOADED", {})
    build = front.build_text

    def leave_out(text: str, which: int) -> None:
        def build_without(*arguments):
            lines = build(*arguments).splitlines()
            del lines[[i for i, line in enumerate(lines) if text in line][which]]
            return "\n".join(lines)

        monkeypatch.setattr(front, "build_text", build_without)

    return leave_out


def test_exchanges_between_ctas(launch):
    out = poisoned(256, dtype=torch.int32)
    launch(two_exchanges, out, num_ctas=2)
    x = torch.arange(256, dtype=torch.int32) + 3
    same(out, x + x.sum().int())


def test_scratch_that_a_peer_still_reads(launch, compiled_without):
    compiled_without("ttng.cluster_barrier", 0)
    with pytest.raises(gluon_cpu.DataRace, match=line_of(__file__, "exchange")) as caught:
        launch(two_exchanges, poisoned(256, dtype=torch.int32), num_ctas=2)
    assert "reads: two_exchanges (CTA 0): exchange between CTAs" in str(caught.value).replace("CTA 1", "CTA 0")
    assert "writes: two_exchanges (CTA 0): scratch of convert_layout" in str(caught.value).replace("CTA 1", "CTA 0")


def test_an_exit_before_the_peer_has_read(launch, compiled_without):
    compiled_without("ttng.cluster_barrier", -1)
    with pytest.raises(gluon_cpu.LifetimeError, match="exchange between CTAs"):
        launch(two_exchanges, poisoned(256, dtype=torch.int32), num_ctas=2)


# ---------------------------------------------------------------------------------------------------------------------
# Functions that are not inlined: the compiler counts their offsets from where the call has its memory
# ---------------------------------------------------------------------------------------------------------------------


@jit(noinline=True)
def turn_around(x_ptr, out_ptr):
    tile = gl.allocate_shared_memory(gl.float32, [128], PLAIN)
    i = gl.arange(0, 128, ROW)
    tile.store(gl.load(x_ptr + i))
    gl.store(out_ptr + i, tile.load(gl.BlockedLayout([1], [32], [4], [0])) + gl.sum(tile.load(ROW), 0))


@jit(noinline=True)
def two_calls(x_ptr, out_ptr):
    mine = gl.allocate_shared_memory(gl.float32, [128], PLAIN)
    i = gl.arange(0, 128, ROW)
    mine.store(gl.load(x_ptr + i) + 1)
    turn_around(x_ptr, out_ptr)
    gl.store(out_ptr + 128 + i, mine.load(ROW))


@jit
def with_memory_of_its_own(x_ptr, out_ptr):
    mine = gl.allocate_shared_memory(gl.float32, [128], PLAIN)
    i = gl.arange(0, 128, ROW)
    mine.store(gl.load(x_ptr + i) + 2)
    two_calls(x_ptr, out_ptr)
    turn_around(x_ptr, out_ptr + 256)
    gl.store(out_ptr + 384 + i, mine.load(ROW))


@pytest.mark.parametrize("mode", ["fast", "lowered"])
def test_memory_of_functions_that_are_not_inlined(launch, mode):
    x, out = small_integers(128), poisoned(4, 128)
    launch(with_memory_of_its_own, x, out, mode=mode)
    same(out, torch.stack([x + x.sum(), x + 1, x + x.sum(), x + 2]))


@jit
def calling_role(x_ptr, out_ptr):
    turn_around(x_ptr, out_ptr)


@jit
def called_by_two_roles(x_ptr, out_ptr):
    gl.warp_specialize([(calling_role, (x_ptr, out_ptr)), (calling_role, (x_ptr, out_ptr + 128))], [4])


@pytest.mark.parametrize("mode", ["fast", "lowered"])
def test_a_function_that_two_roles_call(launch, mode):
    x, out = small_integers(128), poisoned(2, 128)
    launch(called_by_two_roles, x, out, mode=mode)
    same(out, torch.stack([x + x.sum(), x + x.sum()]))
