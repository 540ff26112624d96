"""The delays that tests on a card put into the backward's roles: they are in the machine code, and numbers stay right.

In a process of their own, as Triton looks at what a kernel calls once.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

SCRIPT = """
import sys, warnings
import torch
from gluon_attn import attention
from gluon_attn.backward.launch import Choices, compiled_backward
from gluon_attn.backward.table import rows_by_default
from gluon_attn.device import Device
from gluon_attn.gradients import attention_backward
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.testing import check_gradients
from tests.gpu.delays import DELAYS, delay, register_twin

delay(*DELAYS)
warnings.simplefilter("error")  # as that products wait for each other
head_dim = int(sys.argv[1])
choices = Choices(
    dtype=torch.bfloat16,
    padded_head_dims=(head_dim, head_dim),
    mask=Mask(causal=True),
    config=rows_by_default((head_dim, head_dim), True)[0].config,
    deterministic=True,
    finishes=head_dim < 256,
)
kernels = compiled_backward(choices)
print("clocks", *(kernel.asm["ptx"].count("%clock") for kernel in kernels))

register_twin()
q, dout = torch.randn(2, 1, 2, 100, head_dim).to(torch.bfloat16)
k, v = torch.randn(2, 1, 1, 150, head_dim).to(torch.bfloat16)
out, lse = attention(q, k, v, causal=True, return_lse=True, device=Device.hopper())
options = {"causal": True, "device": Device.hopper(), "deterministic": True}
check_gradients(q, k, v, dout, attention_backward(dout, None, q, k, v, out, lse, **options), causal=True)
print("right")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "head_dim", [128, pytest.param(64, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.slow)]
)
def test_delayed_kernels_compile_and_are_right(head_dim):
    command = [sys.executable, "-c", SCRIPT, str(head_dim)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    clocks, right = done.stdout.splitlines()
    before, main, *_ = map(int, clocks.split()[1:])
    assert before == 2  # two for each delay
    # The load role has two, the gradient role products and dQ in both loops, the reduce role two.
    assert main >= 2 * (2 + 2 * 3 + 2)
    assert right == "right"
