"""The bench of the gradients: which configs there are to try, what is said of them, what the host is asked to do."""

import concurrent.futures
import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gradients
from bench.points import Point
from bench.timing import Timing
from gluon_attn import attention, attention_varlen
from gluon_attn.backward.table import HOPPER, UNLIKE
from gluon_attn.device import Device
from gluon_attn.gradients import attention_backward
from gluon_attn.runtime.launcher import Launcher
from gluon_attn.testing import backward_call

RESULTS = Path(__file__).parents[2] / "bench" / "results"
POINT = Point(head_dim=64, causal=True, length=130, batch=1, heads=1)


TABLE = {(d, d): config for d, config in HOPPER.items()} | UNLIKE


@pytest.mark.parametrize("head_dims", TABLE, ids=str)
def test_candidates_fit_and_the_tables_is_among_them(head_dims):
    found = gradients.configs(*head_dims)
    assert TABLE[head_dims] in found
    assert len({gradients.label(config) for config in found}) == len(found)
    assert all(config.smem_bytes(*head_dims) <= Device.hopper().smem_bytes for config in found)


def test_what_does_not_compile_is_said(monkeypatch):
    def broken(*given, **options):
        raise RuntimeError("no registers")

    monkeypatch.setattr(gradients, "compiled_backward", broken)
    assert gradients.refusal(HOPPER[64], POINT) == "does not compile: RuntimeError: no registers"


@pytest.fixture
def stand_ins(monkeypatch):
    """gluon_cpu for the card, threads for processes; nothing is compiled or timed, but all is called."""

    def timed(calls, rounds=1):
        return {name: Timing(0.001, (call() is None or 0.001,)) for name, call in calls.items()}

    class Threads(concurrent.futures.ThreadPoolExecutor):
        def __init__(self, **options):
            super().__init__(max_workers=1)

    on_cpu: dict[str, Any] = {"device": Device.hopper()}
    monkeypatch.setattr(gradients, "time_interleaved", timed)
    monkeypatch.setattr(gradients, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(gradients, "refusal", lambda config, **_: None if config.rings_in_step else "not tried")
    monkeypatch.setattr(gradients, "attention", partial(attention, **on_cpu))
    monkeypatch.setattr(gradients, "attention_backward", partial(attention_backward, **on_cpu))
    monkeypatch.setattr(gradients, "backward_call", partial(backward_call, **on_cpu))
    tensors = Point.tensors
    monkeypatch.setattr(Point, "tensors", lambda point, device="cuda": tensors(point, "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("in_order", [False, True])
def test_candidates_are_compared_with_the_table_before_they_are_timed(in_order, stand_ins, monkeypatch):
    keys_128 = [c for c in gradients.configs(64) if c.keys == 128]
    monkeypatch.setattr(gradients, "configs", lambda *head_dims: keys_128)
    found = json.loads(json.dumps(gradients.measure_candidates(POINT, 1, in_order)))
    assert found["table"] in found["results"]
    assert set(found["results"]) == {gradients.label(c) for c in keys_128 if c.rings_in_step}
    assert set(found["refused"].values()) == {"not tried"}


@pytest.mark.parametrize("wrong", [2.0, float("nan")])
def test_wrong_gradients_are_not_timed(wrong):
    right = [torch.randn(3, 4) for _ in range(3)]
    assert gradients.difference(right, right) is None
    assert str(gradients.difference([right[0], wrong * right[1], right[2]], right)).startswith("wrong: dK is off by")


def test_the_host_is_timed_forward_and_backward(stand_ins, monkeypatch):
    asked: dict[str, Any] = {}

    def by_rounds(seconds_of, calls):
        asked.update({name: call() for name, call in calls.items()})
        return dict.fromkeys(calls, 1.0)

    monkeypatch.setattr(gradients, "measure_by_rounds", by_rounds)
    monkeypatch.setattr(gradients, "HOST_POINT", dataclasses.replace(POINT))
    monkeypatch.setattr(
        gradients,
        "calls_of",
        lambda *given, **options: dict.fromkeys(("ours", "ours, deterministic", "cudnn"), lambda: None),
    )
    monkeypatch.setattr(gradients, "attention_varlen", partial(attention_varlen, device=Device.hopper()))
    monkeypatch.setattr(gradients, "HOST_LENGTHS", (70, 0, 60))
    monkeypatch.setattr(gradients, "packed_calls", partial(gradients.packed_calls, "cpu"))
    assert set(gradients.host_microseconds()) == set(asked)
    assert asked["packed forward"].shape == (130, 1, 64)
    assert asked["packed forward, to be differentiated"].requires_grad
    assert len(asked["packed backward"]) == 3
    assert asked["forward"].shape == (1, 1, 130, 64)
    assert asked["forward, to be differentiated"].requires_grad
    assert len(asked["backward, called directly"]) == 3


def test_what_a_call_launches_is_launched_again(monkeypatch):
    launched = []
    monkeypatch.setattr(Launcher, "__call__", lambda *given: launched.append(given))
    one, other = object.__new__(Launcher), object.__new__(Launcher)

    def call() -> None:
        one((1, 2), 7)
        other((), 7)

    again = gradients.relaunching(call)
    again()
    assert launched == 2 * [(one, (1, 2), 7), (other, (), 7)]


def test_a_backward_pass_of_nothing_has_gradients():
    inputs = [torch.randn(2, 3, requires_grad=True) for _ in range(3)]
    out = gradients.Nothing.apply(*inputs)
    assert len(torch.autograd.grad(out, inputs, torch.ones_like(out))) == 3


@pytest.mark.parametrize(
    "arguments", [["--candidates", "--only", "64x128 q9"], ["--only", "64x128 q2do2ds1dq2 r24"]], ids=["label", "alone"]
)
def test_labels_that_are_of_no_config_are_refused(arguments, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench.gradients", *arguments])
    with pytest.raises(SystemExit):
        gradients.main()
    assert "--only: expected labels of configs of these head dims, with --candidates, got" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("h200_gradients.json", "| D=64 causal 16384 | 434 | 524 | 480 | 164 | 1.21 |"),
        ("h200_gradients_grouped.json", "| D=128 full 2048 GQA 8:1 B=8 H=64 |"),  # not all points have a fixed order
        ("h200_gradients_host.json", "backward, cuDNN                        84.8 us"),
        ("h200_gradients_sustained.json", "| D=64 full 8192 | 1.58 | 1.35 |"),
        ("h200_gradients_dq_slots.json", "times the table's"),
    ],
)
def test_shows_each_kind_of_result_file(monkeypatch, capsys, file, line):
    monkeypatch.setattr(sys, "argv", ["bench.gradients", "--show", str(RESULTS / file)])
    gradients.main()
    assert line in capsys.readouterr().out


def test_a_result_file_of_another_command_is_refused(monkeypatch, capsys):
    other = RESULTS / "h200_gradients_parts.json"
    monkeypatch.setattr(sys, "argv", ["bench.gradients", "--show", str(other)])
    with pytest.raises(SystemExit):
        gradients.main()
    assert f"--show: expected a result file of this command, got {other}" in capsys.readouterr().err
