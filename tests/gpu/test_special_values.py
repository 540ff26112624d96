"""NaN and infinity in Q, K, V and the scales come out on the card as of plain PyTorch."""

import itertools
from typing import Any

import pytest
import torch

from gluon_attn import ForwardConfig, attention
from gluon_attn.apart import Apart
from gluon_attn.forward.table import hopper_config
from tests.gluon_attn.special_values import check_special, special_tensors
from tests.gpu.checks import outcomes_of, settle

pytestmark = pytest.mark.timeout(1800)

DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
AS_INTEGERS: dict[str, tuple[bool, ForwardConfig]] = {
    "three roles": (False, hopper_config(3, 128, 2, 2, 160, turns=True, early_exp=1, integer_max=True)),
    "four roles, causal": (True, hopper_config(4, 64, 2, 4, 112, integer_max=True)),
}
# Name: dtype, head dim and further arguments of attention().
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    f"{dtype}, D={d}, {'causal' if causal else 'full'}, {num_ctas} CTAs": (
        dtype,
        d,
        {"causal": causal, "num_ctas": num_ctas},
    )
    for dtype, d, causal, num_ctas in itertools.product(DTYPES, (64, 128, 256), (False, True), (1, 2))
} | {
    f"{dtype}, D=64, maxima as integers, {name}": (dtype, 64, {"causal": causal, "config": config})
    for dtype, (name, (causal, config)) in itertools.product(DTYPES[:2], AS_INTEGERS.items())
}


def run_case(name: str) -> None:
    dtype, head_dim, options = CASES[name]
    given = special_tensors(getattr(torch, dtype), head_dim, refused_on_cpu=True)
    q, k, v = (t.cuda() for t in (given.q, given.k, given.v))
    scales: dict[str, Any] = {of: scale.cuda() for of, scale in given.scales.items()}
    out, lse = attention(q, k, v, return_lse=True, **options, **scales)
    check_special(given, out, lse, causal=options["causal"])


APART = Apart(function="tests.gpu.test_special_values:run_case", group=lambda name: CASES[name][:2])


@pytest.fixture(scope="module")
def outcome(request):
    yield from outcomes_of(APART, request)


@pytest.mark.parametrize("name", CASES)
def test_as_in_plain_pytorch(name, outcome):
    settle(outcome(name))
