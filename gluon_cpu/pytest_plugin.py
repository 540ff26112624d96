"""A fixture that runs a test's kernels on the CPU machine, and a marker for how many schedules.

In conftest.py: `pytest_plugins = ["gluon_cpu.pytest_plugin"]`. Then

    @pytest.mark.gluon_schedules(20)
    def test_my_kernel(gluon_machine):
        my_kernel[(4,)](x, out, BLOCK=128)
"""

from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from gluon_cpu import NothingChecked, Schedule, machine
from gluon_cpu.context import plan
from gluon_cpu.ops.mbarrier import plural
from gluon_cpu.verdicts import SEEN, Seen
from gluon_cpu.wanted import Wanted

DEFAULT_SCHEDULES = 10
ACCEPTED = "gluon_cpu_accepted"  # a property of a test's report, which reaches the summary from other processes too


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
    try:
        runs = plan(count, options.pop("policies", None), options.pop("seed", 0), **options)
    except (TypeError, ValueError) as error:  # fails this test alone: raised here, it would stop all of the file
        metafunc.parametrize("gluon_machine", [error], indirect=True, ids=["wrong marker"])
        return
    names = [f"{run['schedule'].policy}-{run['schedule'].seed}" + f"-{run.get('mode', '')}".rstrip("-") for run in runs]
    metafunc.parametrize("gluon_machine", runs, indirect=True, ids=names)


@pytest.fixture
def gluon_machine(request: pytest.FixtureRequest) -> Iterator[Schedule]:
    """Ordinary launches of Gluon kernels run on the CPU machine, under this test's schedule (the fixture's value).

    A test that ends without a launch is an error, as nothing was checked.
    """
    if isinstance(request.param, Exception):
        pytest.fail(f"gluon_schedules: {request.param}", pytrace=False)
    seen = Seen()
    given = request.param.get("outputs")
    outputs = None if given is None else Wanted(given, shared=True)
    token = SEEN.set(seen)
    try:
        with machine(**request.param | ({} if outputs is None else {"outputs": outputs})):
            yield request.param["schedule"]
    finally:
        SEEN.reset(token)
    for entry in request.param.get("accept", ()):
        count = seen.accepted[entry]
        if count or not skipped_or_failed(request):
            request.node.user_properties.append((ACCEPTED, [str(entry), count]))
    known = shown_by(request.node.stash.get(RAISED, None))
    request.node.stash[RAISED] = None  # its traceback holds the test's tensors
    caught = [finding for finding in seen.raised if id(finding) not in known]
    if caught:
        note = "the test caught it and went on; to pass over a known finding, give the marker accept=[...]"
        for finding in caught:
            finding.add_note(note)
    seen.raised = caught
    if seen.collect():
        raise ExceptionGroup(plural(len(seen.findings), "finding"), seen.findings)
    if not seen.launches and not skipped_or_failed(request):
        raise NothingChecked(f"{request.node.name} launched no kernel on the machine: there was nothing to check")
    if outputs is not None and not skipped_or_failed(request):
        outputs.refuse_unmet()


def shown_by(error: BaseException | None) -> set[int]:
    """The ids of the exceptions in the report of a failed test: its own, those it holds and those that led to it."""
    ids: set[int] = set()
    todo = [error]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in ids:
            ids.add(id(one))
            context = None if one.__suppress_context__ else one.__context__
            todo += [one.__cause__, context, *getattr(one, "exceptions", ())]
    return ids


def skipped_or_failed(request: pytest.FixtureRequest) -> bool:
    return request.node.stash.get(CALLED, None) is not True


CALLED = pytest.StashKey[bool]()
RAISED = pytest.StashKey[BaseException | None]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    try:
        result = yield
    except BaseException as error:
        if "gluon_machine" in getattr(item, "fixturenames", ()):
            item.stash[RAISED] = error
        raise
    item.stash[CALLED] = True
    return result


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was accepted, by test and over all its schedules, and what was to be accepted but never met."""
    counts: Counter[tuple[str, str]] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "teardown":
                for name, value in report.user_properties:
                    if name == ACCEPTED:
                        counts[report.nodeid.partition("[")[0], value[0]] += value[1]
    if counts:
        terminalreporter.section("gluon_cpu: accepted findings")
    for (test, entry), count in counts.items():
        met = "accepted, but not found" if not count else "accepted" if count == 1 else f"accepted {count} times"
        terminalreporter.write_line(f"{test}: {met}: {entry}")
