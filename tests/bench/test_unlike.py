"""The bench of V's head dim unlike Q's: what is called, what is refused, and what is made of the times."""

import argparse
import dataclasses
import json
from functools import partial

import pytest
import torch

from bench import passes, unlike
from bench.timing import Timing
from gluon_attn import attention
from gluon_attn.device import Device
from gluon_attn.reference import reference_attention
from gluon_attn.testing import backward_call


def by_reference(backend, q, k, v, causal):
    return reference_attention(q, k, v, causal=causal)[0]


@pytest.fixture
def stand_ins(monkeypatch):
    """gluon_cpu for the card. Nothing is timed: the first call takes 1 ms, each one after it 1 ms more."""

    def timed(calls, rounds):
        return {name: Timing(0.001 * (i + 1), (0.001,)) for i, name in enumerate(calls)}

    monkeypatch.setattr(unlike, "time_interleaved", timed)
    monkeypatch.setattr(unlike, "attention", partial(attention, device=Device.hopper()))
    monkeypatch.setattr(unlike, "in_one_launch", partial(unlike.in_one_launch, device="cpu"))
    monkeypatch.setattr(unlike, "backward_call", partial(backward_call, device=Device.hopper()))
    monkeypatch.setattr(unlike, "sdpa", by_reference)
    monkeypatch.setattr(passes, "by_cudnn", lambda q, k, v: reference_attention(q, k, v, causal=True)[0])
    monkeypatch.setattr(passes, "ANCHOR", (1, 1, 40, 64))
    small = tuple(dataclasses.replace(point, length=72, heads=2) for point in unlike.POINTS)
    monkeypatch.setattr(unlike, "POINTS", small)
    monkeypatch.setattr(unlike, "forwards_of", partial(unlike.forwards_of, device="cpu"))
    monkeypatch.setattr(passes, "provenance", lambda commit: {"commit": commit})


def found_by_a_run(tmp_path):
    out = tmp_path / "found.json"
    unlike.run(argparse.Namespace(sets=["unlike"], rounds=1, peers=None, commit="abc", out=out))
    return json.loads(out.read_text())["points"]


def test_both_passes_are_timed_beside_cudnn(stand_ins, tmp_path, capsys):
    points = found_by_a_run(tmp_path)
    assert [(p["pass"], p["point"]["causal"]) for p in points] == [
        ("forward", True), ("backward", True), ("forward", False), ("backward", False),
    ]  # fmt: skip
    for point in points:
        results = point["results"]
        other = [unlike.OTHER_NAME] * (point["pass"] == "backward")
        assert list(results) == ["ours", "cudnn", passes.ANCHOR_NAME, *other]
        assert results["ours"]["ms"] == pytest.approx(1)
        assert point["ours_over_cudnn"] == pytest.approx(2)
        # cuDNN's plain call takes 3 ms here: FlashAttention-4 is as much slower as that is than it was.
        fa4 = unlike.FA4_TFLOPS[point["pass"], point["point"]["causal"]]
        assert point["fa4_carried_tflops"] == pytest.approx(fa4 * passes.ANCHOR_MS[point["pass"]] / 3)
    flops = 2 * 2 * 72**2 * (192 + 128)
    assert points[2]["results"]["ours"]["tflops"] == pytest.approx(flops / 1e-3 / 1e12)
    assert points[3]["results"]["ours"]["tflops"] == pytest.approx(2 * 2 * 72**2 * (3 * 192 + 2 * 128) / 1e-3 / 1e12)
    assert "| 2.000 |" in capsys.readouterr().out


def test_what_cudnn_refuses_is_said(stand_ins, monkeypatch, tmp_path, capsys):
    def refuses(*_):
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(unlike, "sdpa", refuses)
    for point in found_by_a_run(tmp_path):
        assert point["missing"] == {"cudnn": "No available kernel. Aborting execution."}
        assert "ours_over_cudnn" not in point
        assert "ours_over_fa4_carried" in point
    assert "no cudnn: No available kernel" in capsys.readouterr().out


def test_what_fails_is_no_refusal(stand_ins, monkeypatch, tmp_path):
    def fails(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(unlike, "sdpa", fails)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        found_by_a_run(tmp_path)


def test_the_points_are_those_of_the_published_figures():
    assert [(p.head_dim, p.head_dim_v, p.batch, p.heads, p.length) for p in unlike.POINTS] == 2 * [
        (192, 128, 1, 16, 8192)
    ]
    assert passes.ANCHOR == (1, 16, 16384, 128)
    assert torch.bfloat16 == unlike.POINTS[0].tensors("meta")[0].dtype
