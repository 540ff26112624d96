"""A fixture that runs a test's kernels on the CPU machine, and a marker for how many schedules.

In conftest.py: `pytest_plugins = ["gluon_cpu.pytest_plugin"]`. Then

    @pytest.mark.gluon_schedules(20)
    def test_my_kernel(gluon_machine):
        my_kernel[(4,)](x, out, BLOCK=128)
"""

from collections.abc import Iterator
from typing import Any

import pytest

from gluon_cpu import Schedule, machine
from gluon_cpu.context import plan

DEFAULT_SCHEDULES = 10


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "gluon_schedules(n, policies=..., seed=0, **options): run the test under n schedules of gluon_cpu; options go "
        "to the machine, for example target='sm_100a'",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "gluon_machine" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("gluon_schedules")
    options: dict[str, Any] = dict(marker.kwargs) if marker else {}
    count = int(marker.args[0]) if marker and marker.args else int(options.pop("n", DEFAULT_SCHEDULES))
    runs = plan(count, options.pop("policies", None), options.pop("seed", 0), **options)
    names = [f"{run['schedule'].policy}-{run['schedule'].seed}" + f"-{run.get('mode', '')}".rstrip("-") for run in runs]
    metafunc.parametrize("gluon_machine", runs, indirect=True, ids=names)


@pytest.fixture
def gluon_machine(request: pytest.FixtureRequest) -> Iterator[Schedule]:
    """Ordinary launches of Gluon kernels run on the CPU machine, under this test's schedule (the fixture's value)."""
    with machine(**request.param):
        yield request.param["schedule"]
