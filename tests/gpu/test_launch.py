"""Around the kernel: what is returned, streams, graphs, devices, caches, memory; in a process of their own."""

import pytest

from gluon_attn.apart import Apart
from tests.gpu.checks import outcomes_of, settle
from tests.gpu.launches.memory import MEMORY
from tests.gpu.launches.outputs import OUTPUTS
from tests.gpu.launches.streams import STREAMS

pytestmark = pytest.mark.timeout(1800)

LAUNCHES = OUTPUTS | STREAMS | MEMORY


def run_test(name: str) -> None:
    LAUNCHES[name]()


# The order of memory tests matters little: one process has them all.
APART = Apart(function="tests.gpu.test_launch:run_test", group=lambda name: "launches")


@pytest.fixture(scope="module")
def outcome(request):
    yield from outcomes_of(APART, request)


@pytest.mark.parametrize("name", LAUNCHES)
def test_launch(name, outcome):
    settle(outcome(name))
