"""NaN and infinity in Q, K, V and the scales come out as of plain PyTorch, in every dtype and with every lever; and
scales at the edge of what numbers can hold."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gluon_attn import ForwardConfig, attention, reference_attention
from gluon_attn.call import Extras
from gluon_attn.cpu import launches_on_cpu
from gluon_attn.device import Device
from gluon_attn.forward.plan import Plan
from gluon_attn.forward.table import blackwell_config, hopper_config, pick_config
from gluon_attn.problem import Problem
from gluon_attn.reference import dequantise
from gluon_attn.tensors import SCALES
from tests.gluon_attn.special_values import E4M3, E5M2, INF, NAN, Tensors, check_special, special_tensors
from tests.slow import slow_if

H200, B200, B300 = Device.hopper(), Device.blackwell(), Device.blackwell_ultra()
BF16, FP16 = torch.bfloat16, torch.float16


@dataclass(frozen=True, kw_only=True)
class Case:
    device: Device
    dtype: torch.dtype
    head_dim: int = 64
    causal: bool = False
    num_ctas: int = 1
    config: ForwardConfig | None = None  # default: the table's
    slow: bool = False
    softcap: float | None = None
    slope: float | None = None  # of ALiBi, in each head


CASES = {
    "H200, bf16, maxima as integers": Case(
        device=H200,
        dtype=BF16,
        config=hopper_config(3, 128, 2, 2, 160, integer_max=True, turns=True, early_exp=1),
    ),
    "H200, fp16, causal, maxima as integers": Case(
        device=H200, dtype=FP16, causal=True, config=hopper_config(4, 64, 2, 4, 112, integer_max=True)
    ),
    "H200, bf16, soft cap, half by polynomial": Case(
        device=H200, dtype=BF16, softcap=20.0, config=hopper_config(4, 64, 2, 4, 112, half_by_polynomial=True)
    ),
    "H200, bf16, ALiBi, causal": Case(device=H200, dtype=BF16, causal=True, slope=0.05),
    "H200, bf16, D=128, 2 CTAs": Case(device=H200, dtype=BF16, head_dim=128, num_ctas=2, slow=True),
    "H200, bf16, D=256, causal": Case(device=H200, dtype=BF16, head_dim=256, causal=True, slow=True),
    "H200, e4m3": Case(device=H200, dtype=E4M3),
    "H200, e5m2, D=128, causal": Case(device=H200, dtype=E5M2, head_dim=128, causal=True, slow=True),
    "H200, e4m3, V transposed before": Case(device=H200, dtype=E4M3, head_dim=256, slow=True),
    "H200, e5m2, causal, 2 CTAs": Case(device=H200, dtype=E5M2, causal=True, num_ctas=2, slow=True),
    "B200, bf16": Case(device=B200, dtype=BF16),
    "B200, fp16, D=128, causal": Case(device=B200, dtype=FP16, head_dim=128, causal=True, slow=True),
    "B200, bf16, every exponential by polynomial": Case(
        device=B200, dtype=BF16, config=blackwell_config(6, 192, polynomial_columns=16, load_pieces=2, exp_pieces=4)
    ),
    "B200, e5m2": Case(device=B200, dtype=E5M2),
    "B200, bf16, causal, 2 CTAs": Case(device=B200, dtype=BF16, causal=True, num_ctas=2, slow=True),
    "B200, bf16, 4 CTAs": Case(device=B200, dtype=BF16, num_ctas=4, slow=True),
    "B300, bf16, D=128, maxima from loads": Case(device=B300, dtype=BF16, head_dim=128, slow=True),
    "B300, e4m3, causal": Case(device=B300, dtype=E4M3, causal=True, slow=True),
    "B300, fp16, causal, 2 CTAs": Case(device=B300, dtype=FP16, causal=True, num_ctas=2, slow=True),
}


@pytest.mark.parametrize("name", slow_if(lambda name: CASES[name].slow, CASES))
@pytest.mark.slow_but(
    "H200, fp16, causal, maxima as integers",
    "B200, bf16, every exponential by polynomial",
    "H200, bf16, ALiBi, causal",
    "B200, bf16",
    "H200, e4m3",
)
def test_as_in_plain_pytorch(name):
    case = CASES[name]
    given = special_tensors(case.dtype, case.head_dim)
    slopes = None if case.slope is None else torch.full((len(given.names),), case.slope)
    out, lse = attention(
        given.q,
        given.k,
        given.v,
        causal=case.causal,
        return_lse=True,
        num_ctas=case.num_ctas if case.config is None else None,
        config=case.config,
        device=case.device,
        q_scale=given.scales.get("q_scale"),
        k_scale=given.scales.get("k_scale"),
        v_scale=given.scales.get("v_scale"),
        softcap=case.softcap,
        alibi_slopes=slopes,
    )
    check_special(given, out, lse, causal=case.causal, softcap=case.softcap, alibi_slopes=slopes)


@pytest.mark.parametrize("device", [H200, B200], ids=["H200", "B200"])
def test_a_negative_scale_gives_nan(device):
    """As on a card, where attention() does not look at it: here the kernel is launched without asking it."""
    given = special_tensors(E5M2, 64, refused_on_cpu=True)
    heads = [h for h, name in enumerate(given.names) if name.endswith("negative")]
    given = Tensors(
        names=tuple(given.names[h] for h in heads),
        q=given.q[:, heads],
        k=given.k[:, heads],
        v=given.v[:, heads],
        scales={name: scale[:, heads] for name, scale in given.scales.items()},
    )
    problem = Problem.of(given.q, given.k, given.v, scales=tuple(given.scales.values()))
    out, lse = torch.empty(given.q.shape, dtype=BF16), torch.empty(given.q.shape[:3])
    launches = launches_on_cpu(Plan.of(problem, pick_config(problem, device), device), given.q, given.k, given.v, out)
    q_scale, k_scale, v_scale = (given.scales[name] for name in SCALES)
    extras = Extras(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale).given()
    launches(extras | {"q": given.q, "k": given.k, "v": given.v, "out": out, "lse": lse})
    assert given.names == ("v_scale, negative", "q_scale, negative", "k_scale, negative")
    check_special(given, out, lse, causal=False)


SCORES = {
    "NaN": [NAN, 1.0, 2.0],
    "+inf": [INF, 1.0, 2.0],
    "-inf": [-INF, 1.0, 2.0],
    "-inf alone": [-INF, -INF, -INF],
    "NaN and +inf": [NAN, INF, 1.0],
}


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES.keys())
def test_the_specification_is_plain_pytorch(scores):
    q, v = torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]]])
    k = torch.tensor([[[[score, 0.0] for score in scores]]])
    out, lse = reference_attention(q, k, v, scale=1.0)
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v, scale=1.0), equal_nan=True)
    torch.testing.assert_close(lse[0, 0], torch.tensor(scores).logsumexp(0, keepdim=True), equal_nan=True)


# --- Scales that are 0, tiny or large

on_both = pytest.mark.parametrize("device", [H200, B200], ids=["H200", "B200"])


def qkv(dtype: torch.dtype = torch.bfloat16, q_len: int = 40, kv_len: int = 200) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, n, 64, generator=generator) for n in (q_len, kv_len, kv_len))
    return q.to(dtype), k.to(dtype), v.to(dtype)


@on_both
@pytest.mark.parametrize("causal", [False, True])
def test_a_head_that_is_all_zeros_has_scale_0_and_even_weights(device, causal):
    q, k, v = qkv(E4M3)
    q_scale, k_scale = torch.tensor([[0.0, 1.0]]), torch.tensor([[2.0, 0.5]])
    out, lse = attention(q, k, v, causal=causal, q_scale=q_scale, k_scale=k_scale, device=device, return_lse=True)
    want, want_lse = reference_attention(
        dequantise(q, q_scale, 2).double(),
        dequantise(k, k_scale, 2).double(),
        v.double(),
        causal=causal,
    )
    assert (lse - want_lse).abs().max() < 1e-4
    assert (out - want).abs().max() < 0.05 * want.abs().max()


@on_both
@pytest.mark.parametrize("scale", [1e-30, 50.0])
def test_scales_far_from_the_usual(device, scale):
    """Even weights, and weights that are one key's alone: scores times scale up to about 1e3."""
    q, k, v = qkv()
    out, lse = attention(q, k, v, scale=scale, device=device, return_lse=True)
    want, want_lse = reference_attention(q.double(), k.double(), v.double(), scale=scale)
    plain, plain_lse = reference_attention(q, k, v, scale=scale)
    assert (out - want).abs().max() <= 2 * (plain - want).abs().max()
    assert (lse - want_lse).abs().max() <= 1e-5 + 2 * (plain_lse - want_lse).abs().max()
