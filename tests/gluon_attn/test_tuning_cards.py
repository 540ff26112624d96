"""Table files that come with the package: which cards they serve, and whether they hold."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.tune import command
from bench.tune.forward import Forward
from bench.tune.gradients import Gradients
from gluon_attn import attention, supports, tuning
from gluon_attn.backward import table as backward
from gluon_attn.device import Device
from gluon_attn.forward.table import PACKAGED, hopper_config, pick_config
from gluon_attn.problem import Problem
from gluon_attn.table_file import KIND
from tests.bench.tune.fakes import FakeCard
from tests.gluon_attn.table_files import (
    ASKED,
    BACKWARD_CONFIG,
    BACKWARD_ROW,
    CONFIG,
    H100,
    H200,
    PROVENANCE,
    ROW,
    content,
    qkv,
)

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("packaged_alone")


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


def test_kernels_of_gradients_that_only_files_have(of_cards, monkeypatch):
    """Each once, by its first row; not those that rows in code have."""
    few, many = (vars(table) for table in of_cards)
    in_code = backward.PACKAGED[0]
    tables = [
        tuning.Table(**few | {"source": "a.json", "backward_rows": (in_code, *few["backward_rows"])}),
        tuning.Table(**many | {"source": "b.json", "backward_rows": (*few["backward_rows"], *many["backward_rows"])}),
    ]
    monkeypatch.setattr(tuning, "OF_CARDS", tuple(tables))
    found = tuning.gradient_kernels_of_cards()
    assert found == {"a row 1": few["backward_rows"][0], "b row 1": many["backward_rows"][0]}


WITHIN = 1.02  # of the fastest that was timed
FILES = sorted(tuning.TABLES.glob("*.json"))
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn}


def faults(path: Path) -> Iterator[str]:
    """What keeps a file that `python -m bench tune` wrote from being one of the package."""
    table = tuning.read(path)
    if {device.name for device in table.devices} != {table.provenance["card"]}:
        yield "it was measured on another card than it is for"
    if not path.name.startswith(f"{table.devices[0].model.lower()}_"):
        yield f"its name does not begin with {table.devices[0].model.lower()}_"
    if not table.rows and not table.backward_rows:
        yield "it has no row"
    if any(row.scores for row in (*table.rows, *table.backward_rows)):
        yield "a row is for changed scores, which no test of these files computes"
    for found in (*table.measured, *table.backward_measured):
        if found is None:
            yield "a row has no measurement"
        elif found.ms[found.chosen] > WITHIN * min(found.ms.values()):
            yield f"{found.chosen} is not the fastest at {found.shape}"
    for shape in table.provenance["shapes"]:
        fields = dict(shape["shape"])
        asked = Problem(**fields | {"dtype": DTYPES[fields["dtype"]], "scale": 1.0, "layout": "bhsd"})
        choices: Any = Forward(asked, table.devices[0], PACKAGED)
        rows: Any = table.rows
        if shape.get("of_gradients"):
            choices, rows = Gradients(asked, table.devices[0], backward.PACKAGED), table.backward_rows
        serves = choices.name(choices.served_by(rows))
        if serves != shape["chosen"]:
            yield f"{choices.title} is served by {serves}, and chosen was {shape['chosen']}"


def test_files_of_the_package_hold():
    assert {path.name: list(faults(path)) for path in FILES} == {path.name: [] for path in FILES}
    assert tuning.TABLES == ROOT / "gluon_attn" / "tables"
    assert [table.source for table in tuning.of_package()] == [f"gluon_attn/tables/{path.name}" for path in FILES]


@pytest.fixture(scope="module")
def of_a_sweep(tmp_path_factory):
    """A file that the tuner has written for two of its sets, on a card that is made up."""
    path = tmp_path_factory.mktemp("swept") / "h200_all.json"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tuning, "OF_CARDS", ())
        patched.setattr(command, "provenance", lambda commit: PROVENANCE | {"driver": "1"})
        patched.setattr(command, "print", lambda *_, **__: None, raising=False)
        given = command.parser().parse_args(["--sweep", "e4m3", "backward", "--out", str(path), "--generations", "1"])
        given.reach, given.first = command.REACH_OF_SWEEP, 6
        batches = command.batches_of(given)
        card = FakeCard(hopper_config(2, 64, 2, 4, 232, early_exp=1))
        card.peer_s = {asked: 1e-3 for batch in batches for asked in batch.problems}
        command.run(batches, H200, card, given, resume=False)
    return path


def test_what_the_tuner_writes_can_be_a_file_of_the_package(of_a_sweep, tmp_path, monkeypatch):
    assert list(faults(of_a_sweep)) == []
    (tmp_path / of_a_sweep.name).write_bytes(of_a_sweep.read_bytes())
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    [table] = tuning.of_package()
    assert table.source == "gluon_attn/tables/h200_all.json"
    assert len(table.provenance["shapes"]) == 48
    assert table.rows
    monkeypatch.setattr(tuning, "OF_CARDS", (table,))
    for row in table.rows:
        assert row in tuning.rows_for(dataclasses.replace(H200, name="NVIDIA H200 NVL", sm_count=120))
        assert row not in tuning.rows_for(H100)


def of_all_sizes(row: dict[str, Any]) -> dict[str, Any]:
    """Another config, for all problems of the row's kind."""
    kind = {name: row["conditions"][name] for name in KIND}
    return row | {"conditions": kind, "config": row["config"] | {"kv_slots": 2}}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            lambda given: given["provenance"].update(card="NVIDIA H100"),
            "it was measured on another card than it is for",
        ),
        (lambda given: given["forward"][0].pop("measured"), "a row has no measurement"),
        (lambda given: given["forward"][0]["measured"]["ms"].update(other=1e-3), "is not the fastest at"),
        (lambda given: given["forward"].pop(0), "is served by"),
        (lambda given: given["forward"][0]["conditions"].update(scores="alibi"), "a row is for changed scores"),
        (lambda given: given["forward"].insert(0, of_all_sizes(given["forward"][0])), "is served by"),
        (lambda given: given.update(forward=[], backward=[]), "it has no row"),
    ],
)
def test_what_keeps_a_file_out_of_the_package(of_a_sweep, tmp_path, change, fault):
    given = json.loads(of_a_sweep.read_text(encoding="utf-8"))
    change(given)
    path = tmp_path / "h200_x.json"
    path.write_text(json.dumps(given), encoding="utf-8")
    found = list(faults(path))
    assert any(fault in one for one in found)
    other = path.rename(tmp_path / "x.json")
    assert "its name does not begin with h200_" in list(faults(other))
