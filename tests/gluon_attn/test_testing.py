"""The checks of the tests on the card can fail: each planted fault is found."""

from typing import Any

import pytest
import torch

from gluon_attn import reference_attention, testing
from gluon_attn.testing import Surrounded, check, last_place, normal_qkv, repeat

NEG_INF = float("-inf")


def problem():
    """Causal, with more queries than keys, so that the first 8 of 40 rows see no key."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 40, 64), (1, 2, 32, 64), (1, 2, 32, 64))
    return [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]


def good_result(q, k, v):
    out, lse = reference_attention(q.double(), k.double(), v.double(), causal=True)
    return out.to(q.dtype), lse.float()


def test_a_good_result_passes():
    q, k, v = problem()
    check(q, k, v, *good_result(q, k, v), causal=True)


def a_key_too_many(q, k, v, out, lse):
    wrong, wrong_lse = good_result(q, torch.cat((k, k[:, :, :1]), 2), torch.cat((v, v[:, :, :1]), 2))
    return wrong[:, :, :40], wrong_lse


def one_row_of_another(q, k, v, out, lse):
    out[0, 0, 39] = out[0, 1, 39]
    return out, lse


def nan_at_one_place(q, k, v, out, lse):
    out[0, 3, 39, 63] = float("nan")
    return out, lse


def something_in_a_masked_row(q, k, v, out, lse):
    out[0, 0, 3, 0] = 1e-6
    return out, lse


FAULTS = {
    "a key too many": (a_key_too_many, "O is off"),
    "one row of another head": (one_row_of_another, "O is off"),
    "NaN at one place": (nan_at_one_place, "not finite"),
    "O not 0 in a row that sees no key": (something_in_a_masked_row, "O is not 0"),
    "O in fp32": (lambda q, k, v, out, lse: (out.float(), lse), "O is"),
    "O too short": (lambda q, k, v, out, lse: (out[:, :, 1:], lse), "O is"),
    "LSE in base 2": (lambda q, k, v, out, lse: (out, lse * 1.4427), "LSE is off"),
    "LSE off by 0.001": (lambda q, k, v, out, lse: (out, lse + 1e-3), "LSE is off"),
    "LSE of a masked row is inf": (lambda q, k, v, out, lse: (out, lse.abs()), "LSE is -inf in other rows"),
    "LSE in bf16": (lambda q, k, v, out, lse: (out, lse.bfloat16()), "LSE"),
    "LSE (B, Sq, H)": (lambda q, k, v, out, lse: (out, lse.transpose(1, 2)), "LSE"),
    "LSE NaN": (lambda q, k, v, out, lse: (out, lse.masked_fill(lse > 3, float("nan"))), "LSE.* not finite"),
}


@pytest.mark.parametrize(("fault", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_found(fault, message):
    q, k, v = problem()
    with pytest.raises(AssertionError, match=message):
        check(q, k, v, *fault(q, k, v, *good_result(q, k, v)), causal=True)


@pytest.mark.parametrize(
    ("dtype", "at", "unit"),
    [
        (torch.bfloat16, 1.0, 2**-7),
        (torch.bfloat16, 1.9, 2**-7),
        (torch.bfloat16, 0.9, 2**-8),
        (torch.float16, 4, 2**-8),
    ],
)
def test_last_place(dtype, at, unit):
    assert last_place(dtype, at) == unit


@pytest.mark.parametrize("where", [(0, 1, 1, 8), (2, 1, 1, 8), (1, 0, 1, 8), (1, 4, 2, 8), (1, 1, 6, 9), (1, 1, 1, 7)])
def test_a_write_outside_is_found(where):
    around = Surrounded((1, 3, 5, 16), torch.bfloat16, "cpu")
    assert around.view.shape == (1, 3, 5, 16)
    assert around.view.data_ptr() % 16 == 0
    around.view.zero_()
    around.check_outside_untouched()
    around.buffer[where] = 0.0
    with pytest.raises(AssertionError, match="1 elements outside"):
        around.check_outside_untouched()


@pytest.mark.parametrize("wrong_at", [None, 1, 5])
def test_a_launch_unlike_the_first_is_found(monkeypatch, wrong_at):
    """Launches from 0, of which the first is the one that is checked; 8 more are asked for."""
    launches = 0

    def attention(q, k, v, *, out=None, causal, return_lse):
        nonlocal launches
        result, lse = good_result(q, k, v)
        if launches == wrong_at:
            lse[0, 0, 39] += 2**-10
        launches += 1
        return (result if out is None else out.copy_(result)), lse

    monkeypatch.setattr(testing, "attention", attention)
    if wrong_at is None:
        repeat(8, *problem(), causal=True)
    else:
        with pytest.raises(AssertionError, match="1 of 8 launches differ"):
            repeat(8, *problem(), causal=True)
    assert launches == 9


def test_normal_numbers_are_the_same_for_a_seed_and_no_others():
    kind: dict[str, Any] = {"q_len": 3, "kv_len": 5, "head_dim": 8, "head_dim_v": 16, "device": "cpu"}
    q, k, v = normal_qkv(**kind)
    assert (q.shape, k.shape, v.shape) == ((1, 2, 3, 8), (1, 2, 5, 8), (1, 2, 5, 16))
    assert all(map(torch.equal, (q, k, v), normal_qkv(**kind)))
    assert not torch.equal(k, normal_qkv(**kind, seed=1)[1])
    assert not torch.equal(k, v[..., :8])


@pytest.mark.parametrize("name", ["dQ", "dK"])
@pytest.mark.parametrize(("error", "is_right"), [(7e-6, True), (1e-3, False)])
def test_of_a_single_key_dp_and_delta_may_be_rounded_unlike(name, error, is_right):
    q, k, v = normal_qkv(
        batch=1, heads=1, kv_heads=1, q_len=64, kv_len=1, head_dim=64, head_dim_v=256, dtype=torch.float16, device="cpu"
    )
    dout = testing.normal(1, 1, 64, 256, dtype=torch.float16, device="cpu")
    inputs = [t.double().requires_grad_() for t in (q, k, v)]
    out, _ = reference_attention(*inputs, causal=True)
    grads = [g.half() for g in torch.autograd.grad(out, inputs, dout.double())]
    grads[("dQ", "dK").index(name)] += error
    if is_right:
        testing.check_gradients(q, k, v, dout, grads, causal=True)
    else:
        with pytest.raises(AssertionError, match=f"{name} is off"):
            testing.check_gradients(q, k, v, dout, grads, causal=True)
