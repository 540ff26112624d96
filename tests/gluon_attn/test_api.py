"""attention() where there is no card: what it refuses, in which order, and what it says."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch.autograd import forward_ad

import gluon_attn.api
from gluon_attn import ForwardConfig, attention, reference_attention
from gluon_attn.device import Device
from gluon_attn.forward.table import blackwell_config, hopper_config, pick_config
from gluon_attn.problem import Problem
from tests.gluon_attn.problems import qkv

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HOPPER, BLACKWELL, BLACKWELL_ULTRA = Device.hopper(), Device.blackwell(), Device.blackwell_ultra()


def a_config() -> ForwardConfig:
    return pick_config(Problem.of(*qkv()), Device.hopper(), num_ctas=1)


def test_tensors_without_a_card_are_refused():
    with pytest.raises(RuntimeError, match=r"Hopper or Blackwell") as caught:
        attention(*qkv())
    assert type(caught.value) is RuntimeError
    assert "cpu" in str(caught.value)


@pytest.mark.parametrize("num_ctas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_described_card_is_executed_on_the_cpu(num_ctas):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 64, dtype=torch.bfloat16) for _ in range(3))
    out, lse = attention(q, k, v, device=Device.hopper(), num_ctas=num_ctas, return_lse=True)
    want, want_lse = reference_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(out.double(), want, atol=0.01, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=0)


def test_fp8_with_values_transposed_before_is_executed_on_the_cpu():
    """As attention() launches it: two kernels."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 144).to(torch.float8_e4m3fn) for _ in range(3))
    out, _ = attention(q, k, v, causal=True, device=Device.hopper(), return_lse=True)
    want, _ = reference_attention(q.double(), k.double(), v.double(), causal=True)
    torch.testing.assert_close(out.double(), want, atol=0.1, rtol=0)


@pytest.mark.parametrize(
    ("device", "head_dim"),
    [(Device.hopper(), 64), (Device.hopper(), 256), pytest.param(BLACKWELL, 64, marks=pytest.mark.slow)],
    ids=["Hopper", "Hopper, V transposed before", "Blackwell"],
)
def test_without_lse_and_with_scales_left_out(device, head_dim):
    """Nothing else changes."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, head_dim).to(E4M3) for _ in range(3))
    scales = dict(zip(("q_scale", "k_scale", "v_scale"), (torch.rand(1, 2) + 0.5 for _ in range(3)), strict=True))
    ones = {name: torch.ones(1, 2) for name in scales}
    for left_out in itertools.chain.from_iterable(itertools.combinations(scales, n) for n in range(4)):
        given: dict[str, Any] = {name: scale for name, scale in scales.items() if name not in left_out}
        want, want_lse = attention(q, k, v, device=device, return_lse=True, **(ones | given))
        out = attention(q, k, v, device=device, **given)
        assert isinstance(out, torch.Tensor)
        assert torch.equal(out, want), left_out
        assert torch.equal(attention(q, k, v, device=device, return_lse=True, **given)[1], want_lse), left_out
    q, k, v = (torch.randn(1, 2, 40, 64, dtype=torch.bfloat16) for _ in range(3))
    out, (want, _) = attention(q, k, v, device=device), attention(q, k, v, device=device, return_lse=True)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out, want)


NAMED: dict[str, Any] = dict(zip("qkv", qkv(), strict=True))
# Each is wrong by itself, and would be on any machine: the lack of a card must not hide it.
REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "shapes": (ValueError, r"^k: expected head_dim 64 \(as q\), got 32", {"k": qkv()[1][..., :32]}),
    "dtype": (TypeError, r"^q: expected .*float16, bfloat16, .*got torch.float32", {"q": qkv()[0].float()}),
    "layout": (ValueError, r"^layout: expected .*got 'sbhd'", {"layout": "sbhd"}),
    "scale": (ValueError, r"^scale: expected .*got -1", {"scale": -1.0}),
    "out": (ValueError, r"^out: expected .*got", {"out": qkv()[0][:, :1]}),
    "num_ctas 3": (ValueError, r"^num_ctas: expected one of .1, 2. or None.*got 3", {"num_ctas": 3, "device": HOPPER}),
    "num_ctas 0": (ValueError, r"^num_ctas: expected one of .1, 2. or None.*got 0", {"num_ctas": 0, "device": HOPPER}),
    "num_ctas that the config has not": (
        ValueError,
        r"^num_ctas: expected 1.*got 2",
        {"num_ctas": 2, "config": a_config()},
    ),
    "num_ctas is a bool": (TypeError, r"^num_ctas: expected an int or None, got bool", {"num_ctas": True}),
    "num_ctas is a float": (
        TypeError,
        r"^num_ctas: expected an int or None, got float; .*leave it out",
        {"num_ctas": 2.0},
    ),
    "num_ctas of numpy": (TypeError, r"^num_ctas: expected an int or None, got numpy.int64", {"num_ctas": np.int64(1)}),
    "return_lse is a string": (TypeError, r"^return_lse: expected a bool, got str; give True", {"return_lse": "no"}),
    "return_lse is a number": (TypeError, r"^return_lse: expected a bool, got int", {"return_lse": 1}),
    "sparse": (TypeError, r"^v: expected a dense tensor, got .*sparse_coo; .*to_dense", {"v": qkv()[0].to_sparse()}),
    "negative q_scale": (
        ValueError,
        r"^q_scale: expected no negative number, got -2; negate q and its scale",
        dict(zip("qkv", qkv(dtype=E5M2), strict=True)) | {"q_scale": torch.tensor([[1.0, -2.0]]), "device": HOPPER},
    ),
    "negative k_scale": (
        ValueError,
        r"^k_scale: expected no negative number, got -2; negate k and its scale",
        dict(zip("qkv", qkv(dtype=E5M2), strict=True)) | {"k_scale": torch.tensor([[-2.0, 1.0]]), "device": BLACKWELL},
    ),
    "scales of bfloat16": (TypeError, r"^k_scale: expected None .*got a Tensor", {"k_scale": torch.ones(1, 2)}),
    "scale of another shape": (
        ValueError,
        r"^v_scale: expected shape \(1, 2\).*got \(2, 1\)",
        dict(zip("qkv", qkv(dtype=E5M2), strict=True)) | {"v_scale": torch.ones(2, 1)},
    ),
    "config": (TypeError, r"^config: expected a ForwardConfig.*got tuple", {"config": (128, 128)}),
}


@pytest.mark.parametrize(("error", "message", "change"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(error, message, change):
    arguments = NAMED | change
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        attention(**arguments)
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("before", "then"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"scale": 1.0}, {"scale": True}),
        ({"num_ctas": 1}, {"num_ctas": True}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"chunk": 1}, {"chunk": True}),
        ({"window": (1, 0)}, {"window": (1.0, 0)}),
        ({"window": (1, 0)}, {"window": (1, False)}),
    ],
    ids=str,
)
def test_what_equals_an_option_of_before_is_refused_by_its_type(before, then, no_launch):
    attention(*qkv(), device=HOPPER, **before)
    with pytest.raises(TypeError, match=rf"^{next(iter(then))}: expected"):
        attention(*qkv(), device=HOPPER, **then)


@pytest.mark.parametrize("calls_before", [0, 1])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_forward_mode_is_refused(with_gradients, name, calls_before, no_launch):
    """A tangent would be dropped; without one the call is none of forward mode's."""
    tensors: dict[str, Any] = dict(zip("qkv", qkv(), strict=True))
    with forward_ad.dual_level():
        for _ in range(calls_before):
            attention(**tensors, device=HOPPER)
        tensors[name] = forward_ad.make_dual(tensors[name], torch.ones_like(tensors[name]))
        tensors["k"].requires_grad_(with_gradients)
        with pytest.raises(NotImplementedError, match=rf"^{name}: expected .*without a tangent.*primal"):
            attention(**tensors, device=HOPPER)


def test_what_may_change_is_checked_once_per_call(monkeypatch, no_launch):
    checked = []
    monkeypatch.setattr(gluon_attn.api, "check_call", lambda *tensors: checked.append(tensors))
    for calls in (1, 2):
        attention(*qkv(), device=HOPPER)
        assert len(checked) == calls


@pytest.mark.parametrize("device", [None, HOPPER])
def test_meta_tensors_are_refused_with_what_to_do(device):
    with pytest.raises(
        RuntimeError, match=r"^q: expected .*, got one on 'meta'; .*make q, k and v on the card"
    ) as caught:
        attention(*(t.to("meta") for t in qkv()), device=device)
    assert "Device." not in str(caught.value)


UNSUPPORTED: dict[str, Any] = {
    "attn_mask": torch.zeros(1),
    "dropout_p": 0.1,
    "block_table": torch.zeros(1),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_feature_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=rf"\b{name}\b"):
        attention(**(NAMED | {name: UNSUPPORTED[name]}))


def test_unknown_keyword():
    with pytest.raises(TypeError, match="is_causal"):
        attention(*qkv(), is_causal=True)


def test_options_are_keywords():
    with pytest.raises(TypeError, match="positional"):
        attention(*qkv(), True)  # type: ignore[call-arg]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inputs_that_require_grad_are_fine_without_grad_mode(mode):
    tensors = qkv(requires_grad=True)
    with mode(), pytest.raises(RuntimeError, match="Hopper") as caught:
        attention(*tensors)
    assert type(caught.value) is RuntimeError  # the lack of a card, not of gradients


# On the CPU, so that nothing but the device that is described decides. What is asked for, the error and its message.
NOT_ON_THIS_CARD: dict[str, tuple[Device, dict[str, Any], type[Exception], str]] = {
    "D=136 on Blackwell": (
        BLACKWELL,
        {"head_dim": 136},
        NotImplementedError,
        r"^v: head_dim 136 on a Blackwell card .*at most 128.*tensor memory",
    ),
    "D=256 in fp8 on Blackwell": (
        BLACKWELL_ULTRA,
        {"head_dim": 256, "dtype": E4M3},
        NotImplementedError,
        r"^v: head_dim 256 on a Blackwell card .*at most 128",
    ),
    "four CTAs on Hopper": (
        HOPPER,
        {"num_ctas": 4},
        ValueError,
        r"^num_ctas: expected one of .1, 2. or None for NVIDIA H200, got 4",
    ),
    "a Hopper config on Blackwell": (
        BLACKWELL,
        {"config": a_config()},
        ValueError,
        r"^config: expected a BlackwellConfig for NVIDIA B200, got a HopperConfig",
    ),
    "a Blackwell config on Hopper": (
        HOPPER,
        {"config": blackwell_config(3, 192)},
        ValueError,
        r"^config: expected a HopperConfig for NVIDIA H200, got a BlackwellConfig",
    ),
    "max_in_load on sm_100": (
        BLACKWELL,
        {"config": blackwell_config(3, 192, max_in_load=True)},
        ValueError,
        r"^config: expected max_in_load=False for NVIDIA B200, got True",
    ),
    "a rescale threshold with fp8": (
        BLACKWELL,
        {"config": blackwell_config(3, 192, rescale_threshold=8.0), "dtype": E4M3},
        ValueError,
        r"^config: expected rescale_threshold=0 for torch.float8_e4m3fn, .*overflow, got 8.0",
    ),
    "O staged in Q on Hopper in fp8": (
        HOPPER,
        {"config": hopper_config(2, 64, 1, 2, 232, stage_in_queries=True), "dtype": E5M2},
        ValueError,
        r"^config: expected stage_in_queries=False for torch.float8_e5m2, .*larger than .*Q, got True",
    ),
    "maxima as integers on Hopper in fp8": (
        HOPPER,
        {"config": hopper_config(2, 128, 2, 2, 232, integer_max=True), "dtype": E4M3},
        ValueError,
        r"^config: expected integer_max=False for torch.float8_e4m3fn, .*, got True",
    ),
    "a config of fp8 on Hopper in 16 bits": (
        HOPPER,
        {"config": pick_config(Problem.of(*qkv(dtype=E4M3)), HOPPER)},
        ValueError,
        r"^config: expected transpose_registers=0 for torch.bfloat16, got 56",
    ),
    "a role to transpose too small a V on Hopper": (
        HOPPER,
        {
            "config": hopper_config(2, 64, 2, 2, 200, transpose_registers=56),
            "dtype": E4M3,
        },
        ValueError,
        r"^config: expected transpose_registers=0 for blocks of 64 keys at head_dim 64, got 56",
    ),
    "too many slots on Blackwell": (
        BLACKWELL,
        {"config": blackwell_config(13, 192)},
        ValueError,
        r"^config: expected .*232448 bytes of shared memory of NVIDIA B200, got .*lower kv_slots",
    ),
}


@pytest.mark.parametrize(
    ("device", "asked", "error", "message"), NOT_ON_THIS_CARD.values(), ids=NOT_ON_THIS_CARD.keys()
)
def test_not_on_this_card(device, asked, error, message):
    tensors = qkv(**{name: asked[name] for name in ("dtype", "head_dim") if name in asked})
    options = {name: asked[name] for name in ("num_ctas", "config") if name in asked}
    with pytest.raises((NotImplementedError, ValueError), match=message) as caught:
        attention(*tensors, **options, device=device)
    assert type(caught.value) is error
    if not options:  # what there is no kernel for is refused also where there is nothing to compute
        with pytest.raises(error, match=message):
            attention(*(t[:, :, :0] for t in tensors), device=device)


@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
def test_scales_that_require_grad_are_refused(name):
    scale = torch.ones(1, 2, requires_grad=True)
    with pytest.raises(NotImplementedError, match=rf"^{name}: expected a tensor that does not require grad"):
        attention(*qkv(dtype=E4M3), **{name: scale}, device=BLACKWELL)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_fp8_inputs_give_bf16(dtype):
    """Also where there is nothing to compute."""
    q, k, v = (t[:, :, :0] for t in qkv(dtype=dtype))
    out, lse = attention(q, k, v, device=BLACKWELL, return_lse=True)
    assert (out.shape, out.dtype) == (q.shape, torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((1, 2, 0), torch.float32)


def test_attention_checks_the_version(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.7.0")
    q, k, v = (t[:, :, :13] for t in qkv())  # a shape that no other test has asked for
    with pytest.raises(RuntimeError, match=r"^triton: expected"):
        attention(q, k, v)


def test_device_must_be_a_device():
    with pytest.raises(TypeError, match=r"^device: .* Device or None, got str; give Device.hopper.* on the CPU$"):
        attention(*qkv(), device="cpu")  # type: ignore[arg-type]


def test_out_that_requires_grad_is_refused():
    with pytest.raises(NotImplementedError, match=r"^out: expected a tensor that does not require grad"):
        attention(*qkv(), out=qkv(requires_grad=True)[0])


@pytest.mark.parametrize(
    ("name", "hint"),
    [("softmax_scale", "scale"), ("is_causal", "causal"), ("sm_scale", "scale"), ("window_size", "window")],
)
def test_a_known_name_of_elsewhere_gets_a_hint(name, hint):
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{name}'; use {hint}"):
        attention(*qkv(), **{name: 1})  # type: ignore[arg-type]


def test_another_architecture_than_the_cards_is_refused(monkeypatch):
    """Where the tensors are on a card. There is none here: a tensor that says it is on one, and a card for it."""
    real = Device.of
    monkeypatch.setattr(Device, "of", lambda device: HOPPER if device.type == "meta" else real(device))
    q, k, v = (t.to("meta") for t in qkv())
    monkeypatch.setattr("gluon_attn.api.check_call", lambda *_: None)
    with pytest.raises(ValueError, match=r"^device: expected one of compute capability \(9, 0\).*got NVIDIA B200"):
        attention(q, k, v, device=BLACKWELL)
