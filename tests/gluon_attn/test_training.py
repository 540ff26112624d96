"""The training run of tests/gpu, tiny and on the CPU: with our kernels losses are torch's, and wrong ones are told."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gluon_attn import attention
from gluon_attn.device import Device
from gluon_attn.training import WINDOW, Attend, Model, Shape, disagreement, farthest, table, text, train

TINY = Shape(layers=1, heads=2, kv_heads=1, vocabulary=32, batch=1, length=80)
STEPS = 2 * WINDOW


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return plain(q.float(), k.float(), v.float()).to(q.dtype)


def ours(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return attention(q, k, v, causal=True, device=Device.hopper())


def see_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def without_gradient_of_v(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k, v.detach())


def weight_gradients(attend: Attend) -> Tensor:
    """Of the projection to Q, K and V, which only attention passes on."""
    torch.manual_seed(0)
    model = Model(TINY, attend)
    tokens = text(TINY, 0)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens[:, :-1])
    F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
    (grad,) = (p.grad for name, p in model.named_parameters() if name.endswith("qkv.weight") and p.grad is not None)
    return grad


def test_a_step_with_our_kernels():
    """As near to attention in fp32 as torch's in bf16 is; a missing gradient is far from it."""
    want = weight_gradients(in_float32)
    got, by_torch, wrong = (weight_gradients(a) - want for a in (ours, plain, without_gradient_of_v))
    assert got.norm() < 2 * by_torch.norm()
    assert wrong.norm() > 20 * by_torch.norm()


def test_two_steps_of_training_with_our_kernels():
    got, want = (train(attend, TINY, 2, "cpu") for attend in (ours, in_float32))
    torch.testing.assert_close(got, want, atol=0.01, rtol=0)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """So small products gain nothing by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def peers() -> dict[str, Tensor]:
    return {"bf16": train(plain, TINY, STEPS, "cpu"), "fp32": train(in_float32, TINY, STEPS, "cpu")}


@pytest.mark.parametrize("wrong", [see_all, without_gradient_of_v])
def test_wrong_attention_is_told(wrong, peers):
    losses = train(wrong, TINY, STEPS, "cpu")
    assert str(disagreement({"wrong": losses}, peers)).startswith("wrong: expected losses within")


def test_what_does_not_learn_is_told(peers):
    flat = torch.full((1, STEPS), 3.0)
    assert "expected the loss to fall" in str(disagreement({"flat": flat}, {"a": flat, "b": flat}))
    assert disagreement({"same": peers["bf16"]}, peers, falls_to=0.97) is None
    assert disagreement({"none": flat * float("nan")}, peers) is not None


def test_one_run_in_three_may_leave_the_others(peers):
    """But not two."""
    like = peers["bf16"]
    for strays in range(4):
        runs = like.repeat(3, 1)
        runs[:strays, WINDOW:] += 1
        assert (disagreement({"ours": runs}, peers, falls_to=9) is None) == (strays < 2)
        assert farthest(runs) == pytest.approx(1.0 if strays in (1, 2) else 0.0, abs=1e-5)


def test_one_run_without_numbers_is_told(peers):
    runs = peers["bf16"].repeat(3, 1)
    runs[1, -1] = float("nan")
    assert disagreement({"ours": runs}, peers, falls_to=9) is not None


def test_the_table_has_a_column_for_each_window(peers):
    head, *rows = table(peers).splitlines()
    assert head.split()[3:] == ["20", "40", "one", "run"]
    assert [row.split()[0] for row in rows] == ["bf16", "fp32"]


def test_text_is_repeated_and_the_same_each_time():
    assert torch.equal(text(TINY, 3), text(TINY, 3))
    assert not torch.equal(text(TINY, 3), text(TINY, 4))
    first = text(TINY, 0)[0]
    assert torch.equal(first[:8], first[8:16])
