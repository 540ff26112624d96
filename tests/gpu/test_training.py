"""A training run with our attention learns as one with torch's does; in a process of its own."""

from functools import partial
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gluon_attn import attention
from gluon_attn.apart import Apart
from gluon_attn.training import Shape, disagreement, table, train
from tests.gpu.checks import outcomes_of, settle

pytestmark = pytest.mark.timeout(1800)

STEPS, RUNS = 200, 3
PEERS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "FlashAttention-2": SDPBackend.FLASH_ATTENTION,
    "plain torch": SDPBackend.MATH,
}


def by_torch(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def ours(deterministic: bool, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return attention(q, k, v, causal=True, deterministic=deterministic)


def run(name: str) -> None:
    shape = Shape(head_dim=int(name.removeprefix("D=")))
    peers = {peer: train(partial(by_torch, backend), shape, STEPS, "cuda", RUNS) for peer, backend in PEERS.items()}
    judged = {
        "ours": train(partial(ours, False), shape, STEPS, "cuda", RUNS),
        "ours, fixed order": train(partial(ours, True), shape, STEPS, "cuda", RUNS),
    }
    shown = table(peers | judged)
    print(shown)
    wrong = disagreement(judged, peers)
    assert wrong is None, f"{wrong}\n{shown}"


APART = Apart(function="tests.gpu.test_training:run")


@pytest.fixture(scope="module")
def outcome(request):
    yield from outcomes_of(APART, request)


@pytest.mark.parametrize("name", ["D=64", "D=128"])
def test_training_learns_as_with_torch(name, outcome):
    settle(outcome(name))
