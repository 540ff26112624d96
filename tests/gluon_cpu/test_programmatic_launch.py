"""A kernel that may start before the one before it ends: what it reads or writes too early is a finding."""

from typing import Any

import numpy as np
import pytest
import torch

import gluon_cpu
from gluon_attn import attention
from gluon_attn.device import Device
from gluon_attn.runtime.compat import gdc_launch_dependents, gdc_wait
from gluon_cpu import front
from gluon_cpu.compat import GluonASTSource
from gluon_cpu.generate import generate
from gluon_cpu.ir.parse import parse_module
from tests.compat import gl, jit, mbarrier, tma
from tests.gluon_cpu.campaign_mutants import instead_of_compiling
from tests.gluon_cpu.layouts import MATRIX, ROW
from tests.gluon_cpu.support import descriptor, new_barrier, normal, poisoned, same, store_matrix


@jit
def first(x_ptr, y_ptr, EARLY: gl.constexpr):
    """y = 2 x"""
    if EARLY:
        gdc_launch_dependents()
    at = gl.program_id(0) * 128 + gl.arange(0, 128, ROW)
    gl.store(y_ptr + at, 2 * gl.load(x_ptr + at))


@jit
def second(y_ptr, z_ptr, WHEN: gl.constexpr):
    """z = y + 1. WHEN it waits for the kernel before: "first", "late", or "never"."""
    at = gl.program_id(0) * 128 + gl.arange(0, 128, ROW)
    if WHEN == "first":
        gdc_wait()
    y = gl.load(y_ptr + at)
    if WHEN == "late":
        gdc_wait()
    gl.store(z_ptr + at, y + 1)


def run(when: str, early: bool = True, launch_pdl: bool = False) -> None:
    x, y, z = normal(512), poisoned(512), poisoned(512)
    gluon_cpu.launch(first, (4,), x, y, early)
    gluon_cpu.launch(second, (4,), y, z, when, launch_pdl=launch_pdl)
    same(z, 2 * x + 1)


def test_waits_before_it_reads():
    run("first", launch_pdl=True)


@pytest.mark.parametrize("when", ["late", "never"])
def test_reads_too_early(when):
    with pytest.raises(gluon_cpu.DataRace, match=r"in first, launched before(.|\n)*reads: (.|\n)*calls gdc_wait\(\)"):
        run(when, launch_pdl=True)


def test_an_ordinary_launch_needs_no_wait():
    run("never")
    run("never", launch_pdl=True, early=False)  # the kernel before does not let it start


def test_only_the_launch_before_counts():
    x, y, z = normal(512), poisoned(512), poisoned(512)
    gluon_cpu.launch(first, (4,), x, y, True)
    gluon_cpu.launch(first, (4,), x, poisoned(512), False)
    gluon_cpu.launch(second, (4,), y, z, "never", launch_pdl=True)


def test_writes_what_the_kernel_before_reads_or_writes():
    for hit in ("x", "y"):
        tensors = {"x": normal(512), "y": poisoned(512)}
        gluon_cpu.launch(first, (4,), tensors["x"], tensors["y"], True)
        with pytest.raises(gluon_cpu.Finding, match="launched before"):
            gluon_cpu.launch(second, (4,), normal(512), tensors[hit], "never", launch_pdl=True)


def test_what_the_kernel_before_wrote_does_not_count_as_written():
    x, y = normal(512), poisoned(512)
    gluon_cpu.launch(first, (4,), x, y, True)
    with pytest.raises(gluon_cpu.OutputError):
        gluon_cpu.launch(second, (2,), normal(512), y, "first", launch_pdl=True, outputs=[y])


@jit
def between(x_ptr, WHEN: gl.constexpr):
    """Lets the next kernel start; waits for the one before "first", "late" or "never". Reads x."""
    if WHEN == "first":
        gdc_wait()
    gdc_launch_dependents()
    if WHEN == "late":
        gdc_wait()
    gl.load(x_ptr + gl.arange(0, 128, ROW))


def run_three(when: str) -> None:
    x, y, z = normal(512), poisoned(512), poisoned(512)
    gluon_cpu.launch(first, (4,), x, y, True)
    gluon_cpu.launch(between, (1,), y if when == "first" else x, when, launch_pdl=True)
    gluon_cpu.launch(second, (4,), y, z, "late", launch_pdl=True)


def test_three_kernels():
    run_three("first")  # who lets the third start has waited for the first
    with pytest.raises(gluon_cpu.DataRace, match="in first, launched before"):
        run_three("late")
    with pytest.raises(NotImplementedError, match=r"^launch_pdl: expected a gdc_wait\(\) in between"):
        run_three("never")


def test_the_same_memory_by_another_address():
    memory = np.random.default_rng(0).standard_normal(1024).astype(np.float32)
    gluon_cpu.launch(first, (4,), normal(512), torch.from_numpy(memory[256:768]), True)
    with pytest.raises(gluon_cpu.DataRace, match="launched before"):
        gluon_cpu.launch(second, (4,), memory[256:768], poisoned(512), "never", launch_pdl=True)


@jit
def loader(y, tile, loaded, waited, FROM_PEER: gl.constexpr):
    if FROM_PEER:
        mbarrier.wait(waited, 0)
    mbarrier.expect(loaded, y.block_type.nbytes)
    tma.async_load(y, [0, 0], loaded, tile)


@jit
def reader(z_ptr, tile, loaded, waited):
    gdc_wait()
    mbarrier.arrive(waited)
    mbarrier.wait(loaded, 0)
    store_matrix(z_ptr, tile.load(MATRIX))


@jit
def second_in_roles(y, z_ptr, FROM_PEER: gl.constexpr):
    """One role waits for the kernel before; the other loads, after a signal of the first or (a race) without."""
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], y.layout)
    loaded, waited = new_barrier(1), new_barrier(1)
    gl.barrier()
    gl.warp_specialize(
        [(reader, (z_ptr, tile, loaded, waited)), (loader, (y, tile, loaded, waited, FROM_PEER))], [1], [24]
    )
    mbarrier.invalidate(loaded)
    mbarrier.invalidate(waited)


@pytest.mark.parametrize("seed", range(8))
def test_waiting_in_another_role(seed):
    schedule = gluon_cpu.Schedule("random", seed)
    x, y, z = normal(1024), poisoned(1024), poisoned(32, 32)
    gluon_cpu.launch(first, (8,), x, y, True)
    gluon_cpu.launch(second_in_roles, (1,), descriptor(y.view(32, 32), [32, 32]), z, True, schedule=schedule,
                     launch_pdl=True)  # fmt: skip
    same(z.view(-1), 2 * x)
    gluon_cpu.launch(first, (8,), x, y, True)
    with pytest.raises(gluon_cpu.DataRace, match=r"calls gdc_wait\(\), or waits for a role that has"):
        gluon_cpu.launch(second_in_roles, (1,), descriptor(y.view(32, 32), [32, 32]), z, False, schedule=schedule,
                         launch_pdl=True)  # fmt: skip


def compile_without_wait(kernel: Any, *compile_arguments: Any) -> Any:
    signature, constants, attrs, options, arch, _ = compile_arguments
    text = front.build_text(GluonASTSource(kernel, signature, constants, attrs), arch, options, True)
    lines = [line for line in text.splitlines() if "tt.grid_dependency_wait" not in line]
    return front.Compiled(generate(parse_module("\n".join(lines) + "\n"), True))


def test_attention_that_does_not_wait_for_transposed_values():
    q, k, v = (normal(1, 1, 128, 256).to(torch.float8_e4m3fn) for _ in range(3))  # at D=256 always transposed before
    attention(q, k, v, device=Device.hopper())
    with (
        instead_of_compiling(compile_without_wait),
        pytest.raises(gluon_cpu.DataRace, match="in transpose_values, launched before"),
    ):
        attention(q, k, v, device=Device.hopper())
