"""Attention under torch.compile, torch.export and torch.autocast, on gluon_cpu."""

import contextlib
import dataclasses
import io
import re
import shutil
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from gluon_attn import attention, reference_attention, supports
from gluon_attn.call import Extras, Options
from gluon_attn.device import Device
from gluon_attn.ops import ARGUMENTS, FORWARD_PRODUCTS, attention_op, flops
from gluon_attn.support import REFUSALS
from gluon_attn.testing import check_gradients

HOPPER = Device.hopper()


def qkv(q_len: int = 100, kv_len: int = 130, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, h, n, 64, generator=generator).to(dtype).requires_grad_()
        for h, n in ((2, q_len), (1, kv_len), (1, kv_len))
    ]


def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse = attention(q * 2, k, v, causal=True, return_lse=True, device=HOPPER)
    return out * lse[..., None].to(out.dtype)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_whole_it_is_what_it_is_in_eager_mode(dynamic):
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for n in (100, 70) if dynamic else (100,):
        inputs = qkv(n)
        dout = torch.randn_like(inputs[0])
        results = [fn(*inputs) for fn in (compiled, model)]
        assert torch.equal(*results)
        # The bits of dQ depend on the order of its sums.
        for one, other in zip(*(torch.autograd.grad(out, inputs, dout) for out in results), strict=True):
            torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)


def arguments(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Any, ...]:
    """Of the operator; None, and nothing read, what is not given."""
    named = dict.fromkeys(ARGUMENTS) | {"q": q, "k": k, "v": v, "read": [], "causal": False} | given
    return tuple(named.values())


def test_the_operators_are_what_torch_expects():
    inputs = qkv(40, 40)
    bias = torch.randn(1, 1, 40, 40).requires_grad_()
    given = arguments(*inputs, bias=bias, causal=True, layout="bhsd", deterministic=False, card="hopper")
    torch.library.opcheck(torch.ops.gluon_attn.forward, given, raise_exception=True)


def test_documents_in_a_graph():
    ids = torch.arange(80, dtype=torch.int32)[None] // 30

    def of_documents(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, segment_ids=ids.expand(q.shape[0], -1).contiguous(), device=HOPPER)

    inputs = qkv(80, 80)
    compiled = torch.compile(of_documents, backend="aot_eager", fullgraph=True)
    results = [fn(*inputs) for fn in (compiled, of_documents)]
    assert torch.equal(*results)
    grads = [torch.autograd.grad(out.float().sum(), inputs) for out in results]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("shared", ["", "by heads", "by rows"])
def test_a_bias_in_a_graph(shared):
    """With its gradient, also where several rows or heads share it; and of other lengths in the same graph."""

    def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        out = attention(q, k, v, bias=bias * 2, causal=True, device=HOPPER)
        assert isinstance(out, Tensor)
        return out

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(biased, backend=counter, fullgraph=True, dynamic=True)
    for n in (40, 24):
        shape = (1, 1 if shared == "by heads" else 2, 1 if shared == "by rows" else n, n)
        bias = torch.randn(shape).bfloat16().requires_grad_()
        inputs = [*qkv(n, n), bias]
        results = [fn(*inputs) for fn in (compiled, biased)]
        assert torch.equal(*results)
        grads = [torch.autograd.grad(out, inputs, torch.ones_like(out)) for out in results]
        assert grads[1][3].norm() > 0
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)
    assert counter.frame_count == 1


def test_a_bias_alone_has_a_gradient_in_a_graph():
    q, k, v = (t.detach() for t in qkv(40, 40))
    bias = torch.randn(1, 2, 40, 40).requires_grad_()
    dout = torch.randn_like(q)
    compiled = torch.compile(partial(attention, q, k, v, device=HOPPER), backend="aot_eager", fullgraph=True)
    (grad,) = torch.autograd.grad(compiled(bias=bias), bias, dout)
    exact = bias.detach().double().requires_grad_()
    out, _ = reference_attention(q.double(), k.double(), v.double(), bias=exact)
    (want,) = torch.autograd.grad(out, exact, dout.double())
    torch.testing.assert_close(grad.double(), want, atol=0.02, rtol=0.02)


def test_fp8_with_scales_in_a_graph():
    q, k, v = (t.detach().to(torch.float8_e4m3fn) for t in qkv(40, 40))
    scales = {f"{n}_scale": torch.tensor([[scale]]) for n, scale in zip("qkv", (0.5, 2.0, 3.0), strict=True)}
    attend: Any = partial(attention, device=HOPPER)
    out = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k, v, **scales)
    assert torch.equal(out, attend(q, k, v, **scales))
    assert not torch.equal(out, attend(q, k, v))


def test_checkpointed():
    q, k, v = inputs = qkv(40, 40)
    dout = torch.randn_like(q)
    out = checkpoint(partial(attention, device=HOPPER), q, k, v, use_reentrant=False)
    check_gradients(q, k, v, dout, torch.autograd.grad(out, inputs, dout))


def test_checkpointed_with_a_bias():
    bias = torch.randn(1, 2, 40, 40).bfloat16().requires_grad_()
    inputs = [*qkv(40, 40), bias]
    dout = torch.randn_like(inputs[0])

    def model(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        out = attention(q, k, v, bias=bias, device=HOPPER)
        assert isinstance(out, Tensor)
        return out

    want = torch.autograd.grad(model(*inputs), inputs, dout)
    out = checkpoint(model, *inputs, use_reentrant=False)
    for one, other in zip(torch.autograd.grad(out, inputs, dout), want, strict=True):
        assert other.norm() > 0
        torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)


def test_other_lengths_make_no_other_graph():
    """But for the second, which makes one of any length."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for n in (40, 24, 30, 64, 16):
        inputs = [t.detach() for t in qkv(n, n)]
        assert torch.equal(compiled(*inputs), model(*inputs))
    assert counter.frame_count in (1, 2)  # 1 where another test has shown that lengths change


class Exported(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return model(q, k, v)


def exported() -> Any:
    """Of any length."""
    inputs = tuple(t.detach() for t in qkv(40, 40))
    return torch.export.export(Exported(), inputs, dynamic_shapes=[{2: torch.export.Dim("length", min=2)}] * 3)


def test_exported():
    """Also after it was saved."""
    assert "gluon_attn.forward" in str(exported().graph)
    file = io.BytesIO()
    torch.export.save(exported(), file)
    loaded = torch.export.load(file)
    for n in (40, 24):
        inputs = [t.detach() for t in qkv(n, n)]
        assert torch.equal(loaded.module()(*inputs), model(*inputs))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
def test_by_inductor(tmp_path):
    """A graph with lengths that change, and a model compiled ahead: what is beside attention it fuses, and rounds less
    often."""
    compiled: Any = torch.compile(model, fullgraph=True, dynamic=True)
    package = torch._inductor.aoti_compile_and_package(exported(), package_path=str(tmp_path / "model.pt2"))
    ahead = torch._inductor.aoti_load_package(package)
    for n in (24, 40):
        inputs = qkv(n, n)
        want, got, by_package = (fn(*inputs) for fn in (model, compiled, ahead))
        torch.testing.assert_close(by_package, want, atol=0.02, rtol=0.02)
        torch.testing.assert_close(got, want, atol=0.02, rtol=0.02)
        for one, other in zip(*(torch.autograd.grad(out.sum(), inputs) for out in (got, want)), strict=True):
            torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("grad", [False, True])
def test_autocast_converts_fp32(grad):
    inputs = [t.detach().requires_grad_(grad) for t in qkv(dtype=torch.float32)]
    plain = attention(*(t.bfloat16() for t in inputs), device=HOPPER)
    assert isinstance(plain, Tensor)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(*inputs, device=HOPPER)
        mixed = attention(inputs[0].bfloat16(), inputs[1], inputs[2].bfloat16(), device=HOPPER)
    assert isinstance(mixed, Tensor)
    assert torch.equal(mixed, plain)
    assert isinstance(out, Tensor)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, plain)
    if grad:
        out.float().sum().backward()
        assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in inputs)
    with pytest.raises(TypeError, match=r"^q: expected dtype float16, bfloat16"):
        attention(*(t.detach() for t in inputs), device=HOPPER)
    with pytest.raises(TypeError, match=r"^q: expected dtype float16, bfloat16"):
        attention(*(t.detach().to("meta") for t in inputs))


Q = torch.zeros(1, 2, 24, 64, dtype=torch.bfloat16)
WITH_GRAD = torch.zeros(1, 2, 24, 64, dtype=torch.bfloat16, requires_grad=True)
FP8 = Q.to(torch.float8_e4m3fn)
# Arguments, and what is said of them: as without a graph, but for what only a graph refuses.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "out": ({"out": torch.empty_like(Q)}, r"out: expected None under torch.compile or torch.export, got a value"),
    "a config": ({"config": 3}, r"config: expected None under torch.compile or torch.export, got a value"),
    "a device": ({"device": dataclasses.replace(HOPPER, sm_count=1)}, r"device: expected Device.hopper\(\), "),
    "an int as a window": ({"window": 5}, r"window: expected two numbers, got 5; give \(left, right\)"),
    "an int as a bool": ({"causal": 1}, r"causal: expected a bool, got int; give True or False"),
    "a soft cap": ({"softcap": True}, r"softcap: expected a number or None, got bool"),
    "a float as a chunk": ({"chunk": 2.0}, r"chunk: expected an int or None, got float; give a number of keys"),
    "a tensor as a scale": ({"scale": torch.tensor(2.0)}, r"scale: expected a float or None, got torch.Tensor"),
    "a layout": ({"layout": "sbhd"}, r"layout: expected one of \('bhsd', 'bshd'\), got 'sbhd'"),
    "num_ctas": ({"num_ctas": "2"}, r"num_ctas: expected an int or None, got str; give 1 or 2"),
    "no tensor": ({"k": None}, r"k: expected a torch.Tensor, got NoneType; make it with"),
    "a dtype": ({"v": Q.float()}, r"v: expected dtype float16, bfloat16, .* got torch.float32"),
    "dimensions": ({"q": Q[0, 0]}, r"q: expected 4 dimensions, got 2 \(shape \(24, 64\)\)"),
    "numbers as sinks": ({"sinks": [0.0, 0.0]}, r"sinks: expected a torch.Tensor .*or None, got list"),
    "a gradient of slopes": (
        {"alibi_slopes": torch.zeros(2, requires_grad=True)},
        r"alibi_slopes: expected a tensor that does not require grad, as only q, k, v, sinks and a bias have",
    ),
    "a gradient in fp8": (
        {"q": FP8.clone().requires_grad_(), "k": FP8, "v": FP8},
        r"q: expected float16 or bfloat16, as gradients are asked for and fp8 has none, got torch.float8_e4m3fn",
    ),
    "a gradient in fp8 on a card": (
        {"q": FP8.clone().requires_grad_(), "k": FP8, "v": FP8, "device": None},
        r"q: expected float16 or bfloat16, as gradients are asked for and fp8 has none, got torch.float8_e4m3fn",
    ),
    "a gradient on Blackwell": (
        {"q": WITH_GRAD, "device": Device.blackwell()},
        r"device: expected a Hopper card, as gradients are asked for",
    ),
    "a sum of a bias in a fixed order": (
        {"bias": torch.zeros(1, 1, 24, 24, requires_grad=True), "deterministic": True},
        r"bias: expected shape \(1, 2, 24, 24\), as its gradient is asked for and deterministic, got \(1, 1, 24, 24\)",
    ),
}  # fmt: skip
IN_A_GRAPH_ALONE = ("out", "a config", "a device")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_a_graph(name):
    """By name: while it is made, under a mode that sees operators, and as without."""
    options, message = REFUSED[name]
    given: dict[str, Any] = {"q": Q, "k": Q, "v": Q, "device": HOPPER} | options
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"raised exception \w+\(['\"]{message}"):
        torch.compile(lambda: attention(**given), backend="eager", fullgraph=True, dynamic=False)()
    if name in IN_A_GRAPH_ALONE:
        extras = {"out": given["out"]} if "out" in given else {}
        rest = {n: value for n, value in given.items() if n in ("config", "device")}
        with pytest.raises(NotImplementedError, match=rf"^{message}"):
            attention_op(Q, Q, Q, Extras(**extras), Options(**rest))
        return
    on_cpu = given["device"] is None
    with FlopCounterMode(display=False), pytest.raises(REFUSALS, match=rf"^{message}"):
        attention(**given)
    with pytest.raises(REFUSALS, match=rf"^{message}"):
        attention(**given)
    assert on_cpu or re.match(message, str(supports(**given)))


def test_what_no_graph_takes_breaks_it_if_it_may():
    """Without fullgraph, with gradients too: nothing of what a call does is traced, and it is as without a graph."""
    small = dataclasses.replace(HOPPER, sm_count=3)

    def into(q: Tensor) -> Tensor:
        x = q.detach() * 2
        out = torch.empty_like(x)
        attention(x, x, x, out=out, device=HOPPER)
        return out + 1

    def differentiated(q: Tensor) -> Any:
        x = (q.detach() * 2).requires_grad_()
        torch.sum(attention(x, x, x, device=small)).backward()  # type: ignore[arg-type]
        assert x.grad is not None
        return x.grad + 1

    for function in (into, differentiated):
        torch.compiler.reset()
        want = function(qkv(40)[0])
        got = torch.compile(function, backend="aot_eager")(qkv(40)[0])
        torch.testing.assert_close(got, want, atol=0.02, rtol=0.02)


def jvp(function: Any, q: Tensor) -> Tensor | None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        return forward_ad.unpack_dual(function(dual, dual, dual)).tangent


def differentiated(function: Any, q: Tensor) -> Tensor:
    return torch.func.grad(lambda q: function(q, q, q).float().sum())(q)


def batched(function: Any, q: Tensor) -> Tensor:
    return torch.vmap(lambda q: function(q, q, q))(q[None])


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (jvp, "q: expected a tensor without a tangent, as forward-mode differentiation is not supported"),
        (differentiated, "q: expected a plain tensor, got one that torch.func differentiates"),
        (
            batched,
            r"q: expected a plain tensor, got one that torch.vmap has batched \(put its dimension into",
        ),
    ],
)
def test_transforms_are_refused_as_without(transform, message):
    """Under a mode; and in a graph, where forward mode lost its tangent."""
    attend: Any = partial(attention, device=HOPPER)
    for mode in (contextlib.nullcontext(), FlopCounterMode(display=False)):
        with mode, pytest.raises(NotImplementedError, match=f"^{message}"):
            transform(attend, Q)
    if transform is not differentiated:  # which torch itself refuses
        with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
            torch.compile(transform, backend="aot_eager", fullgraph=True)(attend, Q)

    def asks_before(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attend(q, k, v) if supports(q, k, v, device=HOPPER) is None else q * 3

    if transform is not differentiated:
        compiled: Any = torch.compile(transform, backend="eager", fullgraph=True)
        assert torch.equal(compiled(asks_before, Q), torch.full_like(Q, 3) if transform is jvp else 3 * Q[None])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": -1.0}, r"^scale: expected a finite positive number from .* got -1.0"),
        ({"softcap": 0.0}, r"^softcap: expected a positive number from .* got 0.0"),
        ({"window": (-1, 0)}, r"^window: expected numbers from 0 to .* got -1"),
        ({"bias": torch.zeros(1, 2, 24, 23)}, r"^bias: expected shape \(1 or 1, 2 or 1, 24 or 1, 24\), got"),
    ],
)
def test_sizes_are_checked_when_a_graph_runs(options, message):
    """So that it may be made of ones that are not known."""
    compiled = torch.compile(partial(attention, device=HOPPER, **options), backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match=message):
        compiled(Q, Q, Q)


def test_no_second_derivative():
    """Under a mode that sees operators, and in a graph, of which torch says it first."""
    inputs: list[Any] = qkv(40, 40)
    attend: Any = partial(attention, device=HOPPER)
    with FlopCounterMode(display=False):
        (dq,) = torch.autograd.grad(attend(*inputs).float().sum(), inputs[:1], create_graph=True)
        with pytest.raises(NotImplementedError, match=r"^attention: gradients of its gradients are not supported"):
            torch.autograd.grad(dq.float().square().sum(), inputs)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)

    def twice() -> None:  # torch refuses the first or the second, as its settings say
        (dq,) = torch.autograd.grad(compiled(*inputs).float().sum(), inputs[:1], create_graph=True)
        torch.autograd.grad(dq.float().square().sum(), inputs)

    with pytest.raises(RuntimeError, match=r"double backward|requires create_graph=False"):
        twice()


@pytest.mark.parametrize(("q_len", "kv_len", "causal"), [(5, 7, False), (5, 7, True), (7, 5, True), (4, 4, True)])
def test_flops_count_what_is_seen(q_len, kv_len, causal):
    hidden = torch.ones(q_len, kv_len).triu(1 + kv_len - q_len) if causal else torch.zeros(q_len, kv_len)
    seen = int((1 - hidden).sum())
    for layout in ("bhsd", "bshd"):
        sizes = [(2, 3, n, 8) if layout == "bhsd" else (2, n, 3, 8) for n in (q_len, kv_len, kv_len)]
        q, k, v = (torch.empty(size, device="meta") for size in sizes)
        given = dict(zip(ARGUMENTS, arguments(q, k, v, causal=causal, layout=layout), strict=True))
        assert flops(given, FORWARD_PRODUCTS) == 4 * 2 * 3 * 8 * seen
    inputs = [t.detach() for t in qkv(40, 40)]
    with FlopCounterMode(display=False) as counter:
        torch.ops.gluon_attn.forward(*arguments(*inputs, layout="bhsd", card="hopper"))
    assert counter.get_total_flops() == 4 * 2 * 40 * 40 * 64


def test_fake_tensors_in_their_mode_have_shapes():
    with FakeTensorMode() as mode, torch.no_grad():
        out, lse = attention(*map(mode.from_tensor, qkv(100, 130)), return_lse=True, device=HOPPER)
    assert (out.shape, out.dtype) == ((1, 2, 100, 64), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((1, 2, 100), torch.float32)


def test_modes_see_the_operators():
    """FLOPs of both passes are counted; and it is kept what a policy of checkpointing says, so that nothing is computed
    again. Without the operator, config= goes unseen, and right."""
    q, k, v = inputs = qkv(40, 40)
    dout = torch.randn_like(q)
    with FlopCounterMode(display=False) as counter:
        grads = torch.autograd.grad(attention(q, k, v, device=HOPPER), inputs, dout)
    check_gradients(q, k, v, dout, grads)
    products = 2 + 5
    assert counter.get_total_flops() == products * 2 * 2 * 40 * 40 * 64
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        attention(q, k, v, device=dataclasses.replace(HOPPER, sm_count=1))
    assert counter.get_total_flops() == 0

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        ours = operator == torch.ops.gluon_attn.forward.default
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    kept = partial(create_selective_checkpoint_contexts, policy)
    out = checkpoint(partial(attention, device=HOPPER), q, k, v, use_reentrant=False, context_fn=kept)
    with FlopCounterMode(display=False) as counter:
        grads = torch.autograd.grad(out, inputs, dout)
    check_gradients(q, k, v, dout, grads)
    assert counter.get_total_flops() == 5 * 2 * 2 * 40 * 40 * 64
