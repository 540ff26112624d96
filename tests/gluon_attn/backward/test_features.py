"""Gradients under windows and chunks, of changed scores, of sinks and of a bias, against autograd in float64."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from channels.compat import gl, jit
from gluon_attn import attention, reference_attention
from gluon_attn.device import Device
from gluon_attn.gradients import attention_backward
from gluon_attn.score_mod import ScoreMod
from tests.slow import slow_if

HOPPER = Device.hopper()
SINKS = torch.tensor([-1.0, 0.5, 2.0, 4.0])
SLOPES = torch.tensor([0.5, -0.25, 0.125, 0.0625])

# Options, lengths, head dim.
CASES: dict[str, tuple[dict[str, Any], tuple[int, int], int]] = {
    "window": ({"window": (70, 0)}, (300, 300), 64),
    "window to the left": ({"window": (40, None)}, (200, 270), 64),
    "window to the right": ({"window": (None, 30)}, (270, 200), 128),
    "window to both sides": ({"window": (33, 65)}, (300, 300), 128),
    "only the own position": ({"window": (0, 0)}, (200, 200), 64),
    "window, D=256": ({"window": (70, 0)}, (200, 260), 256),
    "window, keys that nobody sees": ({"window": (20, 0)}, (70, 400), 64),
    "window, rows without keys": ({"causal": True, "window": (50, None)}, (400, 130), 64),
    "chunks": ({"causal": True, "chunk": 90}, (300, 300), 64),
    "chunks, all keys of one": ({"chunk": 90}, (200, 250), 128),
    "soft cap": ({"causal": True, "softcap": 2.0}, (200, 230), 64),
    "soft cap, D=128": ({"softcap": 2.0}, (200, 230), 128),
    "soft cap, D=256": ({"causal": True, "softcap": 2.0}, (130, 130), 256),
    "ALiBi": ({"causal": True, "alibi_slopes": SLOPES}, (200, 230), 64),
    "ALiBi, D=128": ({"alibi_slopes": SLOPES}, (230, 200), 128),
    "documents": ({"causal": True, "documents": 90}, (300, 300), 64),
    "documents, D=128": ({"documents": 61}, (200, 330), 128),
    "documents, D=256": ({"causal": True, "documents": 70}, (150, 150), 256),
    "documents and a window": ({"documents": 120, "window": (70, 0)}, (260, 260), 64),
    "sinks": ({"causal": True, "sinks": SINKS}, (200, 230), 64),
    "sinks, rows without keys": ({"causal": True, "sinks": SINKS}, (270, 130), 128),
    "bias": ({"causal": True, "bias": (2, 4, True)}, (200, 230), 64),
    "bias, D=128": ({"bias": (2, 4, True)}, (200, 230), 128),
    "bias that is not learned": ({"causal": True, "bias": (1, 4, True), "learned": False}, (400, 330), 64),
    "bias, one for the batch": ({"bias": (1, 4, True)}, (200, 230), 64),
    "bias, one for the batch, D=128": ({"causal": True, "bias": (1, 4, True)}, (200, 230), 128),
    "bias, one for the heads, D=256": ({"causal": True, "bias": (2, 1, True)}, (130, 150), 256),
    "bias, a row": ({"causal": True, "bias": (2, 1, False)}, (230, 200), 64),
    "bias, a row, D=128": ({"bias": (1, 4, False)}, (200, 230), 128),
    "bias, a row, D=256": ({"bias": (1, 1, False)}, (130, 150), 256),
    "bias in fp32": ({"causal": True, "bias": (2, 4, True), "bias_dtype": torch.float32}, (200, 230), 64),
    "bias in fp32, one for all, D=128": (
        {"causal": True, "bias": (1, 1, True), "bias_dtype": torch.float32},
        (200, 230),
        128,
    ),
    "bias of -inf": ({"causal": True, "bias": (2, 4, True), "hidden": 5}, (200, 230), 64),
    "bias of -inf, one for the batch, D=128": ({"bias": (1, 4, True), "hidden": 5}, (200, 230), 128),
    "bias, window and sinks": ({"window": (70, 20), "bias": (2, 4, True), "sinks": SINKS}, (260, 260), 64),
    "bias and documents": ({"causal": True, "documents": 90, "bias": (1, 4, True)}, (300, 300), 64),
    "sinks, window and soft cap": ({"window": (70, 0), "sinks": SINKS, "softcap": 2.0}, (260, 260), 64),
}
QUICK = (
    "bias",
    "bias of -inf",
    "bias that is not learned",
    "bias, one for the batch, D=128",
    "bias, one for the heads, D=256",
    "bias, a row",
    "documents",
    "window",
    "ALiBi, D=128",
    "sinks, window and soft cap",
)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normal_qkv(
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    q_len: int,
    kv_len: int | None = None,
    head_dim: int,
    head_dim_v: int | None = None,
) -> list[Tensor]:
    kv_len = q_len if kv_len is None else kv_len
    shapes = ((heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, head_dim_v or head_dim))
    return [normal(batch, *shape, seed=i) for i, shape in enumerate(shapes)]


def gradients(function: Any, inputs: list[Tensor], dout: Tensor, dlse: Tensor) -> list[Tensor]:
    """Of inputs, through O and LSE; an LSE of -inf does not move."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    out, lse = function(*inputs)
    seen = lse.isfinite()
    loss = (out * dout.to(out.dtype)).sum() + torch.where(seen, lse * dlse.to(lse.dtype), 0.0).sum()
    return list(torch.autograd.grad(loss, inputs))


def bias_of(kind: tuple[int, int, bool], lengths: tuple[int, int], dtype: torch.dtype, where: str) -> Tensor:
    """Of so many batches and heads; whether each query has its own row. In rows as long as TMA asks for; what follows
    there is NaN."""
    batches, heads, each_row = kind
    rows = normal(batches, heads, lengths[0] if each_row else 1, lengths[1], seed=9)
    padded = F.pad(rows, (0, -lengths[1] % 8), value=math.nan)
    return padded.to(where, dtype)[..., : lengths[1]]  # moved later, its rows would be no longer than they are here


def hidden_by(every: int, lengths: tuple[int, int]) -> Tensor:
    """(Sq, Sk): keys that a bias hides, one of `every` and from the middle of the last block on, and all from a row."""
    rows, keys = (torch.arange(n) for n in lengths)
    hidden = (rows[:, None] + keys) % every == 0
    hidden[:, lengths[1] // 128 * 128 + 1 :] = True
    hidden[lengths[0] // 2] = True
    return hidden


def check(
    options: dict[str, Any],
    lengths: tuple[int, int],
    head_dim: int,
    deterministic: bool = False,
    where: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    kv_heads: int = 2,
    head_dim_v: int | None = None,
) -> None:
    """where: "cpu", to execute the kernels there, or "cuda". dtype: of q, k, v, and of a bias if options say no other.

    Of options, documents: how long they are; those of the second batch begin elsewhere. bias: of how many batches and
    heads, and whether each query has its own row; hidden: it has -inf where `hidden_by` says; learned: it has a
    gradient."""
    options = dict(options)
    learned = options.pop("learned", True)
    if "bias" in options:
        options["bias"] = bias_of(options["bias"], lengths, options.pop("bias_dtype", dtype), where)
    hidden = None
    if "hidden" in options:
        hidden = hidden_by(options.pop("hidden"), lengths).to(where)
        options["bias"].masked_fill_(hidden, -math.inf)
    if "documents" in options:
        size, starts = options.pop("documents"), torch.tensor([[0], [17]])
        options["segment_ids"] = tuple(((torch.arange(n) + starts) // size).int().to(where) for n in lengths)
    q, k, v = normal_qkv(
        batch=2, heads=4, kv_heads=kv_heads, q_len=lengths[0], kv_len=lengths[1], head_dim=head_dim,
        head_dim_v=head_dim_v,
    )  # fmt: skip
    dout, dlse = normal(*q.shape[:3], v.shape[3], seed=7), normal(*q.shape[:3], dtype=torch.float32, seed=8)
    q, k, v, dout, dlse = (t.to(where, dlse.dtype if t is dlse else dtype) for t in (q, k, v, dout, dlse))
    options = {name: x.to(where) if isinstance(x, Tensor) else x for name, x in options.items()}
    names = [name for name in ("sinks", "bias") if name in options and (learned or name != "bias")]
    others = [options[name] for name in names]

    def by(function: Any, **more: Any) -> Any:
        def call(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Any:
            given = options | more | dict(zip(names, others, strict=True))
            if "bias" in names and deterministic:  # torch adds up what is of several batches, heads or rows
                given["bias"] = given["bias"].expand(*q.shape[:3], k.shape[2])
            if function is reference_attention and hidden is not None:  # autograd of rows of -inf alone is NaN
                given |= {"bias": given["bias"].masked_fill(hidden, 0.0), "mask": ~hidden}
            return function(q, k, v, **given)

        return call

    def rounding_of_sinks() -> Tensor:
        """How far off O in 16 bits, of which delta is, puts their gradient, a sum of P delta over rows: three standard
        deviations. O's own rounding and that of the probabilities in it are about as large."""
        given = [t.double() for t in (q, k, v, *others)]
        out, lse = by(reference_attention)(*given)
        of_rows = (given[3][:, None] - lse).exp() * (out * dout).norm(dim=-1)
        deviation = torch.finfo(dtype).eps / 2 / math.sqrt(3)  # of a rounding error
        return 3 * math.sqrt(2) * deviation * of_rows.norm()

    ours = by(attention, device=HOPPER if where == "cpu" else None, return_lse=True, deterministic=deterministic)
    got = gradients(ours, [q, k, v, *others], dout, dlse)
    exact = gradients(by(reference_attention), [t.double() for t in (q, k, v, *others)], dout, dlse)
    plain = gradients(by(reference_attention), [q, k, v, *others], dout, dlse)
    for name, one, want, other in zip(("q", "k", "v", *names), got, exact, plain, strict=True):
        assert one.isfinite().all(), name
        error, budget = (one.double() - want).norm(), (other.double() - want).norm()
        floor = 1e-4 * want.norm() + (rounding_of_sinks() if name == "sinks" else 0)
        assert error <= 3 * budget + floor, f"d{name}: off by {error:.3e}, plain torch by {budget:.3e}"
        # What has no gradient has exactly none.
        nothing = (want == 0).all(-1)
        assert not one[nothing].any(), name


@pytest.mark.parametrize("name", slow_if(lambda name: name not in QUICK, CASES))
@pytest.mark.slow_but("documents", "bias", "window", "sinks, window and soft cap")
def test_against_float64(name):
    check(*CASES[name])


IN_ORDER = ["window", "chunks", "window to both sides", "bias", "bias, one for the batch"]


@pytest.mark.parametrize("name", slow_if(lambda name: name not in ("window", "bias, one for the batch"), IN_ORDER))
def test_in_a_fixed_order(name):
    check(*CASES[name], deterministic=True)


@jit
def table(score, q_index, k_index, head, batch, FAR: gl.constexpr, bias):
    """A bias by distance, up to FAR, of each head: (H, FAR + 1) fp32."""
    distance = gl.minimum(gl.abs(q_index - k_index), FAR)
    return score * 0.5 + gl.load(bias + head * (FAR + 1) + distance)


@jit
def table_backward(dscore, score, modified, q_index, k_index, head, batch, FAR: gl.constexpr, bias):
    return dscore * 0.5


def test_a_function_of_ones_own():
    far = 20
    bias = normal(4, far + 1, dtype=torch.float32, seed=3)
    q, k, v = normal_qkv(batch=2, heads=4, kv_heads=2, q_len=150, kv_len=170, head_dim=64)
    dout, dlse = normal(*q.shape, seed=7), torch.zeros(q.shape[:3])
    mod = ScoreMod(table, table_backward, constants=(far,), tensors=(bias,))

    def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        distance = (torch.arange(150)[:, None] - torch.arange(170)).abs().clamp(max=far)
        scores = (q @ k.mT) * 64**-0.5 * 0.5 + bias.to(q.dtype)[:, distance]
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, score_mod=mod, return_lse=True, device=HOPPER)

    got = gradients(ours, [q, k, v], dout, dlse)
    want = gradients(exact, [t.double() for t in (q, k, v)], dout, dlse)
    for one, other in zip(got, want, strict=True):
        assert (one.double() - other).norm() <= 0.01 * other.norm()


def test_a_function_without_a_derivative_is_refused():
    q, k, v = (t.requires_grad_() for t in normal_qkv(batch=1, heads=4, kv_heads=2, q_len=16, head_dim=64))
    mod = ScoreMod(table, constants=(3,), tensors=(torch.zeros(4, 4),))
    with pytest.raises(NotImplementedError, match=r"^score_mod: expected one with a backward function"):
        attention(q, k, v, score_mod=mod, device=HOPPER)


def test_no_keys():
    """LSE is the sink, and what moves it moves the sink."""
    q, k, v = normal_qkv(batch=2, heads=4, kv_heads=2, q_len=16, kv_len=0, head_dim=64)
    sinks = SINKS.clone().requires_grad_()
    out, lse = attention(q, k, v, sinks=sinks, return_lse=True, device=HOPPER)
    assert not out.any()
    assert torch.equal(lse, SINKS[:, None].expand(2, 4, 16))
    lse.sum().backward()
    assert sinks.grad is not None
    assert torch.equal(sinks.grad, torch.full((4,), 32.0))


def test_called_directly():
    q, k, v = normal_qkv(batch=1, heads=4, kv_heads=2, q_len=70, head_dim=64)
    options: dict[str, Any] = {"causal": True, "sinks": SINKS, "device": HOPPER}
    with torch.no_grad():
        out, lse = attention(q, k, v, return_lse=True, **options)
    grads = attention_backward(torch.ones_like(out), None, q, k, v, out, lse, **options)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape, SINKS.shape]


@pytest.mark.parametrize(("limit", "q_len"), [({"window": (63, 0)}, 1), ({"chunk": 64}, 64)], ids=["window", "chunk"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in order"])
def test_few_queries_of_many_keys_in_a_limit(limit, q_len, deterministic):
    """There are fewer key blocks than processors, which share them if enough row blocks see each; here all but the last
    are seen by none."""
    q, k, v = normal_qkv(batch=1, heads=1, kv_heads=1, q_len=q_len, kv_len=66 * 128, head_dim=64)
    dout, dlse = normal(*q.shape, seed=7), torch.zeros(q.shape[:3])
    options = {"causal": True} | limit

    def ours(*inputs: Tensor) -> Any:
        return attention(*inputs, return_lse=True, device=HOPPER, deterministic=deterministic, **options)

    def reference(*inputs: Tensor) -> Any:
        return reference_attention(*(t.double() for t in inputs), **options)

    for name, got, right in zip(
        ("dq", "dk", "dv"), gradients(ours, [q, k, v], dout, dlse), gradients(reference, [q, k, v], dout, dlse),
        strict=True,
    ):  # fmt: skip
        assert (got - right).abs().max() <= 0.02 * right.abs().max(), name
