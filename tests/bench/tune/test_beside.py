"""How a table does beside others."""

import dataclasses
from typing import Any

import pytest

from bench.points import sweep
from bench.predict import problem_of
from bench.tune.beside import LIMITS, fa3_over_cudnn, geometric_means, ratios, table
from bench.tune.search import shape_of
from bench.tune.sweeps import HEAD_DIMS
from gluon_attn.score_mod import softcap
from tests.gluon_attn.problems import problem


def test_the_line_of_every_point_of_the_sweep():
    points = [p for dtype in ("bf16", "e4m3") for p in sweep(dtype, HEAD_DIMS)]
    lines = {point.name: fa3_over_cudnn(shape_of(problem_of(point))) for point in points}
    assert len(lines) == 48
    assert None not in lines.values()
    assert lines["D=64 full 512"] == 0.85
    assert lines["D=128 causal 16384"] == 1.29


@pytest.mark.parametrize(
    "unlike",
    [{"batch": 3}, {"kv_heads": 8}, {"kv_len": 256}, {"head_dim_v": 64}, {"q_len": 600, "kv_len": 600}],
    ids=str,
)
def test_what_was_not_timed_has_no_line(unlike):
    point = next(p for p in sweep("bf16", HEAD_DIMS) if p.name == "D=128 full 512")
    assert fa3_over_cudnn(shape_of(dataclasses.replace(problem_of(point), **unlike))) is None


def test_limits_and_scores_have_no_line_and_are_named():
    shape: dict[str, Any] = shape_of(problem_of(sweep("bf16", (64,))[0]))
    assert fa3_over_cudnn(shape) is not None
    found = {"shape": shape, "chosen": "a", "in_use": "a", "gain": 0.0, "spread": 0.0}
    plain = list(table({"shapes": [found]}))[2]
    for limit in ({"left": 20}, {"right": 5}, {"chunk": 64}, {"scores": "softcap"}):
        assert fa3_over_cudnn(shape | limit) is None
        [(name, value)] = limit.items()
        of_limit = list(table({"shapes": [found | {"shape": shape | limit}]}))[2]
        assert of_limit.split(" | ")[0] == f"{plain.split(' | ')[0]}, {name} {value}"


def test_limits_are_part_of_the_shape_where_they_hide_something():
    asked = dataclasses.replace(problem(), causal=True, score_mod=softcap(9.0))
    every: list[dict[str, Any]] = [{"left": 20}, {"left": 20, "causal": False, "right": 30}, {"chunk": 64}]
    for fields in every:
        shape = shape_of(dataclasses.replace(asked, **fields))
        of_limits = {name: shape[name] for name in LIMITS if name in shape}
        of_fields = {name: n for name, n in fields.items() if name != "causal"}
        assert of_limits == of_fields | {"scores": "softcap", "softcap": 9.0}
    shape = shape_of(dataclasses.replace(asked, left=asked.kv_len, score_mod=None))
    assert not {*LIMITS} & shape.keys()


def test_means_are_of_speeds():
    assert ratios({"peer": 2.0, "in_use": 1.0, "new": 0.5}) == {
        "in_use_over_peer": 2.0, "new_over_peer": 4.0, "new_over_in_use": 2.0
    }  # fmt: skip
    one, other = {"peer": 2.0, "in_use": 2.0, "new": 2.0}, {"peer": 8.0, "in_use": 2.0, "new": 0.5}
    expected = {"in_use_over_peer": 2.0, "new_over_peer": 4.0, "new_over_in_use": 2.0}
    assert geometric_means([one, other]) == pytest.approx(expected)
    lines = [one | {"fa3_over_cudnn": 1.0}, other | {"fa3_over_cudnn": 1.21}]
    assert geometric_means(lines) == pytest.approx(expected | {"fa3_over_cudnn": 1.1})
    assert geometric_means([lines[0], other]) == pytest.approx(expected)  # not of some of them alone


def test_a_file_without_times_beside_the_peer_is_shown_too():
    shape = {"dtype": "bfloat16", "head_dim": 64, "head_dim_v": 64, "causal": True, "q_len": 512}
    found: dict[str, Any] = {"shape": shape, "chosen": "a", "in_use": "b", "gain": 0.05, "spread": 0.01}
    beside = {"peer": 2.0, "in_use": 2.0, "new": 1.0, "fa3_over_cudnn": 1.21}
    assert list(table({"shapes": [found, found | {"beside": beside}]}))[2:] == [
        "| bfloat16 D=64 causal 512 | a | +5.0% ±1.0% | – | – | – |",
        "| bfloat16 D=64 causal 512 | a | +5.0% ±1.0% | 1.000 | 2.000 | 1.21 |",
        "| geometric mean of 1, bfloat16 | | +100.0% | 1.000 | 2.000 | 1.210 |",
    ]
    found["beside"] = beside
    unlike = found | {
        "shape": shape | {"head_dim": 192, "head_dim_v": 128},
        "beside": {"peer": 2, "in_use": 1, "new": 1},
    }
    of_sets = list(table({"shapes": [found, unlike, unlike | {"of_gradients": True}]}))[3:]
    assert [line.split(" | ")[0] for line in of_sets] == [
        "| bfloat16 D=192/128 causal 512",
        "| gradients, bfloat16 D=192/128 causal 512",
        "| geometric mean of 1, bfloat16",
        "| geometric mean of 1, bfloat16 D=192/128",
        "| geometric mean of 1, gradients, bfloat16 D=192/128",
    ]
    assert "1.210" in of_sets[2]  # which those without FlashAttention-3's line leave alone
