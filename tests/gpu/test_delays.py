"""The gradients with random delays in each role: right, and in a fixed order the same bits; each in its own process."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gluon_attn import attention
from gluon_attn.apart import Apart
from gluon_attn.gradients import attention_backward
from gluon_attn.testing import gradient_errors, normal, normal_qkv
from tests.gpu.checks import outcomes_of, settle
from tests.gpu.delays import DELAYS, delay

pytestmark = pytest.mark.timeout(900)

LAUNCHES = 200
LAUNCHES_IN_ORDER = 10_000  # with delays in the reduce role alone, where the order of sums is kept
KEPT = 20  # of those, to be compared with float64
HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))  # of Q and of V, all that the table has
ROLES = {**{role: (role,) for role in DELAYS}, "all roles": tuple(DELAYS)}


# More key blocks than processors, and an odd number to a head; and fewer, so that programs share them.
MANY: dict[str, Any] = {"batch": 4, "heads": 8, "kv_heads": 4, "q_len": 700, "kv_len": 1400}
SHARED: dict[str, Any] = {"heads": 2, "kv_heads": 1, "q_len": 4000, "kv_len": 200}
# So many that sums depend on their order. Who begins late leaves its part to a program that has another already.
MORE_SHARED: dict[str, Any] = {"heads": 2, "kv_heads": 1, "q_len": 4000, "kv_len": 500}
MORE_PARTS: dict[str, Any] = {"heads": 4, "kv_heads": 4, "q_len": 2048, "kv_len": 2048}  # than programs, if causal
MORE_PARTS_OF_FEW: dict[str, Any] = MORE_PARTS | {"kv_heads": 2}  # at D=256, whose key blocks have 64 keys


def launches(
    head_dims: tuple[int, int], causal: bool, deterministic: bool, count: int, sizes: dict[str, Any] = MANY
) -> None:
    head_dim, head_dim_v = head_dims
    q, k, v = normal_qkv(**sizes, head_dim=head_dim, head_dim_v=head_dim_v)
    dout = normal(*q.shape[:3], head_dim_v, seed=7)
    out, lse = attention(q, k, v, causal=causal, return_lse=True)
    what = f"D={head_dims} {sizes} {causal=} {deterministic=}"
    kept: list[tuple[Tensor, ...]] = []
    different = torch.zeros(3, dtype=torch.int64, device="cuda")
    for i in range(count):
        grads = attention_backward(dout, None, q, k, v, out, lse, causal=causal, deterministic=deterministic)
        if i < KEPT:
            kept.append(grads)
        different += torch.stack([(a != b).any() for a, b in zip(kept[0], grads, strict=True)])
    for error in gradient_errors(q, k, v, dout, kept, causal=causal):
        assert error.error <= error.budget, f"{what}: {error}"
    dq, dk, dv = different.tolist()
    assert (dk, dv) == (0, 0), f"{what}: dK and dV differ in {dk} and {dv} of {count} launches"
    if deterministic:
        assert dq == 0, f"{what}: dQ differs in {dq} of {count} launches"
    else:
        assert dq > 0, f"{what}: dQ has the same bits {count} times: programs were not shuffled"


def run(name: str) -> None:
    delay(*ROLES[name])
    in_order = LAUNCHES_IN_ORDER if name == "reduce" else LAUNCHES
    for head_dims in HEAD_DIMS:
        launches(head_dims, True, False, LAUNCHES)
        launches(head_dims, False, False, LAUNCHES, MORE_SHARED)
        launches(head_dims, True, False, LAUNCHES, MORE_PARTS_OF_FEW if head_dims[0] == 256 else MORE_PARTS)
        launches(head_dims, True, True, in_order)
        launches(head_dims, False, True, in_order, SHARED)
    launches((128, 128), False, True, in_order)


APART = Apart(function="tests.gpu.test_delays:run", item_seconds=300, processes=len(ROLES))


@pytest.fixture(scope="module")
def outcome(request):
    yield from outcomes_of(APART, request)


@pytest.mark.parametrize("name", ROLES)
def test_right_with_delays(name, outcome):
    settle(outcome(name))
