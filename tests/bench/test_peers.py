"""What of ours and of its peers is timed."""

import dataclasses
from collections.abc import Sequence

import torch

from bench import peers
from bench.candidates import CANDIDATES, label
from bench.points import Point
from gluon_attn import ForwardConfig


def test_calls_of_a_point(monkeypatch):
    """What of ours and of its peers is timed, by dtype, CTA counts and configs."""
    monkeypatch.setattr(peers, "flex", lambda *_: lambda: None)
    monkeypatch.setattr(Point, "tensors", lambda self: [torch.zeros(1, 1, 8, 16, dtype=torch.bfloat16)] * 3)
    plain = Point(head_dim=64, causal=False, length=512)

    def names(point: Point, configs: Sequence[ForwardConfig] = (), ctas: Sequence[int] = (1, 2)) -> list[str]:
        return list(peers.calls_of(point, configs, ["fa2", "flex"], ctas))

    assert names(plain) == ["cudnn", "fa2", "flex", "ours", "ours 1cta", "ours 2cta"]
    assert names(dataclasses.replace(plain, dtype="fp16"), ctas=[2]) == ["cudnn", "fa2", "flex", "ours", "ours 2cta"]
    assert names(dataclasses.replace(plain, dtype="e4m3"), ctas=[1]) == ["cudnn", "ours", "ours 1cta"]
    assert names(dataclasses.replace(plain, baseline_length=512))[3:] == ["ours", "ours, plainer"]
    configs = CANDIDATES[64, 64, 2][:2]
    assert names(plain, configs)[3:] == [label(config) for config in configs]
