"""Each minor release of Triton that is supported makes the same of the kernels for Hopper: as much of the card, and no
serialised products. Compiled only; what they compute is for tests/gpu, with the Triton of that machine."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from channels.compat import MINORS
from gluon_attn.runtime.compat import triton

ROOT = Path(__file__).parents[3]
OTHERS = [minor for minor in MINORS if not triton.__version__.startswith(f"{minor}.")]
COMMAND = [sys.executable, "-m", "tests.gluon_attn.kernels.hopper_kernels"]
PARTS = 16  # as many as .ci/run divides the slow cases into, so that every commit compares some of the kernels

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def run(command: list[str], *first: Path) -> str:
    """What the command prints, with these folders before what is installed."""
    path = os.pathsep.join(map(str, (*first, ROOT)))
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def folder_of(minor: str) -> Path:
    """Where `make` puts the other release; skips where there is none."""
    ready = ROOT / f".triton-{minor}" / ".ready"
    if not ready.exists():
        pytest.skip(f"no Triton {minor} here: `make {ready.relative_to(ROOT)}` installs it, where pip finds it")
    version = run([sys.executable, "-c", "import triton; print(triton.__version__)"], ready.parent)
    assert version.startswith(f"{minor}.")
    return ready.parent


def kernels(part: int, *first: Path) -> dict[str, dict[str, Any]]:
    found = map(json.loads, run([*COMMAND, f"{part}/{PARTS}"], *first).splitlines())
    return {kernel.pop("name"): kernel for kernel in found}


@pytest.mark.parametrize("part", range(1, PARTS + 1))
@pytest.mark.parametrize("minor", OTHERS)
def test_the_same_kernels_as_with_the_newest(minor, part):
    with ThreadPoolExecutor(2) as pool:
        compiling = pool.submit(kernels, part, folder_of(minor)), pool.submit(kernels, part)
    other, own = (made.result() for made in compiling)
    assert other.keys() == own.keys() != set()
    different = [said for name in own for said in differences(name, other[name], own[name])]
    assert different == []


def differences(name: str, other: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """What must not differ. Of the instructions outside loops a fifth comes and goes with the compiler's release, and
    some spills: 40 at D=256, causal, in order, where programs share key blocks and so hand in dK and dV."""
    said = [
        f"{name}: {fact}: {other[fact]}, with the newest {own[fact]}"
        for fact in ("smem_bytes", "warps", "registers", "loops")
        if other[fact] != own[fact]
    ]
    said += [f"{name}: serialised" for kernel in (other, own) if kernel["serialised"]]
    if not 0.8 <= other["instructions"] / own["instructions"] <= 1.25:
        said.append(f"{name}: {other['instructions']} instructions, with the newest {own['instructions']}")
    if other["spills_in_loops"] > own["spills_in_loops"] or other["spills"] > own["spills"] + 40:
        said.append(f"{name}: spills {other['spills']}, with the newest {own['spills']}")
    return said


@pytest.mark.parametrize("minor", OTHERS)
def test_the_assembler_is_chosen_for_our_kernels_alone(minor):
    """The tests of that, with the other release: it takes the older assembler for Hopper by itself."""
    said = run([sys.executable, "-m", "pytest", "-q", "tests/gluon_attn/runtime/test_assembler.py"], folder_of(minor))
    assert " passed" in said
    assert "skipped" not in said


REFUSED = """
import torch
from gluon_attn import attention
from gluon_attn.device import Device
q = torch.zeros(1, 1, 16, 64, dtype=torch.bfloat16)
calls = (
    lambda: attention(q, q, q, device=Device.hopper()),
    lambda: __import__("gluon_cpu"),
    lambda: __import__("proving"),
)
for call in calls:
    try:
        call()
    except (ImportError, RuntimeError) as error:
        print(error)
"""


@pytest.mark.parametrize("minor", OTHERS)
def test_what_an_older_one_has_not_is_said(minor):
    lines = run([sys.executable, "-c", REFUSED], folder_of(minor)).splitlines()
    assert [line.partition(", got ")[0] for line in lines] == [
        "triton: expected version 3.9 to execute kernels on the CPU",
        "gluon_cpu: expected Triton 3.9, whose operations it knows",
        "triton: expected version 3.9 for kernels for sm_100a",
    ]


BY_ADDING = """
import torch
import gluon_cpu
from channels import compat
from gluon_attn import attention
from gluon_attn.device import Device
from gluon_attn.gradients import attention_backward
from gluon_attn.kernels.hopper.backward import reduce
from gluon_attn.testing import gradient_errors

compat.atomic_load = reduce.atomic_load = compat.load_by_adding
torch.manual_seed(0)
for q_len, kv_len, causal in ((200, 250, True), (700, 100, False)):  # the second: programs share key blocks
    q = torch.randn(1, 2, q_len, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 1, kv_len, 64, dtype=torch.bfloat16) for _ in range(2))
    dout, options = torch.randn_like(q), {"causal": causal, "device": Device.hopper()}
    out, lse = attention(q, k, v, return_lse=True, **options)
    for order in (False, True):
        results = []
        call = lambda: results.append(attention_backward(dout, None, q, k, v, out, lse, deterministic=order, **options))
        gluon_cpu.check(call, schedules=3, quiet=True)
        for e in gradient_errors(q, k, v, dout, results, causal=causal):
            print(e.name, e.error <= e.budget)
"""


def test_gradients_where_there_is_no_atomic_load():
    """What stands for it with Triton 3.8, executed by gluon_cpu: numbers, races, deadlocks."""
    said = run([sys.executable, "-c", BY_ADDING]).split()
    assert said == ["dQ", "True", "dK", "True", "dV", "True"] * 4
