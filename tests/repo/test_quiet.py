"""What a program that imports the packages prints of their own: nothing."""

import os
import subprocess
import sys

import pytest

from tests.slow import slow_if


def test_an_import_says_nothing_at_exit():
    """Triton's bindings print thirty lines about leaks if a jitted function outlives them."""
    command = [sys.executable, "-c", "import numpy, channels, gluon_attn, gluon_cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


# A reduction and a name of Hopper's made the bindings say so, in a process that compiles: hence a cache of its own.
PROGRAM = """
import sys
import torch
{imported}
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

@gluon.jit
def total(x_ptr, out_ptr, BUG: gl.constexpr):
    gl.static_assert(BUG != "assert", "asserted")
    i = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    if BUG == "layout":
        gl.load(x_ptr + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0], [[1]])))
    gl.store(out_ptr, gl.sum(gl.load(x_ptr + i)))

{launch}(total, (1,), torch.ones(64 if sys.argv[1] == "finding" else 128), torch.zeros(1), sys.argv[1])
"""
# A module that lives to the end is freed late if the program holds a function that leads to it, rather than a package.
WAYS = {
    "package": {"imported": "import gluon_cpu", "launch": "gluon_cpu.launch"},
    "function": {"imported": "from gluon_cpu import launch", "launch": "launch"},
}
LAST = {
    "nothing": "",
    "finding": "Mask it.",
    "layout": "the compiler refuses it",
    "assert": "asserted",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bug", slow_if(lambda bug: bug != "nothing", LAST))
@pytest.mark.slow_but("nothing-package")
def test_a_launch_says_nothing_at_exit(tmp_path, way, bug):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(**WAYS[way]))
    environment = os.environ | {"GLUON_CPU_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, str(program), bug], capture_output=True, text=True, env=environment)
    assert done.returncode == (bug != "nothing"), done.stderr
    assert "leaked" not in done.stderr
    assert LAST[bug] in done.stderr
    assert bool(done.stderr) == (bug != "nothing")


# A function of the package in a module beside a kernel that names a module of the bindings kept the package's own
# objects of the compiler alive: only in a process that compiles attention.
BESIDE = """
from gluon_cpu.front import errors_in
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy

@gluon.jit
def unused():
    async_copy.wait_group(0)
"""
ATTENTION = """
import torch
from gluon_attn import attention
from gluon_attn.device import Device
import beside

q, k, v = (torch.ones(1, 1, 64, 64, dtype=torch.bfloat16) for _ in range(3))
attention(q, k, v, device=Device.hopper())
"""


def test_a_first_compile_of_attention_says_nothing_at_exit(tmp_path):
    (tmp_path / "beside.py").write_text(BESIDE)
    (tmp_path / "program.py").write_text(ATTENTION)
    environment = os.environ | {"GLUON_CPU_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert list((tmp_path / "cache").iterdir()), "it has compiled"
    assert done.stdout + done.stderr == ""
