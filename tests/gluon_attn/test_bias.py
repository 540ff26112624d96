"""What is taken for a bias, what is refused, how TMA sees it and which config has room for it."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from gluon_attn import attention, attention_varlen
from gluon_attn.bias import Bias, view_of_bias
from gluon_attn.device import Device
from gluon_attn.forward.configs import BlackwellConfig, HopperConfig
from gluon_attn.forward.fits import require_fits
from gluon_attn.forward.table import UNLIKE_ON_BLACKWELL, Row, blackwell_config, hopper_config, pick_config
from gluon_attn.problem import Problem
from gluon_attn.tensors import PADDED_HEAD_DIMS
from tests.gluon_attn.problems import problem

HOPPER, BLACKWELL = Device.hopper(), Device.blackwell()
BF16, FP32 = torch.bfloat16, torch.float32


def test_what_is_compiled():
    """Lengths and strides are not looked at: only which dimensions are there."""
    q = torch.zeros(2, 4, 24, 64, dtype=BF16)

    def of(*shape: int, dtype: torch.dtype = BF16) -> Bias | None:
        return Problem.of(q, q, q, bias=torch.zeros(*shape, dtype=dtype)).bias

    assert of(2, 4, 24, 24) == Bias(dtype=BF16, each_row=True, shared=False)
    assert of(1, 4, 24, 24) == of(2, 1, 24, 24) == Bias(dtype=BF16, each_row=True, shared=True)
    assert of(2, 4, 1, 24, dtype=FP32) == Bias(dtype=FP32, each_row=False, shared=True)


def test_a_dimension_of_size_1_may_have_any_stride():
    t = torch.zeros(64, 40)[:, :24].as_strided((1, 1, 64, 24), (3, 5, 40, 1))
    assert view_of_bias(t).strides == (32, 32, 40, 1)
    assert view_of_bias(t.expand(2, 3, 64, 24)).strides == (0, 0, 40, 1)


KINDS = [Bias(dtype=dtype, each_row=each_row, shared=False) for dtype in (BF16, FP32) for each_row in (True, False)]


def test_there_is_a_config_for_all():
    """And where the table's own has room, it is that."""
    kept = 0
    for head_dim, head_dim_v, causal, length in itertools.product(
        PADDED_HEAD_DIMS, PADDED_HEAD_DIMS, (False, True), (128, 4096)
    ):
        sizes = {"head_dim": head_dim, "head_dim_v": head_dim_v, "q_len": length, "kv_len": length, "causal": causal}
        own = pick_config(problem(**sizes), HOPPER)
        for bias in KINDS:
            asked = problem(**sizes, bias=bias)
            config = pick_config(asked, HOPPER)
            assert isinstance(config, HopperConfig)
            needed = config.smem_bytes(head_dim, 2, head_dim_v) + config.bias_bytes(bias)
            assert needed <= HOPPER.smem_bytes
            require_fits(config, asked, HOPPER)
            kept += config == own
    assert kept > 0


# Of head dims of Q and V, where a bias of each row has no room on Blackwell, whatever the config.
NO_ROOM = {(256, 128): (BF16, FP32), (256, 64): (FP32,), (192, 128): (FP32,)}


@pytest.mark.parametrize("device", [BLACKWELL, Device.blackwell_ultra()], ids=lambda device: device.name)
def test_there_is_a_config_on_blackwell_where_one_has_room(device):
    for head_dims, causal, bias in itertools.product(
        ((64, 64), (128, 128), *UNLIKE_ON_BLACKWELL), (False, True), KINDS
    ):
        asked = problem(head_dim=head_dims[0], head_dim_v=head_dims[1], kv_len=4096, causal=causal, bias=bias)
        if bias.each_row and bias.dtype in NO_ROOM.get(head_dims, ()):
            with pytest.raises(ValueError, match=r"^config: none has room for a bias"):
                pick_config(asked, device)
        else:
            config = pick_config(asked, device)
            assert isinstance(config, BlackwellConfig)
            assert not config.max_in_load
            require_fits(config, asked, device)
            tiles = 2 * (128 if bias.each_row else 1) * config.block_n * bias.dtype.itemsize
            assert config.bias_bytes(bias) == tiles
            assert config.smem_bytes(head_dims[0], 2, head_dims[1]) + tiles <= device.smem_bytes


@pytest.mark.parametrize("block_n", [128, 64])
@pytest.mark.parametrize("result_slots", [2, 1])
def test_a_row_for_a_bias_serves_its_own_config_on_blackwell(block_n, result_slots):
    """Where that has room: others were not timed."""
    config = replace(blackwell_config(2, 192, result_slots=result_slots), block_n=block_n)
    asked = problem(head_dim=64, kv_len=8192, bias=KINDS[0])
    require_fits(config, asked, BLACKWELL)
    assert pick_config(asked, BLACKWELL, None, [Row(64, False, config, scores="bias")]) == config


Q = torch.zeros(1, 2, 24, 64, dtype=BF16)
REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no tensor": (3, {}, TypeError, r"^bias: expected a torch.Tensor of shape \(1 or 1, 2 or 1, 24 or 1, 24\) or None"),
    "two dimensions": (torch.zeros(24, 24), {}, ValueError, r"^bias: expected shape .*, got \(24, 24\); view it"),
    "other heads": (torch.zeros(1, 3, 24, 24), {}, ValueError, r"^bias: expected shape \(1 or 1, 2 or 1, .*\(1, 3, "),
    "one key for all": (torch.zeros(1, 2, 24, 1), {}, ValueError, r"^bias: expected shape .*, 24\), got \(1, 2, 24, 1"),
    "bools": (torch.zeros(1, 2, 24, 24).bool(), {}, TypeError, r"^bias: expected dtype torch.bfloat16 .*bool.*-inf"),
    "fp16 with bf16": (torch.zeros(1, 2, 24, 24).half(), {}, TypeError, r"^bias: expected dtype .*got torch.float16"),
    "sparse": (torch.zeros(1, 2, 24, 24).to_sparse(), {}, TypeError, r"^bias: expected a dense tensor, .*to_dense"),
    "its device": (torch.zeros(1, 2, 24, 24, device="meta"), {}, ValueError, r"^bias: expected device cpu"),
    "columns first": (torch.zeros(1, 2, 24, 24).mT, {}, ValueError, r"^bias: expected stride 1 in the last .*contig"),
    "rows of 26": (
        torch.zeros(1, 2, 24, 26)[..., :24], {}, ValueError, r"^bias: expected strides .* 4 elements, got 26 .*contig",
    ),
    "an address": (
        torch.zeros(2 * 24 * 24 + 1)[1:].view(1, 2, 24, 24), {}, ValueError, r"^bias: expected a base address",
    ),
    "a sum of gradients in a fixed order": (
        torch.zeros(1, 1, 24, 24).requires_grad_(), {"deterministic": True}, NotImplementedError,
        r"^bias: expected shape \(1, 2, 24, 24\), as its gradient is asked for and deterministic, got .*expand",
    ),
    "a soft cap": (torch.zeros(1, 2, 24, 24), {"softcap": 2.0}, NotImplementedError, r"^bias: .* with softcap"),
    "two CTAs": (torch.zeros(1, 2, 24, 24), {"num_ctas": 2}, ValueError, r"^num_ctas: expected 1 or None with a bias"),
    "a config of two CTAs": (
        torch.zeros(1, 2, 24, 24), {"config": hopper_config(2, 64, 2, 2, 232, num_ctas=2)}, ValueError,
        r"^config: expected one CTA with a bias, got 2",
    ),
    "two CTAs of Blackwell": (
        torch.zeros(1, 2, 24, 24), {"device": BLACKWELL, "num_ctas": 2}, ValueError,
        r"^num_ctas: expected 1 or None with a bias, got 2",
    ),
    "maxima of scores without it": (
        torch.zeros(1, 2, 24, 24),
        {"device": Device.blackwell_ultra(), "config": blackwell_config(2, 192, max_in_load=True)}, ValueError,
        r"^config: expected max_in_load=False with a bias",
    ),
    "no room on Blackwell": (
        torch.zeros(1, 2, 24, 24), {"device": BLACKWELL, "config": blackwell_config(6, 192)}, ValueError,
        r"^config: expected a config that fits the 232448 bytes .*got one that needs 295936",
    ),
    "a tiny scale": (torch.zeros(1, 2, 24, 24), {"scale": 1e-35}, ValueError, r"^scale: expected at least 1e-30 with"),
    "three roles": (
        torch.zeros(1, 2, 24, 24), {"config": hopper_config(3, 64, 1, 2, 160)}, ValueError,
        r"^config: expected at most 2 softmax_roles with a bias of each row, got 3",
    ),
    "no room": (
        torch.zeros(1, 2, 24, 24), {"config": hopper_config(2, 128, 2, 3, 232)}, ValueError,
        r"^config: expected a config that fits the 232448 bytes .*got one that needs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    bias, options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        attention(Q, Q, Q, bias=bias, **({"device": HOPPER} | options))


def test_rows_that_need_padding_are_refused_with_how_to_pad_them():
    q, k, v = Q, Q[:, :, [0] * 27], Q[:, :, [0] * 27]
    bias = torch.zeros(1, 2, 24, 27, dtype=BF16)
    with pytest.raises(ValueError, match=r"^bias: expected strides that are multiples of 8 .*functional") as caught:
        attention(q, k, v, bias=bias, device=HOPPER)
    advice = str(caught.value).partition("pad its rows, ")[2].partition(":")[0] + ":27]"
    attention(q, k, v, bias=eval(advice, {"torch": torch, "bias": bias}), device=HOPPER)


def test_refused_in_fp8_and_of_packed_sequences():
    q8 = Q.to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match=r"^bias: not supported with q of torch.float8_e4m3fn"):
        attention(q8, q8, q8, bias=torch.zeros(1, 2, 24, 24), device=HOPPER)
    starts = torch.tensor([0, 24], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"^bias: not supported together with cu_seqlens_q"):
        attention_varlen(Q[0], Q[0], Q[0], starts, starts, 24, 24, bias=Q, device=HOPPER)
