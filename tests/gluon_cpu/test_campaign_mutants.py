"""The campaign on mutants: parts of it have each mutant once, and what survives or is not there is no success."""

import itertools
import types

import pytest

from tests.gluon_cpu import campaign_mutants
from tests.gluon_cpu.campaign_mutants import main
from tests.gluon_cpu.mutants import Mutant

MUTANTS = {"a": 5, "b": 1, "c": 0, "d": 8}  # by kernel


@pytest.fixture
def tried(monkeypatch):
    """(kernel, number of the mutant) of all that were run, none of them in earnest. Each is found but where a test
    says something else of it in `said`."""
    run: list[tuple[str, int]] = []

    def verdict(runs, mutant, seeds):
        run.append((runs[0], mutant.number))
        return said.get((runs[0], mutant.number), "DataRace (random, seed 0)")

    def mutants(kernel):
        return [Mutant("delete", "wait", n, "", (), "", "") for n in range(MUTANTS[kernel])]

    said: dict[tuple[str, int], str] = {}
    kernels = {name: types.SimpleNamespace(runs=lambda name=name: [name]) for name in MUTANTS}
    monkeypatch.setattr(campaign_mutants, "KERNELS", kernels)
    monkeypatch.setattr(campaign_mutants, "text_of", lambda run: run)
    monkeypatch.setattr(campaign_mutants, "mutants", mutants)
    monkeypatch.setattr(campaign_mutants, "verdict", verdict)
    return types.SimpleNamespace(run=run, said=said)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 14])
def test_shards_have_every_mutant_once_and_are_of_one_size(parts, tried):
    sizes = []
    for part in range(1, parts + 1):
        before = len(tried.run)
        assert main(["--shard", f"{part}/{parts}"]) == 0
        sizes.append(len(tried.run) - before)
    assert sorted(tried.run) == [(kernel, n) for kernel, count in MUTANTS.items() for n in range(count)]
    assert max(sizes) - min(sizes) <= 1


def test_a_shard_goes_on_over_kernels(tried):
    every = list(itertools.chain.from_iterable(zip(itertools.repeat(k), range(n)) for k, n in MUTANTS.items()))
    assert main(["--shard", "2/4"]) == 0
    assert tried.run == every[1::4]


def test_a_shard_of_some_counts_among_these(tried, capsys):
    assert main(["--kernel", "d", "--only", "#7", "--shard", "1/2"]) == 0
    assert tried.run == [("d", 7)]
    assert "1 mutants, 0 survived" in capsys.readouterr().out


def test_some_are_left_out(tried):
    assert main(["--kernel", "a", "--without", "#1", "#3"]) == 0
    assert [number for _, number in tried.run] == [0, 2, 4]


def test_what_survives_is_no_success(tried, capsys):
    tried.said["d", 3] = ""
    assert main([]) == 1
    assert "14 mutants, 1 survived" in capsys.readouterr().out
    assert main(["--shard", "1/2"]) == 0  # not among these
    assert main(["--shard", "2/2"]) == 1


def test_wrong_numbers_without_a_finding_are_no_success(tried):
    tried.said["a", 0] = "WRONG NUMBERS, no finding (random, seed 0)"
    assert main(["--kernel", "a"]) == 1


@pytest.mark.parametrize("arguments", [["--kernel", "c"], ["--only", "no such mutant"], ["--shard", "15/15"]])
def test_nothing_to_run_is_no_success(arguments, tried, capsys):
    assert main(arguments) == 2
    assert "no mutant" in capsys.readouterr().out
    assert not tried.run


@pytest.mark.parametrize("arguments", [["--seeds", "0"], ["--shard", "0/2"], ["--shard", "3/2"], ["--kernel", "x"]])
def test_arguments_that_are_refused(arguments, tried):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
