"""torch's SDPA with our kernels and without, on the card; each case in a process of its own, as what it turns on is on
for a whole process."""

import contextlib
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import attention as torch_attention
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gluon_attn import attention, torch_sdpa
from gluon_attn.apart import Apart, Skipped
from gluon_attn.cudnn import cudnn_is_faster
from gluon_attn.device import Device
from gluon_attn.testing import check, check_gradients
from tests.gluon_attn.sdpa import check_varlen_attn
from tests.gpu.checks import outcomes_of, settle
from tests.gpu.sdpa_calls import CUDNN, FLASH, Seen, only, ours, qkv, tensors
from tests.gpu.sdpa_not_ours import FALLS_THROUGH, STAYS, check_falls_through, check_stays

pytestmark = pytest.mark.timeout(1800)


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    loss = model(x).float().square().mean()
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def check_call(head_dim: int, causal: bool, kv_heads: int = 4, q_len: int = 1000, kv_len: int | None = None) -> None:
    q, k, v = inputs = qkv(head_dim, q_len, kv_len, kv_heads)
    options: dict[str, Any] = {"is_causal": causal, "enable_gqa": kv_heads != 4}
    with ours(2):
        out = F.scaled_dot_product_attention(q, k, v, **options)
        dout = torch.randn_like(out)
        grads = torch.autograd.grad(out, inputs, dout)
    check(q.detach(), k.detach(), v.detach(), out.detach(), None, causal=causal)
    check_gradients(q.detach(), k.detach(), v.detach(), dout, grads, causal=causal)


def check_window() -> None:
    """Which only the operator has."""
    q, k, v = inputs = tensors(*((2, 300, 4, 64),) * 3)
    with ours(2):
        out = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, 300, 300, 0.0, False, False, window_size_left=32, window_size_right=0
        )[0]
        dout = torch.randn_like(out)
        grads = torch.autograd.grad(out, inputs, dout)
    q, k, v = (t.detach() for t in inputs)
    check(q, k, v, out.detach(), None, window=(32, 0), layout="bshd")
    check_gradients(q, k, v, dout, grads, window=(32, 0), layout="bshd")


def check_packed() -> None:
    inputs = tensors(*((500, 4, 64),) * 3)
    starts = torch.tensor([0, 200, 500], dtype=torch.int32, device="cuda")
    with ours(2):
        out = torch.ops.aten._flash_attention_forward(*inputs, starts, starts, 300, 300, 0.0, True, False)[0]
        dout = torch.randn_like(out)
        grads = torch.autograd.grad(out, inputs, dout)
    for rows in (slice(0, 200), slice(200, 500)):
        q, k, v, o, do, *of_qkv = (t.detach()[None, rows] for t in (*inputs, out, dout, *grads))
        check(q, k, v, o, None, causal=True, layout="bshd")
        check_gradients(q, k, v, do, of_qkv, causal=True, layout="bshd")


def check_functionalized() -> None:
    """Torch puts what its stand-ins stand for in their place before our operators."""
    q, k, v = (t.detach() for t in qkv())

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with ours(2):
        assert torch.equal(torch.func.functionalize(call)(q, k, v), call(q, k, v))


def check_first_call() -> None:
    """Of the process: at that, torch orders its backends, on Hopper cuDNN first."""
    q, k, v = (t.detach() for t in qkv())
    with ours(1):
        F.scaled_dot_product_attention(q, k, v)


def check_order_stays() -> None:
    """And with it the backend that computes a call, forward and backward."""
    q, k, v = inputs = qkv()
    with Seen() as off:
        want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(want, inputs, torch.ones_like(want))
    assert len(off.names) == 2
    order, choice = torch._C._get_sdp_priority_order(), torch._fused_sdp_choice(q, k, v, is_causal=True)
    with ours(2), Seen() as on:
        assert torch._C._get_sdp_priority_order() == order
        assert torch._fused_sdp_choice(q, k, v, is_causal=True) == choice
        got = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(got, inputs, torch.ones_like(got))
    assert on.names == off.names
    assert torch._C._get_sdp_priority_order() == order
    assert not torch.equal(got, want)  # another kernel
    assert torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=True), want)


def check_backend(backend: SDPBackend) -> None:
    """That a user asks for, and no other."""
    q, k, v = inputs = qkv()
    name = "flash_attention" if backend == FLASH else "cudnn_attention"
    with only(backend, q, k, v), ours(2), Seen() as seen:
        out = F.scaled_dot_product_attention(q, k, v)
        dout = torch.randn_like(out)
        grads = torch.autograd.grad(out, inputs, dout)
    assert seen.names == [name, f"{name}_backward"]
    check(q.detach(), k.detach(), v.detach(), out.detach(), None)
    check_gradients(q.detach(), k.detach(), v.detach(), dout, grads)
    with sdpa_kernel(SDPBackend.MATH), ours(0):  # nor where all of ours are turned off
        F.scaled_dot_product_attention(q, k, v)


def check_cudnns_results(head_dim: int, of_v: int, packed: bool) -> None:
    """Shapes, strides and the log-sum-exp of cuDNN's operator, as of ours in its place."""
    torch.manual_seed(0)
    if packed:
        q, k, v = torch.randn(2, 300, 3, 4, head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 3).unbind(2)
    else:
        q, k, v = (torch.randn(2, 4, 300, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    v = v[..., :of_v]
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention
    with only(CUDNN, q, k, v, is_causal=True):
        want = operator(q, k, v, None, True, 0.0, True)
    with ours(1):
        got = operator(q, k, v, None, True, 0.0, True)
    for one, other in zip(got[:6], want[:6], strict=True):
        if isinstance(other, Tensor):
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        else:
            assert one == other
    torch.testing.assert_close(got[0], want[0], atol=0.02, rtol=0.02)
    torch.testing.assert_close(got[1], want[1], atol=1e-3, rtol=1e-3)


def check_activated() -> None:
    """By torch's own switch, with the order of backends set by hand; the inputs as users have them."""
    q, k, v = (t.detach() for t in qkv())
    with sdpa_kernel(FLASH):
        want = F.scaled_dot_product_attention(q, k, v)
        torch_attention.activate_flash_attention_impl("GLUON")
        assert torch_attention.current_flash_attention_impl() == "GLUON"
        got = F.scaled_dot_product_attention(q, k, v)
        assert not torch.equal(got, want)  # another kernel
        check(q, k, v, got, None)
        torch_attention.restore_flash_attention_impl()
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), want)


def check_activated_leaves_cudnn() -> None:
    """Torch's own switch is of FlashAttention alone."""
    q, k, v = (t.detach() for t in qkv())
    with only(CUDNN, q, k, v):
        want = F.scaled_dot_product_attention(q, k, v)
        torch_attention.activate_flash_attention_impl("GLUON")
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), want)


def check_one_pass_each(backend: SDPBackend, forward_is_ours: bool) -> None:
    """Torch's gradients of our forward pass, or ours of torch's: O and LSE are the same function."""
    q, k, v = inputs = qkv(kv_heads=2)
    passes: list[contextlib.AbstractContextManager[None]] = [ours(1), contextlib.nullcontext()]
    with only(backend, q, k, v, is_causal=True, enable_gqa=True):
        with passes[not forward_is_ours]:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        dout = torch.randn_like(out)
        with passes[forward_is_ours]:
            grads = torch.autograd.grad(out, inputs, dout)
    check(q.detach(), k.detach(), v.detach(), out.detach(), None, causal=True)
    check_gradients(q.detach(), k.detach(), v.detach(), dout, grads, causal=True)


def check_left_to_cudnn(heads: int, kv_heads: int, length: int, head_dim: int, of_v: int) -> None:
    """Gradients that it computes faster, of our forward pass: one call is ours. Or two, where ours are faster."""
    q, k, v = inputs = tensors(
        (1, heads, length, head_dim), (1, kv_heads, length, head_dim), (1, kv_heads, length, of_v)
    )
    stays = cudnn_is_faster(q, k, v, causal=True, device=None)
    assert stays or (head_dim != 192 and Device.of(q.device).model != "H100")
    grouped = heads > kv_heads
    with only(CUDNN, q, k, v, is_causal=True, enable_gqa=grouped), ours(1 if stays else 2):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        dout = torch.randn_like(out)
        grads = torch.autograd.grad(out, inputs, dout)
    check_gradients(q.detach(), k.detach(), v.detach(), dout, grads, causal=True)


def check_threads() -> None:
    """Each turns it on and off in its own time, while the others compute."""
    q, k, v = (t.detach() for t in qkv())
    want = attention(q, k, v)
    assert isinstance(want, Tensor)

    def work(_: int) -> bool:
        with torch_sdpa.enabled():
            return torch.equal(F.scaled_dot_product_attention(q, k, v), want)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(200)))
    assert not torch.equal(F.scaled_dot_product_attention(q, k, v), want)
    with sdpa_kernel(FLASH):
        assert not torch.equal(F.scaled_dot_product_attention(q, k, v), want)


def check_deterministic() -> None:
    """Torch has no cuDNN then."""
    torch.use_deterministic_algorithms(True)
    q, k, v = inputs = qkv()
    dout = torch.randn_like(q)
    with ours(4), Seen() as seen:
        outs = [F.scaled_dot_product_attention(q, k, v, is_causal=True) for _ in range(2)]
        runs = [torch.autograd.grad(out, inputs, dout) for out in outs]
    assert seen.names == ["flash_attention"] * 2 + ["flash_attention_backward"] * 2
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    check_gradients(q.detach(), k.detach(), v.detach(), dout, runs[0], causal=True)


def check_module(module: nn.Module, calls: int) -> None:
    """A step of training, as near to the one in fp32 as torch's own in bf16 is, twice over."""
    module = module.cuda().train()
    x = tensors((4, 300, 256))[0].detach()
    half = copy.deepcopy(module).bfloat16()
    with sdpa_kernel(SDPBackend.MATH):
        _, want = step(module, x.float())
    _, plain = step(half, x)
    with ours(calls):
        _, got = step(half, x)
    for name, w, p, g in zip(dict(module.named_parameters()), want, plain, got, strict=True):
        error, budget = (g.float() - w).norm(), 2 * (p.float() - w).norm()
        assert error <= budget + 1e-6, f"{name}: off by {error:.3e}, budget {budget:.3e}"


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(256, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def check_compiled(before: bool) -> None:
    """before: it is compiled, and has been called, before ours are turned on."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True) * 3

    inputs = qkv()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    if before:
        torch.autograd.grad(compiled(*inputs).sum(), inputs)
    with ours(4):
        outs = [fn(*inputs) for fn in (compiled, model)]
        grads = [torch.autograd.grad(out.sum(), inputs) for out in outs]
    assert torch.equal(*outs)
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)


def check_checkpointed(is_kept: bool) -> None:
    """With a policy of what to keep, which names torch's operators."""
    operators = [
        getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention").default for name in ("flash", "cudnn")
    ]

    def policy(context: Any, operator: Any, *args: Any, **kw: Any) -> CheckpointPolicy:
        kept = operator in operators and is_kept
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    kept = partial(create_selective_checkpoint_contexts, policy)
    q, k, v = inputs = qkv()
    model = partial(F.scaled_dot_product_attention, is_causal=True)
    dout = torch.randn_like(q)
    with ours(2 if is_kept else 3):
        out = checkpoint(model, *inputs, use_reentrant=False, context_fn=kept)
        grads = torch.autograd.grad(out, inputs, dout)
    check_gradients(q.detach(), k.detach(), v.detach(), dout, grads, causal=True)


def check_autocast(dtype: torch.dtype) -> None:
    """Of fp32, which torch converts."""
    q, k, v = inputs = [t.detach().to(dtype).float().requires_grad_() for t in qkv()]
    dout = torch.randn_like(q).to(dtype)
    with ours(2), torch.autocast("cuda", dtype):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert out.dtype == dtype
        grads = torch.autograd.grad(out, inputs, dout)
    assert [t.dtype for t in grads] == [torch.float32] * 3
    q, k, v = (t.detach().to(dtype) for t in inputs)
    check(q, k, v, out.detach(), None, causal=True)
    check_gradients(q, k, v, dout, [t.to(dtype) for t in grads], causal=True)


def check_graph() -> None:
    """Captured once, replayed with other numbers."""
    q, k, v = (t.detach() for t in qkv())
    with ours(3):
        for _ in range(2):
            F.scaled_dot_product_attention(q, k, v)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = F.scaled_dot_product_attention(q, k, v)
    q.normal_()
    graph.replay()
    check(q, k, v, out, None)


def check_graph_not_loaded() -> None:
    """Captured before ours are loaded: torch's kernels are, both passes, and the first warning says why."""
    q, k, v = inputs = qkv()
    dout = torch.randn_like(q)

    def both_passes() -> list[Tensor]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return [out, *torch.autograd.grad(out, inputs, dout)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        want = both_passes()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with ours(0), pytest.warns(UserWarning, match="leaves attention to torch.*captured"), torch.cuda.graph(graph):
        got = both_passes()
    graph.replay()
    assert torch.equal(got[0], want[0])
    check_gradients(q.detach(), k.detach(), v.detach(), dout, got[1:], causal=True)
    with ours(2):
        assert not torch.equal(both_passes()[0], want[0])  # loaded now


def check_varlen(lengths: list[int], window: tuple[int, int]) -> None:
    if max(lengths) > 128 and window == (-1, -1) and hasattr(varlen, "_can_use_cudnn"):
        raise Skipped("this torch has another operator for long packed sequences, cuDNN's, which is not replaced")
    with ours(2):
        check_varlen_attn(lengths, window, "cuda")


CASES: dict[str, Callable[[], None]] = {
    "D=128": lambda: check_call(128, causal=False),
    "D=128, causal": lambda: check_call(128, causal=True),
    "D=64, causal, GQA": lambda: check_call(64, causal=True, kv_heads=2),
    "D=256, causal": lambda: check_call(256, causal=True),
    "D=100, which torch pads": lambda: check_call(100, causal=True),
    "unequal lengths": lambda: check_call(128, causal=False, q_len=300, kv_len=700),
    "a window": check_window,
    "packed": check_packed,
    "functionalized": check_functionalized,
    "first call": check_first_call,
    "order stays": check_order_stays,
    "FlashAttention asked for": lambda: check_backend(FLASH),
    "cuDNN asked for": lambda: check_backend(CUDNN),
    "cuDNN's results": lambda: check_cudnns_results(128, 128, packed=False),
    "cuDNN's results, packed": lambda: check_cudnns_results(64, 64, packed=True),
    "cuDNN's results, D=192 and 128": lambda: check_cudnns_results(192, 128, packed=True),
    "activated": check_activated,
    "activated, cuDNN": check_activated_leaves_cudnn,
    **{
        f"{name}, {whose}": partial(check_one_pass_each, backend, forward_is_ours=forward_is_ours)
        for name, backend in (("FlashAttention-2", FLASH), ("cuDNN", CUDNN))
        for whose, forward_is_ours in (("our forward pass", True), ("our backward", False))
    },
    "left to cuDNN, D=192 and 128": lambda: check_left_to_cudnn(2, 2, 2048, 192, 128),
    "left to cuDNN, 8 heads to a KV head": lambda: check_left_to_cudnn(8, 1, 2048, 128, 128),
    "threads": check_threads,
    "deterministic": check_deterministic,
    "MultiheadAttention": lambda: check_module(SelfAttention(), 2),
    "TransformerEncoderLayer": lambda: check_module(
        nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True), 2
    ),
    "compiled": lambda: check_compiled(before=False),
    "compiled before": lambda: check_compiled(before=True),
    "checkpointed": lambda: check_checkpointed(is_kept=False),
    "checkpointed, kept by a policy": lambda: check_checkpointed(is_kept=True),
    "autocast": lambda: check_autocast(torch.bfloat16),
    "autocast, fp16": lambda: check_autocast(torch.float16),
    "CUDA graph": check_graph,
    "CUDA graph, kernels not loaded": check_graph_not_loaded,
    **{f"falls through: {name}": partial(check_falls_through, name) for name in FALLS_THROUGH},
    **{f"stays with its backend: {name}": partial(check_stays, name) for name in STAYS},
    "varlen_attn": lambda: check_varlen([100, 128, 5, 37], (-1, -1)),
    "varlen_attn, causal": lambda: check_varlen([100, 128, 5, 37], (-1, 0)),
    "varlen_attn, a window": lambda: check_varlen([100, 128, 5, 37], (16, 8)),
    "varlen_attn, long": lambda: check_varlen([700, 129, 300], (-1, -1)),
    "varlen_attn, causal, long": lambda: check_varlen([700, 129, 300], (-1, 0)),
}


def run(name: str) -> None:
    CASES[name]()


APART = Apart(function="tests.gpu.test_torch_sdpa:run", processes=4)


@pytest.fixture(scope="module")
def outcome(request):
    yield from outcomes_of(APART, request)


@pytest.mark.parametrize("name", CASES)
def test_sdpa(name, outcome):
    settle(outcome(name))
