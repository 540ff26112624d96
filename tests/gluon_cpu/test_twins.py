"""The campaign on right kernels: which twins it has, that it runs them, and that it fails where it should."""

import re
from pathlib import Path

import pytest
import torch

import gluon_cpu
from gluon_attn.tuning import kernels_of_cards
from tests.gluon_cpu import campaign_silent, twins
from tests.gluon_cpu import findings_hopper as hopper
from tests.gluon_cpu.campaign_silent import main
from tests.gluon_cpu.findings_cases import CASES, ints

WRONG = "twins: wrong"


def launched_by(monkeypatch: pytest.MonkeyPatch, source) -> set[str]:
    names: set[str] = set()
    monkeypatch.setattr(gluon_cpu, "launch", lambda kernel, *_, **__: names.add(kernel.__name__))
    for _, twin in source():
        twin()
    return names


@pytest.mark.parametrize(
    ("file", "source", "refused"),
    [
        ("test_right_kernels.py", twins.of_right_kernels, {"without_a_layout", "of_another_size"}),
        ("test_findings_order.py", twins.of_order, set()),
        ("test_findings.py", twins.of_findings, set()),
    ],
)
def test_every_kernel_of_the_file_is_a_twin(file, source, refused, monkeypatch):
    text = (Path(__file__).parent / file).read_text(encoding="utf-8")
    kernels = set(re.findall(r"gluon_cpu\.launch\(\s*(?:(?:copies|hopper)\.)?(\w+), \(", text))
    assert kernels - refused == launched_by(monkeypatch, source)


def test_every_case_has_its_twin(monkeypatch):
    assert launched_by(monkeypatch, twins.of_cases) == {case.kernel.__name__ for case in CASES.values()}


def test_the_twins_run(capsys):
    assert main(["--only", "twins: an arrival", "--seeds", "1"]) == 0
    assert "2 kernels, 10 schedules, no finding" in capsys.readouterr().out


def test_a_mended_example_runs(capsys):
    assert main(["--only", "found.md, halves", "--seeds", "1", "--policies", "late"]) == 0
    assert "1 kernels, 1 schedules, no finding" in capsys.readouterr().out


def test_a_finding_is_told(monkeypatch, capsys):
    monkeypatch.setitem(twins.TWINS, WRONG, twins.launched(hopper.no_wait, lambda: (ints(128),), BUG=True))
    assert main(["--only", WRONG, "--seeds", "1"]) == 1
    said = capsys.readouterr().out
    assert f"{WRONG}: replay with Schedule(" in said
    assert "data race on tile" in said


def test_numbers_that_depend_on_the_schedule_are_told(monkeypatch):
    numbers = iter(range(9))
    monkeypatch.setitem(twins.TWINS, WRONG, lambda **_: [torch.tensor([next(numbers)])])
    with pytest.raises(AssertionError, match="other numbers under Schedule"):
        main(["--only", WRONG, "--seeds", "1"])


def test_nan_is_the_same_as_itself():
    same = [torch.tensor([float("nan")])]
    assert campaign_silent.watch("NaN", lambda **_: same, campaign_silent.schedules([0, 1], ["late"])) == 2


def test_shards_have_every_kernel_once(monkeypatch):
    watched: list[str] = []

    def watch(name: str, *_: object) -> int:
        watched.append(name)
        return 1

    monkeypatch.setattr(campaign_silent, "watch", watch)
    for part in (1, 2, 3):
        assert main(["--only", "twins", "--shard", f"{part}/3"]) == 0
    assert sorted(watched) == sorted(twins.TWINS)


@pytest.mark.parametrize("arguments", [["--only", "no such kernel"], ["--only", WRONG, "--shard", "2/2"]])
def test_nothing_to_run_is_no_success(arguments, monkeypatch):
    monkeypatch.setitem(twins.TWINS, WRONG, lambda **_: [])
    assert main(arguments) == 2


@pytest.mark.parametrize("arguments", [["--seeds", "0"], ["--shard", "0/2"], ["--shard", "3/2"], ["--shard", "2"]])
def test_arguments_that_are_refused(arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_every_row_of_the_table_is_run():
    """Also rows that differ in no more than slots, one of which may serve longer sequences."""
    of_table = [name for name in campaign_silent.kernels() if re.search(r"^sm_.* row \d+$", name)]
    rows = (*campaign_silent.TIMED, *kernels_of_cards().values())
    assert len(of_table) == sum(len(campaign_silent.DTYPES[row.element_bytes]) for row in rows)
