"""Table files: what they say, and what is refused."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from gluon_attn import tuning
from gluon_attn.backward import table as backward
from gluon_attn.backward.table import HOPPER, UNLIKE, BackwardRow
from gluon_attn.device import Device
from gluon_attn.forward.table import (
    PACKAGED,
    Row,
    blackwell_config,
    hopper_config,
)
from tests.gluon_attn.table_files import (
    BACKWARD_CONFIG,
    BACKWARD_ROW,
    H200,
    MEASURED,
    PROVENANCE,
    ROW,
    content,
    gradients,
)

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("packaged_alone")


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


def test_a_threshold_beyond_a_float_is_refused(written):
    given = content([Row(64, True, blackwell_config(6, 192, rescale_threshold=8))], [Device.blackwell()])
    given["forward"][0]["config"]["rescale_threshold"] = 10**400
    with pytest.raises(ValueError, match=r"rescale_threshold: expected a number of at most 2\^63, got a larger one"):
        tuning.read(written(given))


def test_a_row_may_reach_far(written):
    """As the tuner writes it with --reach 1048576, and without max_kv_len."""
    row = dataclasses.replace(ROW, min_kv_len=2**40, max_kv_len=None, q_lens=(1, 2**51))
    assert tuning.read(written(content([row]))).rows[0].q_lens == (1, 2**51)


def test_every_packaged_row_can_be_in_a_file(written):
    for device in (H200, Device.blackwell(), Device.blackwell_ultra()):
        rows = [row for row in PACKAGED if device.arch in row.config.archs]
        assert [row.config for row in tuning.read(written(content(rows, [device]))).rows] == [r.config for r in rows]


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
        ("schema", True, "schema: expected 1, got True, as another version of gluon_attn writes it"),
        ("schema", 1.0, "schema: expected 1, got 1.0, as another version of gluon_attn writes it"),
        ("devices.0.name", "", "devices[0].name: expected the name of a card, got ''; give it as torch has it"),
        ("devices.0.name", " ", "devices[0].name: expected the name of a card, got ' '; give it as torch has it"),
        (
            "devices.0.l2_bytes",
            10**400,
            "l2_bytes: expected a number of at most 2^63, got a larger one; give one that is",
        ),
        ("devices.0.capability", [9, 10**400], "capability[1]: expected a whole number of at most 2^63, got a larger"),
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
        ("forward.0.config.kv_slots", 10**400, "kv_slots: expected a whole number of at most 2^63, got a larger one"),
        ("forward.0.config.kind", "ampere", "forward[0].config.kind: expected one of hopper, blackwell, got 'ampere'"),
        ("forward.0.config.kind", ["hopper"], "config.kind: expected one of hopper, blackwell, got ['hopper']"),
        ("forward.0.conditions.keys", 3, "forward[0].conditions: expected padded_head_dim"),
        ("forward.0.conditions.causal", "no", "forward[0].conditions.causal: expected true or false, got 'no'"),
        ("forward.0.conditions.padded_head_dim", 96, "padded_head_dim: expected one of 64, 128, 192, 256, got 96"),
        ("forward.0.conditions.min_kv_len", 0, "forward[0].conditions.min_kv_len: expected at least 1, got 0"),
        ("forward.0.conditions.max_kv_len", 8, "max_kv_len: expected at least min_kv_len, 512, got 8"),
        ("forward.0.conditions.q_lens", [3, 2], "q_lens: expected the least and the most, from 1 on, got [3, 2]"),
        ("forward.0.conditions.min_kv_len", 2**64, "min_kv_len: expected a whole number of at most 2^63, got a larger"),
        ("forward.0.conditions.q_lens", [1, 2**64], "q_lens[1]: expected a whole number of at most 2^63, got a larger"),
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
        ("ms", {"a": math.nan}, "forward[0].measured.ms.a: expected milliseconds, got nan"),
        ("ms", {"a": math.inf}, "forward[0].measured.ms.a: expected milliseconds, got inf"),
        ("chosen", "c", "forward[0].measured.chosen: expected one of those in ms, a, b, got 'c'"),
        ("in_use", ["a"], "forward[0].measured.in_use: expected one of those in ms, a, b, got ['a']"),
        ("spread", math.nan, "forward[0].measured.spread: expected a number, got nan"),
        ("ms", {"a": 1e300}, "forward[0].measured.ms.a: expected milliseconds of at most 2^63, got a larger one"),
        ("gain", 10**400, "forward[0].measured.gain: expected a number of at most 2^63, got a larger one"),
        ("gain", -(10**400), "forward[0].measured.gain: expected a number of at most 2^63, got a larger one"),
        ("gain", "much", "forward[0].measured.gain: expected a number, got 'much'"),
    ],
)
def test_measurements_are_checked(written, field, value, says):
    given = content()
    given["forward"][0]["measured"] = dataclasses.asdict(MEASURED) | {field: value}
    with pytest.raises(ValueError, match=r"table\.json: ") as refused:
        tuning.read(written(given))
    assert says in str(refused.value)


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
        assert (found.head_dims, found.config, found.causal) == (row.head_dims, row.config, row.causal)


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


def test_a_config_of_another_architecture(written):
    given = content([Row(128, False, blackwell_config(3, 192))])
    with pytest.raises(ValueError, match=r"expected one for NVIDIA H200 \(sm_90\), which the file names, got a Black"):
        tuning.load(written(given))


def test_what_is_no_json(written, tmp_path):
    with pytest.raises(ValueError, match=r"table\.json: table: expected JSON"):
        tuning.load(written("{"))
    with pytest.raises(ValueError, match=r"table\.json: table: expected JSON, got what is none: maximum recursion"):
        tuning.load(written("[" * 100000))
    with pytest.raises(FileNotFoundError, match=r"none\.json: expected a table file, .*; give the path of one"):
        tuning.load(tmp_path / "none.json")
