"""The planted race that ConSan has to find, executed by gluon_cpu: it is one, and it is none with the wait."""

import pytest
import torch

import gluon_cpu
from gluon_attn.runtime.compiler import compile_gluon
from gluon_attn.sanitizer import HAND_OVERS, hand_over


@pytest.mark.parametrize("name", HAND_OVERS)
def test_it_compiles_for_a_card(name):
    kernel = compile_gluon(
        hand_over, {"out_ptr": "*fp32"}, {"WAIT": HAND_OVERS[name]}, arch=90, num_warps=4, num_ctas=1
    )
    assert kernel.asm["cubin"]


@pytest.mark.parametrize("name", HAND_OVERS)
def test_without_the_wait_there_is_a_race(name):
    out = torch.full((128,), float("nan"))

    def call() -> None:
        hand_over[(1,)](out, WAIT=HAND_OVERS[name], num_warps=4)

    if HAND_OVERS[name]:
        gluon_cpu.check(call, schedules=20, quiet=True)
        assert bool((out == 1).all())
    else:
        with pytest.raises(gluon_cpu.Finding, match="race"):
            gluon_cpu.check(call, schedules=20, quiet=True)
