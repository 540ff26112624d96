"""Which Triton is accepted; what the compiler's front end makes of a kernel, which names it on record."""

import re

import pytest
import torch
import triton

from channels.compat import gl, jit
from gluon_attn import api, attention, gradients
from gluon_attn.device import Device
from gluon_attn.forward.launch import build_of
from gluon_attn.forward.table import BLACKWELL
from gluon_attn.gradients import attention_backward
from gluon_attn.runtime.compiler import check_triton_version, front_end


@pytest.mark.parametrize("version", ["3.7.1", "3.10.0", "4.9.0", "3.90.0", "2.3.9"])
def test_another_triton_is_refused(monkeypatch, version):
    monkeypatch.setattr(triton, "__version__", version)
    told = rf"^triton: expected version 3\.8 or 3\.9, got {re.escape(version)}; install it with pip"
    with pytest.raises(RuntimeError, match=told):
        check_triton_version()


@pytest.mark.parametrize("version", ["3.8.0", "3.8.1", "3.9.0", "3.9.1", "3.9.0+git1234567", "3.9.0.post1"])
def test_what_is_accepted(monkeypatch, version):
    monkeypatch.setattr(triton, "__version__", version)
    check_triton_version()
    check_triton_version(90)


def test_the_newest_does_it_all(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    for arch in (90, 100, 103):
        check_triton_version(arch, on_cpu=True)


HERE = "expected version 3.9 {}, got 3.8.0; install it with pip"
Q = torch.zeros(1, 1, 16, 64, dtype=torch.bfloat16)


def test_an_older_one_has_no_kernels_for_blackwell(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.8.0")
    row = next(row for row in BLACKWELL if 100 in row.config.archs)
    with pytest.raises(RuntimeError, match=re.escape(HERE.format("for kernels for sm_100a"))):
        build_of(torch.bfloat16, row.padded_head_dim, row.mask, row.config).compile(100)


@pytest.mark.parametrize(
    "call",
    [
        lambda: attention(Q, Q, Q, device=Device.hopper()),
        lambda: attention_backward(Q, None, Q, Q, Q, Q, torch.zeros(1, 1, 16), device=Device.hopper()),
    ],
    ids=["forward", "backward"],
)
def test_an_older_one_executes_nothing_on_the_cpu(monkeypatch, call):
    monkeypatch.setattr(triton, "__version__", "3.8.0")
    monkeypatch.setattr(api, "_launches", {})
    monkeypatch.setattr(gradients, "_launches", {})
    with pytest.raises(RuntimeError, match=re.escape(HERE.format("to execute kernels on the CPU"))):
        call()


@jit
def fill(out_ptr, VALUE: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.store(out_ptr + gl.arange(0, 128, LAYOUT), gl.full([128], VALUE, gl.int32, LAYOUT))


@jit
def fill_with_a_comment(out_ptr, VALUE: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    # Another line, and so another place in the source.
    gl.store(out_ptr + gl.arange(0, 128, LAYOUT), gl.full([128], VALUE, gl.int32, LAYOUT))


def text_of(fn=fill, value: int = 1, starts_early: bool = False) -> str:
    signature, constants = {"out_ptr": "*i32"}, {"VALUE": value}
    made = front_end(fn, signature, constants, arch=90, num_warps=4, num_ctas=1, starts_early=starts_early)
    return made.replace("fill_with_a_comment", "fill")


def test_the_front_end_depends_on_the_kernel_and_not_on_its_place():
    assert text_of() == text_of(fill_with_a_comment)
    assert len({text_of(), text_of(value=2), text_of(starts_early=True)}) == 3
