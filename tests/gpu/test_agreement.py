"""gluon_cpu and Triton's concurrency sanitizer on the card say the same of the same kernels, or the reason is known."""

import pytest

pytest.importorskip("gluon_cpu", exc_type=ImportError)  # it says which Triton it needs

from tests.gpu.agreement import CARD, ROWS, compare, lines_of, stored
from tests.gpu.checks import outcomes_of

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def outcome(request):
    yield from outcomes_of(CARD, request)


@pytest.mark.parametrize("name", ROWS)
def test_same_verdict(name, outcome):
    comparison = compare(name, outcome(name), stored()[name])
    assert comparison.ok, "\n".join(lines_of([comparison]))
