"""fp8 with a scale for each KV head, together with masks, changed scores and sinks: O and LSE against float64."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from gluon_attn import attention, reference_attention
from gluon_attn.device import Device
from gluon_attn.forward.configs import ForwardConfig
from gluon_attn.forward.table import blackwell_config, hopper_config
from gluon_attn.tensors import SCALES
from gluon_attn.testing import largest, last_place, stands_for
from tests.gluon_cpu.attention import kv_scales, normal_qkv
from tests.slow import slow_if

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
BATCH, HEADS, KV_HEADS = 2, 4, 2
ALONE: dict[str, dict[str, Any]] = {
    "chunk": {"chunk": 70},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([-1.0, 0.0, 3.0, 6.0])},
    "alibi_slopes": {"alibi_slopes": torch.tensor([0.5, 0.05, -0.02, 0.25])},
    "window": {"window": (90, 20)},
}
FEATURES = ALONE | {"window, softcap, sinks": ALONE["window"] | ALONE["softcap"] | ALONE["sinks"]}
CONFIGS: dict[str, tuple[Device, ForwardConfig]] = {
    "Hopper": (Device.hopper(), hopper_config(2, 128, 2, 2, 216, early_exp=1, transpose_registers=56)),
    "Hopper, V transposed before": (Device.hopper(), hopper_config(2, 128, 2, 2, 216)),
    "Blackwell": (Device.blackwell(), blackwell_config(3, 192)),
}
# Of each feature, dtype and config one is among the quick cases.
QUICK = {
    ("chunk", "e5m2", "Hopper"),
    ("softcap", "e4m3", "Hopper"),
    ("sinks", "e5m2", "Hopper, V transposed before"),
    ("alibi_slopes", "e4m3", "Hopper, V transposed before"),
    ("window", "e5m2", "Blackwell"),
    ("window, softcap, sinks", "e4m3", "Hopper"),
}
CASES = slow_if(lambda case: case not in QUICK, itertools.product(FEATURES, DTYPES, CONFIGS))


def rounded(q: Tensor, k: Tensor, v: Tensor, **asked: Any) -> Tensor:
    """O in fp32 with probabilities in e4m3, rounded as `gluon_attn.testing.plain_fp8` has it, and O rounded to bf16."""
    one = torch.eye(k.shape[2]).expand(*k.shape[:2], -1, -1)
    p, _ = reference_attention(q.float(), k.float(), one, **asked)  # O, where V is the unit matrix
    top = p.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 2.0**8
    p = (p / top).to(DTYPES["e4m3"]).float() * top
    return (p @ v.float().repeat_interleave(HEADS // KV_HEADS, dim=1)).to(torch.bfloat16)


@pytest.mark.parametrize(("name", "dtype", "kind"), CASES)
def test_against_float64(name, dtype, kind):
    """O and LSE within the budgets of `gluon_attn.testing.check`. Without the feature, or without any of the scales,
    they would not be."""
    device, config = CONFIGS[kind]
    asked, causal = FEATURES[name], name != "softcap"
    q, k, v = normal_qkv(batch=BATCH, heads=HEADS, kv_heads=KV_HEADS, q_len=150, kv_len=203, dtype=DTYPES[dtype])
    scales = kv_scales(BATCH, KV_HEADS)
    given: dict[str, Any] = dict(zip(SCALES, scales, strict=True))
    device = dataclasses.replace(device, sm_count=3)
    out, lse = attention(q, k, v, causal=causal, **asked, **given, device=device, config=config, return_lse=True)

    wide = [stands_for(t, scale, KV_HEADS, "bhsd") for t, scale in zip((q, k, v), scales, strict=True)]
    want, want_lse = reference_attention(*wide, causal=causal, **asked)
    _, single_lse = reference_attention(*(t.float() for t in wide), causal=causal, **asked)
    of_out = 2 * largest(rounded(*wide, causal=causal, **asked).double() - want) + last_place(out.dtype, largest(want))
    of_lse = 2 * largest(single_lse.double() - want_lse) + 2.0**-16 * max(1.0, largest(want_lse))
    assert want_lse.isfinite().all()
    assert largest(out.double() - want) <= of_out
    assert largest(lse.double() - want_lse) <= of_lse

    other, other_lse = reference_attention(*wide, causal=causal)
    assert largest(other - want) > of_out
    assert largest(other_lse - want_lse) > of_lse
    for i, plain in enumerate((q, k, v)):
        unscaled = [*wide[:i], plain.double(), *wide[i + 1 :]]
        assert largest(reference_attention(*unscaled, causal=causal, **asked)[0] - want) > of_out
