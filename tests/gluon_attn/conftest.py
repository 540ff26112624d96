"""Fixtures of tests of table files, of models of transformers, and of torch's operators of attention."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gluon_attn import api, sdpa_calls, torch_sdpa
from gluon_attn.forward.plan import Plan
from tests.gluon_attn.sdpa import HOPPER, Originals
from tests.gluon_attn.table_files import content


@pytest.fixture
def written(tmp_path):
    """Writes a table file, and gives its path."""

    def write(given: Any = None) -> Path:
        path = tmp_path / "table.json"
        path.write_text(given if isinstance(given, str) else json.dumps(content() if given is None else given))
        return path

    return write


@pytest.fixture
def planned(monkeypatch):
    """The configs that calls were prepared with, nothing being executed."""
    seen: list[Any] = []

    def launch(plan: Plan, *_: Any) -> Any:
        seen.append(plan.config)
        return lambda tensors: None

    monkeypatch.setattr("gluon_attn.cpu.launches_on_cpu", launch)
    monkeypatch.setattr(api, "_launches", {})
    return seen


@pytest.fixture
def ran(monkeypatch) -> Iterator[list[tuple[str, int]]]:
    """Who computed attention in a model of transformers, and of how many queries, since the list was last cleared."""
    from tests.gluon_attn.hf_models import counted_calls  # it imports transformers, which other tests do not need

    yield from counted_calls(monkeypatch)


@pytest.fixture
def originals(monkeypatch) -> Iterator[Originals]:
    monkeypatch.setattr(sdpa_calls, "_left", {})  # a test may change what is left to torch
    stand_ins = Originals("CPU")
    yield stand_ins
    stand_ins.library._destroy()


@pytest.fixture
def calls(originals) -> Iterator[list[Any]]:
    """Those that went to torch's own kernels, while ours are in their place."""
    handle = torch_sdpa.override("CPU", HOPPER)
    yield originals.calls
    handle.remove()


@pytest.fixture
def no_launch(monkeypatch):
    """attention() on the CPU as far as the launch, which does nothing."""

    class NoLaunch:
        def __init__(self, launch, arch):
            pass

        def __call__(self, tensors):
            pass

    monkeypatch.setattr("gluon_attn.cpu.CpuLaunch", NoLaunch)
    monkeypatch.setattr(api, "_launches", {})
