"""Traced, batched, differentiated and fake tensors are refused by name: on the first call of a shape and later."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gluon_attn import api, attention
from gluon_attn.device import Device
from gluon_attn.refusals import refuse_unusual

Q = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16)
Q8 = Q.to(torch.float8_e4m3fn)


def attend(q):
    return attention(q, q, q, device=Device.hopper())


@pytest.fixture(params=["first call", "later call"])
def _calls(request, monkeypatch):
    """A launch that does nothing, remembered or not for the key that all the tensors below share."""

    class Launch:
        def __call__(self, *tensors):
            pass

    monkeypatch.setattr(api, "_launches", {})
    if request.param == "later call":
        with monkeypatch.context() as patch:
            patch.setattr(api, "prepare", lambda *args: Launch())
            attend(Q)
            with_out(torch.zeros_like(Q))
            for name in ("q_scale", "k_scale", "v_scale"):
                with_scale(name, torch.ones(1, 1))
            for name in ("sinks", "alibi_slopes"):
                with_heads(name, torch.ones(1))
        assert len(api._launches) == 7


def fake():
    with FakeTensorMode() as mode:
        q = mode.from_tensor(Q)
    attend(q)


def with_out(out):
    return attention(Q, Q, Q, out=out, device=Device.hopper())


def fake_out():
    with FakeTensorMode() as mode:
        with_out(mode.from_tensor(Q))


def with_scale(name, scale):
    return attention(Q8, Q8, Q8, device=Device.hopper(), **{name: scale})


def fake_scale(name):
    with FakeTensorMode() as mode:
        scale = mode.from_tensor(torch.ones(1, 1))
    with_scale(name, scale)


def with_heads(name, t, q=Q):
    return attention(q, Q, Q, device=Device.hopper(), **{name: t})


def fake_of_heads(name):
    with FakeTensorMode() as mode:
        t = mode.from_tensor(torch.ones(1))
    with_heads(name, t)


def vmap_of_heads(name, q=Q):
    torch.vmap(lambda t: with_heads(name, t, q))(torch.ones(2, 1))


CASES = {
    "fake sinks": (lambda: fake_of_heads("sinks"), "sinks: .* FakeTensor"),
    "fake alibi_slopes": (lambda: fake_of_heads("alibi_slopes"), "alibi_slopes: .* FakeTensor"),
    "vmap of sinks": (lambda: vmap_of_heads("sinks"), "sinks: .* torch.vmap has batched"),
    "vmap of alibi_slopes": (lambda: vmap_of_heads("alibi_slopes"), "alibi_slopes: .* torch.vmap has batched"),
    "vmap of sinks, with gradients": (
        lambda: vmap_of_heads("sinks", Q.detach().requires_grad_()),
        "sinks: .* torch.vmap has batched",
    ),
    "grad of sinks": (
        lambda: torch.func.grad(lambda t: with_heads("sinks", t).sum())(torch.ones(1)),
        "sinks: .* torch.func differentiates",
    ),
    "vmap of out": (lambda: torch.vmap(with_out)(Q.expand(2, *Q.shape)), "out: .* torch.vmap has batched"),
    "fake out": (fake_out, "out: .* FakeTensor"),
    "fake q_scale": (lambda: fake_scale("q_scale"), "q_scale: .* FakeTensor"),
    "fake v_scale": (lambda: fake_scale("v_scale"), "v_scale: .* FakeTensor"),
    "vmap of k_scale": (
        lambda: torch.vmap(lambda s: with_scale("k_scale", s))(torch.ones(2, 1, 1)),
        "k_scale: .* torch.vmap has batched",
    ),
    "vmap": (lambda: torch.vmap(attend)(Q.expand(2, *Q.shape)), "q: .* torch.vmap has batched"),
    "grad": (lambda: torch.func.grad(lambda q: attend(q).sum())(Q), "q: .* torch.func differentiates"),
    "jvp": (lambda: torch.func.jvp(attend, (Q,), (Q,)), "q: .* torch.func differentiates"),
    "fake": (fake, "q: .* FakeTensor"),
    "functionalize": (lambda: torch.func.functionalize(attend)(Q), "q: expected a tensor with memory, got one that st"),
    "zeros without memory": (lambda: attend(torch._efficientzerotensor(Q.shape, dtype=Q.dtype)), "q: .* with memory"),
    "sinks without memory": (
        lambda: with_heads("sinks", torch._efficientzerotensor(1)),
        "sinks: expected a tensor with memory",
    ),
    "trace": (lambda: torch.jit.trace(attend, (Q,)), "torch.jit.trace is not supported"),
}


@pytest.mark.usefixtures("_calls")
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(("call", "message"), CASES.values(), ids=CASES)
def test_refused_by_name(call, message):
    with pytest.raises(NotImplementedError, match=message):
        call()


def test_plain_ones_are_not():
    class Named(torch.Tensor):
        pass

    refuse_unusual(q=Q, k=torch.nn.Parameter(Q), v=Q.as_subclass(Named), out=None)


def test_a_jagged_tensor_is_sent_to_packed_sequences():
    rows = [torch.randn(length, 2, 64, dtype=torch.bfloat16) for length in (3, 5)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    with pytest.raises(NotImplementedError, match=r"^q: .* jagged .*\.offsets\(\) to attention_varlen"):
        attention(jagged, jagged, jagged, device=Device.hopper())
