"""`python -m gluon_attn`: options, progress, tables and the verdict; with stand-ins for what takes long."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gluon_attn import __main__ as command
from gluon_attn import demo
from gluon_attn.forward.table import HOPPER
from gluon_attn.gradients import attention_backward

ROOT = Path(__file__).parents[2]
KERNELS = len({(row.padded_head_dim, row.causal, row.config) for row in HOPPER if row.element_bytes == 2})


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    bare = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    command = [sys.executable, "-m", "gluon_attn", *arguments]
    return subprocess.run(command, cwd=ROOT, env=bare, capture_output=True, text=True, timeout=580)


def test_help_runs_nothing():
    done = run("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: python -m gluon_attn")
    assert "sm_90a" not in done.stdout
    assert done.stderr == ""  # what Triton's bindings say on exit is kept from it


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["now"], "unrecognized arguments: now"),
        (["--schedules", "0"], "expected 1 or more, got 0"),
        (["--schedules", "many"], "invalid"),
    ],
)
def test_nonsense_is_refused(monkeypatch, capsys, arguments, says):
    monkeypatch.setattr(demo, "run_without_a_card", lambda *args, **options: pytest.fail("ran"))
    monkeypatch.setattr(sys, "argv", ["gluon_attn", *arguments])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert says in capsys.readouterr().err


@pytest.fixture
def stand_ins(monkeypatch):
    """Threads for processes, and nothing executed or compiled. Set `found` to what an execution finds."""
    settings: dict[str, Any] = {"found": None, "seconds": 0.0}

    def execute(job, schedules):
        time.sleep(settings["seconds"])
        return f"{demo.name_of(job)} {schedules}", settings["found"]

    class Threads(concurrent.futures.ThreadPoolExecutor):
        def __init__(self, **options):
            super().__init__(max_workers=1)

    monkeypatch.setattr(demo, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(demo, "execute", execute)
    monkeypatch.setattr(demo, "execute_gradients", execute)
    monkeypatch.setattr(demo, "describe", lambda kernel: f"kernel {kernel.padded_head_dim} {kernel.unlike}")
    monkeypatch.setattr(demo, "quiet_exit", lambda: None)
    return settings


def printed(monkeypatch, capsys, *arguments: str) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["gluon_attn", "--cpu", *arguments])
    command.main()
    return capsys.readouterr().out.splitlines()


def test_the_verdict_comes_last(monkeypatch, capsys, stand_ins):
    lines = printed(monkeypatch, capsys)
    assert lines[-1] == (
        "All 11 cases, forward and gradients, agree with float64, and no race was found under 10 schedules each."
    )
    assert any("It takes about" in line for line in lines[:5])
    assert sum(line.startswith("kernel ") for line in lines) == KERNELS + 2


def test_options(monkeypatch, capsys, stand_ins):
    lines = printed(monkeypatch, capsys, "--schedules", "1", "--no-kernels")
    assert "sm_90a bf16 causal, 2 CTAs 1" in lines
    assert "sm_90a bf16 causal, gradients, in a fixed order 1" in lines
    assert not any(line.startswith("kernel ") for line in lines)
    assert lines[-1].endswith("no race was found under 1 schedule each.")


def test_a_finding_is_printed_once_and_fails(monkeypatch, capsys, stand_ins):
    stand_ins["found"] = "a race, in two\nlines"
    with pytest.raises(SystemExit, match="1"):
        printed(monkeypatch, capsys)
    said = capsys.readouterr()
    assert said.out.endswith("\n\nFAILED: sm_90a bf16 full, 1 CTA: a race, in two\nlines\n")
    assert (said.out + said.err).count("a race") == 1
    assert "agree" not in said.out


def test_what_takes_long_is_said(monkeypatch, capsys, stand_ins):
    stand_ins["seconds"] = 0.2
    monkeypatch.setattr(demo, "QUIET_SECONDS", 0.02)
    lines = printed(monkeypatch, capsys, "--no-kernels")
    assert any(line.endswith("executing sm_90a bf16 full, 1 CTA (case 1 of 11)") for line in lines)


def test_an_execution_gives_what_the_race_checker_found(monkeypatch):
    monkeypatch.setattr(demo, "find_race", lambda call, schedules: "a race")
    row, problem = demo.execute(demo.EXECUTIONS[0], 3)
    assert problem == "a race"
    assert row.split()[:4] == ["sm_90a", "bf16", "full", "1"]


def test_a_finding_in_the_gradients_fails(monkeypatch, capsys, stand_ins):
    monkeypatch.setattr(demo, "execute_gradients", lambda job, schedules: ("a row", "a race"))
    with pytest.raises(SystemExit, match="1"):
        printed(monkeypatch, capsys)
    assert capsys.readouterr().out.endswith("a row\n\nFAILED: sm_90a bf16 full, gradients: a race\n")


def test_an_execution_of_gradients_gives_what_the_race_checker_found(monkeypatch):
    monkeypatch.setattr(demo, "find_race", lambda call, schedules: "a race")
    row, problem = demo.execute_gradients(demo.GRADIENT_EXECUTIONS[2], 3)
    assert problem == "a race"
    assert row.split()[:5] == ["sm_90a", "bf16", "causal", "fixed", "order"]


def test_an_execution_of_gradients():
    row, problem = demo.execute_gradients(demo.GRADIENT_EXECUTIONS[1], 1)
    assert problem is None
    assert row.split()[-3:-1] == ["1", "0"], row


@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_gradients_are_compared_with_float64(monkeypatch, error):
    """Whatever a schedule gave: the error is in the second of three."""
    calls = []

    def fake_backward(*given, **options):
        grads = attention_backward(*given, **options)
        calls.append(1)
        grads[1][0, 0, 0, 0] += error if len(calls) == 2 else 0.0
        return grads

    monkeypatch.setattr(demo, "attention_backward", fake_backward)
    monkeypatch.setattr(demo, "find_race", lambda call, schedules: any(call() for _ in range(schedules)) or None)
    _, problem = demo.execute_gradients(demo.GRADIENT_EXECUTIONS[0], 3)
    assert len(calls) == 3
    assert str(problem).startswith("wrong: expected an error of dK at most")


@pytest.mark.parametrize(("error", "is_wrong"), [(1e-4, False), (0.5, True), (float("nan"), True)])
def test_an_execution_is_compared_with_float64(monkeypatch, error, is_wrong):
    """Whatever a schedule gave: the error is in the second of three."""
    calls = []

    def fake_attention(q, k, v, causal, **options):
        out, lse = demo.reference_attention(q.double(), k.double(), v.double(), causal=causal)
        calls.append(1)
        out[0, 0, 0, 0] += error if len(calls) == 2 else 0.0
        return out, lse

    monkeypatch.setattr(demo, "attention", fake_attention)
    monkeypatch.setattr(demo, "find_race", lambda call, schedules: [call() for _ in range(schedules)][:0] or None)
    _, problem = demo.execute(demo.EXECUTIONS[1], 3)
    assert len(calls) == 3
    assert (problem is not None) == is_wrong


@pytest.fixture
def stand_in_for_a_card(monkeypatch):
    """The problem made small and its tensors on the CPU; nothing is timed."""
    randn = torch.randn
    small = dataclasses.replace(demo.PREFILL, heads=2, kv_heads=1, q_len=130, kv_len=130, head_dim=64, scale=0.125)
    monkeypatch.setattr(demo, "PREFILL", small)
    monkeypatch.setattr(demo, "milliseconds", lambda call, runs=1: [call(), 2.0][1])
    monkeypatch.setattr(demo, "attention", partial(demo.attention, device=demo.HOPPER_CARD))
    monkeypatch.setattr(demo, "attention_backward", partial(attention_backward, device=demo.HOPPER_CARD))
    monkeypatch.setattr("torch.nn.attention.sdpa_kernel", lambda backend: contextlib.nullcontext())
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: randn(*shape, **options | {"device": "cpu"}))


def test_a_card_is_shown_forward_and_backward(capsys, stand_in_for_a_card):
    assert demo.run_prefill(demo.HOPPER_CARD, kernels=False) is None
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-4:-2]] == ["ours", "cuDNN"]
    assert all(line.count("2.000 ms") == 3 for line in lines[-4:-2])
    assert lines[-1] == (
        "All results agree with float64. Ours runs at 1.00 times cuDNN's speed forward, 1.00 backward, 1.00 both."
    )


def test_wrong_gradients_on_a_card_are_said(monkeypatch, capsys, stand_in_for_a_card):
    def twice_dk(*given, **options):
        dq, dk, dv = attention_backward(*given, **options, device=demo.HOPPER_CARD)
        return dq, 2 * dk, dv

    monkeypatch.setattr(demo, "attention_backward", twice_dk)
    assert str(demo.run_prefill(demo.HOPPER_CARD, kernels=False)).startswith("wrong: expected an error of dK at most")
    assert "Ours" not in capsys.readouterr().out


def test_no_two_kernels_look_alike():
    """Each is listed once, and something that is printed tells it from all others."""
    kernels = demo.listed()
    registers = [(k.config.softmax_registers, k.config.load_registers) for k in kernels]
    shown = [(*k.kind, r, k.unlike) for k, r in zip(kernels, registers, strict=True)]
    assert [row for row, times in collections.Counter(shown).items() if times > 1] == []


def test_what_tells_configs_apart():
    config = next(row.config for row in HOPPER)
    other = dataclasses.replace(config, kv_slots=config.kv_slots + 1, load_registers=40)
    assert demo.told_apart(other, [config, other]) == f"kv_slots={other.kv_slots}"
    assert demo.told_apart(config, [config]) == ""


@pytest.mark.slow
def test_the_command_executes_and_compiles():
    if torch.cuda.is_available():
        pytest.skip("this machine has a card: the command runs attention on it, as tests/gpu does")
    done = run("--schedules", "2")
    assert done.returncode == 0, done.stderr
    table = [line.split() for line in done.stdout.splitlines() if line.startswith("sm_")]
    in_order = [row for row in table if row[3] in ("any", "fixed")]
    assert [(*row[2:4], row[-2]) for row in in_order] == [
        ("full", "any", "0"),
        ("causal", "any", "0"),
        ("causal", "fixed", "0"),
    ]
    table = [row for row in table if row not in in_order]
    executed = [row for row in table if row[1] in ("bf16", "e4m3")]
    assert {tuple(row[:4]) for row in executed} == {
        *(("sm_90a", "bf16", *case) for case in (("full", "1"), ("causal", "2"))),
        *(("sm_100a", "bf16", mask, ctas) for mask in ("full", "causal") for ctas in "12"),
        *(("sm_100a", dtype, "causal", ctas) for dtype, ctas in (("bf16", "4"), ("e4m3", "1"))),
    }
    assert {row[8] for row in executed} == {"0"}, "no finding"
    compiled_for = collections.Counter(row[0] for row in table if row not in executed)
    assert compiled_for == {"sm_90a": KERNELS, "sm_100a": 2}
    assert not done.stderr


def test_a_reader_that_has_enough_ends_it_quietly(monkeypatch):
    """As `head` does; and what is printed at the end does not fail either."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", encoding="utf-8") as out:
        monkeypatch.setattr(sys, "stdout", out)
        after = []
        with demo.while_read():
            for _ in range(1000):
                print("a line of more than a few words", flush=True)
            after.append("printed")
        print("and one more", flush=True)
        with demo.while_read():
            print("what is not written before the end")
    assert after == []
