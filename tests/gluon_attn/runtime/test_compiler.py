"""Which Triton is accepted; what the compiler's front end makes of a kernel, which names it on record."""

import re

import pytest
import triton

from channels.compat import gl, jit
from gluon_attn.runtime.compiler import check_triton_version, front_end


@pytest.mark.parametrize("version", ["3.8.0", "3.8.1", "3.10.0", "4.9.0", "3.90.0", "2.3.9"])
def test_another_triton_is_refused(monkeypatch, version):
    monkeypatch.setattr(triton, "__version__", version)
    with pytest.raises(RuntimeError, match=rf"^triton: expected .*3\.9.*, got {re.escape(version)}.*pip install"):
        check_triton_version()


@pytest.mark.parametrize("version", ["3.9.0", "3.9.1", "3.9.0+git1234567", "3.9.0.post1"])
def test_triton_3_9_is_accepted(monkeypatch, version):
    monkeypatch.setattr(triton, "__version__", version)
    check_triton_version()


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
