"""The checks of the tests on the card can fail: each planted fault is found."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

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

    def attention(q, k, v, *, out, causal, num_ctas, return_lse):
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


@pytest.mark.parametrize("launches", [0, -8, 7, 12])
def test_launches_that_would_not_all_be_made_are_refused(launches):
    with pytest.raises(ValueError, match=f"launches: expected a positive multiple of 8, got {launches}"):
        repeat(launches, *problem(), causal=True)


@pytest.mark.parametrize("allowed", [True, False])
def test_a_check_leaves_the_setting_of_products_as_it_was(allowed):
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, allowed
    try:
        q, k, v = problem()
        check(q, k, v, *good_result(q, k, v), causal=True)
        assert matmul.allow_tf32 is allowed
        with testing.exact_products():
            assert not matmul.allow_tf32
        assert matmul.allow_tf32 is allowed
    finally:
        matmul.allow_tf32 = before


def test_normal_numbers_are_the_same_for_a_seed_and_no_others():
    kind: dict[str, Any] = {"q_len": 3, "kv_len": 5, "head_dim": 8, "head_dim_v": 16, "device": "cpu"}
    q, k, v = normal_qkv(**kind)
    assert (q.shape, k.shape, v.shape) == ((1, 2, 3, 8), (1, 2, 5, 8), (1, 2, 5, 16))
    assert all(map(torch.equal, (q, k, v), normal_qkv(**kind)))
    assert not torch.equal(k, normal_qkv(**kind, seed=1)[1])
    assert not torch.equal(k, v[..., :8])


ONE_KEY: dict[str, Any] = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 64, "kv_len": 1, "head_dim": 64}


def of_one_key(v_columns, dlse_size) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor | None]:
    """(q, k, v, dO) in fp16, and dLSE or None: P is 1 and dP is delta, so dS is dLSE, and without that 0."""
    q, k, v = normal_qkv(**ONE_KEY, head_dim_v=v_columns, dtype=torch.float16, device="cpu")
    dout = testing.normal(1, 1, 64, v_columns, dtype=torch.float16, device="cpu", seed=7)
    dlse = testing.normal(1, 1, 64, dtype=torch.float32, device="cpu", seed=8)
    return (q, k, v, dout), None if dlse_size is None else dlse_size * dlse


def same(x):
    return x


def gradients_by_formula(tensors, dlse, dtype, delta_of=same, dlse_of=same):
    """dQ, dK and dV for one key; dS is dP less what delta_of makes of delta, plus what dlse_of makes of dLSE."""
    q, k, v, dout = (t.to(dtype) for t in tensors)
    dp = dout @ v.mT
    ds = dp - delta_of((dout * v).sum(-1, keepdim=True))
    if dlse is not None:
        ds = ds + dlse_of(dlse[..., None].to(dtype))
    scale = q.shape[-1] ** -0.5
    grads = scale * ds @ k, scale * ds.mT @ q, dout.sum(-2, keepdim=True)
    return [g.half() for g in grads]


# What is made of delta, and of dLSE.
WRONG_DELTAS = {
    "no delta": (torch.zeros_like, same),
    "delta of the row before": (lambda delta: delta.roll(1, dims=2), same),
    "delta twice": (lambda delta: 2 * delta, same),
    "delta off by a thousandth": (lambda delta: 1.001 * delta, same),
}
WRONG_DLSES = {
    "no dLSE": (same, torch.zeros_like),
    "dLSE subtracted": (same, torch.neg),
    "dLSE of the row before": (same, lambda dlse: dlse.roll(1, dims=2)),
    "dLSE in base 2": (same, lambda dlse: dlse * 1.4427),
}
WRONG = WRONG_DELTAS | WRONG_DLSES
# With a dLSE of 100 a thousandth of delta is within a unit in the last place of the gradient.
FAULTS_OF_DELTA = [
    *itertools.product(WRONG_DELTAS, (None, 1.0)),
    *itertools.product([name for name in WRONG_DELTAS if "thousandth" not in name], [100.0]),
    *itertools.product(WRONG_DLSES, (1.0, 100.0)),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("dlse_size", [None, 1.0, 100.0])
@pytest.mark.parametrize("v_columns", [64, 256])
def test_of_a_single_key_right_gradients_pass(v_columns, dlse_size, dtype):
    tensors, dlse = of_one_key(v_columns, dlse_size)
    grads = gradients_by_formula(tensors, dlse, dtype)
    testing.check_gradients(*tensors, grads, dlse=dlse)


@pytest.mark.parametrize(("wrong", "dlse_size"), FAULTS_OF_DELTA)
@pytest.mark.parametrize("name", ["dQ", "dK"])
def test_of_a_single_key_a_wrong_delta_is_found(name, wrong, dlse_size):
    """In either of the gradients that it makes wrong."""
    tensors, dlse = of_one_key(64, dlse_size)
    i = ("dQ", "dK").index(name)
    grads = gradients_by_formula(tensors, dlse, torch.float64)
    grads[i] = gradients_by_formula(tensors, dlse, torch.float64, *WRONG[wrong])[i]
    with pytest.raises(AssertionError, match=f"{name} is off"):
        testing.check_gradients(*tensors, grads, dlse=dlse)


def test_where_gradients_cancel_what_is_allowed_follows_dlse():
    """Two queries, q and -q, and two keys, k and -k, with q k = 0: each P is a half, and dQ and dK are 0."""
    q, k = (torch.zeros(1, 1, 2, 64, dtype=torch.float16) for _ in range(2))
    q[0, 0, :, 0] = k[0, 0, :, 1] = torch.tensor([1.0, -1.0])
    dout, dlse = torch.zeros_like(q), torch.full((1, 1, 2), 100.0)
    errors = testing.gradient_errors(q, k, k, dout, [[torch.zeros_like(q)] * 3], dlse=dlse)
    allowed = 2**-20 * 100 * 64**-0.5
    assert [e.budget for e in errors] == pytest.approx([allowed] * 3, rel=0.01)


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
