"""Items in processes of their own, as the tests of a module: see gluon_attn/apart.py."""

import concurrent.futures
from collections.abc import Callable, Iterator

import pytest

from gluon_attn.apart import Apart, Outcome


class Registry(dict[str, Callable[[], None]]):
    """Tests by their names: as a decorator it adds one."""

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        self[function.__name__] = function
        return function


def settle(outcome: Outcome) -> None:
    """Let the running test end like this."""
    if outcome.verdict == "skipped":
        pytest.skip(outcome.text)
    if outcome.verdict != "passed":
        pytest.fail(outcome.text, pytrace=False)


def outcomes_of(apart: Apart, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Outcome]]:
    """Body of a module's fixture: starts all selected items (parameter `name` of its tests), waits for one."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    items = [item for item in items if item.module is request.module and hasattr(item, "callspec")]
    names = dict.fromkeys(str(item.callspec.params["name"]) for item in items if "name" in item.callspec.params)
    with concurrent.futures.ThreadPoolExecutor(apart.processes) as pool:
        futures = apart.start(names, pool)
        yield lambda name: futures[name].result()[name]
