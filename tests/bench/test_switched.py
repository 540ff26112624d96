"""bench.switched without a card: its calls, and what it shows of a result file."""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bench import switched

RESULT = Path(__file__).parents[2] / "bench/results/h200_switched.json"


def test_calls_have_names_of_their_own():
    shapes = switched.shapes()
    assert len({shape.name for shape in shapes}) == len(shapes)
    assert {shape.set for shape in shapes} == {"head dims", "few queries", "grouped", "small"}


def test_both_passes_of_a_call(monkeypatch):
    """On the CPU, where torch computes them: the shapes are those of the call."""
    shape = switched.Shape(set="small", head_dim=16, q_len=5, kv_len=7, batch=2, heads=4, kv_heads=2)
    inputs = [torch.randn(2, 4, 5, 16), *(torch.randn(2, 2, 7, 16) for _ in range(2))]
    monkeypatch.setattr(switched.Shape, "tensors", lambda self: inputs)
    passes = switched.passes_of(shape)
    out = passes["forward"]()
    q, k, v = inputs
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    assert not out.requires_grad
    assert [grad.shape for grad in passes["backward"]()] == [t.shape for t in inputs]
    assert shape.name == "D=16 full 5 of 7 keys, B=2 H=4/2"


def test_calls_that_are_handed_on(monkeypatch):
    """They go through a function in Python to the kernel that was there, with all arguments, until they are not."""
    name = "_scaled_dot_product_flash_attention_for_cpu"  # of operators, that which a CPU has a kernel of
    monkeypatch.setattr(switched.torch_sdpa, "FLASH", {name: None})
    monkeypatch.setattr(switched.torch_sdpa, "CUDNN", {})
    handed: list[str] = []
    real = switched.hand_on

    def noting(original, device, *args, **kw):
        handed.append(name)
        return real(original, device, *args, **kw)

    monkeypatch.setattr(switched, "hand_on", noting)
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    with switched.handing_on(key="CPU"):
        got = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    assert torch.equal(got, want)
    assert handed == [name]
    F.scaled_dot_product_attention(q, k, v)
    assert handed == [name]


def test_what_is_shown(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.switched", "--show", str(RESULT)])
    switched.main()
    printed = capsys.readouterr().out
    points = json.loads(RESULT.read_text(encoding="utf-8"))["points"]
    by_call, in_a_row = printed.split("| us of each, in a row |")
    assert len(points) == len(switched.shapes()) == by_call.count("\n| D=")
    assert in_a_row.count("\n| D=") == sum("in_a_row" in point for point in points) > 0
    for which in switched.PASSES:
        ratios = [switched.ratio(point["passes"][which]) for point in points]
        slower = sum(r < 1 for r in ratios)
        assert f"{which}: slower at {slower} of {len(points)} calls, lowest {min(ratios):.2f}" in printed


def test_without_a_card(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench.switched"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="expected a Hopper card, got none"):
        switched.main()
