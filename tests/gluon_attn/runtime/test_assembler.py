"""Our kernels get the newest assembler, whatever Triton is pointed at; and one that serialises products is told of."""

import contextlib
import os
import re
import warnings
from types import SimpleNamespace

import pytest
import torch

from gluon_attn.device import Device
from gluon_attn.forward.launch import compiled
from gluon_attn.forward.table import pick_config
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.problem import Problem
from gluon_attn.runtime import assembler, compiler
from gluon_attn.runtime.assembler import (
    KNOB,
    VARIABLE,
    disassemble,
    is_serialised,
    newest_assembler,
    warn_if_serialised,
)
from gluon_attn.runtime.compat import knobs, nvidia_compiler

# A kernel that compiles fast and that an assembler of CUDA 12.9 serialises, with every minor release of Triton.
PROBLEM = Problem(
    dtype=torch.bfloat16,
    batch=1,
    heads=32,
    kv_heads=32,
    q_len=512,
    kv_len=512,
    head_dim=64,
    causal=False,
    scale=64**-0.5,
    layout="bhsd",
)


def compile_kernel():
    """Not from memory, but perhaps from Triton's cache."""
    return compiled.__wrapped__(torch.bfloat16, 64, Mask(), pick_config(PROBLEM, Device.hopper()), arch=90)


@pytest.fixture
def older(monkeypatch):
    """Point Triton at the older of the assemblers that it ships; Triton 3.8 takes that for Hopper by itself."""
    tool = knobs.nvidia.ptxas
    if assembler.release(tool) >= (13,):
        pytest.skip(f"this Triton ships {tool.version} as its older assembler, which serialises nothing")
    monkeypatch.setenv(VARIABLE, tool.path)
    assembler.forget_assembler()
    assembler.warn_once.cache_clear()
    yield tool
    assembler.forget_assembler()
    assembler.warn_once.cache_clear()


def seen_by_triton() -> tuple[str, str | None, str]:
    """What Triton would assemble a user's kernel with, and cache it under."""
    return getattr(knobs.nvidia, KNOB).path, os.environ.get(VARIABLE), nvidia_compiler.get_ptxas_version(90)


@pytest.mark.slow
def test_an_older_assembler_is_passed_over_for_our_kernels_and_no_others(request, monkeypatch, tmp_path):
    wanted = compile_kernel()
    tool = request.getfixturevalue("older")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # or it would be found there
    before = seen_by_triton()
    assert before[:2] == (tool.path, tool.path)
    assert f"release {tool.version}" in before[2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = compile_kernel()
    assert got.hash == wanted.hash  # cached under one name
    assert disassemble(got) == disassemble(wanted)
    assert not is_serialised(disassemble(got))
    assert seen_by_triton() == before
    assert assembler.assembler_version() == assembler.shipped_assembler().version


def test_what_an_older_assembler_makes_is_told_of_once(older, monkeypatch):
    monkeypatch.setattr(compiler, "newest_assembler", contextlib.nullcontext)
    with pytest.warns(RuntimeWarning, match="has serialised the matrix products") as caught:
        kernel, _ = compile_kernel(), compile_kernel()
    assert is_serialised(disassemble(kernel))
    (warned,) = caught
    assert VARIABLE in str(warned.message)  # what to do


def test_a_newer_assembler_is_left_to_its_user(monkeypatch):
    mine = SimpleNamespace(path="/mine/ptxas", version="13.10")
    # Without the scope that a change needs.
    monkeypatch.setattr(assembler, "knobs", SimpleNamespace(nvidia=SimpleNamespace(**{KNOB: mine})))
    monkeypatch.setattr(assembler, "shipped_assembler", lambda: SimpleNamespace(path="/shipped", version="13.4"))
    with newest_assembler():
        assert getattr(assembler.knobs.nvidia, KNOB) is mine


def test_a_triton_without_an_assembler_uses_the_configured_one(older, monkeypatch):
    monkeypatch.setattr(assembler, "shipped_assembler", lambda: None)
    with newest_assembler():
        assert getattr(knobs.nvidia, KNOB) == older


def test_after_a_compile_that_fails_the_users_assembler_is_back(older):
    before = seen_by_triton()
    with contextlib.suppress(ZeroDivisionError), newest_assembler():
        assert getattr(knobs.nvidia, KNOB) == assembler.shipped_assembler()
        raise ZeroDivisionError
    assert seen_by_triton() == before


def kernel_of(cubin: bytes, arch: int = 90) -> SimpleNamespace:
    return SimpleNamespace(asm={"cubin": cubin}, metadata=SimpleNamespace(target=SimpleNamespace(arch=arch)))


@pytest.mark.parametrize(
    "kernel", [kernel_of(b"..release 13.4.."), kernel_of(b"", arch=100)], ids=["known", "no wgmma"]
)
def test_what_is_known_to_be_good_is_not_disassembled(monkeypatch, kernel):
    shipped = SimpleNamespace(path="/shipped", version="13.4")
    monkeypatch.setattr(assembler, "shipped_assembler", lambda: shipped)
    monkeypatch.setattr(assembler, "disassemble", lambda kernel: pytest.fail("disassembled"))
    warn_if_serialised(kernel)


@pytest.mark.parametrize(
    ("waits", "serialised"), [(0, False), (1, False), (2, False), (3, True), (4, True)], ids=lambda n: str(n)
)
def test_is_serialised(waits, serialised):
    sass = "/*00*/ HGMMA.64x128x16.F32.BF16 R24, gdesc[UR40] ;\n" * 2 + "/*10*/ QGMMA.64x8x32 R1 ;\n"
    assert is_serialised(sass + "/*20*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n" * waits) == serialised
    assert not is_serialised(re.sub(r"[HQ]GMMA", "FFMA", sass) + "WARPGROUP.DEPBAR.LE gsb0 ;" * waits)
