"""Sinks and the changes of scores that have a name: numbers against float64 on both architectures."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gluon_attn.cpu import launches_on_cpu
from gluon_attn.device import Device
from gluon_attn.forward.configs import ForwardConfig
from gluon_attn.forward.launch import NOT_GIVEN
from gluon_attn.forward.plan import Plan
from gluon_attn.forward.table import blackwell_config, hopper_config
from gluon_attn.problem import Problem
from gluon_attn.reference import reference_attention
from gluon_attn.score_mod import NEAR_ZERO, ScoreFunction, alibi, softcap
from tests.gluon_cpu.attention import normal_qkv
from tests.slow import slow_if

CONFIGS: dict[str, tuple[Device, ForwardConfig]] = {
    "Hopper": (Device.hopper(), hopper_config(2, 64, 2, 2, 232)),
    "Hopper, turns": (Device.hopper(), hopper_config(2, 128, 2, 2, 232, turns=True, early_exp=2, integer_max=True)),
    "Blackwell": (Device.blackwell(), blackwell_config(3, 192)),
    "Hopper, half by polynomial": (Device.hopper(), hopper_config(4, 64, 2, 4, 112, half_by_polynomial=True)),
}
FOR_ALL = slow_if(lambda name: name == "Hopper", ["Hopper", "Hopper, turns", "Blackwell"])
SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 150, "kv_len": 203}


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    name: str,
    *,
    causal: bool,
    scale: float | None = None,
    score_mod: ScoreFunction | None = None,
    sinks: Tensor | None = None,
    **tensors: Tensor,
) -> tuple[Tensor, Tensor]:
    device, config = CONFIGS[name]
    problem = dataclasses.replace(
        Problem.of(q, k, v, causal=causal, scale=scale),
        score_mod=score_mod,
        sinks=None if sinks is None else sinks.dtype,
    )
    out, lse = torch.full(q.shape, float("nan"), dtype=q.dtype), torch.full(q.shape[:3], float("nan"))
    given: dict[str, Any] = {**NOT_GIVEN, "q": q, "k": k, "v": v, "out": out, "lse": lse, "sinks": sinks, **tensors}
    plan = Plan.of(problem, config, dataclasses.replace(device, sm_count=3))
    launches_on_cpu(plan, q, k, v, out)(given)
    return out, lse


def check(
    got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], *, of_out: float = 4e-3, of_lse: float = 1e-4
) -> None:
    torch.testing.assert_close(got[0].double(), want[0], atol=of_out, rtol=0)
    torch.testing.assert_close(got[1].double(), want[1], atol=of_lse, rtol=1e-5)


@pytest.mark.parametrize("name", FOR_ALL)
@pytest.mark.parametrize("dtype", slow_if(lambda dtype: dtype == torch.float16, [torch.float32, torch.float16]))
@pytest.mark.slow_but("dtype0-Blackwell")
def test_sinks(name, dtype):
    q, k, v = normal_qkv(**SIZES, dtype=torch.float16)
    sinks = torch.tensor([-1.0, 0.0, 5.0, 8.0], dtype=dtype)
    got = run(q, k, v, name, causal=True, sinks=sinks)
    check(got, reference_attention(q.double(), k.double(), v.double(), causal=True, sinks=sinks))


@pytest.mark.slow
@pytest.mark.parametrize("name", FOR_ALL)
def test_sinks_far_from_the_scores(name):
    """O goes to 0 and LSE to the sink where it is far above them; it counts for nothing where it is far below."""
    q, k, v = normal_qkv(**SIZES, dtype=torch.float16)
    sinks = torch.tensor([-math.inf, -1e4, 1e4, 1e38])
    out, lse = run(q, k, v, name, causal=False, sinks=sinks)
    plain, plain_lse = run(q, k, v, name, causal=False)
    assert torch.equal(out[:, :2], plain[:, :2])
    assert torch.equal(lse[:, :2], plain_lse[:, :2])
    assert not out[:, 2:].any()
    torch.testing.assert_close(lse[:, 2:], sinks[None, 2:, None].expand_as(lse[:, 2:]))


@pytest.mark.parametrize("name", FOR_ALL)
def test_rows_without_keys_see_their_sink(name):
    q, k, v = normal_qkv(**(SIZES | {"q_len": 203, "kv_len": 70}), dtype=torch.float16)
    sinks = torch.tensor([-1.0, 0.0, -math.inf, 8.0])
    out, lse = run(q, k, v, name, causal=True, sinks=sinks)
    check((out, lse), reference_attention(q.double(), k.double(), v.double(), causal=True, sinks=sinks))
    assert not out[:, :, : 203 - 70].any()
    assert torch.equal(lse[0, :, 0], sinks)


@pytest.mark.parametrize("name", FOR_ALL)
@pytest.mark.parametrize("cap", slow_if(lambda cap: cap == 15.0, [2.0, 15.0]))
def test_soft_cap(name, cap):
    """Scores up to many times the cap."""
    q, k, v = normal_qkv(**SIZES, dtype=torch.float16)
    q = q * 4
    got = run(q, k, v, name, causal=True, score_mod=softcap(cap))
    want = reference_attention(q.double(), k.double(), v.double(), causal=True, softcap=cap)
    check(got, want)
    assert (want[1] - reference_attention(q.double(), k.double(), v.double(), causal=True)[1]).abs().max() > 0.1


WITHOUT_MAXIMA = ("Hopper", "Hopper, turns", "Hopper, half by polynomial")


def scores_around(centres: tuple[float, ...], q_len: int, kv_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, whose scores in head h are centres[h] and something normal, which in the last one is times 30."""
    q, k, v = normal_qkv(heads=len(centres), q_len=q_len, kv_len=kv_len, dtype=torch.float32)
    q[:, -1] *= 30
    q[..., 0], k[..., 0] = 1.0, torch.tensor(centres)[:, None] * q.shape[-1] ** 0.5
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_if(lambda name: name == "Hopper", WITHOUT_MAXIMA))
@pytest.mark.parametrize(
    ("causal", "q_len"), [(False, 100), (True, 300)], ids=["full", "causal, rows without keys, sinks"]
)
def test_soft_cap_without_maxima(name, causal, q_len):
    """The largest cap for that: scores that all are near it, or near its negative, or from the one to the other."""
    q, k, v = scores_around((0.0, 150.0, -150.0, 40.0, -40.0, 0.0), q_len, 270)
    sinks = torch.tensor([0.0, 55.0, -55.0, -math.inf, -40.0, 1e4]) if causal else None
    got = run(q, k, v, name, causal=causal, score_mod=softcap(NEAR_ZERO), sinks=sinks)
    want = reference_attention(q.double(), k.double(), v.double(), causal=causal, softcap=NEAR_ZERO, sinks=sinks)
    assert want[1].nan_to_num(0, 0, 0).abs().max() > NEAR_ZERO - 1
    check(got, want, of_out=2e-2, of_lse=2e-4)
    if causal:
        assert not got[0][:, :, : q_len - 270].any()


@pytest.mark.parametrize("causal", slow_if(lambda causal: causal, [False, True]))
def test_a_large_soft_cap_has_maxima(causal):
    """Without, exponentials would be beyond fp32's range."""
    q, k, v = scores_around((0.0, 150.0, -150.0), 100, 270)
    got = run(q, k, v, "Hopper", causal=causal, score_mod=softcap(150.0))
    want = reference_attention(q.double(), k.double(), v.double(), causal=causal, softcap=150.0)
    assert want[1].max() > 110
    check(got, want, of_out=2e-2, of_lse=2e-3)


@pytest.mark.parametrize("name", FOR_ALL)
@pytest.mark.parametrize("by_batch", slow_if(lambda by_batch: not by_batch, [False, True]))
@pytest.mark.slow_but("True-Hopper, turns")
def test_alibi(name, by_batch):
    """Slopes of either sign. Some rows see no key if the mask is causal."""
    slopes = torch.tensor([0.5, -0.25, 0.125, 0.0625])
    if by_batch:
        slopes = torch.stack([slopes, 2 * slopes])
    for causal, lengths in ((False, {}), (True, {}), (True, {"q_len": 203, "kv_len": 150})):
        q, k, v = normal_qkv(**SIZES | lengths, dtype=torch.float16)
        got = run(q, k, v, name, causal=causal, score_mod=alibi(slopes), aux0=slopes)
        check(got, reference_attention(q.double(), k.double(), v.double(), causal=causal, alibi_slopes=slopes))


@pytest.mark.parametrize("causal", slow_if(lambda causal: not causal, [False, True]))
def test_alibi_of_scores_that_count_for_nothing(causal):
    """A softmax scale next to 0, as slopes are counted in units of scores before it."""
    q, k, v = normal_qkv(**SIZES, dtype=torch.float16)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    got = run(q, k, v, "Hopper", causal=causal, scale=1e-37, score_mod=alibi(slopes), aux0=slopes)
    check(got, reference_attention(*(t.double() for t in (q, k, v)), causal=causal, scale=1e-37, alibi_slopes=slopes))
