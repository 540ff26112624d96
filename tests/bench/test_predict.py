"""What times are expected to be: counts, the fit, and how it is judged."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import predict
from bench.predict import Constants, Counts, Sample
from bench.tune.forward import Forward
from gluon_attn.device import Device
from gluon_attn.forward.configs import HopperConfig, label
from gluon_attn.forward.plan import Plan
from gluon_attn.forward.table import PACKAGED, hopper_config
from tests.gluon_attn.problems import problem

ROOT = Path(__file__).parents[2]
H200 = Device.hopper()
TIMED = json.loads(predict.TIMED.read_text(encoding="utf-8"))
WRITTEN = json.loads(predict.PREDICTED.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def every() -> list[Sample]:
    return predict.samples(TIMED, H200)


def test_labels_are_read_as_they_are_written():
    for name in {kernel["config"] for kernel in TIMED["kernels"]}:
        config = predict.config_of(name, 2)
        assert label(config) == re.sub(r"(kv\d)t", r"\1T", name)  # turns of before, which a t stood for
    with pytest.raises(ValueError, match="label: expected one as '2x128 q2kv2Te2il 1cta', got 'cudnn'"):
        predict.config_of("cudnn", 2)


@pytest.mark.parametrize("kernel", TIMED["kernels"], ids=lambda k: f"{k['dtype'][6:]} {k['head_dim']} {k['config']}")
def test_issue_slots_are_as_in_the_compiled_kernels(kernel):
    size = 1 if "float8" in kernel["dtype"] else 2
    config = predict.config_of(kernel["config"], size)
    slots = predict.issue_slots(config.block_n, kernel["head_dim"], size, config.integer_max)
    assert slots == pytest.approx(min(loop["instructions"] for loop in kernel["loops"]), rel=0.07)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        # 32 heads of 4 row blocks of 256: no program has more than one, of 16 key blocks
        ({"q_len": 1024, "kv_len": 1024}, (16, 0, 1)),
        # 8 row blocks of each: 256 items on 132 programs
        ({"q_len": 2048, "kv_len": 2048}, (64, 0, 2)),
        # the last key block is not full
        ({"q_len": 256, "kv_len": 1000}, (16, 1, 1)),
        # 8 row blocks, each with 4 masked key blocks, in 128 pairs of 36 key blocks
        ({"q_len": 2048, "kv_len": 2048, "causal": True}, (36, 8, 2)),
    ],
)
def test_the_program_with_most_to_do(sizes, expected):
    config = hopper_config(4, 64, 2, 4, 112)
    plan = Plan.of(problem(head_dim=64, **sizes), config, H200)
    assert predict.most_of_a_program(plan) == expected


def test_all_work_is_handed_out():
    """Over all programs as many key blocks as there are, whatever the order: on one program it is the whole."""
    asked = problem(head_dim=128, causal=True, q_len=3000, kv_len=3000, batch=1, heads=7, kv_heads=7)
    one = dataclasses.replace(H200, sm_count=1)
    seen = 7 * sum(-(-min(first + 128, 3000) // 128) for first in range(0, 3000, 128))
    for longest in (False, True):
        config = hopper_config(2, 128, 2, 2, 232, last_heads_longest_first=longest)
        blocks, masked, row_blocks = predict.most_of_a_program(Plan.of(asked, config, one))
        assert (blocks, row_blocks) == (seen, 7 * 24)
        assert masked == 7 * 24


def test_counts_of_a_key_block():
    counts = Counts.of(problem(), hopper_config(2, 128, 2, 2, 232, num_ctas=2), H200)
    assert counts.tensor == 2 * 2 * 64 * 128 * 256 / 4096
    assert counts.exp2 == 2 * 64 * 128 / 16
    assert counts.bytes == 128 * 256 * 2 / 2
    fp8 = Counts.of(problem(dtype=torch.float8_e4m3fn), hopper_config(2, 128, 2, 2, 240), H200)
    assert fp8.tensor == counts.tensor / 2
    assert fp8.transposed_bytes == 2 * 2 * 16 * 1024 * 128
    assert counts.transposed_bytes == 0


def test_a_fit_finds_what_times_were_made_of(every):
    made = Constants(tensor=1.3, issue=0.9, exp2=0.5, launch_us=6.0, row_block=500.0, turns=0.95)
    some = [s.counts for s in every[::5]]
    ms = predict.predicted_ms(some, made)
    found = predict.predicted_ms(some, predict.fitted(some, list(ms)))
    assert np.abs(found / ms - 1).mean() < 0.02


def test_a_config_is_judged_by_a_fit_that_has_not_seen_it(every):
    """Nor its length; and those that differ in the number of CTAs alone are in one half."""
    some = [s for s in every if s.point.length in (512, 1024)]
    _, ms = predict.judged(some)
    _, others = predict.judged([dataclasses.replace(s, ms=s.ms * 2) if s.part != 3 else s for s in some])
    same = [a == b for a, b in zip(ms, others, strict=True)]
    assert same == [s.part == 0 for s in some]
    halves: dict[tuple[str, int, str], set[int]] = {}
    for s in every:
        halves.setdefault((s.point.dtype, s.point.head_dim, s.label.rpartition(" ")[0]), set()).add(s.part // 2)
    assert all(len(half) == 1 for half in halves.values())
    assert {s.part % 2 for s in every if s.point.length == 512} != {s.part % 2 for s in every if s.point.length == 1024}
    assert len(every) == sum(len(point["results"]) - 1 for point in TIMED["points"])


def test_measures():
    assert predict.rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert predict.rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    pairs = [(1.0, 5.0), (1.2, 4.0), (2.0, 6.0), (3.0, 7.0)]  # measured, predicted
    assert predict.lost_by_choice(pairs) == pytest.approx(0.2)
    assert predict.in_first_half(pairs)
    assert not predict.in_first_half([(m, -p) for m, p in pairs])


def test_what_is_predicted_to_be_equal_gains_nothing_by_the_order_of_a_list():
    """Ranks are shared, and of what is chosen among equals the slowest counts."""
    measured = [1.0, 1.2, 2.0, 3.0]
    assert predict.rank_correlation(measured, [5.0] * 4) == 0
    for order in itertools.permutations(zip(measured, (1.0, 1.0, 1.0, 2.0), strict=True)):
        assert predict.rank_correlation(*zip(*order, strict=True)) == pytest.approx(0.6**0.5)
        assert predict.lost_by_choice(order) == 1
        assert not predict.in_first_half(order)


def test_the_errors_are_those_of_the_constants(every):
    """Of each part, on another."""
    fits = [Constants(**fit) for fit in WRITTEN["constants_of_parts"]]
    ms = [float(predict.predicted_ms([s.counts], fits[s.part])[0]) for s in every]
    rates = predict.rates(every, ms)
    assert rates == {
        point: {name: pytest.approx(rate, rel=1e-3) for name, rate in of_point.items()}
        for point, of_point in WRITTEN["predicted_tflops"].items()
    }
    table = predict.error_table(every, ms, lambda s: s.kind) + predict.error_table(every, ms, lambda s: "all")
    for row, committed in zip(table, WRITTEN["errors"], strict=True):
        assert row == {k: v if isinstance(v, str) else pytest.approx(v, abs=1e-3) for k, v in committed.items()}


@pytest.mark.parametrize("constants", [predict.constants(), *(Constants(**c) for c in WRITTEN["constants_of_parts"])])
def test_constants_are_a_fit(every, constants):
    """None of them a little more or less is better by much: where a descent ends, depends on the last bits."""
    fits = [Constants(**c) for c in WRITTEN["constants_of_parts"]]
    known = [s for s in every if constants not in fits or s.part == fits.index(constants) ^ 3]
    measured = np.log([s.ms for s in known])

    def loss(c: Constants) -> float:
        return float(np.mean((np.log(predict.predicted_ms([s.counts for s in known], c)) - measured) ** 2))

    least = loss(constants)
    for field, factor in itertools.product(dataclasses.fields(Constants), (0.97, 1.03)):
        near = dataclasses.replace(constants, **{field.name: getattr(constants, field.name) * factor})
        assert loss(near) > 0.98 * least


def test_the_command_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    """From any folder. Where its descent ends may differ with another numpy, and so do the errors, by little."""
    monkeypatch.chdir(tmp_path)
    predict.main(["--out", "out.json"])
    written = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    printed = capsys.readouterr().out
    assert "\n".join(predict.lines(written["errors"])) in printed
    assert written["timed"] == WRITTEN["timed"]
    assert written.keys() == WRITTEN.keys()
    for row, committed in zip(written["errors"], WRITTEN["errors"], strict=True):
        for name in ("kind", "points", "samples"):
            assert row[name] == committed[name]
        assert row["mean_error"] == pytest.approx(committed["mean_error"], abs=0.01)


def test_a_file_elsewhere_keeps_its_name():
    assert predict.named(predict.TIMED) == "bench/results/h200_candidates.json"
    assert predict.named(Path("/elsewhere/timed.json")) == "/elsewhere/timed.json"


def test_the_page_has_the_error_table():
    page = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    assert "\n".join(predict.lines(WRITTEN["errors"])) in page


def test_only_kinds_whose_table_has_it_are_ordered():
    """In bf16, where the fastest is all but always in the half that is predicted to be the faster."""
    kinds = {row["kind"]: row for row in WRITTEN["errors"]}
    for head_dim, causal in itertools.product((64, 128, 256), (False, True)):
        row = kinds[f"bf16 D={head_dim} {'causal' if causal else 'full'}"]
        supported = row["rank_correlation"] > 0.6 and row["fastest_among_first_half"] > 0.9
        assert predict.can_order(problem(head_dim=head_dim, causal=causal), H200) == supported
    assert not predict.can_order(problem(), Device.blackwell())
    for dtype in (torch.float8_e4m3fn, torch.float16):  # of the latter nothing was timed
        assert not predict.can_order(problem(dtype=dtype), H200)


def test_configs_in_order():
    slow, fast = hopper_config(1, 128, 2, 2, 232), hopper_config(2, 128, 2, 2, 232, turns=True)
    asked = problem(q_len=4096, kv_len=4096)
    assert predict.in_order([slow, fast], asked, H200) == predict.in_order([fast, slow], asked, H200) == [fast, slow]


def test_the_tuner_begins_with_what_is_predicted_to_be_fast():
    """Where that can be told; what is pruned comes last, and nothing is left out."""
    asked = problem(q_len=4096, kv_len=4096)
    choices = Forward(asked, H200, PACKAGED)
    first = [config for config in choices.first() if isinstance(config, HopperConfig)]
    able = [config for config in first if choices.why_pruned(config) is None]
    assert first[: len(able)] == able == predict.in_order(able[::-1], asked, H200)
    assert len(able) < len(first) == len(set(first))
    assert {row.config for row in PACKAGED if row.is_of_kind(asked, H200)} <= set(first)
