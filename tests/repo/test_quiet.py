"""What a program that imports the packages prints of their own: nothing."""

import os
import subprocess
import sys

import pytest


def test_an_import_says_nothing_at_exit():
    """Triton's bindings print thirty lines about leaks if a jitted function outlives them."""
    command = [sys.executable, "-c", "import numpy, channels, gluon_attn, gluon_cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


# A reduction and a name of Hopper's made the bindings say so, in a process that compiles: hence a cache of its own.
PROGRAM = """
import sys
import torch
import gluon_cpu
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

@gluon.jit
def total(x_ptr, out_ptr):
    i = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(out_ptr, gl.sum(gl.load(x_ptr + i)))

gluon_cpu.launch(total, (1,), torch.ones(int(sys.argv[1])), torch.zeros(1))
"""


@pytest.mark.parametrize(("length", "status", "last"), [(128, 0, ""), (64, 1, "Mask it.")], ids=["right", "a finding"])
def test_a_launch_says_nothing_at_exit(tmp_path, length, status, last):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(length)]
    environment = os.environ | {"GLUON_CPU_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == status
    assert "leaked" not in done.stderr
    assert last in done.stderr
    assert bool(done.stderr) == bool(last)
