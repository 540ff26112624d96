"""An integer division by zero is no finding by itself, but where its result decides something."""

import inspect
from typing import Any

import pytest
import torch

import gluon_cpu
from gluon_cpu import Accept
from tests.compat import gl, jit, mbarrier, tma
from tests.gluon_cpu.layouts import PLAIN, ROW
from tests.gluon_cpu.support import descriptor, new_barrier, normal, poisoned, same

MODES = pytest.mark.parametrize("mode", ["fast", "lowered"])


@jit
def tiles(x_ptr, out_ptr, n, STEPS: gl.constexpr):
    """The last step divides by zero; what it does is masked off by n."""
    i = gl.arange(0, 128, ROW)
    for step in range(STEPS):
        tile = step % (2 - step) + step // (2 - step)
        gl.store(out_ptr + i + step * 128, gl.load(x_ptr + i + tile, mask=(i < 128) & (step < n)), mask=step < n)


@MODES
def test_a_result_that_nobody_looks_at(mode):
    x, out = normal(256), poisoned(384)
    gluon_cpu.launch(tiles, (1,), x, out, 2, 3, mode=mode, outputs=[])
    same(out[:256], torch.cat([x[:128], x[1:129]]))


@MODES
def test_an_address(mode):
    with pytest.raises(gluon_cpu.DivisionByZero) as caught:
        gluon_cpu.launch(tiles, (1,), normal(256), poisoned(384), 3, 3, mode=mode)
    message = str(caught.value)
    assert "gl.load(x_ptr" in message, "where it is used"
    assert "tile = step % (2 - step)" in message, "where the division is"
    assert caught.value.schedule is not None


@jit
def elements(x_ptr, y_ptr, out_ptr, HOW: gl.constexpr):
    """Of two tensors of integers, the quotient: for elements of y that are 0 it means nothing."""
    i = gl.arange(0, 128, ROW)
    x, y = gl.load(x_ptr + i), gl.load(y_ptr + i)
    q = x // y if HOW != "unsigned" else (x.to(gl.uint32) % y.to(gl.uint32)).to(gl.int32)
    if HOW == "chosen" or HOW == "unsigned":
        gl.store(out_ptr + i, gl.where(y != 0, q * 2 + 1, -1))
    elif HOW == "masked":
        gl.store(out_ptr + i, q, mask=y != 0)
    elif HOW == "shared":
        tile = gl.allocate_shared_memory(gl.int32, [128], PLAIN)
        tile.store(q)
        gl.store(out_ptr + i, gl.where(y != 0, tile.load(ROW), -1))
    elif HOW == "reshaped":
        pairs = gl.where(y.reshape([64, 2]) != 0, q.reshape([64, 2]), -1)
        gl.store(out_ptr + i, gl.convert_layout(pairs.reshape([128]), ROW))
    elif HOW == "stored":
        gl.store(out_ptr + i, q)
    elif HOW == "compared":
        gl.store(out_ptr + i, x, mask=q > 0)
    elif HOW == "summed":
        gl.store(out_ptr, gl.sum(q, 0))
    elif HOW == "asserted":
        gl.device_assert(q < 1000)
    elif HOW == "added":
        gl.atomic_add(out_ptr + i, q)


ELEMENTS, FIRST = inspect.getsourcelines(elements.fn)
DIVISION = FIRST + next(i for i, line in enumerate(ELEMENTS) if "q = x // y" in line)


def values() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.arange(-60, 68, dtype=torch.int32), torch.arange(128, dtype=torch.int32) % 5
    return x, y


def quotients() -> torch.Tensor:
    x, y = values()
    return torch.where(y != 0, torch.div(x, y.clamp(min=1), rounding_mode="trunc"), -1).to(torch.int32)


@MODES
@pytest.mark.parametrize("how", ["chosen", "masked", "shared", "reshaped"])
def test_elements_that_are_chosen_away(how, mode):
    (x, y), out = values(), torch.full((128,), -1, dtype=torch.int32)
    gluon_cpu.launch(elements, (1,), x, y, out, how, mode=mode)
    wanted = quotients()
    same(out, torch.where(y != 0, wanted * 2 + 1, -1).to(torch.int32) if how == "chosen" else wanted)


def test_unsigned_elements():
    (x, y), out = values(), torch.full((128,), -1, dtype=torch.int32)
    x = x.abs()
    gluon_cpu.launch(elements, (1,), x, y, out, "unsigned")
    same(out, torch.where(y != 0, x % y.clamp(min=1) * 2 + 1, -1).to(torch.int32))


@MODES
@pytest.mark.parametrize("how", ["stored", "compared", "summed", "asserted", "added"])
def test_elements_that_decide_something(how, mode):
    x, y = values()
    with pytest.raises(gluon_cpu.DivisionByZero, match="q = x // y"):
        gluon_cpu.launch(elements, (1,), x, y, torch.zeros(128, dtype=torch.int32), how, mode=mode)
    out = torch.zeros(128, dtype=torch.int32)
    gluon_cpu.launch(elements, (1,), x, y.clamp(min=1), out, how, mode=mode)  # without a zero


@jit
def decisions(desc, out_ptr, n, zero, HOW: gl.constexpr):
    rest = n % zero
    if HOW == "branch":
        if rest > 3:
            gl.store(out_ptr, 1.0)
    elif HOW == "loop":
        for step in range(rest):
            gl.store(out_ptr + step, 1.0)
    elif HOW == "copy":
        tile = gl.allocate_shared_memory(gl.float32, [32, 32], desc.layout)
        loaded = new_barrier(1)
        gl.barrier()
        mbarrier.expect(loaded, desc.nbytes_per_cta)
        tma.async_load(desc, [rest, 0], loaded, tile)
        mbarrier.wait(loaded, 0)
    elif HOW == "nothing" and n > 3:
        gl.store(out_ptr, 1.0 + gl.where(zero == 0, 0, rest))


@MODES
@pytest.mark.parametrize("how", ["branch", "loop", "copy"])
def test_scalars_that_decide_something(how, mode):
    arguments = descriptor(normal(64, 32), [32, 32]), torch.zeros(8), 7
    with pytest.raises(gluon_cpu.DivisionByZero, match="rest = n % zero"):
        gluon_cpu.launch(decisions, (1,), *arguments, 0, how, mode=mode)
    gluon_cpu.launch(decisions, (1,), *arguments, 5, how, mode=mode)


def test_a_scalar_that_is_chosen_away():
    out = torch.zeros(8)
    gluon_cpu.launch(decisions, (1,), descriptor(normal(64, 32), [32, 32]), out, 7, 0, "nothing")
    assert out[0] == 1


PASSED: dict[str, dict[str, Any]] = {
    "skip": {"skip": ["DivisionByZero"]},
    "accept, the function of the use": {
        "accept": [Accept(kind="DivisionByZero", place="elements", reason="it is known")]
    },
    "accept, the line of the division": {
        "accept": [Accept(kind="DivisionByZero", place=f"test_division_by_zero.py:{DIVISION}", reason="it is known")]
    },
}


@MODES
@pytest.mark.parametrize("passed", PASSED)
@pytest.mark.parametrize("how", ["stored", "compared", "summed", "asserted", "added"])
def test_who_lets_it_pass_goes_on_with_0(how, passed, mode):
    (x, y), out = values(), torch.zeros(128, dtype=torch.int32)

    def run() -> None:
        elements[(1,)](x, y, out, how)

    checked = gluon_cpu.check(run, schedules=1, mode=mode, **PASSED[passed])
    assert ("it is known" in str(checked)) == (passed != "skip")
    quotient = torch.where(y != 0, quotients(), 0)
    if how in ("stored", "added"):
        same(out, quotient.to(torch.int32))
    elif how == "compared":
        same(out, torch.where(quotient > 0, x, 0).to(torch.int32))
    elif how == "summed":
        assert out[0] == quotient.sum()


@MODES
@pytest.mark.parametrize("how", ["branch", "loop", "copy"])
def test_scalars_that_pass_are_0(how, mode):
    out = torch.zeros(8)

    def run() -> None:
        decisions[(1,)](descriptor(normal(64, 32), [32, 32]), out, 7, 0, how)

    gluon_cpu.check(run, schedules=1, mode=mode, skip=["DivisionByZero"])
    assert out.sum() == 0


def test_it_can_be_kept_for_the_end():
    (x, y), out = values(), torch.zeros(128, dtype=torch.int32)
    with pytest.raises(ExceptionGroup) as caught:
        gluon_cpu.check(lambda: elements[(1,)](x, y, out, "stored"), schedules=1, keep_going=True)
    assert [type(one) for one in caught.value.exceptions] == [gluon_cpu.DivisionByZero]
    same(out, torch.where(y != 0, quotients(), 0).to(torch.int32))
