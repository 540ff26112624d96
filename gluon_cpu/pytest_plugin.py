"""A fixture that runs a test's kernels on the CPU machine, and a marker for how many schedules.

In conftest.py: `pytest_plugins = ["gluon_cpu.pytest_plugin"]`. Then

    @pytest.mark.gluon_schedules(20)
    def test_my_kernel(gluon_machine):
        my_kernel[(4,)](x, out, BLOCK=128)
"""

from collections.abc import Generator, Iterator
from typing import Any

import pytest

from gluon_cpu import NothingChecked, Schedule, machine
from gluon_cpu.context import plan
from gluon_cpu.ops.mbarrier import plural
from gluon_cpu.verdicts import SEEN, Seen

DEFAULT_SCHEDULES = 10


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "gluon_schedules(n, policies=..., seed=0, **options): run the test under n schedules of gluon_cpu; options go "
        "to the machine, for example target='sm_100a', skip=['UninitialisedRead']",
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
    """Ordinary launches of Gluon kernels run on the CPU machine, under this test's schedule (the fixture's value).

    A test that ends without a launch is an error, as nothing was checked.
    """
    seen = Seen()
    token = SEEN.set(seen)
    try:
        with machine(**request.param):
            yield request.param["schedule"]
    finally:
        SEEN.reset(token)
    if seen.findings:
        raise ExceptionGroup(plural(len(seen.findings), "finding"), seen.findings)
    if not seen.launches and not skipped_or_failed(request):
        raise NothingChecked(f"{request.node.name} launched no kernel on the machine: there was nothing to check")


def skipped_or_failed(request: pytest.FixtureRequest) -> bool:
    return request.node.stash.get(CALLED, None) is not True


CALLED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    item.stash[CALLED] = True
    return result
