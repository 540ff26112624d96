"""What gradients are expected to take: counts, and how the fit is judged. See test_predict.py."""

import dataclasses
import json
from pathlib import Path

import pytest

from bench import predict, predict_gradients
from bench.predict_gradients import Constants, Counts, Sample
from gluon_attn.backward.configs import label
from gluon_attn.backward.launch import main_kernels
from gluon_attn.backward.plan import BackwardPlan
from gluon_attn.backward.table import HOPPER
from gluon_attn.device import Device
from gluon_attn.resources import resources
from tests.gluon_attn.problems import problem

ROOT = Path(__file__).parents[2]
H200, CARD = Device.hopper(), predict_gradients.CARD
PATHS = (*predict_gradients.FITTED, *predict_gradients.OTHER_CARD)
FILES = [json.loads(path.read_text(encoding="utf-8")) for path in PATHS]
WRITTEN = json.loads(predict_gradients.PREDICTED.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def every() -> list[Sample]:
    return predict_gradients.samples(FILES, H200)


def test_all_that_was_timed_is_judged(every):
    """On each card at the same 24 points; all configs where a row was found, and those of a result file."""
    for card in ("H100", "H200"):
        mine = [s for s in every if s.card == card]
        assert len({s.point for s in mine}) == 24
        assert all(label(predict_gradients.config_of(s.label)) == s.label for s in mine)
    tuned, slots, other = FILES
    searched = [len(row["measured"]["ms"]) for row in other["backward"]]
    assert len([s for s in every if s.card == "H100"]) == sum(searched) + 24 - len(searched)
    here = {(s.point.name, s.label): s.ms for s in every if s.card == "H200"}
    for point in slots["points"]:
        for name, found in point["results"].items():
            assert (here.get((point["name"], name)) == found["ms"]) != point["in_order"]
    of_tuner = [row["measured"] for row in tuned["backward"]]
    assert all(name in {s.label for s in every} for one in of_tuner for name in one["ms"])
    for config in HOPPER.values():
        assert predict_gradients.config_of(label(config)) == config
    with pytest.raises(ValueError, match="label: expected one as '64x128 q2do2ds2 in step r24', got 'cudnn'"):
        predict_gradients.config_of("cudnn")


@pytest.mark.parametrize("head_dim", HOPPER)
def test_issue_slots_are_as_in_the_compiled_kernels(head_dim):
    """Of head dim 256 too, of which nothing was fitted."""
    plan = BackwardPlan.of(problem(head_dim=head_dim, q_len=4096, kv_len=4096), HOPPER[head_dim], H200)
    (kernel,) = main_kernels(plan).values()
    counted = min(loop.instructions for loop in resources(kernel).loops)
    assert predict_gradients.issue_slots(HOPPER[head_dim], head_dim) == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize(
    ("sizes", "head_dim", "expected"),
    [
        # 32 heads of 8 key blocks, of which no program has more than two
        ({"q_len": 1024, "kv_len": 1024}, 64, (2 * 8, 0)),
        # 32 heads of 32 key blocks: 7 for each program, and 100 that all share
        ({"q_len": 4096, "kv_len": 4096}, 64, (32 * 1024 / 132, 0)),
        # 16 heads of 16 key blocks, each in 32 row blocks: in 128 pairs, of which no program has two
        ({"q_len": 2048, "kv_len": 2048, "causal": True, "heads": 8, "kv_heads": 8}, 128, (32 + 2, 4)),
    ],
)
def test_the_program_with_most_to_do(sizes, head_dim, expected):
    asked = problem(head_dim=head_dim, **({"batch": 2, "heads": 16, "kv_heads": 16} | sizes))
    plan = BackwardPlan.of(asked, HOPPER[head_dim], H200)
    steps, masked, _ = predict_gradients.most_of_a_program(plan)
    assert (steps, masked) == pytest.approx(expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", HOPPER)
def test_all_work_is_handed_out(head_dim, causal):
    """Over all programs as many steps as there are; on one program it is the whole."""
    config = HOPPER[head_dim]
    asked = problem(head_dim=head_dim, causal=causal, q_len=3000, kv_len=3000, batch=1, heads=6, kv_heads=3)
    seen = masked = 0
    for first_row in range(0, 3000, config.block_m):
        for first_key in range(0, 3000, config.keys):
            seen += not causal or first_key <= min(first_row + config.block_m, 3000) - 1
            hidden = causal and first_key <= min(first_row + config.block_m, 3000) - 1
            masked += hidden and min(first_key + config.keys, 3000) - 1 > first_row
    plan = BackwardPlan.of(asked, config, dataclasses.replace(H200, sm_count=1))
    key_blocks = 3 * -(-3000 // config.keys)
    assert predict_gradients.most_of_a_program(plan) == (6 * seen, 6 * masked, key_blocks)


def test_counts_of_a_step():
    counts = Counts.of(problem(), HOPPER[128], H200)
    assert counts.tensor == 2 * 64 * 128 * 5 * 128 / 4096
    assert counts.exp2 == 64 * 128 / 16
    assert (counts.in_step, counts.two_ds, counts.deep, counts.columns) == (False, False, False, 256)
    assert Counts.of(problem(), dataclasses.replace(HOPPER[128], query_slots=3), H200).deep
    assert Counts.of(problem(), dataclasses.replace(HOPPER[128], ds_slots=2), H200).two_ds


def test_a_config_is_judged_by_a_fit_that_has_not_seen_it(every):
    """Nor its length, nor another card."""
    _, ms = predict_gradients.judged(every, CARD)
    changed = [dataclasses.replace(s, ms=s.ms * 2) if (s.card, s.part) != (CARD, 3) else s for s in every]
    _, others = predict_gradients.judged(changed, CARD)
    assert [a == b for a, b in zip(ms, others, strict=True)] == [s.part == 0 for s in every]


def test_the_errors_are_those_of_the_constants(every):
    fits = [Constants(**fit) for fit in WRITTEN["constants_of_parts"]]
    ms = [float(predict_gradients.predicted_ms([s.counts], fits[s.part])[0]) for s in every]
    assert predict_gradients.rates(every, ms) == {
        point: {name: pytest.approx(rate, rel=1e-3) for name, rate in of_point.items()}
        for point, of_point in WRITTEN["predicted_tflops"].items()
    }
    for row, committed in zip(predict_gradients.errors(every, ms, CARD), WRITTEN["errors"], strict=True):
        assert row == {k: v if isinstance(v, str) else pytest.approx(v, abs=1e-3) for k, v in committed.items()}


def test_the_constants_that_are_used_are_of_the_card_that_was_fitted(every):
    """Of all that was timed there they are off by less than those that have not seen a half."""
    here = [s for s in every if s.card == CARD]
    ms = predict_gradients.predicted_ms([s.counts for s in here], predict_gradients.constants())
    off = sum(abs(m / s.ms - 1) for s, m in zip(here, ms, strict=True)) / len(here)
    assert off < next(row["mean_error"] for row in WRITTEN["errors"] if row["kind"] == "H200 all")


def test_the_command_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    """As in test_predict.py."""
    monkeypatch.chdir(tmp_path)
    predict_gradients.main(["--out", "out.json"])
    written = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert "\n".join(predict.lines(written["errors"])) in capsys.readouterr().out
    assert (written["timed"], written.keys()) == (WRITTEN["timed"], WRITTEN.keys())
    for row, committed in zip(written["errors"], WRITTEN["errors"], strict=True):
        assert row["kind"] == committed["kind"]
        assert row["mean_error"] == pytest.approx(committed["mean_error"], abs=0.01)


def test_the_page_has_the_error_table():
    page = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    assert "\n".join(predict.lines(WRITTEN["errors"])) in page
