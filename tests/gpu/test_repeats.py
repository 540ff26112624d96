"""Repeated launches give equal bits; each test in a process of its own, so that a hang stays in it."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gluon_attn import attention
from gluon_attn.testing import check, normal_qkv
from tests.gpu.checks import Apart, outcomes_of

pytestmark = pytest.mark.timeout(1800)

REPEATS: dict[str, Callable[[], None]] = {}


def repeat(launches: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """Each result equals the first, bit by bit; enqueued back to back, 8 at a time, with one wait at the end."""
    out, lse = attention(q, k, v, **options, return_lse=True)
    check(q, k, v, out, lse, causal=options.get("causal", False))
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    outs = [torch.empty_like(out) for _ in range(8)]
    for _ in range(launches // len(outs)):
        for given in outs:
            given.fill_(float("nan"))
        lses = [attention(q, k, v, **options, return_lse=True, out=given)[1] for given in outs]
        for given, lse_again in zip(outs, lses, strict=True):
            same = (given == out).all() & (lse_again == lse).all()
            different += ~same
    wrong = int(different)
    assert wrong == 0, f"{wrong} of {launches} launches differ from the first: {options}"


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
    outcome(name).settle()
