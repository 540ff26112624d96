"""The bring-up kit: its runner with steps that fail, hang and crash; its report; a first pass without a card."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bench.bringup import cases, levers, report, speed
from bench.bringup.runner import Notes, Result, run_steps
from bench.bringup.steps import STEPS
from bench.timing import Timing
from gluon_attn import ForwardConfig
from gluon_attn.device import Device
from gluon_attn.forward.configs import BlackwellConfig
from gluon_attn.forward.table import HOPPER, blackwell_config
from tests.bench.bringup_fakes import FAKES, HUNG_SECONDS, LEFT_BEHIND

ROOT = Path(__file__).parents[2]

# ---------------------------------------------------------------------------------------------------------------------
# The runner, with steps that are nothing but their fates
# ---------------------------------------------------------------------------------------------------------------------

REFERENCE = "tests.bench.bringup_fakes:FAKES"


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def is_gone(file: Path) -> bool:
    """The process whose id is in the file; it may take a moment to go."""
    pid = int(file.read_text())
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """(results by name, what the report was after each step, the folder of the report)"""
    folder = tmp_path_factory.mktemp("bringup")
    planned = [step.name for step in FAKES]
    os.environ[LEFT_BEHIND] = str(folder)
    seen: list[list[str]] = []

    def done(results):
        report.write(folder, results, planned)
        seen.append([step["name"] for step in json.loads((folder / "report.json").read_text())["steps"]])

    try:
        results = run_steps(FAKES, REFERENCE, done)
    finally:
        del os.environ[LEFT_BEHIND]
    return {result.name: result for result in results}, seen, folder


def test_each_fate_is_told_and_the_rest_goes_on(outcome):
    results, _, _ = outcome
    assert {name: (result.verdict, result.reason) for name, result in results.items()} == {
        "passes": ("passed", ""),
        "fails": ("failed", "ValueError: a reason"),
        "skips": ("skipped", "there is no card"),
        "hangs": ("failed", f"killed: it had not ended after {HUNG_SECONDS} s"),
        "crashes": ("failed", "its process died, exit status -6"),
        "needs a failed one": ("skipped", "needs 'fails', which failed"),
        "needs a skipped one": ("skipped", "there is no card"),
        "needs what needs a failed one": ("skipped", "needs 'fails', which failed"),
        "needs a passed one": ("passed", ""),
        "leaves a process behind": ("passed", ""),
    }


def test_what_was_known_before_the_end_is_kept(outcome):
    results, _, _ = outcome
    assert results["passes"].data == {"answer": 42}
    assert results["passes"].lines == ["all is well"]
    assert results["fails"].data == results["hangs"].data == {"seen before": True}
    assert results["crashes"].lines == ["so far so good"]
    assert "this was printed" in results["fails"].printed
    assert "in hangs" in results["hangs"].printed  # where it was when its time was up
    assert results["hangs"].seconds >= HUNG_SECONDS


def test_steps_run_in_order_and_the_report_is_written_after_each(outcome):
    _, seen, _ = outcome
    names = [step.name for step in FAKES]
    assert seen == [names[: i + 1] for i in range(len(names))]


@pytest.mark.parametrize("step", ["hangs", "leaves a process behind"])
def test_a_step_takes_its_own_processes_along(outcome, step):
    _, _, folder = outcome
    assert is_gone(folder / step)


def test_the_report_says_it_all(outcome):
    results, _, folder = outcome
    found = json.loads((folder / "report.json").read_text())
    assert found["verdicts"] == {"passed": 3, "failed": 3, "skipped": 4}
    assert found["not_run"] == []
    assert found["steps"] == [dataclasses.asdict(result) for result in results.values()]
    text = (folder / "report.txt").read_text()
    for result in results.values():
        assert any(
            line.startswith(result.name) and result.reason in line and result.verdict in line.lower()
            for line in text.splitlines()
        ), result.name
    assert "FAILED" in text
    assert "    all is well" in text
    assert text.splitlines()[-1].startswith("3 passed, 3 failed, 4 skipped")


def test_the_report_has_the_provenance_and_what_has_not_run(tmp_path):
    machine = Result(name=report.MACHINE, verdict="passed", data={"card": "B200", "commit": "abc"})
    report.write(tmp_path, [machine], [report.MACHINE, "later"])
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["provenance"] == {"card": "B200", "commit": "abc"}
    assert found["not_run"] == ["later"]
    text = (tmp_path / "report.txt").read_text()
    assert "B200" in text
    assert "later" in text


# ---------------------------------------------------------------------------------------------------------------------
# The steps
# ---------------------------------------------------------------------------------------------------------------------


def test_the_steps_come_in_rising_order_of_risk():
    names = [step.name for step in STEPS]
    assert len(set(names)) == len(names)
    kinds = list(dict.fromkeys(name.partition(",")[0] for name in names))
    risks = "machine, card, compile, smallest, ConSan finds a race, ConSan, grid, repeated, sweep, levers"
    assert kinds == risks.split(", ")
    assert [name for name in names if name.startswith("smallest")] == [f"smallest, {n} CTAs" for n in (1, 2, 4)]
    assert [name for name in names if name.startswith("ConSan,")] == [
        f"ConSan, {mask}, {n} CTAs" for n in (1, 2) for mask in ("full", "causal")
    ]
    for i, step in enumerate(STEPS):
        assert set(step.needs) <= set(names[:i]), step.name
        sanitized = step.env.get("TRITON_INSTRUMENTATION_MODE") == "consan"
        assert sanitized == step.name.startswith("ConSan")


def test_every_lever_is_tried_on_and_off():
    fields = {f.name for f in dataclasses.fields(BlackwellConfig) if f.default is not dataclasses.MISSING}
    assert set(levers.BLACKWELL_PLAIN) == fields - {"cga_layout", "result_slots"}  # the depth of a channel is none
    table = blackwell_config(3, 192, exp_pieces=4, early_p=True, exp_turns=True, polynomial_columns=2)
    plain = levers.plain(table)
    tried = {name for config in levers.variants(plain, 103).values() for name in levers.differences(plain, config)}
    assert tried == set(levers.BLACKWELL_PLAIN)
    assert "early_p=False" in levers.variants(table, 100)
    assert all(100 in config.archs and config != table for config in levers.variants(table, 100).values())
    assert "max_in_load=True" not in levers.variants(plain, 100)


HOPPER_LEVERS = {"turns=True", "early_exp=1", "early_exp=2"}


def test_hopper_has_levers_too():
    for row in HOPPER:
        plain = levers.plain(row.config)
        on_one_cta = {"integer_max=True"} if plain.num_ctas == 1 else set()
        assert set(levers.variants(plain, 90)) == HOPPER_LEVERS | on_one_cta


def every_case(monkeypatch, device):
    monkeypatch.setattr(cases.device_at_hand, "on_card", lambda: True)
    monkeypatch.setattr(cases.device_at_hand, "device", lambda: device)
    return list(cases.all_cases().values())


@pytest.mark.parametrize("device", [Device.blackwell(), Device.blackwell_ultra()], ids=["B200", "B300"])
def test_the_grid_covers_what_there_is(monkeypatch, device):
    every = every_case(monkeypatch, device)
    table = [case for case in every if not case.lever]
    for causal in (False, True):
        for num_ctas in (1, 2, 4):
            these = [case for case in table if (case.num_ctas, case.causal) == (num_ctas, causal)]
            assert {case.dtype for case in these} == {"bf16", "fp16", "e4m3", "e5m2"}
            assert {case.head_dim for case in these} >= {8, 40, 64, 72, 96, 128}
            assert {case.layout for case in these} == {"bhsd", "bshd"}
            assert any(case.kv_heads not in (1, case.heads) for case in these)
            assert any(case.heads > 2 * device.sm_count for case in these)
            assert any(case.q_len % 2 and case.kv_len % 2 for case in these)
            tried = {case.lever for case in every if (case.num_ctas, case.causal) == (num_ctas, causal)}
            assert tried - {""} == {"plain", *levers.variants(levers.plain(blackwell_config(3, 192)), device.arch)}
    for case in every:
        case.config()  # is valid
    assert len({case.group for case in every}) < len(every) / 2, "cases of one kernel share a process"


def test_the_grid_on_hopper(monkeypatch):
    every = every_case(monkeypatch, Device.hopper())
    assert {case.num_ctas for case in every} == {1, 2}
    assert {192, 256} <= {case.head_dim for case in every}
    assert {case.lever for case in every} == {"", "plain", "integer_max=True"} | HOPPER_LEVERS


# ---------------------------------------------------------------------------------------------------------------------
# Speed: what is made of the times
# ---------------------------------------------------------------------------------------------------------------------


def timing(median, spread=0.01):
    return Timing(median, (median * (1 - spread / 2), median, median * (1 + spread / 2)))


def test_only_what_beats_the_noise_wins():
    timings = {
        "table": timing(1.0), "slower": timing(1.1), "as fast": timing(0.995), "loud": timing(0.9, spread=0.3),
        "faster": timing(0.9), "fastest": timing(0.8),
    }  # fmt: skip
    assert speed.winners(timings) == ["fastest", "faster"]
    assert speed.gains(timings)["fastest"] == pytest.approx(0.25)


def test_changes_are_combined_as_far_as_they_go_together():
    table = blackwell_config(3, 192, exp_pieces=4, early_p=True)
    configs: dict[str, ForwardConfig] = {
        "turns": dataclasses.replace(table, exp_turns=True),
        "one piece": dataclasses.replace(table, exp_pieces=1, early_p=False),
        "four loads": dataclasses.replace(table, load_pieces=4),
    }
    # load_pieces=4 asks for exp_pieces=4.
    assert speed.combined(table, configs, ["turns", "one piece", "four loads"]) == dataclasses.replace(
        table, exp_turns=True, exp_pieces=1, early_p=False
    )
    assert speed.combined(table, configs, []) == table


@pytest.fixture
def timed_without_a_card(monkeypatch):
    """The speed steps with everything of the card replaced: what was asked to be timed, and times by config."""
    b200 = Device.blackwell()
    monkeypatch.setattr(cases.device_at_hand, "on_card", lambda: True)
    monkeypatch.setattr(cases.device_at_hand, "device", lambda: b200)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    small = [torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16)] * 3
    monkeypatch.setattr(speed.Point, "tensors", lambda point: small)
    monkeypatch.setattr(speed, "attention", fake_attention)
    monkeypatch.setattr(speed, "check", lambda *_, **__: None)
    monkeypatch.setattr(speed, "precompile", lambda jobs, arch: iter(sorted(jobs, key=str)))
    monkeypatch.setattr(speed, "time_interleaved", fake_times)


def fake_attention(q, k, v, return_lse=False, **options):
    if options.get("num_ctas") == 4:
        raise RuntimeError("four CTAs do not run")
    config = options.get("config")
    if config is not None and config.dynamic:
        raise AssertionError("wrong numbers")
    return (q, q[..., 0]) if return_lse else q


def fake_times(calls, rounds):
    """Turns gain a quarter and packed arithmetic off a tenth; nothing else does."""

    def seconds(call):
        config = call.keywords.get("config") if hasattr(call, "keywords") else None
        if config is None:
            return 1.0
        return 1.0 * (0.8 if config.exp_turns else 1) * (0.9 if not config.packed_arithmetic else 1)

    return {name: timing(seconds(call)) for name, call in calls.items()}


def notes_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_comparison_of_levers_proposes_what_gains_together(timed_without_a_card, tmp_path):
    with pytest.raises(AssertionError, match=r"wrong, or did not run: dynamic=True$"):
        speed.compare_levers(128, False, Notes(tmp_path / "notes"))
    entries = notes_of(tmp_path / "notes")
    data = {entry["key"]: entry["value"] for entry in entries if "key" in entry}
    assert data["proposal"] == data["table"] | {"exp_turns": True, "packed_arithmetic": False}
    assert data["gains"]["exp_turns=True"]["gain"] == pytest.approx(0.25)
    assert data["lever: dynamic=True failed"] == "wrong numbers"
    assert entries[-2]["line"].startswith("proposal: together: exp_turns=True packed_arithmetic=False: +38.9%")


def test_the_sweep_says_ratios_and_what_failed(timed_without_a_card, monkeypatch, tmp_path):
    monkeypatch.setattr(speed, "sdpa", fake_sdpa)
    monkeypatch.setattr(speed, "LENGTHS", (1024,))
    with pytest.raises(AssertionError, match=r"wrong, or did not run: S=1024, ours, 4 CTAs$"):
        speed.sweep(64, True, Notes(tmp_path / "notes"))
    data = {entry["key"]: entry["value"] for entry in notes_of(tmp_path / "notes") if "key" in entry}
    timed = data["S=1024"]["timed"]
    assert set(timed) == {"cudnn", "ours", "ours, 1 CTAs", "ours, 2 CTAs", "ours, e4m3"}
    assert timed["ours"]["times cudnn"] == 1
    assert "no FlashAttention" in data["S=1024: fa2 failed"]


def fake_sdpa(backend, *_):
    if backend == speed.BACKENDS["fa2"]:
        raise RuntimeError("no FlashAttention here")


# ---------------------------------------------------------------------------------------------------------------------
# For real
# ---------------------------------------------------------------------------------------------------------------------


EXECUTED = "smallest, 1 CTAs"  # takes half a minute


@pytest.mark.slow
@pytest.mark.parametrize("executed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["skipped", "executed"])
def test_the_command_runs_and_reports(tmp_path, executed):
    if torch.cuda.is_available():
        pytest.skip("this machine has a card: the command would run the kernels on it")
    command = [
        sys.executable,
        "-m",
        "bench.bringup",
        "--out",
        str(tmp_path),
        "--only",
        "sweep, D=64, full",
        *(["smallest, 1*"] if executed else []),
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    verdicts = {step["name"]: step["verdict"] for step in found["steps"]}
    assert verdicts == {
        "machine": "passed",
        "card": "skipped",
        **({EXECUTED: "passed"} if executed else {}),
        "sweep, D=64, full": "skipped",
    }
    assert "finds no CUDA device" in found["steps"][-1]["reason"]
    assert {"card", "commit", "date", "torch", "triton", "assembler"} <= set(found["provenance"])
    assert "sweep, D=64, full" in run.stdout
    if executed:
        assert "right: 129 x 200, causal" in (tmp_path / "report.txt").read_text()
        assert EXECUTED in run.stdout
