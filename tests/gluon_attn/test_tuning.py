"""Table files: which calls they serve."""

import dataclasses
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gluon_attn import api, attention, call, supports, tuning
from gluon_attn import gradients as api_gradients
from gluon_attn.forward.table import (
    hopper_config,
    pick_config,
    rows_by_default,
)
from tests.gluon_attn.table_files import (
    ASKED,
    BACKWARD_CONFIG,
    CONFIG,
    H100,
    H200,
    ROW,
    content,
    gradients,
    qkv,
)

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("packaged_alone")


def test_a_table_serves_the_devices_that_it_names(written):
    packaged = pick_config(ASKED, H200)
    assert packaged != CONFIG
    assert tuning.active() == ()
    table = tuning.load(written())
    assert tuning.active() == tuning.serving(H200) == (table,)
    assert tuning.serving(H100) == ()
    assert pick_config(ASKED, H200, None, tuning.rows_for(H200)) == CONFIG
    for other in (H100, dataclasses.replace(H200, sm_count=66)):
        assert pick_config(ASKED, other, None, tuning.rows_for(other)) == packaged
    assert pick_config(ASKED, H200) == packaged  # pure: what is not given has no effect
    tuning.reset()
    assert pick_config(ASKED, H200, None, tuning.rows_for(H200)) == packaged


@pytest.mark.parametrize(
    "unlike",
    [
        {"kv_len": 511},
        {"kv_len": 2049},
        {"q_len": 511},
        {"q_len": 2049},
        {"batch": 5},
        {"heads": 1, "kv_heads": 1},
        {"head_dim": 64},
        {"causal": True},
        {"dtype": torch.float8_e4m3fn},
    ],
    ids=str,
)
def test_what_is_unlike_the_shape_keeps_the_packaged_row(written, unlike):
    tuning.load(written())
    asked = dataclasses.replace(ASKED, **({"head_dim_v": 0} | unlike))
    assert pick_config(asked, H200, None, tuning.rows_for(H200)) == pick_config(asked, H200)


def test_query_heads_of_a_kv_head(written):
    tuning.load(written(content([dataclasses.replace(ROW, heads_per_kv_head=4)])))
    for kv_heads, served in ((16, False), (4, True), (2, False)):
        asked = dataclasses.replace(ASKED, kv_heads=kv_heads)
        assert (pick_config(asked, H200, None, tuning.rows_for(H200)) == CONFIG) == served


def test_the_later_table_is_asked_first_and_a_block_ends_it(written):
    first = tuning.load(written())
    wider = hopper_config(2, 64, 1, 2, 232)
    with tuning.load(written(content([dataclasses.replace(ROW, config=wider)]))) as second:
        assert tuning.active() == (second, first)
        assert pick_config(ASKED, H200, None, tuning.rows_for(H200)) == wider
    assert tuning.active() == (first,)
    assert pick_config(ASKED, H200, None, tuning.rows_for(H200)) == CONFIG


def test_launches_do_not_survive_a_change_of_tables(written, planned):
    """Nor are they made twice with the same table."""
    tensors = qkv()
    rows = []
    for _ in range(2):
        attention(*tensors, device=H200)
    rows.append(len(planned))
    with tuning.load(written()):
        for _ in range(2):
            assert supports(*tensors, device=H200) is None
            attention(*tensors, device=H200)
        rows.append(len(planned))
    attention(*tensors, device=H200)
    assert rows + [len(planned)] == [1, 2, 2]
    assert planned[0] != CONFIG
    assert planned[1] == CONFIG


@pytest.mark.parametrize("of_gradients", [False, True], ids=["O", "gradients"])
def test_a_table_loaded_while_a_launch_is_made_is_not_kept_under_those_before(
    written, planned, monkeypatch, of_gradients
):
    """As another thread may do."""
    module = api_gradients if of_gradients else api
    q, k, v = qkv()
    out, lse = torch.zeros_like(q), torch.zeros(1, 16, 512)
    path = written(content() | {"backward": gradients()["backward"]})

    def run() -> None:
        if of_gradients:
            api_gradients.attention_backward(out, None, q, k, v, out, lse, device=H200)
        else:
            attention(q, k, v, device=H200)

    monkeypatch.setattr("gluon_attn.cpu.backward_on_cpu", lambda plan, *_: planned.append(plan.config))
    monkeypatch.setattr(api_gradients, "_launches", {})
    with monkeypatch.context() as patched:
        patched.setattr(module, "problem_of", lambda *given: tuning.load(path) and call.problem_of(*given))
        run()
    tuning.reset()
    run()
    own = BACKWARD_CONFIG if of_gradients else CONFIG
    assert planned
    assert own not in planned
    with tuning.load(path):
        run()
    assert planned[-1] == own


def test_under_torch_compile(written, planned):
    """The operator in the graph asks the table that serves when it runs; `supports` is traced with it."""
    tensors = qkv()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        assert supports(q, k, v, device=H200) is None
        return attention(q, k, v, device=H200)

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    with torch.no_grad():
        compiled(*tensors)
        tuning.load(written())
        compiled(*tensors)
    assert [config == CONFIG for config in planned] == [False, True]


def test_kernels_compiled_ahead_are_those_of_the_table_too(written):
    tuning.load(written())
    rows = rows_by_default(128, False, 2, 90, table=tuning.rows_of_arch(90))
    assert rows[0].config == CONFIG
    assert rows[1:] == rows_by_default(128, False, 2, 90)  # a row for a few sizes is in nobody's place
    assert rows_by_default(128, False, 2, 100, table=tuning.rows_of_arch(100)) == rows_by_default(128, False, 2, 100)


@pytest.mark.parametrize(
    ("here", "is_loaded", "warned"),
    [([H100, H100], True, True), ([H100, H200], True, False), ([], True, False), ([H100], False, False)],
    ids=["another", "one of two", "none", "not loaded any more"],
)
def test_a_file_for_other_cards_alone_is_warned_of_once_a_card_is_in_use(written, monkeypatch, here, is_loaded, warned):
    waiting = list[Callable[[], None]]()
    monkeypatch.setattr(torch.cuda, "_lazy_call", waiting.append)
    monkeypatch.setattr(tuning, "cards_here", lambda: here)
    table = tuning.load(written())
    if not is_loaded:
        tuning.unload(table)
    [first_use] = waiting
    with warnings.catch_warnings(record=True, action="always") as seen:
        first_use()
    says = (
        "expected a table file for NVIDIA H100 80GB HBM3 with 132 processors, which is here, got one for NVIDIA H200 "
    )
    assert [f"table.json: {says}" in str(one.message) for one in seen] == [True] * warned


def test_a_file_for_other_cards_is_not_in_use_where_warnings_are_errors(written, monkeypatch):
    monkeypatch.setattr(torch.cuda, "_lazy_call", lambda call: call())
    monkeypatch.setattr(tuning, "cards_here", lambda: [H100])
    with warnings.catch_warnings(action="error"), pytest.raises(UserWarning, match="expected a table file for NVIDIA"):
        tuning.load(written())
    assert tuning.active() == ()


def test_a_file_from_the_environment(written):
    path = written()
    code = "import gluon_attn; print([t.source for t in gluon_attn.tuning.active()])"
    environment = os.environ | {tuning.VARIABLE: str(path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str([str(path)])


def test_what_is_wrong_with_a_file_from_the_environment_names_the_variable(monkeypatch, written, tmp_path):
    for path, error, says in (
        (tmp_path / "none.json", FileNotFoundError, "none.json: expected a table file"),
        (written("{"), ValueError, "table.json: table: expected JSON"),
    ):
        monkeypatch.setenv(tuning.VARIABLE, str(path))
        with pytest.raises(error, match=rf"^GLUON_ATTN_TABLE: .*{says}.*; or unset the variable"):
            tuning.load_from_environment()
    assert tuning.active() == ()
