"""Table files: what they say, what is refused, which calls they serve."""

import dataclasses
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gluon_attn import api, attention, call, supports, tuning
from gluon_attn import gradients as api_gradients
from gluon_attn.backward import table as backward
from gluon_attn.backward.plan import BackwardPlan
from gluon_attn.backward.table import HOPPER, UNLIKE, BackwardRow
from gluon_attn.bias import Bias
from gluon_attn.device import Device
from gluon_attn.forward.plan import Plan
from gluon_attn.forward.table import (
    PACKAGED,
    Row,
    blackwell_config,
    hopper_config,
    pick_config,
    rows_by_default,
)
from tests.gluon_attn.problems import problem

ROOT = Path(__file__).parents[2]
H200 = Device.hopper()
H100 = dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3")
PROVENANCE = {"date": "2026-11-25", "commit": "abc", "card": "NVIDIA H200", "torch": "2.11", "triton": "3.9.0"}
# Unlike what the packaged table has for the problem.
CONFIG = hopper_config(2, 64, 1, 3, 232, turns=True)
ROW = Row(128, False, CONFIG, min_kv_len=512, max_kv_len=2048, q_lens=(512, 2048), sequence_heads=(16, 64))
ASKED = problem()
MEASURED = tuning.Measured(shape={"batch": 2}, ms={"a": 1.0, "b": 1.1}, chosen="a", in_use="b", gain=0.1, spread=0.01)


@pytest.fixture(autouse=True)
def packaged_alone(monkeypatch):
    monkeypatch.setattr(tuning, "OF_CARDS", ())
    tuning.reset()
    yield
    tuning.reset()


def content(rows=(ROW,), devices=(H200,)) -> dict[str, Any]:
    return tuning.as_json(devices, PROVENANCE, rows, [None] * len(rows))


@pytest.fixture
def written(tmp_path):
    """Writes a table file, and gives its path."""

    def write(given: Any = None) -> Path:
        path = tmp_path / "table.json"
        path.write_text(given if isinstance(given, str) else json.dumps(content() if given is None else given))
        return path

    return write


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        Row(64, True, hopper_config(4, 64, 2, 4, 112, num_ctas=2), heads_per_kv_head=4, one_round=True),
        Row(192, False, hopper_config(2, 128, 1, 2, 232, stage_in_queries=True), padded_head_dim_v=128),
        Row(128, True, hopper_config(2, 128, 2, 4, 240), 1, min_reuse=4096),
    ],
)
def test_what_is_written_is_read(written, row):
    device = dataclasses.replace(H200, sm_count=100)
    table = tuning.read(written(tuning.as_json([device], PROVENANCE, [row], [MEASURED])))
    [found] = table.rows
    assert found.head_dims == row.head_dims
    assert found == dataclasses.replace(row, padded_head_dim_v=row.head_dims[1], card="NVIDIA H200", date="2026-11-25")
    assert table.devices == (device,)
    assert table.measured == (MEASURED,)


def test_rows_of_blackwell(written):
    config = blackwell_config(6, 192, exp_pieces=4, rescale_threshold=8, num_ctas=2)
    table = tuning.read(written(content([Row(64, True, config)], [Device.blackwell()])))
    assert [row.config for row in table.rows] == [config]


def test_every_packaged_row_can_be_in_a_file(written):
    for device in (H200, Device.blackwell(), Device.blackwell_ultra()):
        rows = [row for row in PACKAGED if device.arch in row.config.archs]
        assert [row.config for row in tuning.read(written(content(rows, [device]))).rows] == [r.config for r in rows]


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


def qkv() -> list[torch.Tensor]:
    return [torch.zeros(1, 16, 512, 128, dtype=torch.bfloat16) for _ in range(3)]


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


def changed(place: str, value: Any) -> dict[str, Any]:
    """A table file's content with another value at a place such as forward.0.config.block_n; None: without it."""
    given = content()
    *way, last = place.split(".")
    inner: Any = given
    for step in way:
        inner = inner[int(step) if step.isdigit() else step]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return given


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ("schema", 2, "schema: expected 1, got 2, as another version of gluon_attn writes it"),
        ("sideways", [], "table: expected schema, devices, provenance, forward, backward, got an unknown 'sideways'"),
        ("backward", {}, "backward: expected a list, got {}"),
        ("forward", None, "table: expected 'forward', got none"),
        ("forward", {}, "forward: expected a list, got {}"),
        ("devices", [], "devices: expected at least one device, got none"),
        ("devices.0.sm_count", "132", "devices[0].sm_count: expected a number, got '132'"),
        ("devices.0.sm_count", 0, "devices[0].sm_count: expected at least 1, got 0"),
        ("devices.0.capability", [9], "devices[0].capability: expected two whole numbers, got [9]"),
        ("devices.0.capability", [8, 0], "devices[0]: device: expected a Hopper (compute capability 9.0)"),
        ("provenance.commit", None, "provenance.commit: expected a text, got None"),
        ("forward.0.config.blocks", 3, "forward[0].config: expected kind, block_n"),
        ("forward.0.config.block_n", None, "forward[0].config: expected 'block_n', got none"),
        ("forward.0.config.block_n", "64", "forward[0].config.block_n: expected a whole number, got '64'"),
        ("forward.0.config.turns", 1, "forward[0].config.turns: expected true or false, got 1"),
        ("forward.0.config.kv_slots", True, "forward[0].config.kv_slots: expected a whole number, got True"),
        ("forward.0.config.block_n", 96, "forward[0].config: self.block_n=96 must be 64 or 128"),
        ("forward.0.config.cga_layout", [[1]], "forward[0].config.cga_layout[0]: expected two whole numbers, got [1]"),
        ("forward.0.config.kv_slots", 40, "forward[0].config: not for a row of these conditions: config: expected a"),
        ("forward.0.config.half_by_polynomial", True, "config: expected half_by_polynomial=False"),
        ("forward.0.config.kind", "ampere", "forward[0].config.kind: expected one of hopper, blackwell, got 'ampere'"),
        ("forward.0.conditions.keys", 3, "forward[0].conditions: expected padded_head_dim"),
        ("forward.0.conditions.causal", "no", "forward[0].conditions.causal: expected true or false, got 'no'"),
        ("forward.0.conditions.padded_head_dim", 96, "padded_head_dim: expected one of 64, 128, 192, 256, got 96"),
        ("forward.0.conditions.min_kv_len", 0, "forward[0].conditions.min_kv_len: expected at least 1, got 0"),
        ("forward.0.conditions.max_kv_len", 8, "max_kv_len: expected at least min_kv_len, 512, got 8"),
        ("forward.0.conditions.q_lens", [3, 2], "q_lens: expected the least and the most, from 1 on, got [3, 2]"),
        ("forward.0.measured", {}, "forward[0].measured: expected 'shape', got none"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(written, place, value, says):
    path = written(changed(place, value))
    with pytest.raises(ValueError, match=r"table\.json: ") as refused:
        tuning.load(path)
    assert says in str(refused.value)
    assert tuning.active() == ()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("ms", {"a": 0}, "forward[0].measured.ms.a: expected more than 0, got 0"),
        ("chosen", "c", "forward[0].measured.chosen: expected one of those in ms, a, b, got 'c'"),
        ("gain", "much", "forward[0].measured.gain: expected a number, got 'much'"),
    ],
)
def test_measurements_are_checked(written, field, value, says):
    given = content()
    given["forward"][0]["measured"] = dataclasses.asdict(MEASURED) | {field: value}
    with pytest.raises(ValueError, match=r"table\.json: ") as refused:
        tuning.read(written(given))
    assert says in str(refused.value)


BACKWARD_CONFIG = dataclasses.replace(HOPPER[128], query_slots=3, ds_slots=1, load_registers=32)
BACKWARD_ROW = BackwardRow((128, 128), BACKWARD_CONFIG, False, min_kv_len=512, max_kv_len=2048, q_lens=(512, 2048))


def gradients(row: BackwardRow = BACKWARD_ROW, devices: Sequence[Device] = (H200,)) -> dict[str, Any]:
    return tuning.as_json(devices, PROVENANCE, [], [], [row], [MEASURED])


@pytest.mark.parametrize(
    "row",
    [
        BACKWARD_ROW,
        BackwardRow((64, 64), HOPPER[64], True, sequence_heads=(1, 9), heads_per_kv_head=4, min_reuse=2),
        BackwardRow((192, 128), UNLIKE[192, 128], False),
        BackwardRow((256, 256), HOPPER[256], None, min_kv_len=512),
    ],
)
def test_rows_of_gradients_are_read_as_they_are_written(written, row):
    table = tuning.read(written(gradients(row)))
    assert table.backward_rows == (dataclasses.replace(row, card="NVIDIA H200", date="2026-11-25"),)
    assert table.backward_measured == (MEASURED,)
    assert table.rows == ()


def test_a_file_without_gradients(written):
    given = content()
    del given["backward"]
    assert tuning.read(written(given)).backward_rows == ()


def test_every_packaged_row_of_gradients_can_be_in_a_file(written):
    for row in backward.PACKAGED:
        [found] = tuning.read(written(gradients(row))).backward_rows
        assert (found.head_dims, found.config, found.causal) == (row.head_dims, row.config, None)


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


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (
            "conditions.element_bytes",
            2,
            "backward[0].conditions: expected padded_head_dim, padded_head_dim_v, causal, ",
        ),
        ("conditions.one_round", True, "got an unknown 'one_round'"),
        ("conditions.causal", None, "backward[0].conditions: expected 'causal', got none"),
        ("conditions.causal", 1, "backward[0].conditions.causal: expected true or false, or null for both, got 1"),
        (
            "conditions.padded_head_dim",
            256,
            "expected padded head dims of 64 and 64, 128 and 128, 256 and 256, 192 and",
        ),
        ("config.kind", "blackwell", "backward[0].config.kind: expected one of hopper, got 'blackwell'"),
        ("config.turns", True, "backward[0].config: expected kind, block_m"),
        ("config.block_m", 96, "backward[0].config: self.block_m=96 must be 64 or 128"),
        ("config.keys", 64, "not for a row of these conditions: config: expected keys=128 at head_dim 128, got 64"),
        ("config.dq_slots", 2, "config: expected at most as many dq_slots as q_pieces, 1, got 2"),
        (
            "config.query_slots",
            4,
            "config: expected a config that fits the 232448 bytes of shared memory of NVIDIA H200",
        ),
    ],
)
def test_what_is_wrong_in_a_row_of_gradients_is_said(written, place, value, says):
    given = gradients(dataclasses.replace(BACKWARD_ROW, config=dataclasses.replace(BACKWARD_CONFIG, dout_slots=4)))
    if place != "config.query_slots":
        given = gradients()
    part, name = place.split(".")
    if value is None:
        del given["backward"][0][part][name]
    else:
        given["backward"][0][part][name] = value
    with pytest.raises(ValueError, match=r"table\.json: backward\[0\]") as refused:
        tuning.load(written(given))
    assert says in str(refused.value)


def test_only_hopper_has_gradients(written):
    with pytest.raises(ValueError, match="config: expected a Hopper card for gradients, got NVIDIA B200"):
        tuning.load(written(gradients(devices=[Device.blackwell()])))


X1 = Device(name="NVIDIA X1 80GB HBM3", capability=(9, 0), sm_count=132, smem_bytes=232448)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        (X1.name, "X1"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100"),
        ("NVIDIA H100 NVL", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("a card", "a card"),
    ],
)
def test_the_model_of_a_card(name, model):
    assert dataclasses.replace(X1, name=name).model == model


@pytest.fixture
def of_cards(written, monkeypatch):
    """Two table files in the package, for models of which there are none: of 100 processors and of 132, with rows of
    other depths."""
    tables = []
    for processors, slots in ((100, 2), (132, 3)):
        device = dataclasses.replace(X1, sm_count=processors)
        row = dataclasses.replace(ROW, config=dataclasses.replace(CONFIG, kv_slots=slots))
        of_gradients = dataclasses.replace(BACKWARD_ROW, config=dataclasses.replace(BACKWARD_CONFIG, query_slots=slots))
        given = tuning.as_json([device], PROVENANCE, [row], [None], [of_gradients], [None])
        tables.append(tuning.Table(**vars(tuning.read(written(given)))))
    monkeypatch.setattr(tuning, "OF_CARDS", tuple(tables))
    return tables


def slots_of(device: Device) -> tuple[int, int]:
    config = pick_config(ASKED, device, None, tuning.rows_for(device))
    return config.kv_slots, backward.pick_config(ASKED, tuning.backward_rows_for(device)).query_slots


def test_a_card_is_served_by_the_nearest_of_its_model(of_cards):
    few, many = of_cards
    like = [dataclasses.replace(X1, name="NVIDIA X1 PCIe", sm_count=n) for n in (100, 110, 120, 132)]
    assert [slots_of(device) for device in like] == [(2, 2), (2, 2), (3, 3), (3, 3)]
    assert [tuning.serving(device) for device in like[1:3]] == [(few, many), (many, few)]
    other = dataclasses.replace(X1, capability=(10, 0))
    for device in (H200, H100, other):
        assert tuning.serving(device) == ()
        assert tuning.rows_for(device) == PACKAGED
        assert tuning.backward_rows_for(device) == backward.PACKAGED
    assert {few.rows[0], many.rows[0]} <= {*tuning.rows_of_arch(90)}
    assert {few.backward_rows[0], many.backward_rows[0]} <= {*tuning.backward_rows_of_arch(90)}
    assert tuning.rows_of_arch(100) == PACKAGED


def test_a_file_that_is_loaded_comes_before_those_of_the_package(of_cards, written):
    assert tuning.active() == ()
    mine = tuning.load(written(content(devices=[X1])))
    assert tuning.serving(X1) == (mine, of_cards[1], of_cards[0])
    assert pick_config(ASKED, X1, None, tuning.rows_for(X1)) == CONFIG
    tuning.reset()
    assert tuning.serving(X1) == (of_cards[1], of_cards[0])


def test_a_graph_asks_the_table_of_the_card(written, planned, monkeypatch):
    """`supports` is traced with it. In a graph on the CPU there is no other card."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        assert supports(q, k, v, device=H200) is None
        return attention(q, k, v, device=H200)

    monkeypatch.setattr(tuning, "OF_CARDS", (tuning.Table(**vars(tuning.read(written()))),))
    with torch.no_grad():
        torch.compile(call, backend="eager", fullgraph=True)(*qkv())
    assert planned == [CONFIG]


def test_table_files_are_in_the_package():
    """They can be read, and were measured on the cards that they are for."""
    for path in sorted(tuning.TABLES.glob("*.json")):
        table = tuning.read(path)
        assert table.rows or table.backward_rows
        assert {device.name for device in table.devices} == {table.provenance["card"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["setuptools"]["package-data"]["gluon_attn"] == ["tables/*.json"]
    assert tuning.TABLES == ROOT / "gluon_attn" / "tables"


def test_a_config_of_another_architecture(written):
    given = content([Row(128, False, blackwell_config(3, 192))])
    with pytest.raises(ValueError, match=r"expected one for NVIDIA H200 \(sm_90\), which the file names, got a Black"):
        tuning.load(written(given))


def test_what_is_no_json(written, tmp_path):
    with pytest.raises(ValueError, match=r"table\.json: table: expected JSON"):
        tuning.load(written("{"))
    with pytest.raises(FileNotFoundError):
        tuning.load(tmp_path / "none.json")


def test_a_file_from_the_environment(written):
    path = written()
    code = "import gluon_attn; print([t.source for t in gluon_attn.tuning.active()])"
    environment = os.environ | {tuning.VARIABLE: str(path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str([str(path)])
