"""A project of its own, with a right kernel and one with a race, and commands run in it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


# A project's test file, with a right kernel and one with a race.
PROJECT = """
import pytest
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


@pytest.mark.gluon_schedules(7)
def test_right(gluon_machine):
    right()


@pytest.mark.gluon_schedules(7)
def test_wrong(gluon_machine):
    wrong()


def test_without_marker(gluon_machine):
    right()
"""


def run_command(tmp_path: Path, *command: str) -> subprocess.CompletedProcess:
    (tmp_path / "test_project.py").write_text(PROJECT, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
