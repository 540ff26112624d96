"""The gradient of a bias: when it is computed, in which memory and order, and what the kernels need for it."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from gluon_attn import attention
from gluon_attn.backward.launch import Choices, builds_of, compiled_backward, main_of
from gluon_attn.backward.plan import finishes
from gluon_attn.backward.table import padded_head_dims, pick_config, require_fits
from gluon_attn.bias import Bias
from gluon_attn.device import Device
from gluon_attn.gradients import attention_backward
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.resources import resources
from gluon_attn.tensors import PADDED_HEAD_DIMS
from tests.gluon_attn.problems import problem
from tests.slow import slow_if

HOPPER = Device.hopper()
BF16, FP32 = torch.bfloat16, torch.float32
KINDS = [Bias(dtype=dtype, each_row=each_row, shared=True) for dtype in (BF16, FP32) for each_row in (True, False)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def given(head_dim: int = 64) -> dict[str, Any]:
    """O, LSE and what they are of, and a bias that is one for both batches."""
    q, k, v, dout = (normal(2, 2, 72, head_dim, seed=i) for i in range(4))
    bias = normal(1, 2, 72, 72, seed=4)
    out, lse = attention(q, k, v, bias=bias, return_lse=True, device=HOPPER)
    return {"dout": dout, "dlse": None, "q": q, "k": k, "v": v, "out": out, "lse": lse, "bias": bias}


def test_it_is_computed_where_it_is_asked_for_alone():
    call = given(head_dim=128)  # of which the config is the same
    without = attention_backward(**call, device=HOPPER)
    assert len(without) == 3
    call["bias"].requires_grad_()
    *others, dbias = attention_backward(**call, device=HOPPER)
    assert (dbias.shape, dbias.dtype) == (call["bias"].shape, BF16)
    assert all(torch.equal(one, other) for one, other in zip(others[1:], without[1:], strict=True))
    config = pick_config(problem(head_dim=64))
    build = builds_of(Choices(dtype=BF16, padded_head_dims=(64, 64), mask=Mask(), config=config, finishes=True))[1]
    assert (build.constants["bias_desc"], build.constants["dbias_ptr"]) == (None, None)


def test_of_a_bias_alone():
    call = given()
    bias = call["bias"].requires_grad_()
    out = attention(call["q"], call["k"], call["v"], bias=bias, device=HOPPER)
    (alone,) = torch.autograd.grad(out, bias, call["dout"])
    *_, direct = attention_backward(**call, device=HOPPER)
    torch.testing.assert_close(alone, direct)


def test_a_fixed_order_of_sums_is_refused():
    call = given()
    call["bias"].requires_grad_()
    wanted = r"^bias: expected shape \(2, 2, 72, 72\), as its gradient is asked for and deterministic, got \(1, 2, "
    with pytest.raises(NotImplementedError, match=wanted):
        attention_backward(**call, device=HOPPER, deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(NotImplementedError, match=wanted):
            attention(call["q"], call["k"], call["v"], bias=call["bias"], device=HOPPER)
    finally:
        torch.use_deterministic_algorithms(False)


def test_expanded_it_has_a_fixed_order():
    call = given()
    call["bias"] = call["bias"].expand(2, 2, 72, 72).requires_grad_()
    one, other = (attention_backward(**call, device=HOPPER, deterministic=True) for _ in range(2))
    assert all(map(torch.equal, one, other))
    assert one[3].shape == (2, 2, 72, 72)


def test_no_keys():
    q, no_keys = normal(1, 2, 24, 64), normal(1, 2, 0, 64)
    bias = torch.zeros(1, 1, 24, 0, dtype=BF16, requires_grad=True)
    out = attention(q, no_keys, no_keys, bias=bias, device=HOPPER)
    assert isinstance(out, Tensor)
    out.sum().backward()
    assert bias.grad is not None
    assert bias.grad.shape == bias.shape


def test_there_is_room():
    for head_dim, head_dim_v, bias in itertools.product(PADDED_HEAD_DIMS, PADDED_HEAD_DIMS, KINDS):
        dims = padded_head_dims(head_dim, head_dim_v)
        for of_bias in (False, True):
            config = pick_config(problem(head_dim=head_dim, head_dim_v=head_dim_v, bias=bias), of_bias=of_bias)
            require_fits(config, dims, HOPPER, bias)
            assert config.smem_bytes(*dims, bias=bias) <= HOPPER.smem_bytes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dq_slots": 9}, "needs 313344 at head_dim 64 with a bias; lower query_slots, dout_slots, ds_slots or dq_slo"),
        ({"query_slots": 4, "dout_slots": 4}, "needs 314368 at head_dim 64 with a bias; lower query_slots"),
    ],
)
def test_what_a_bias_leaves_no_room_for_is_refused(fields, message):
    bias = Bias(dtype=FP32, each_row=True, shared=True)
    config = pick_config(problem(head_dim=64, bias=bias), of_bias=True)
    with pytest.raises(ValueError, match=message):
        require_fits(dataclasses.replace(config, **fields), (64, 64), HOPPER, bias)


def test_a_bias_for_which_no_config_has_room_is_refused_likewise(monkeypatch):
    smaller = dataclasses.replace(HOPPER, smem_bytes=100_000)
    monkeypatch.setattr(Device, "hopper", lambda: smaller)
    with pytest.raises(ValueError, match=r"fits the 100000 bytes .* got one that needs \d+ at head_dim 64 with a bias"):
        pick_config(problem(head_dim=64, bias=KINDS[0]), of_bias=True)


@pytest.mark.parametrize("of_bias", [False, True], ids=["", "with its gradient"])
@pytest.mark.parametrize(
    ("head_dims", "bias"),
    slow_if(
        lambda case: case != ((64, 64), KINDS[0]),
        [(dims, bias) for dims in ((64, 64), (128, 128), (256, 256), (192, 128)) for bias in KINDS],
    ),
    ids=str,
)
def test_it_takes_no_more_memory_than_it_says(head_dims, bias, of_bias):
    config = pick_config(problem(head_dim=head_dims[0], head_dim_v=head_dims[1], bias=bias), of_bias=of_bias)
    mask = Mask(causal=True)
    has_finish = finishes(config, head_dims, HOPPER, bias=bias)
    choices = Choices(
        dtype=BF16,
        padded_head_dims=head_dims,
        mask=mask,
        config=config,
        finishes=has_finish,
        bias=bias,
        of_bias=of_bias,
    )
    kernels = main_of(choices, compiled_backward(choices)).values()
    for part, kernel in zip(config.launches, kernels, strict=True):
        found = resources(kernel)
        assert found.smem_bytes <= part.smem_bytes(head_dims[0], head_dims[1], bias, finishes=has_finish)
        waits = {loop.waits for loop in found.loops}
        assert len(waits) == 1, "the assembler has serialised the products of a loop"
