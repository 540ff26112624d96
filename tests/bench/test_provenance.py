"""Where a figure comes from."""

from types import SimpleNamespace

import pytest
import torch

from bench import provenance
from bench.sustained import Sampler


@pytest.mark.parametrize("changed", ["", "gluon_attn/api.py\nbench/sweep.py"])
def test_code_that_is_in_no_commit_is_named(monkeypatch, changed):
    """The commit itself is what a search is resumed by: what is written meanwhile must not change it."""
    said = {("git", "rev-parse"): "abc", ("git", "diff"): changed}
    monkeypatch.setattr(provenance, "output_of", lambda *command: said.get(command[:2], ""))
    found = provenance.provenance(None)
    assert found["commit"] == "abc"
    assert found.get("changed", []) == changed.split()
    assert "changed" not in provenance.provenance("def")


def test_the_card_that_is_asked_is_torchs(monkeypatch):
    """By its UUID: under CUDA_VISIBLE_DEVICES=1 torch's card 0 is nvidia-smi's card 1."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(uuid="12-ab"))
    command = provenance.query_of_card("clocks.sm", "power.draw")
    assert command == ("nvidia-smi", "-i", "GPU-12-ab", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader")


def test_power_and_clock_as_nvidia_smi_says_them(monkeypatch):
    said = iter(["", "[N/A], 1485 MHz", "612.30 W, 1485 MHz"])

    def output_of(*command):
        line = next(said, None)
        if line is None:
            sampler.stopped.set()
        return line or ""

    monkeypatch.setattr("bench.sustained.output_of", output_of)
    sampler = Sampler()
    sampler.start()
    sampler.join(timeout=60)
    assert [sample[1:] for sample in sampler.stop()] == [(612.3, 1485.0)]
