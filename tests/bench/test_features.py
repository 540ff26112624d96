"""The bench of masks and changed scores: what is called, and what is made of the times."""

import argparse
import json
import pickle
from functools import partial, partialmethod
from typing import Any

import pytest
import torch

from bench import __main__ as bench_main
from bench import features, passes
from bench.__main__ import main
from bench.ahead import Failed
from bench.timing import Timing
from gluon_attn import attention
from gluon_attn.device import Device
from gluon_attn.reference import reference_attention

SMALL = features.Shape(head_dim=64, batch=1, heads=2, kv_heads=1, length=136)
ALL = features.SETS["masks"]
FLEX = [case for case in ALL if case.is_in_flex]


@pytest.mark.parametrize("case", FLEX, ids=[case.name for case in FLEX])
def test_flex_attention_computes_the_same(case):
    """As ours is to be, so that the two times are of the same; in each batch, which documents of their own have."""
    from torch.nn.attention.flex_attention import flex_attention

    shape = features.Shape(head_dim=16, batch=2, heads=2, kv_heads=2, length=256)
    q, k, v = (t.double() for t in shape.tensors("cpu"))
    data = case.data(shape, "cpu")
    if case.name == "documents":
        data = torch.stack([torch.arange(256) // 50, torch.arange(256) // 200]).int()
    call: Any = features.flex(case, shape, [q, k, v], data, "cpu")
    assert call.keywords["block_mask"].shape[0] == shape.batch
    theirs = flex_attention(*call.args, **call.keywords)
    options = case.options(data)
    if "mask_mod" in options:  # the reference has no functions of Gluon
        i, j = torch.arange(shape.length)[:, None], torch.arange(shape.length)
        options = {"mask": case.keeps(data)(0, 0, i, j)}
    ours, _ = reference_attention(q, k, v, causal=True, **options)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_a_graph_of_flex_attention_is_differentiated_again_and_again():
    """torch gives memory of the forward pass to the backward otherwise, and refuses the second one."""
    import torch._dynamo.config
    import torch._functorch.config

    features.flex(features.CAUSAL, SMALL, SMALL.tensors("cpu"), None, "cpu")
    assert not torch._functorch.config.donated_buffer
    assert torch._dynamo.config.recompile_limit >= len(features.PASSES) * len(features.SHAPES) * len(FLEX)


def test_the_visible_share_is_counted():
    share = partial(features.visible_share, shape=SMALL, device="cpu")
    pairs = 136 * 137 / 2
    assert share(features.SINKS) == 1
    assert share(features.window(8)) == pytest.approx((9 * 136 - 36) / pairs)
    assert share(features.chunk(136)) == 1
    two = features.Shape(head_dim=64, batch=2, heads=1, kv_heads=1, length=3000)
    lengths = [int(n) for ids in features.documents_of(two, "cpu") for n in ids.unique(return_counts=True)[1]]
    documents = features.visible_share(features.DOCUMENTS, two, "cpu")
    assert documents == pytest.approx(sum(n * (n + 1) / 2 for n in lengths) / (2 * 3000 * 3001 / 2))
    assert documents < 1


@pytest.fixture
def stand_ins(monkeypatch):
    """gluon_cpu for the card. Nothing is timed, but everything is called."""

    def times(calls, rounds):
        assert all(call() is not None for call in calls.values())
        return {name: Timing(0.001 * (i + 1), (0.001,)) for i, name in enumerate(calls)}

    monkeypatch.setattr(features, "time_interleaved", times)
    monkeypatch.setattr(features, "SHAPES", (SMALL,))
    monkeypatch.setattr(features, "compile_ahead", lambda jobs: None)
    monkeypatch.setattr(features, "attention", partial(attention, device=Device.hopper()))
    monkeypatch.setattr(features, "by_cudnn", lambda q, k, v: reference_attention(q, k, v, causal=True)[0])
    monkeypatch.setattr(features, "measure", partial(features.measure, device="cpu"))
    monkeypatch.setattr(features.Timed, "call", partialmethod(features.Timed.call, device="cpu"))
    monkeypatch.setattr(passes, "provenance", lambda commit: {"commit": commit})


def arguments(tmp_path, peers):
    return argparse.Namespace(sets=["few"], rounds=1, peers=peers, commit="abc", out=tmp_path / "found.json")


def test_a_run_times_each_pass_of_each_case(stand_ins, monkeypatch, tmp_path, capsys):
    of_masks = features.window(8), features.SINKS, features.DOCUMENTS, features.window_by_function(20)
    cases = (*of_masks, features.BIAS, features.LEARNED_BIAS)
    monkeypatch.setitem(features.SETS, "few", cases)
    given = arguments(tmp_path, [])
    features.run(given)
    points = json.loads(given.out.read_text())["points"]
    assert [p["pass"] for p in points] == ["forward", "backward"]
    everywhere = ["cudnn causal", "ours causal", *(f"ours {case.name}" for case in cases[:-1])]
    assert [list(p["results"]) for p in points] == [everywhere, [*everywhere, "ours bias with its gradient"]]
    for point in points:
        assert point["results"]["ours window 8"]["over_ours_causal"] == pytest.approx(1.5)
        seen = features.visible_share(features.window(8), SMALL, "cpu")
        assert point["results"]["ours window 8"]["of_ideal"] == pytest.approx(seen / 1.5)
        # FlashAttention-4's sinks took 0.84 and 0.75 times what cuDNN's causal call did, which takes 1 ms here.
        fa4 = {"forward": 0.84, "backward": 0.75}[point["pass"]]
        assert point["results"]["ours sinks"]["over_fa4_carried"] == pytest.approx(4 / fa4)
    said = capsys.readouterr().out
    assert "| ours sinks | 2.000 | 2.000 |" in said
    assert "| ours bias with its gradient | – | 4.000 |" in said


@pytest.mark.parametrize("case", [features.SINKS, features.LEARNED_BIAS, features.BIAS], ids=lambda case: case.name)
def test_gradients_of_what_is_learned_are_timed(stand_ins, case):
    job = features.Timed(who="ours", case=case.name, shape=SMALL, which="backward")
    gradients = job.call([t.requires_grad_() for t in SMALL.tensors("cpu")])()
    assert len(gradients) == 3 + case.learned


def test_flex_attention_is_timed_beside_ours(stand_ins, monkeypatch, tmp_path, capsys):
    """Unless it is left out; and what it has not, or fails at, is said to be missing."""

    def flex(case, *_):
        def call():
            if case.name == "softcap 30":
                raise ValueError("no room\nat all")
            return torch.zeros((), requires_grad=True) + 0

        return call

    monkeypatch.setattr(features, "flex", flex)
    monkeypatch.setattr(features, "gradients_of", lambda forward, inputs: forward)
    monkeypatch.setitem(features.SETS, "few", (features.window(8), features.SINKS, features.soft_cap(30.0)))
    given = arguments(tmp_path, None)
    features.run(given)
    for point in json.loads(given.out.read_text())["points"]:
        results = point["results"]
        assert list(results) == [
            "cudnn causal", "ours causal", "ours window 8", "flex window 8", "ours sinks", "ours softcap 30",
        ]  # fmt: skip
        assert results["ours window 8"]["over_flex"] == pytest.approx(3 / 4)
        assert [name for name in results if "over_flex" in results[name]] == ["ours window 8"]
        assert point["missing"] == {"flex softcap 30": "ValueError: no room"}
    said = capsys.readouterr().out
    assert "| ours window 8 | 0.750 | 0.750 |" in said
    assert "no flex softcap 30: ValueError: no room" in said
    given.peers = []
    features.run(given)
    assert "flex" not in given.out.read_text()


def test_each_call_is_compiled_ahead(monkeypatch, capsys):
    """FlexAttention's, which take longest, first; one that fails is tried again where it is timed."""
    ran = []

    class Few:
        def __init__(self, work, *, at_once, limit_s):
            assert work is features.call_once
            assert at_once <= features.MAX_PROCESSES

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def run(self, jobs):
            ran.extend(pickle.loads(pickle.dumps(jobs)))
            return enumerate([Failed("OutOfMemoryError"), *[None] * (len(jobs) - 1)])

    monkeypatch.setattr(features, "Workers", Few)
    features.compile_ahead(list(features.timed((features.SINKS, features.BIAS), SMALL, "backward", True)))
    assert [job.name for job in ran] == ["flex bias", "cudnn causal", "ours causal", "ours sinks", "ours bias"]
    assert "flex bias, backward: OutOfMemoryError; it is tried again" in capsys.readouterr().out


def test_only_sinks_are_not_in_flex_attention():
    assert [case.name for case in ALL if not case.is_in_flex] == ["sinks"]
    assert {"window 128", "window 1024", "softcap 30", "alibi", "documents", "bias"} <= {case.name for case in FLEX}


def test_what_flash_attention_4_has_figures_of_is_timed():
    names = {case.name for case in ALL} | {"causal"}
    assert set(features.FA4_OVER_CUDNN) == {(s.head_dim, which) for s in features.SHAPES for which in features.PASSES}
    assert set().union(*features.FA4_OVER_CUDNN.values()) <= names


def test_sets_of_features_are_run_alone(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench", "--sets", "sweep", "masks"])
    with pytest.raises(SystemExit):
        main()
    assert "--sets: expected no others with masks, got sweep; run them apart" in capsys.readouterr().err


def test_sets_of_several_benches_have_a_file_each(monkeypatch, tmp_path):
    ran = []
    for module in bench_main.APART:
        name = module.__name__
        monkeypatch.setattr(module, "run", lambda args, name=name: ran.append((name, args.sets, args.out.name)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("sys.argv", ["bench", "--sets", "varlen", "masks", "--out", str(tmp_path / "found.json")])
    main()
    assert ran == [
        ("bench.features", ["masks"], "found_masks.json"),
        ("bench.varlen", ["varlen"], "found_varlen.json"),
    ]
    ran.clear()
    monkeypatch.setattr("sys.argv", ["bench", "--sets", "masks", "--out", str(tmp_path / "found.json")])
    main()
    assert ran == [("bench.features", ["masks"], "found.json")]
