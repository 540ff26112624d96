"""What is refused before anything is launched, and inputs at the edge of what numbers can hold."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from gluon_attn import BlackwellConfig, ForwardConfig, attention, reference_attention
from gluon_attn.device import Device
from gluon_attn.forward.plan import Plan
from gluon_attn.forward.table import blackwell_config, pick_config
from gluon_attn.problem import Problem
from gluon_attn.reference import dequantise

HOPPER, BLACKWELL = Device.hopper(), Device.blackwell()
both = pytest.mark.parametrize("device", [HOPPER, BLACKWELL], ids=["Hopper", "Blackwell"])


def qkv(dtype: torch.dtype = torch.bfloat16, q_len: int = 40, kv_len: int = 200) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, n, 64, generator=generator) for n in (q_len, kv_len, kv_len))
    return q.to(dtype), k.to(dtype), v.to(dtype)


@both
@pytest.mark.parametrize("causal", [False, True])
def test_a_head_that_is_all_zeros_has_scale_0_and_even_weights(device, causal):
    q, k, v = qkv(torch.float8_e4m3fn)
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


@both
@pytest.mark.parametrize("scale", [1e-30, 50.0])
def test_scales_far_from_the_usual(device, scale):
    """Even weights, and weights that are one key's alone: scores times scale up to about 1e3."""
    q, k, v = qkv()
    out, lse = attention(q, k, v, scale=scale, device=device, return_lse=True)
    want, want_lse = reference_attention(q.double(), k.double(), v.double(), scale=scale)
    plain, plain_lse = reference_attention(q, k, v, scale=scale)
    assert (out - want).abs().max() <= 2 * (plain - want).abs().max()
    assert (lse - want_lse).abs().max() <= 1e-5 + 2 * (plain_lse - want_lse).abs().max()


def test_two_slots_for_keys_and_values_are_enough():
    q, k, v = qkv(kv_len=400)
    out, _ = attention(q, k, v, config=blackwell_config(2, 192), device=BLACKWELL, return_lse=True)
    want, _ = reference_attention(q.double(), k.double(), v.double())
    assert (out - want).abs().max() < 0.01


def test_another_architecture_than_the_cards_is_refused(monkeypatch):
    """Where the tensors are on a card. There is none here: a tensor that says it is on one, and a card for it."""
    real = Device.of
    monkeypatch.setattr(Device, "of", lambda device: HOPPER if device.type == "meta" else real(device))
    q, k, v = (t.to("meta") for t in qkv())
    monkeypatch.setattr("gluon_attn.api.check_call", lambda *_: None)
    with pytest.raises(ValueError, match=r"^device: expected one of compute capability \(9, 0\).*got NVIDIA B200"):
        attention(q, k, v, device=BLACKWELL)


def test_fewer_processors_than_a_cluster_needs():
    q, k, v = qkv()
    one = dataclasses.replace(BLACKWELL, sm_count=1)
    with pytest.raises(ValueError, match=r"^device: expected at least 2 processors.*got 1"):
        Plan.of(Problem.of(q, k, v), pick_config(Problem.of(q, k, v), BLACKWELL, 2), one)


def test_four_ctas_are_blackwells():
    with pytest.raises(ValueError, match=r"^num_ctas: expected one of \(1, 2\) or None for NVIDIA H200, got 4"):
        attention(*qkv(), num_ctas=4, device=HOPPER)


@pytest.mark.parametrize("lengths", [(0, 200), (40, 0)], ids=["no query", "no key"])
def test_an_empty_problem_is_checked_like_any_other(lengths):
    q, k, v = qkv(q_len=lengths[0], kv_len=lengths[1])
    with pytest.raises(ValueError, match=r"^num_ctas: expected one of \(1, 2\)"):
        attention(q, k, v, num_ctas=4, device=HOPPER)
    with pytest.raises(ValueError, match=r"^config: expected a HopperConfig"):
        attention(q, k, v, config=blackwell_config(3, 192), device=HOPPER)


def test_out_may_not_be_q_where_there_are_no_keys_either():
    q, k, v = qkv(kv_len=0)
    before = q.clone()
    with pytest.raises(ValueError, match=r"^out: expected memory of its own"):
        attention(q, k, v, out=q, device=HOPPER)
    assert torch.equal(q, before)


def test_the_base_of_configs_is_no_config():
    fields: dict[str, Any] = {"block_n": 128, "kv_slots": 2, "softmax_registers": 192, "load_registers": 24}
    with pytest.raises(TypeError, match=r"^ForwardConfig: expected a HopperConfig or a BlackwellConfig"):
        ForwardConfig(**fields)  # type: ignore[abstract]  # which a type checker says too


def test_a_quarter_of_p_that_is_too_small_is_refused():
    config = BlackwellConfig(
        block_n=64, kv_slots=4, softmax_registers=192, load_registers=24, exp_pieces=4, early_p=True
    )
    with pytest.raises(ValueError, match=r"^config: expected block_n=128 with early_p for torch.float8_e4m3fn, got 64"):
        attention(*qkv(torch.float8_e4m3fn), config=config, device=BLACKWELL)


def test_a_misaligned_fp8_base_says_by_how_many_elements():
    q, k, v = qkv(torch.float8_e4m3fn)
    shifted = torch.empty(q.numel() + 8, dtype=torch.uint8)[8:].view(torch.float8_e4m3fn).view(q.shape)
    with pytest.raises(ValueError, match=r"slice at a multiple of 16 elements"):
        attention(shifted, k, v, device=HOPPER)
