"""Windows, chunks, changed scores and sinks on the card, forward and backward, against float64."""

import pytest

from gluon_attn.apart import Apart
from tests.gluon_attn.backward.test_features import CASES, check
from tests.gpu.checks import outcomes_of, settle

pytestmark = pytest.mark.timeout(1800)


def run(name: str) -> None:
    """At the lengths of the test without a card, and at some that have many blocks."""
    options, lengths, head_dim = CASES[name]
    for deterministic in (False, True):
        check(options, lengths, head_dim, deterministic, where="cuda")
        check(options, (1500, 1500 + lengths[1] - lengths[0]), head_dim, deterministic, where="cuda")


APART = Apart(function="tests.gpu.test_features:run", processes=16)


@pytest.fixture(scope="module")
def outcome(request):
    yield from outcomes_of(APART, request)


@pytest.mark.parametrize("name", CASES)
def test_features(name, outcome):
    settle(outcome(name))
