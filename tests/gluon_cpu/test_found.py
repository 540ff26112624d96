"""The kernels of docs/found.md: what is found in each, at which line; mended, each is silent and right."""

import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

import gluon_cpu
from tests.docs.examples import Page, mended, options_of

PAGE = Page("found.md", shared=Page("gluon_cpu.md"))
SEEDS = (0, 1)


@dataclass(frozen=True, kw_only=True)
class Found:
    """kind: exactly. lines: code at the places that the message names. words: what else it contains.

    wrong: under how many schedules the numbers are wrong, told by a run without checks: "all", "some" or "none"; None
    where it cannot be told, as the misuse of a barrier ends also such a run.
    """

    kind: type[gluon_cpu.Finding]
    lines: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    wrong: str | None
    mode: str | None = None  # in which it shows


FOUND = {
    "halves": Found(kind=gluon_cpu.OutputError, words=("256 of the 512 bytes", "out_ptr[64]"), wrong="all"),
    "primed": Found(
        kind=gluon_cpu.BarrierMisuse,
        lines=("mbarrier.arrive(freed, count=COUNT)", "tcgen05_mma(a,"),
        words=("wrong phase",),
        wrong=None,
    ),
    "reused": Found(
        kind=gluon_cpu.BarrierMisuse,
        lines=("wide = ", "loaded = "),
        words=("never invalidated",),
        wrong="none",
        mode="lowered",
    ),
    "swapped": Found(kind=gluon_cpu.OutputError, words=("8192 of the 12288 bytes", "out_desc[0, 32]"), wrong="all"),
    "prefetch": Found(
        kind=gluon_cpu.LifetimeError,
        lines=("tma.async_load(desc", "fetch(desc, tiles, loaded, step + 1, True)"),
        wrong="none",
    ),
    "final_wait": Found(kind=gluon_cpu.LifetimeError, lines=("tma.async_store(desc",), wrong="none"),
    "grid": Found(kind=gluon_cpu.OutputRace, lines=("gl.store(out_ptr + i",), words=("of program",), wrong="none"),
    "overlap": Found(kind=gluon_cpu.DataRace, lines=("tma.async_load(desc", "acc = warpgroup_mma(tile"), wrong="some"),
}


@pytest.fixture(scope="module")
def modules(tmp_path_factory) -> Iterator[dict[str, ModuleType]]:
    """Each example by its name, and mended by `right_` and its name."""
    folder = tmp_path_factory.mktemp("found")
    names = [*FOUND, *(f"right_{name}" for name in FOUND)]
    with PAGE.examples(folder) as place:
        for name in FOUND:
            (place / f"right_{name}.py").write_text(mended(PAGE.own[name].code), encoding="utf-8")
        yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


def run(module: ModuleType, **options: Any) -> None:
    """The example's own run, which compares its numbers at the end."""
    with gluon_cpu.machine(**options_of(module), **options):
        module.run()


def place(name: str, code: str) -> str:
    """A pattern for the line of the example that begins with `code`."""
    [line] = [n for n, text in enumerate(PAGE.own[name].code.splitlines(), 1) if text.strip().startswith(code)]
    return rf"examples/{name}\.py:{line}\b"


def test_every_example_of_the_page_is_here():
    assert {block.name for block in PAGE.findings} == set(FOUND)
    assert [b.name for b in PAGE.findings if "\n    assert torch.equal(out, " not in b.code] == []


@pytest.mark.parametrize("policy", gluon_cpu.POLICIES)
@pytest.mark.parametrize("name", FOUND)
def test_found(name, policy, modules):
    want = FOUND[name]
    for seed in SEEDS:
        with pytest.raises(gluon_cpu.Finding) as caught:
            run(modules[name], schedule=gluon_cpu.Schedule(policy, seed=seed), mode=want.mode)
        assert type(caught.value) is want.kind
        message = str(caught.value)
        assert [code for code in want.lines if not re.search(place(name, code), message)] == [], message
        assert [word for word in want.words if word not in message] == [], message


@pytest.mark.parametrize("policy", gluon_cpu.POLICIES)
@pytest.mark.parametrize("name", FOUND)
def test_mended_is_silent_and_right(name, policy, modules):
    for seed in SEEDS:
        for mode in (None, "lowered"):
            run(modules[f"right_{name}"], schedule=gluon_cpu.Schedule(policy, seed=seed), mode=mode)


@pytest.mark.parametrize("name", [name for name in FOUND if FOUND[name].wrong is not None])
def test_numbers_of_the_wrong_kernel(name, modules):
    wrong = 0
    for policy in gluon_cpu.POLICIES:
        try:
            run(modules[name], schedule=gluon_cpu.Schedule(policy), mode=FOUND[name].mode, checks=False)
        except AssertionError:
            wrong += 1
    assert {0: "none", len(gluon_cpu.POLICIES): "all"}.get(wrong, "some") == FOUND[name].wrong
