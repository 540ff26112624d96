"""Calls of torch's operators that came before: what is kept of them, and what is looked at each time."""

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from gluon_attn import call, sdpa_calls, tuning
from gluon_attn.runtime.kernel import KernelUnavailable
from gluon_attn.testing import check, check_gradients, normal
from tests.gluon_attn.sdpa import FLASH, FLASH_BACKWARD, RNG, by_cudnn, by_flash, q_of

BOTH = pytest.mark.parametrize("by", [by_flash, by_cudnn])


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch):
    for name in ("_forward", "_backward", "_left"):
        monkeypatch.setattr(sdpa_calls, name, {})


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """Which of these were asked whether a call is ours."""
    found: list[str] = []
    for name in ("takes", "takes_gradients"):
        asks = getattr(sdpa_calls, name)

        def ask(*args: Any, name: str = name, asks: Callable[..., bool] = asks, **options: Any) -> bool:
            found.append(name)
            return asks(*args, **options)

        monkeypatch.setattr(sdpa_calls, name, ask)
    return found


def both_passes(by: Callable[..., Any], inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    out, lse, *_ = by(*inputs, is_causal=True)
    return [out, lse, *torch.autograd.grad(out, inputs, dout)]


def check_both(inputs: list[Tensor], dout: Tensor, got: list[Tensor]) -> None:
    q, k, v = (t.detach() for t in inputs)
    out, lse, *grads = (t.detach() for t in got)
    check(q, k, v, out, lse.reshape(q.shape[:3]), causal=True)
    check_gradients(q, k, v, dout, grads, causal=True)


@BOTH
def test_the_same_shapes_are_asked_about_once(by, calls, asked):
    """The numbers, and memory, are those of each call."""
    kept = []
    for seed in range(3):
        inputs = [
            normal(1, h, 40, 64, seed=10 * seed + i, device="cpu").requires_grad_() for i, h in enumerate((2, 1, 1))
        ]
        dout = normal(1, 2, 40, 64, seed=10 * seed + 3, device="cpu")
        kept.append((inputs, dout, both_passes(by, inputs, dout)))
    # Both passes in one call: what is asked of gradients asks for a forward pass, too.
    assert asked == ["takes", "takes_gradients", "takes"]
    for inputs, dout, got in kept:
        check_both(inputs, dout, got)
    assert calls == []


@BOTH
@pytest.mark.parametrize("change", ["length", "heads", "strides", "dtype", "scale"])
def test_another_call_is_asked_about(by, change, calls, asked):
    q = q_of(1, 2, 40, 64)
    by(q, q, q)
    options: dict[str, Any] = {"scale": 0.1} if change == "scale" else {}
    if change == "length":
        q = q_of(1, 2, 41, 64)
    elif change == "heads":
        q = q_of(1, 4, 40, 64)
    elif change == "strides":
        q = q_of(1, 40, 2, 64).transpose(1, 2)
    elif change == "dtype":
        q = q.half()
    out, lse, *_ = by(q, q, q, **options)
    check(q, q, q, out, lse.reshape(q.shape[:3]), causal=False, **options)
    assert asked == ["takes", "takes"]
    assert calls == []


@BOTH
@pytest.mark.usefixtures("packaged_alone")
@pytest.mark.filterwarnings("ignore:.*for none of the cards")
def test_another_table_is_asked(by, calls, asked, written):
    q = q_of()
    by(q, q, q)
    with tuning.load(written()):
        by(q, q, q)
    by(q, q, q)
    assert asked == ["takes", "takes"]
    assert calls == []


def misaligned(t: Tensor) -> Tensor:
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


@BOTH
def test_memory_is_looked_at_each_time(by, calls):
    """Some has the same shape and strides, and TMA cannot read it: it goes to torch's own kernel."""
    q = q_of()
    assert not (by(q, q, q)[0] == 7).all()
    other = misaligned(q)
    for inputs in ((other, q, q), (q, other, q), (q, q, other)):
        assert (by(*inputs)[0] == 7).all()
    assert len(calls) == 3
    assert not (by(q, q, q)[0] == 7).all()


def test_memory_in_backward_passes(calls, asked):
    """Of Q, K and V it goes to torch's own kernel; of dO, and of O, it is copied, as in a first call."""
    q, k, v, dout = normal(4, 1, 2, 40, 64, device="cpu")
    out, lse, *_ = by_flash(q, k, v)

    def by(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Any:
        along = [t.transpose(1, 2) for t in (dout, q, k, v, out)]
        grads = FLASH_BACKWARD(*along, lse, None, None, 40, 40, 0.0, False, *RNG)
        return [grad.transpose(1, 2) for grad in grads]

    given = [dout, q, k, v, out]
    want = by(*given)
    check_gradients(q, k, v, dout, want, causal=False)
    assert all(torch.equal(a, b) for a, b in zip(by(*given)[1:], want[1:], strict=True))
    asked.clear()
    for i in range(5):
        changed = [*given[:i], misaligned(given[i]), *given[i + 1 :]]
        before = len(calls)
        got = by(*changed)
        if 1 <= i <= 3:
            assert all((t == 7).all() for t in got)
            assert len(calls) == before + 1
        else:
            check_gradients(q, k, v, dout, got, causal=False)
            assert len(calls) == before
    assert "takes_gradients" in asked


def test_what_is_kept_is_bounded(calls, monkeypatch):
    monkeypatch.setattr(call, "MAX_KEPT", 2)
    for length in (40, 41, 42):
        q = q_of(1, 1, length, 64)
        by_flash(q, q, q)
        assert 1 <= len(sdpa_calls._forward) <= 2
    assert calls == []


@BOTH
def test_what_is_torchs_is_asked_about_once(by, calls, asked):
    """Of both passes; and each call's own tensors are handed on."""
    for times in (1, 2):
        q, k, v, dout = (
            normal(1, 1, length, 64, seed=10 * times + i, device="cpu") for i, length in enumerate((1, 40, 40, 1))
        )  # a single query
        inputs = [t.requires_grad_() for t in (q, k, v)]
        torch.autograd.grad(by(*inputs)[0], inputs, dout)
        (_, forward, _), (_, backward, _) = calls[-2:]
        for got, want in zip((*forward[:3], *backward[:4]), (*inputs, dout, *inputs), strict=True):
            assert torch.equal(got, want)
        assert len(calls) == 2 * times
    assert asked == ["takes", "takes_gradients", "takes"]


@pytest.mark.usefixtures("packaged_alone")
@pytest.mark.filterwarnings("ignore:.*for none of the cards")
def test_what_is_torchs_is_asked_about_again_where_it_may_differ(calls, asked, written):
    """With another table, with another order of sums, and by other options."""
    inputs = [q_of(1, 1, length, 64).requires_grad_() for length in (1, 40, 40)]
    of_both = ["takes", "takes_gradients", "takes"]

    def asks(**options: Any) -> list[str]:
        asked.clear()
        torch.autograd.grad(by_flash(*inputs, **options)[0], inputs, q_of(1, 1, 1, 64))
        return list(asked)

    assert [asks(), asks()] == [of_both, []]
    assert [asks(scale=0.1), asks(scale=0.1)] == [of_both, []]
    with tuning.load(written()):
        assert [asks(), asks()] == [of_both, []]
    try:
        torch.use_deterministic_algorithms(True)
        assert [asks(), asks()] == [of_both[1:], []]
    finally:
        torch.use_deterministic_algorithms(False)
    assert asks() == []


def test_a_refused_address_is_not_kept(calls, asked):
    """As the next tensor of that shape may have one that is taken."""
    q = q_of()
    other = misaligned(q)
    assert (by_flash(other, q, q)[0] == 7).all()
    assert not (by_flash(q, q, q)[0] == 7).all()
    assert asked == ["takes", "takes"]
    assert not sdpa_calls._left


def test_what_is_left_is_bounded(calls, monkeypatch):
    monkeypatch.setattr(call, "MAX_KEPT", 2)
    for length in (40, 41, 42):
        by_flash(q_of(1, 1, 1, 64), *[q_of(1, 1, length, 64)] * 2)
        assert 1 <= len(sdpa_calls._left) <= 2


def test_no_output_is_given_to_what_is_kept(calls, asked):
    """A backward pass whose O has other strides is a call of its own."""
    q = q_of(1, 40, 2, 64)
    out, lse, *_ = FLASH(q, q, q, None, None, 40, 40, 0.0, False, False)
    for o in (out, out.transpose(1, 2).contiguous().transpose(1, 2)):
        FLASH_BACKWARD(q, q, q, q, o, lse, None, None, 40, 40, 0.0, False, *RNG)
    assert asked.count("takes_gradients") == 2
    assert calls == []


def test_a_kernel_that_fails_is_left_to_torch(calls, monkeypatch):
    """Also one that was launched before, and cannot be any more."""
    q = q_of()
    by_flash(q, q, q)

    def fail(*args: Any) -> NoReturn:
        raise KernelUnavailable("gone")

    monkeypatch.setattr(sdpa_calls, "attend_again", fail)
    with pytest.warns(UserWarning, match="gone"):
        assert (by_flash(q, q, q)[0] == 7).all()


@pytest.mark.slow_but("True-True-by_cudnn", "True-False-by_flash", "False-True-by_flash", "False-False-by_cudnn")
@BOTH
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("differentiated", [False, True])
def test_where_a_graph_is_broken(by, causal, differentiated, calls):
    """What the dispatcher calls there is traced, and a launch cannot be."""
    q, dout = q_of().requires_grad_(differentiated), q_of()

    def one() -> list[Tensor]:
        out = by(q, q, q, is_causal=causal)[0]
        return [out, *(torch.autograd.grad(out, q, dout) if differentiated else ())]

    def f() -> list[Tensor]:
        found = []
        for _ in range(2):
            torch._dynamo.graph_break()
            found += one()
        return found

    want = one()
    torch.compiler.reset()
    got = torch.compile(f, backend="eager")()
    for a, b in zip(got, want * 2, strict=True):
        assert (a - b).norm() < 0.01 * b.norm()  # sums of dQ have no order
    assert calls == []
