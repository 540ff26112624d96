"""A project of its own, with a right kernel and one with a race, and commands run in it: as processes, or by their
main functions within this one, which has imported already what takes a process seconds."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


# A project: functions that launch a right kernel and one with a race, and the tests of them.
KERNELS = """
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ROW = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
ROW_1 = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def writer(tile, ready):
    tile.store(gl.full([128], 1, gl.int32, ROW_1))
    mbarrier.arrive(ready)


@gluon.jit
def reader(tile, ready, out_ptr, WAIT: gl.constexpr):
    if WAIT:
        mbarrier.wait(ready, 0)
    gl.store(out_ptr + gl.arange(0, 128, ROW), tile.load(ROW))


@gluon.jit
def hand_over(out_ptr, WAIT: gl.constexpr):
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile = gl.allocate_shared_memory(gl.int32, [128], plain, gl.full([128], 0, gl.int32, ROW))
    ready = mbarrier.allocate_mbarrier()
    mbarrier.init(ready, count=1)
    gl.barrier()
    gl.warp_specialize([(reader, (tile, ready, out_ptr, WAIT)), (writer, (tile, ready))], [1])


def right():
    out = torch.zeros(128, dtype=torch.int32)
    hand_over[(1,)](out, WAIT=True)
    assert bool((out == 1).all())


def wrong():
    hand_over[(1,)](torch.zeros(128, dtype=torch.int32), WAIT=False)
"""
TESTS = """
import pytest
from kernels import right, wrong


@pytest.mark.gluon_schedules(7)
def test_right(gluon_machine):
    right()


@pytest.mark.gluon_schedules(7)
def test_wrong(gluon_machine):
    wrong()


def test_without_marker(gluon_machine):
    right()
"""


def write_project(folder: Path) -> None:
    (folder / "kernels.py").write_text(KERNELS, encoding="utf-8")
    (folder / "test_project.py").write_text(TESTS, encoding="utf-8")


def run_command(tmp_path: Path, *command: str) -> subprocess.CompletedProcess:
    """In a process: what `make test-slow` does for each of the commands."""
    write_project(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )


def run_main(tmp_path: Path, main: Callable[[list[str]], int], *arguments: str) -> subprocess.CompletedProcess:
    """Within this process: a command's main function, called in the project's folder."""
    write_project(tmp_path)
    out, err = io.StringIO(), io.StringIO()
    with within(tmp_path), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status: object
        try:
            status = main(list(arguments))
        except SystemExit as ended:
            status = ended.code
    assert isinstance(status, int), f"ended with {status!r}, not with a status"
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def within(folder: Path) -> Iterator[None]:
    """In this folder. What is imported from it meanwhile is forgotten, as another test's has the same names."""
    path, writes_nothing = list(sys.path), sys.dont_write_bytecode
    try:
        with contextlib.chdir(folder):
            yield
    finally:
        sys.path[:], sys.dont_write_bytecode = path, writes_nothing
        for name, module in list(sys.modules.items()):
            if Path(getattr(module, "__file__", None) or "/").is_relative_to(folder):
                del sys.modules[name]
