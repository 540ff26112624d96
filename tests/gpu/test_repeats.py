"""Repeated launches give equal bits; each test in a process of its own, so that a hang stays in it."""

import itertools
from collections.abc import Callable

import pytest
import torch

from gluon_attn.apart import Apart
from gluon_attn.testing import normal_qkv, repeat
from tests.gpu.checks import outcomes_of, settle

pytestmark = pytest.mark.timeout(1800)

REPEATS: dict[str, Callable[[], None]] = {}


def repeat_test(num_ctas: int, head_dim: int) -> Callable[[], None]:
    def run() -> None:
        # Of one, two and three row blocks to a program, or thereabouts, with heads that end in a tail.
        for batch, q_len, causal, dtype in (
            (1, 700, True, torch.bfloat16),
            (3, 1111, False, torch.bfloat16),
            (3, 1111, True, torch.float16),
        ):
            tensors = normal_qkv(batch=batch, heads=16, kv_heads=4, q_len=q_len, head_dim=head_dim, dtype=dtype)
            repeat(200, *tensors, causal=causal, num_ctas=num_ctas)
        # Bugs of the second lap around a ring show here that small checks miss.
        for batch in (1, 8):
            repeat(
                2000, *normal_qkv(batch=batch, heads=16, q_len=512, head_dim=head_dim), causal=True, num_ctas=num_ctas
            )

    return run


for ctas, d in itertools.product((1, 2), (64, 128, 256)):
    REPEATS[f"repeated launches, D={d}, {ctas} CTA{'s' * (ctas - 1)}"] = repeat_test(ctas, d)


def run_test(name: str) -> None:
    REPEATS[name]()


APART = Apart(function="tests.gpu.test_repeats:run_test")


@pytest.fixture(scope="module")
def outcome(request):
    yield from outcomes_of(APART, request)


@pytest.mark.parametrize("name", REPEATS)
def test_repeated_launches(name, outcome):
    settle(outcome(name))
