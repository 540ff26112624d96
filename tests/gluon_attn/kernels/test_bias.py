"""A bias that is added to scores, on gluon_cpu: numbers against float64, what is refused, what is compiled."""

import dataclasses
import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gluon_attn import attention, reference_attention
from gluon_attn.bias import Bias
from gluon_attn.cpu import find_race
from gluon_attn.device import Device
from gluon_attn.forward.configs import HopperConfig
from gluon_attn.forward.launch import compiled
from gluon_attn.forward.table import hopper_config, pick_config
from gluon_attn.resources import resources
from tests.gluon_attn.problems import problem
from tests.slow import slow_if

HOPPER, BLACKWELL = Device.hopper(), Device.blackwell()
FEW = dataclasses.replace(HOPPER, sm_count=3)  # so that a program has several row blocks
FEW_BLACKWELL = dataclasses.replace(BLACKWELL, sm_count=3)
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
B, H, KV_HEADS = 2, 4, 2


def normal(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normal_bias(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Of any length, in rows as long as TMA asks for; what follows there is NaN."""
    padded = F.pad(normal(*shape, seed=9) * 2, (0, -shape[-1] % 8), value=math.nan)
    return padded.to(dtype)[..., : shape[-1]]


def normal_qkv(
    lengths: tuple[int, int], head_dim: int, head_dim_v: int | None = None, dtype: torch.dtype = BF16
) -> list[Tensor]:
    q_len, kv_len = lengths
    return [
        normal(B, H, q_len, head_dim, dtype=dtype, seed=0),
        normal(B, KV_HEADS, kv_len, head_dim, dtype=dtype, seed=1),
        normal(B, KV_HEADS, kv_len, head_dim_v or head_dim, dtype=dtype, seed=2),
    ]


def check(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, device: Device | None = FEW, **options: Any
) -> tuple[Tensor, Tensor]:
    """O and LSE, found right."""
    out, lse = attention(q, k, v, bias=bias, device=device, return_lse=True, **options)
    options.pop("config", None)
    want, want_lse = reference_attention(q.double(), k.double(), v.double(), bias=bias.double(), **options)
    plain, _ = reference_attention(q, k, v, bias=bias, **options)
    seen = want_lse > -math.inf
    assert torch.equal(lse > -math.inf, seen)
    error, budget = (out.double() - want).abs().max(), (plain.double() - want).abs().max()
    assert error <= 2 * budget + 1e-3, f"O is off by {error:.3e}, plain torch by {budget:.3e}"
    torch.testing.assert_close(lse.double()[seen], want_lse[seen], atol=1e-4, rtol=1e-5)
    _, without = reference_attention(q.double(), k.double(), v.double(), **options)
    assert (without - want_lse)[seen].abs().max() > 0.1, "the bias makes no difference"
    return out, lse


class Case(NamedTuple):
    shape: tuple[int, int, int]  # of the bias, but for the keys
    lengths: tuple[int, int]
    head_dim: int = 64
    options: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it
    dtype: torch.dtype = BF16
    bias_dtype: torch.dtype | None = None
    head_dim_v: int | None = None


TURNS = hopper_config(2, 128, 2, 2, 232, turns=True, early_exp=2, integer_max=True)
CASES = {
    "of all": Case((B, H, 200), (200, 230)),
    "of all, causal": Case((B, H, 300), (300, 300), options={"causal": True}),
    "one for the batch, D=128": Case((1, H, 200), (200, 301), 128, {"causal": True}),
    "one for the heads, D=256": Case((B, 1, 150), (150, 200), 256, {"causal": True}),
    "one for all": Case((1, 1, 200), (200, 170), 128),
    "a row of each head": Case((1, H, 1), (200, 230), options={"causal": True}),
    "a row of each batch, D=128": Case((B, 1, 1), (200, 230), 128),
    "a row, D=256": Case((1, 1, 1), (150, 170), 256),
    "a window": Case((B, H, 300), (300, 300), options={"window": (70, 20)}),
    "a window, a row": Case((B, 1, 1), (300, 300), options={"window": (70, 20)}),
    "fp32": Case((B, H, 200), (200, 230), bias_dtype=FP32),
    "fp32, D=128": Case((1, H, 200), (200, 230), 128, {"causal": True}, bias_dtype=FP32),
    "fp32, a row": Case((B, H, 1), (200, 230), bias_dtype=FP32),
    "fp32, D=256": Case((1, H, 100), (100, 130), 256, bias_dtype=FP32),
    "fp16": Case((B, H, 200), (200, 230), dtype=FP16),
    "one query": Case((B, H, 1), (1, 300)),
    "one key": Case((B, H, 30), (30, 1)),
    "one block": Case((B, H, 64), (64, 128)),
    "more queries than keys": Case((B, H, 400), (400, 77), options={"causal": True}),
    "head dims 192 and 128": Case((B, H, 130), (130, 200), 192, {"causal": True}, head_dim_v=128),
    "head dims 64 and 192": Case((1, H, 130), (130, 200), 64, head_dim_v=192),
    "head dim 80": Case((B, H, 130), (130, 200), 80, {"causal": True}),
    "turns, causal": Case((B, H, 520), (520, 520), options={"causal": True, "config": TURNS}),
}
QUICK = ("of all, causal", "one for the batch, D=128", "a row of each head")


@pytest.mark.parametrize("name", slow_if(lambda name: name not in QUICK, CASES))
@pytest.mark.slow_but("a row of each head")
def test_against_float64(name):
    case = CASES[name]
    q, k, v = normal_qkv(case.lengths, case.head_dim, case.head_dim_v, case.dtype)
    bias = normal_bias(*case.shape, case.lengths[1], dtype=case.bias_dtype or case.dtype)
    check(q, k, v, bias, **case.options)


ON_BLACKWELL = [
    name for name, case in CASES.items() if (case.head_dim_v or case.head_dim) <= 128 and "config" not in case.options
]
QUICK_BLACKWELL = ("of all, causal", "fp32, D=128")


@pytest.mark.parametrize("name", slow_if(lambda name: name not in QUICK_BLACKWELL, ON_BLACKWELL))
def test_against_float64_on_blackwell(name):
    case = CASES[name]
    q, k, v = normal_qkv(case.lengths, case.head_dim, case.head_dim_v, case.dtype)
    bias = normal_bias(*case.shape, case.lengths[1], dtype=case.bias_dtype or case.dtype)
    check(q, k, v, bias, device=FEW_BLACKWELL, **case.options)


def test_heads_after_tokens():
    """The bias is (B, H, Sq, Sk) there too."""
    q, k, v = (t.transpose(1, 2).contiguous() for t in normal_qkv((100, 130), 64))
    check(q, k, v, normal_bias(B, H, 100, 130), layout="bshd")


@pytest.mark.parametrize("strides", ["expanded", "transposed"])
def test_strides(strides):
    q, k, v = normal_qkv((100, 136), 64)
    if strides == "expanded":
        bias = normal_bias(1, H, 1, 136).expand(B, H, 100, 136)
    else:
        bias = normal_bias(B, 100, H, 136).transpose(1, 2)
    check(q, k, v, bias, causal=True)


@pytest.mark.parametrize("device", slow_if(lambda device: device is FEW, [FEW, FEW_BLACKWELL]), ids=["Hopper", "B200"])
def test_beside_sinks_and_documents(device):
    q, k, v = normal_qkv((200, 200), 64)
    ids = (torch.arange(200) // 70).int().expand(B, 200).contiguous()
    sinks = torch.tensor([-1.0, 0.5, 2.0, 4.0])
    check(q, k, v, normal_bias(B, H, 200, 200), device, causal=True, segment_ids=ids, sinks=sinks)


@pytest.mark.parametrize("device", [FEW, FEW_BLACKWELL], ids=["Hopper", "Blackwell"])
@pytest.mark.parametrize(
    ("least", "scale"),
    [(-math.inf, 0.125), (torch.finfo(BF16).min, 0.125), (torch.finfo(BF16).min, 1.0), (-2e37, 0.125), (-1e38, 4.0)],
)
def test_hidden_keys(least, scale, device):
    """By -inf, or by numbers as tensors have masks of; also where the scale is so large that they are still finite as
    raw scores. A row that sees no key has O = 0 and LSE = -inf."""
    q, k, v = normal_qkv((200, 264), 64)
    hidden = torch.arange(264) % 5 == torch.arange(200)[:, None] % 5
    hidden[:, 130:] = True  # whole blocks, the last ones, which are walked first
    hidden[7] = True
    bias = normal_bias(B, 1, 200, 264).masked_fill(hidden, least)
    out, lse = attention(q, k, v, bias=bias, scale=scale, device=device, return_lse=True)
    want, want_lse = reference_attention(
        q.double(), k.double(), v.double(), bias=bias.double().masked_fill(hidden, -math.inf), scale=scale
    )
    assert not out[:, :, 7].any()
    torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_large_numbers(dtype):
    """Scores far above 0, and all of them far below."""
    q, k, v = normal_qkv((130, 200), 64)
    for shift in (1000.0, -1000.0):
        bias = (normal_bias(B, H, 130, 200, dtype=FP32) + shift).to(dtype)
        bias = F.pad(bias, (0, 0))
        out, lse = attention(q, k, v, bias=bias, device=FEW, return_lse=True)
        want, want_lse = reference_attention(q.double(), k.double(), v.double(), bias=bias.double())
        torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=0)
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-2, rtol=0)


def test_no_keys():
    q, k, v = normal_qkv((10, 0), 64)
    out, lse = attention(q, k, v, bias=torch.zeros(1, 1, 10, 0, dtype=BF16), device=HOPPER, return_lse=True)
    assert not out.any()
    assert bool((lse == -math.inf).all())


@pytest.mark.parametrize("shape", [(B, H, 200), (B, 1, 1)], ids=["a tile for each role", "one row for all"])
@pytest.mark.slow_but("a tile for each role")
def test_under_many_schedules(shape):
    q, k, v = normal_qkv((200, 300), 64)
    bias = normal_bias(*shape, 300)
    assert find_race(lambda: attention(q, k, v, bias=bias, causal=True, device=FEW), schedules=3) is None


@pytest.mark.parametrize("shape", [(B, H, 400), (B, 1, 1)], ids=["a tile for each query tile", "one row for all"])
@pytest.mark.slow_but("a tile for each query tile")
def test_under_many_schedules_on_blackwell(shape):
    q, k, v = normal_qkv((400, 300), 64)
    bias = normal_bias(*shape, 300)
    assert find_race(lambda: attention(q, k, v, bias=bias, causal=True, device=FEW_BLACKWELL), schedules=3) is None


KINDS = [Bias(dtype=dtype, each_row=each_row, shared=False) for dtype in (BF16, FP32) for each_row in (True, False)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "bias"),
    [(head_dim, bias) for head_dim in (64, 128, 256) for bias in KINDS],
    ids=str,
)
def test_no_spills(head_dim, bias):
    """In no loop; and it needs no more memory than it says."""
    asked = problem(head_dim=head_dim, q_len=4096, kv_len=4096, causal=True, bias=bias)
    config = pick_config(asked, HOPPER)
    assert isinstance(config, HopperConfig)
    found = resources(compiled(BF16, head_dim, asked.mask, config, bias=bias))
    assert [loop.spills for loop in found.loops] == [0] * len(found.loops)
    assert found.smem_bytes <= config.smem_bytes(head_dim, 2) + config.bias_bytes(bias)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "bias"), [(head_dim, bias) for head_dim in (64, 128) for bias in KINDS], ids=str)
def test_no_spills_on_blackwell(head_dim, bias):
    """In no loop of softmax, elsewhere hardly more than without a bias; and it needs no more memory than it says."""
    asked = problem(head_dim=head_dim, q_len=4096, kv_len=4096, causal=True, bias=bias)
    config = pick_config(asked, BLACKWELL)
    found = resources(compiled(BF16, head_dim, asked.mask, config, bias=bias))
    softmax = [loop for loop in found.loops if loop.exp2 > 1]
    assert len(softmax) == 4
    assert [loop.spills for loop in softmax] == [0] * 4
    assert found.spills <= 64
    assert found.smem_bytes <= config.smem_bytes(head_dim, 2) + config.bias_bytes(bias) <= BLACKWELL.smem_bytes
