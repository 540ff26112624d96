"""The bench of masks and changed scores: what is called, and what is made of the times."""

import argparse
import json
from functools import partial

import pytest
import torch

from bench import features
from bench.__main__ import main
from bench.timing import Timing
from gluon_attn import attention
from gluon_attn.device import Device
from gluon_attn.reference import reference_attention

SMALL = features.Shape(head_dim=64, batch=1, heads=2, kv_heads=1, length=136)
ALL = tuple(case for cases in features.SETS.values() for case in cases)
FLEX = [case for case in ALL if case.is_in_flex]


@pytest.mark.parametrize("case", FLEX, ids=[case.name for case in FLEX])
def test_flex_attention_computes_the_same(case):
    """As ours is to be, so that the two times are of the same."""
    from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention

    shape = features.Shape(head_dim=16, batch=1, heads=2, kv_heads=2, length=256)
    q, k, v = (t.double() for t in shape.tensors("cpu"))
    keeps = features.causal if case.keeps is None else and_masks(features.causal, case.keeps(shape, "cpu"))
    mask = create_block_mask(keeps, None, None, shape.length, shape.length, device="cpu")
    mod = None if case.score_mod is None else case.score_mod(shape, "cpu")
    theirs = flex_attention(q, k, v, score_mod=mod, block_mask=mask)
    options = case.options(shape, "cpu")
    if "mask_mod" in options:  # the reference has no functions of Gluon
        i, j = torch.arange(shape.length)[:, None], torch.arange(shape.length)
        options = {"mask": case.keeps(shape, "cpu")(0, 0, i, j)}
    ours, _ = reference_attention(q, k, v, causal=True, **options)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.fixture
def stand_ins(monkeypatch):
    """gluon_cpu for the card. Nothing is timed, but everything is called."""

    def timed(calls, rounds):
        return {name: Timing(0.001 * (i + 1), (0.001,)) for i, (name, call) in enumerate(calls.items()) if call()}

    def truthy(call):
        return lambda: call() is not None

    monkeypatch.setattr(
        features, "time_interleaved", lambda calls, rounds: timed({n: truthy(c) for n, c in calls.items()}, rounds)
    )
    monkeypatch.setattr(features, "SHAPES", (SMALL,))
    tensors = features.Shape.tensors
    monkeypatch.setattr(features.Shape, "tensors", lambda shape: tensors(shape, "cpu"))
    monkeypatch.setattr(features, "attention", partial(attention, device=Device.hopper()))
    monkeypatch.setattr(features, "by_cudnn", lambda q, k, v: reference_attention(q, k, v, causal=True)[0])
    monkeypatch.setattr(features, "forwards_of", partial(features.forwards_of, device="cpu"))
    monkeypatch.setattr(features, "provenance", lambda commit: {"commit": commit})


def test_a_run_times_each_pass_of_each_case(stand_ins, monkeypatch, tmp_path, capsys):
    cases = (features.window(8), features.SINKS, features.DOCUMENTS, features.window_by_function(20))
    monkeypatch.setitem(features.SETS, "few", cases)
    out = tmp_path / "found.json"
    features.run(argparse.Namespace(sets=["few"], rounds=1, peers=[], commit="abc", out=out))
    found = json.loads(out.read_text())
    assert [p["pass"] for p in found["points"]] == ["forward", "backward"]
    for point in found["points"]:
        assert list(point["results"]) == ["cudnn causal", "ours causal", *(f"ours {case.name}" for case in cases)]
        assert point["results"]["ours window 8"]["over_ours_causal"] == pytest.approx(1.5)
    assert "| ours sinks | 2.000 | 2.000 |" in capsys.readouterr().out


def test_flex_attention_is_timed_beside_ours(stand_ins, monkeypatch, tmp_path, capsys):
    """Unless it is left out; and what it has not is said to be missing."""
    monkeypatch.setattr(features, "flex", lambda *_: lambda: torch.zeros((), requires_grad=True) + 0)
    monkeypatch.setattr(features, "calls_of", lambda which, forwards, tensors: {name: lambda: 0 for name in forwards})
    monkeypatch.setitem(features.SETS, "few", (features.window(8), features.SINKS))
    given = argparse.Namespace(sets=["few"], rounds=1, peers=None, commit="abc", out=tmp_path / "found.json")
    features.run(given)
    for point in json.loads(given.out.read_text())["points"]:
        results = point["results"]
        assert list(results) == ["cudnn causal", "ours causal", "ours window 8", "flex window 8", "ours sinks"]
        assert results["ours window 8"]["over_flex"] == pytest.approx(3 / 4)
        assert [name for name in results if "over_flex" in results[name]] == ["ours window 8"]
        assert point["not_in_flex"] == ["sinks"]
    said = capsys.readouterr().out
    assert "| ours window 8 | 0.750 | 0.750 |" in said
    assert "FlexAttention has no sinks." in said
    given.peers = []
    features.run(given)
    assert "flex" not in given.out.read_text().replace("not_in_flex", "")


def test_only_sinks_are_not_in_flex_attention():
    assert [case.name for case in ALL if not case.is_in_flex] == ["sinks"]
    assert {"window 128", "window 1024", "softcap 30", "alibi", "documents", "bias"} <= {case.name for case in FLEX}


def test_sets_of_features_are_run_alone(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench", "--sets", "sweep", "masks"])
    with pytest.raises(SystemExit):
        main()
    assert "--sets: expected no others with masks, got sweep; run them apart" in capsys.readouterr().err
