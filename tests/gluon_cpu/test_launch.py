"""Ways to run: ordinary launches, modes, targets; an operation that the machine does not know."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import gluon_cpu
from gluon_cpu import generate
from gluon_cpu.compat import GluonJITFunction, JITFunction, driver
from tests.compat import gl, jit
from tests.gluon_cpu import findings_hopper as hopper
from tests.gluon_cpu.layouts import ROW
from tests.gluon_cpu.support import line_of, normal, poisoned, same


@jit
def doubled(x_ptr, out_ptr, N: gl.constexpr):
    i = gl.program_id(0) * N + gl.arange(0, N, ROW)
    gl.store(out_ptr + i, gl.load(x_ptr + i) * 2)


def test_machine_runs_ordinary_launches():
    x, out = normal(512), poisoned(512)
    with gluon_cpu.machine(target="sm_90a"):
        doubled[(4,)](x, out, N=128, num_warps=4)
        doubled[lambda meta: (512 // meta["N"],)](x, out, N=128)
    same(out, x * 2)


def test_threads_leave_nothing_behind():
    """Whoever comes first may end first, or last."""
    run, active = JITFunction.run, driver._active

    def work(_: int) -> bool:
        x, out = normal(512), poisoned(512)
        with gluon_cpu.machine(target="sm_90a"):
            doubled[(4,)](x, out, N=128, num_warps=4)
        return torch.equal(out, x * 2)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(12)))
    assert JITFunction.run is run
    assert driver._active is active
    assert not gluon_cpu.running()
    assert "run" not in GluonJITFunction.__dict__


def test_machine_reports_findings_and_leaves_nothing_behind():
    with pytest.raises(gluon_cpu.DataRace), gluon_cpu.machine(target="sm_90a"):
        hopper.no_wait[(1,)](poisoned(128, dtype=torch.int32), BUG=True)
    with pytest.raises(Exception) as outside:  # noqa: PT011  # as without gluon_cpu: no driver, or a tensor on the CPU
        doubled[(4,)](normal(512), poisoned(512), N=128)
    assert not isinstance(outside.value, gluon_cpu.Finding)


@pytest.mark.parametrize("mode", ["fast", "lowered"])
def test_both_modes_agree(mode):
    x, out = normal(128), poisoned(128)
    gluon_cpu.launch(doubled, (1,), x, out, N=128, mode=mode)
    same(out, x * 2)
    with pytest.raises(gluon_cpu.DataRace):
        gluon_cpu.launch(hopper.no_wait, (1,), poisoned(128, dtype=torch.int32), BUG=True, mode=mode)


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_103a"])
def test_targets(target):
    x, out = normal(128), poisoned(128)
    gluon_cpu.launch(doubled, (1,), x, out, N=128, target=target)
    same(out, x * 2)


@jit
def foreign(x_ptr, out_ptr):
    i = gl.arange(0, 128, ROW)
    embedded = gl.fpsan.embed(gl.load(x_ptr + i))  # <- no such machine
    gl.store(out_ptr + i, embedded)


def test_unknown_operation_is_named_with_its_line(monkeypatch):
    monkeypatch.delitem(generate.HANDLERS, "tti.experimental_fpsan_embed")  # as if Triton had added it yesterday
    with pytest.raises(NotImplementedError, match="fpsan_embed") as caught:
        gluon_cpu.launch(foreign, (1,), normal(128), poisoned(128, dtype=torch.int32))
    assert line_of(__file__, "no such machine") in str(caught.value)


def test_a_warmup_compiles_for_a_card_and_checks_nothing():
    x, out = normal(512), poisoned(512)
    with gluon_cpu.machine() as reports:
        compiled = doubled.warmup(x, out, N=128, grid=(1,))
        assert not reports
        assert ".target sm_90a" in compiled.asm["ptx"]
        doubled[(4,)](x, out, N=128)
    same(out, x * 2)
    assert len(reports) == 1
    with pytest.raises(gluon_cpu.NothingChecked):
        gluon_cpu.check(lambda: doubled.warmup(x, out, N=128, grid=(1,)), schedules=1)
