"""Which tests can run on this machine, and a limit for each of them."""

import atexit
import faulthandler
import functools
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.gluon_cpu.arguments import shard

GPU_TESTS = Path(__file__).parent / "gpu"
HOPPER = (9, 0)


@functools.cache
def why_no_hopper() -> str | None:
    """What was found in place of a Hopper card, or None if there is one."""
    import torch  # takes seconds: only when a test asks for the card

    if not torch.cuda.is_available():
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        return f"torch {torch.__version__} ({build} in this build) finds no CUDA device"
    found = torch.cuda.get_device_capability()
    if found != HOPPER:
        return f"found {torch.cuda.get_device_name()} with capability {found[0]}.{found[1]}"
    return None


def pytest_configure(config: pytest.Config) -> None:
    # Triton 3.9's bindings leak a few objects when they compile a reduction, and say so on exit in thirty lines. Exit
    # handlers run last in, first out: what else is written at exit comes before.
    atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2))
    # A GPU host may have pytest alone, and a hung kernel must not hang the run there either.
    if not config.pluginmanager.hasplugin("timeout"):
        config.pluginmanager.register(FallbackTimeout(float(config.getini("timeout"))))


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption("--part", type=shard, default=(1, 1), help="I/N: of all slow cases every Nth, from the Ith on")
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds a test may take")
        parser.addini("timeout_method", "for pytest-timeout; without it a late test always ends the run")


class FallbackTimeout:
    """Stands in for pytest-timeout: prints all stacks and ends the run when a test is late."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.stderr = os.dup(sys.__stderr__.fileno()) if sys.__stderr__ else 2  # pytest captures the original

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        marker = item.get_closest_marker("timeout")
        seconds = float(marker.args[0] if marker else self.seconds)
        faulthandler.dump_traceback_later(seconds, exit=True, file=self.stderr)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(GPU_TESTS):
            item.add_marker(pytest.mark.gpu)
    leave_further_cases(items)
    others = slow_cases_of_other_parts(items, *config.option.part)
    if others:
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=others)
    # Files whose tests may take longest first: one that begins last would leave all processes but its own idle.
    limits: dict[Path, float] = {}
    for item in items:
        marker = item.get_closest_marker("timeout")
        limits[item.path] = max(limits.get(item.path, 0.0), float(marker.args[0]) if marker else 0.0)
    items.sort(key=lambda item: -limits[item.path])
    # What measures time fails on a busy machine: only when it is asked for.
    if "speed" not in config.option.markexpr:
        speed = [item for item in items if item.get_closest_marker("speed")]
        if speed:
            items[:] = [item for item in items if not item.get_closest_marker("speed")]
            config.hook.pytest_deselected(items=speed)


def leave_further_cases(items: Iterable[pytest.Item]) -> None:
    """Mark as slow what `slow_but` does not name, of each function. Cases that it names and that are not there, because
    their names are others now or were not asked for, leave the function's others as they are."""
    cases: dict[tuple[Path, str], list[tuple[pytest.Item, bool]]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and (marker := item.get_closest_marker("slow_but")):
            stays = item.name[len(item.originalname) + 1 : -1] in marker.args
            cases.setdefault((item.path, item.originalname), []).append((item, stays))
    for found in cases.values():
        if any(stays for _, stays in found):
            for item, stays in found:
                if not stays:
                    item.add_marker(pytest.mark.slow)


def slow_cases_of_other_parts(items: Iterable[pytest.Item], part: int, parts: int) -> set[pytest.Item]:
    """What a part leaves to the others. Neighbours go to different parts, so each has cases of a function with many."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    return set(slow) - set(slow[part - 1 :: parts])


@pytest.hookimpl(tryfirst=True)  # before any fixture touches the card
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (found := why_no_hopper()):
        pytest.skip(f"needs a Hopper card (capability 9.0): {found}")


@pytest.fixture
def packaged_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of table files neither those that come with the package nor others, before and after."""
    from gluon_attn import tuning  # imports torch, which takes seconds

    monkeypatch.setattr(tuning, "OF_CARDS", ())
    tuning.reset()
    yield
    tuning.reset()
