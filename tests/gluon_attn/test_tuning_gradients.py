"""Table files: which gradients they serve."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gluon_attn import api, attention, tuning
from gluon_attn import gradients as api_gradients
from gluon_attn.backward import table as backward
from gluon_attn.backward.plan import BackwardPlan
from gluon_attn.backward.table import HOPPER, BackwardRow
from gluon_attn.bias import Bias
from gluon_attn.forward.table import (
    pick_config,
)
from tests.gluon_attn.problems import problem
from tests.gluon_attn.table_files import (
    BACKWARD_CONFIG,
    H100,
    H200,
    gradients,
    qkv,
)

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("packaged_alone")


@pytest.mark.parametrize(
    ("unlike", "served"),
    [
        ({}, True),
        ({"head_dim": 96, "head_dim_v": 96}, True),
        ({"deterministic": True}, True),
        ({"causal": True}, False),
        ({"head_dim": 64, "head_dim_v": 64}, False),
        ({"kv_len": 4096}, False),
        ({"q_len": 300}, False),
        (
            {"bias": Bias(dtype=torch.bfloat16, each_row=True, shared=False)},
            False,
        ),  # none was timed with the row's config
    ],
    ids=str,
)
def test_rows_of_gradients_serve_what_they_are_for(written, unlike, served):
    asked = problem(**{name: value for name, value in unlike.items() if name != "deterministic"})
    before = backward.pick_config(asked)
    tuning.load(written(gradients()))
    assert (backward.pick_config(asked, tuning.backward_rows_for(H200)) == BACKWARD_CONFIG) == served
    assert backward.pick_config(asked, tuning.backward_rows_for(H100)) == before
    assert backward.pick_config(asked) == before  # pure
    assert pick_config(asked, H200, None, tuning.rows_for(H200)) == pick_config(asked, H200)


def test_gradients_ask_the_tables_that_serve_when_they_are_computed(written, monkeypatch):
    """Whatever served in the forward pass."""
    seen: list[Any] = []

    def launch(plan: BackwardPlan, *_: Any) -> Any:
        seen.append(plan.config)
        return lambda tensors: None

    monkeypatch.setattr("gluon_attn.cpu.launches_on_cpu", lambda *_: lambda tensors: None)
    monkeypatch.setattr("gluon_attn.cpu.backward_on_cpu", launch)
    monkeypatch.setattr(api, "_launches", {})
    monkeypatch.setattr(api_gradients, "_launches", {})
    tensors = [t.requires_grad_() for t in qkv()]

    def forward() -> torch.Tensor:
        out = attention(*tensors, device=H200)
        assert isinstance(out, torch.Tensor)
        return out

    outs = [forward() for _ in range(3)]
    outs[0].sum().backward()
    with tuning.load(written(gradients())):
        outs[1].sum().backward()
    outs[2].sum().backward()
    assert [config == BACKWARD_CONFIG for config in seen] == [False, True]


def test_kernels_of_gradients_compiled_ahead_are_those_of_the_table_too(written):
    def rows(causal: bool) -> list[BackwardRow]:
        return backward.rows_by_default((128, 128), causal, tuning.backward_rows_of_arch(90))

    packaged = rows(False)
    assert [row.config for row in packaged] == [HOPPER[128]]
    tuning.load(written(gradients()))
    assert [row.config for row in rows(False)] == [BACKWARD_CONFIG, HOPPER[128]]
    assert rows(True) == packaged
    tuning.load(written(gradients(BackwardRow((128, 128), BACKWARD_CONFIG, False))))  # of all sizes
    assert [row.config for row in rows(False)] == [BACKWARD_CONFIG]
    assert tuning.backward_rows_of_arch(100) == backward.PACKAGED
