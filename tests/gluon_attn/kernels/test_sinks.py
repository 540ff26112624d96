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
from gluon_attn.score_mod import ScoreFunction, alibi, softcap
from tests.gluon_cpu.attention import normal_qkv
from tests.slow import slow_if

CONFIGS: dict[str, tuple[Device, ForwardConfig]] = {
    "Hopper": (Device.hopper(), hopper_config(2, 64, 2, 2, 232)),
    "Hopper, turns": (Device.hopper(), hopper_config(2, 128, 2, 2, 232, turns=True, early_exp=2)),
    "Blackwell": (Device.blackwell(), blackwell_config(3, 192)),
}
SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 150, "kv_len": 203}


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    name: str,
    *,
    causal: bool,
    score_mod: ScoreFunction | None = None,
    sinks: Tensor | None = None,
    **tensors: Tensor,
) -> tuple[Tensor, Tensor]:
    device, config = CONFIGS[name]
    problem = dataclasses.replace(
        Problem.of(q, k, v, causal=causal), score_mod=score_mod, sinks=None if sinks is None else sinks.dtype
    )
    out, lse = torch.full(q.shape, float("nan"), dtype=q.dtype), torch.full(q.shape[:3], float("nan"))
    given: dict[str, Any] = {**NOT_GIVEN, "q": q, "k": k, "v": v, "out": out, "lse": lse, "sinks": sinks, **tensors}
    plan = Plan.of(problem, config, dataclasses.replace(device, sm_count=3))
    launches_on_cpu(plan, q, k, v, out)(given)
    return out, lse


def check(
    got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], *, of_out: float = 4e-3, of_lse: float = 1e-4
) -> None:
    torch.testing.assert_close(got[0].double(), want[0], atol=4e-3, rtol=0)
    torch.testing.assert_close(got[1].double(), want[1], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sinks(name, dtype):
    q, k, v = normal_qkv(**SIZES, dtype=torch.float16)
    sinks = torch.tensor([-1.0, 0.0, 5.0, 8.0], dtype=dtype)
    got = run(q, k, v, name, causal=True, sinks=sinks)
    check(got, reference_attention(q.double(), k.double(), v.double(), causal=True, sinks=sinks))


@pytest.mark.parametrize("name", CONFIGS)
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


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_without_keys_see_their_sink(name):
    q, k, v = normal_qkv(**(SIZES | {"q_len": 203, "kv_len": 70}), dtype=torch.float16)
    sinks = torch.tensor([-1.0, 0.0, -math.inf, 8.0])
    out, lse = run(q, k, v, name, causal=True, sinks=sinks)
    check((out, lse), reference_attention(q.double(), k.double(), v.double(), causal=True, sinks=sinks))
    assert not out[:, :, : 203 - 70].any()
    assert torch.equal(lse[0, :, 0], sinks)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("cap", [2.0, 15.0])
def test_soft_cap(name, cap):
    """Scores up to many times the cap."""
    q, k, v = normal_qkv(**SIZES, dtype=torch.float16)
    q = q * 4
    got = run(q, k, v, name, causal=True, score_mod=softcap(cap))
    want = reference_attention(q.double(), k.double(), v.double(), causal=True, softcap=cap)
    check(got, want)
    assert (want[1] - reference_attention(q.double(), k.double(), v.double(), causal=True)[1]).abs().max() > 0.1


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("by_batch", slow_if(lambda by_batch: not by_batch, [False, True]))
def test_alibi(name, by_batch):
    q, k, v = normal_qkv(**SIZES, dtype=torch.float16)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    if by_batch:
        slopes = torch.stack([slopes, 2 * slopes])
    for causal in (False, True):
        got = run(q, k, v, name, causal=causal, score_mod=alibi(slopes), aux0=slopes)
        check(got, reference_attention(q.double(), k.double(), v.double(), causal=causal, alibi_slopes=slopes))
