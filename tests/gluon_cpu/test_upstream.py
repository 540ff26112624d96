"""The adapter for Triton's own sanitizer tests, on a small file of that shape: each verdict and the exit status."""

import functools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import gluon_cpu
from tests.gluon_cpu import upstream as adapter
from tests.gluon_cpu.project import run_command, run_main
from tests.gluon_cpu.upstream import IN_CHECKOUT, OnCpu, Said, kinds_for
from tests.slow import param

Upstream = Callable[..., "subprocess.CompletedProcess[str]"]

START = """
import os

import pytest
import torch
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton._internal_testing import is_cuda, run_in_process

capability = torch.cuda.get_device_capability()[0] if is_cuda() else 0


@pytest.fixture
def run_wrapper():
    return not os.environ.get("DISABLE_SUBPROCESS")


@pytest.fixture(params=[1, 2], ids=lambda n: f"{n}ctas")
def num_ctas(request):
    return request.param


@gluon.jit
def writer(tile, filled, layout: gl.constexpr):
    tile.store(gl.full([128], 7, gl.int32, layout))
    mbarrier.arrive(filled)


@gluon.jit
def reader(tile, filled, out, WAIT: gl.constexpr, layout: gl.constexpr):
    if WAIT:
        mbarrier.wait(filled, 0)
    gl.store(out + gl.arange(0, 128, layout), tile.load(layout))


@gluon.jit
def hand_over(out, WAIT: gl.constexpr, COUNT: gl.constexpr):
    cga: gl.constexpr = [[1]] * (gl.num_ctas() // 2)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], cga)
    tile = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0], cga))
    filled = mbarrier.allocate_mbarrier()
    mbarrier.init(filled, count=COUNT)
    gl.warp_specialize([(reader, (tile, filled, out, WAIT, layout)), (writer, (tile, filled, layout))], [4], [32])
"""

RACE = """
@pytest.mark.skipif(capability < 9, reason="needs Hopper")
@pytest.mark.parametrize("FAILURE", [True, False])
def test_race(FAILURE, device, run_wrapper, monkeypatch, num_ctas):
    if run_wrapper:
        result = run_in_process(test_race, (FAILURE, device, False, monkeypatch, num_ctas))
        if FAILURE:
            assert "device-side assert" in str(result.exc)
            assert "Buffer being accessed has outstanding writes" in result.driver_stderr_output
        else:
            assert result.exc is None
            assert result.driver_stderr_output == ""
        return
    monkeypatch.setenv("TRITON_INSTRUMENTATION_MODE", "consan")
    knobs.refresh_knobs()
    out = torch.empty((128, ), device="cuda", dtype=torch.int32)
    hand_over[(1, )](out, WAIT=not FAILURE, COUNT=1, num_warps=4, num_ctas=num_ctas)
"""

OTHERS = """
@pytest.mark.skipif(capability < 10, reason="needs Blackwell")
def test_stuck(device, run_wrapper):
    if run_wrapper:
        result = run_in_process(test_stuck, (device, False))
        assert result.exc is not None
        assert "Deadlock detected" in result.driver_stderr_output
        return
    hand_over[(1, )](torch.empty(128, dtype=torch.int32, device=device), WAIT=True, COUNT=2)


def test_leaves_itself_out(device):
    pytest.skip("not today")


def test_launches_itself(device):
    out = torch.empty(128, dtype=torch.int32, device=device)
    hand_over[(1, )](out, WAIT=True, COUNT=1)
    assert (out == 7).all()


def test_warms_up(device, fresh_knobs):
    fresh_knobs.compilation.instrumentation_mode = "consan"
    hand_over.warmup(torch.empty(128, dtype=torch.int32, device=device), WAIT=True, COUNT=1, grid=(1, ))


@gluon.jit
def unused(out):
    pass


def test_ends_the_process(device, run_wrapper):
    if run_wrapper:
        run_in_process(test_ends_the_process, (device, False))
        return
    os._exit(3)


def test_after_that_end(device, run_wrapper):
    if run_wrapper:
        result = run_in_process(test_after_that_end, (device, False))
        assert result.exc is None
        return
    unused[(1, )](torch.empty(128, device=device))
"""

WRONG = """
@pytest.mark.parametrize("WAIT", [True, False])
def test_expects_the_opposite(WAIT, device, run_wrapper):
    if run_wrapper:
        result = run_in_process(test_expects_the_opposite, (WAIT, device, False))
        if WAIT:
            assert "Buffer being accessed has outstanding reads" in result.driver_stderr_output
        else:
            assert result.exc is None
        return
    hand_over[(1, )](torch.empty(128, dtype=torch.int32, device=device), WAIT=WAIT, COUNT=1)


def test_expects_another_kind(device, run_wrapper):
    if run_wrapper:
        result = run_in_process(test_expects_another_kind, (device, False))
        assert "Deadlock detected" in result.driver_stderr_output
        return
    hand_over[(1, )](torch.empty(128, dtype=torch.int32, device=device), WAIT=False, COUNT=1)
"""


@pytest.fixture
def upstream(request, tmp_path, monkeypatch):
    """The command. In tests that are slow anyway it is a process, and starts others; else both are calls."""
    monkeypatch.setenv("GLUON_CPU_CACHE", str(tmp_path / "cache"))
    if request.node.get_closest_marker("slow"):
        return functools.partial(run_command, tmp_path, "tests.gluon_cpu.upstream")
    monkeypatch.setattr(adapter, "process", adapter.main)
    return functools.partial(run_main, tmp_path, adapter.main)


def verdicts(
    upstream: Upstream, folder: Path, text: str, *arguments: str
) -> tuple[int, dict[str, dict[str, Any]], str]:
    file, out = folder / "test_theirs.py", folder / "out.json"
    file.write_text(text, encoding="utf-8")
    done = upstream(str(file), "--json", str(out), *arguments)
    assert out.exists(), done.stderr
    cases = json.loads(out.read_text(encoding="utf-8"))
    return done.returncode, {case["name"]: case for case in cases}, done.stdout + done.stderr


def test_found_and_clean(upstream, tmp_path):
    before = triton.knobs.compilation.instrumentation_mode
    status, cases, printed = verdicts(upstream, tmp_path, START + RACE, "--targets", "sm_90a")
    assert status == 0
    assert {name: case["verdict"] for name, case in cases.items()} == {
        f"test_race[{ctas}ctas-{failure}]": "found" if failure else "clean"
        for ctas in (1, 2)
        for failure in (True, False)
    }
    assert cases["test_race[1ctas-True]"]["findings"] == ["DataRace"]
    assert "[sm_90a 4/4, " in printed
    assert not (tmp_path / "__pycache__").exists()
    assert triton.knobs.compilation.instrumentation_mode == before  # which the tests of the file change


@pytest.mark.slow
def test_what_does_not_run_is_said(upstream, tmp_path):
    status, cases, printed = verdicts(upstream, tmp_path, START + OTHERS, "--schedules", "2")
    assert status == 0
    assert {name: (case["verdict"], case["target"]) for name, case in cases.items()} == {
        "test_stuck": ("found", "sm_100a"),
        "test_leaves_itself_out": ("left out by the file", "sm_100a"),
        "test_launches_itself": ("clean", "sm_90a"),
        "test_warms_up": ("not runnable", "sm_90a"),
        "test_ends_the_process": ("not runnable", "sm_90a"),
        "test_after_that_end": ("clean", "sm_90a"),
    }
    assert "test_warms_up (sm_90a): it launches no kernel" in printed
    assert "test_ends_the_process (sm_90a): the process ended, with status 3" in printed


NOTHING = """
def test_leaves_itself_out(device):
    pytest.skip("not today")


def test_warms_up(device):
    hand_over.warmup(torch.empty(128, dtype=torch.int32, device=device), WAIT=True, COUNT=1, grid=(1, ))
"""


@pytest.mark.slow
def test_nothing_checked_is_no_success(upstream, tmp_path):
    status, cases, printed = verdicts(upstream, tmp_path, START + NOTHING, "--schedules", "1", "--targets", "sm_90a")
    assert status == 3
    assert {case["verdict"] for case in cases.values()} == {"left out by the file", "not runnable"}
    assert "nothing was checked" in printed


def test_a_miss_and_a_finding_on_right_code_fail(upstream, tmp_path):
    status, cases, printed = verdicts(upstream, tmp_path, START + WRONG, "--schedules", "2", "--targets", "sm_90a")
    assert status == 1
    assert {name: case["verdict"] for name, case in cases.items()} == {
        "test_expects_the_opposite[True]": "missed",
        "test_expects_the_opposite[False]": "finding on right code",
        "test_expects_another_kind": "missed",
    }
    assert "no finding, expected 'Buffer being accessed has outstanding reads'" in printed
    assert "DataRace only, expected 'Deadlock detected'" in printed


@pytest.mark.slow
def test_only_some_of_a_checkout(upstream, tmp_path):
    file = tmp_path / IN_CHECKOUT
    file.parent.mkdir(parents=True)
    file.write_text(START + RACE, encoding="utf-8")
    done = upstream(str(tmp_path), "--only", "race and 1ctas and False", "--schedules", "1", "--targets", "sm_90a")
    assert done.returncode == 0, done.stderr
    assert "clean" in done.stdout
    assert done.stdout.splitlines()[-1].split() == ["all", "1"]


@pytest.mark.parametrize(
    ("text", "arguments", "says"),
    [
        (None, [], "expected a checkout of Triton"),
        ("import nothing_of_this_name", [], "nothing_of_this_name"),
        param((START + RACE, ["--only", "nothing_of_this_name"], "no case is left")),
        param((START + RACE, ["--schedules", "0"], "--schedules: expected a number of at least 1, got '0'")),
    ],
)
@pytest.mark.slow_but("None-arguments0-expected a checkout of Triton")
def test_mistakes_end_with_status_2(text, arguments, says, upstream, tmp_path):
    file = tmp_path / "test_theirs.py"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    done = upstream(str(file), *arguments, "--targets", "sm_90a")
    assert done.returncode == 2
    assert says in done.stderr


@pytest.mark.parametrize(
    ("message", "finding", "same"),
    [
        ("Buffer being accessed has outstanding writes", gluon_cpu.DataRace("x"), True),
        ("Buffer being accessed has outstanding reads", gluon_cpu.Deadlock("x"), False),
        ("Accessing buffer with pending access. Pending access type: any", gluon_cpu.ReuseRace("x"), True),
        ("Async shared-memory access is missing fence_async_shared", gluon_cpu.MissingFence("x"), True),
        ("Async shared-memory access is missing fence_async_shared", gluon_cpu.DataRace("x"), False),
        ("Barrier used before initialization or after invalidation", gluon_cpu.BarrierMisuse("x"), True),
        ("Barrier used before initialization or after invalidation", gluon_cpu.DataRace("x"), False),
        ("Barrier is being reused while still tracking writes", gluon_cpu.DataRace("x"), True),
        ("Deadlock detected", gluon_cpu.TooFewArrivals("x"), True),
        ("a message that is not known", gluon_cpu.OutOfBounds("x"), True),
    ],
)
def test_messages_and_findings(message, finding, same):
    said = Said.of([finding])
    assert (message in said) == same
    assert said.asked == [message]
    assert isinstance(finding, kinds_for(message)) == same
    assert message not in Said.of([])
    assert Said.of([]) == ""


def test_tensors_for_cuda_are_made_on_the_cpu():
    with OnCpu():
        made = [torch.empty(2, device="cuda"), torch.ones(2).to("cuda"), torch.ones(2, device="cpu").cuda()]
        made.append(torch.zeros(2, device=torch.device("cuda", 0)))
    assert [x.device.type for x in made] == ["cpu"] * 4
