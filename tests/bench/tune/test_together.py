"""Searches for several problems, which share kernels and time."""

import dataclasses
import math

import pytest

from bench.ahead import Failed
from bench.tune import together
from bench.tune.command import Batch
from bench.tune.search import FIRST_CONFIRMING_S, Progress, Search
from bench.tune.together import Together
from gluon_attn.forward.table import pick_config
from tests.bench.tune.fakes import (
    ASKED,
    BEST,
    CHOICES,
    COMPILING_S,
    H200,
    IN_USE,
    KEY,
    FakeCard,
    One,
    name_of,
    tuned,
)

OTHERS = tuple(dataclasses.replace(ASKED, batch=batch) for batch in (1, 2))
CAUSAL = dataclasses.replace(ASKED, causal=True)


def searches(card, path, *problems):
    batch, progress = Batch((ASKED, *problems)), Progress.begin(path, KEY, False, lambda: card.clock_s)
    return [Search(batch.choices(p, H200), card, progress, lambda line: None) for p in batch.problems], progress


def test_the_search_ends_in_time(tmp_path):
    """With less and less time: what it has found by then is confirmed, and there is always a result."""
    whole = FakeCard()
    best = One(whole, tmp_path / "whole.json").run(6)
    took = whole.clock_s
    chosen = []
    for limit in (2 * took, took / 2, took / 4, 30.0, 12.0, 6.0, 1.0):
        card = FakeCard()
        looking = One(card, tmp_path / "p.json", limit_s=limit)
        looking.together.run(6, lambda: None)
        chosen.append(looking.search.chosen)
        assert card.clock_s <= max(limit, COMPILING_S + FIRST_CONFIRMING_S)
        assert looking.search.is_measured == (limit > 6)  # by then nothing else is compiled
        if looking.search.is_measured:
            found = looking.search.measured()
            assert found.gain >= 0
            assert found.chosen == found.in_use or found.chosen in looking.found["confirmed"]
    assert chosen[0] == best.chosen
    assert chosen[-1] == name_of(IN_USE)
    assert len(set(chosen)) > 2


def test_what_one_problem_leaves_is_for_the_others(tmp_path):
    card = FakeCard()
    *_, said = tuned(card, tmp_path / "p.json", Batch((ASKED, *OTHERS)), limit_s=300, generations=2)
    shares = [float(line.split()[-2]) for line in said if line.startswith("q (")]
    assert len(shares) == 6
    assert shares[0] < shares[1]  # two thirds of what there is, and then all
    assert card.clock_s <= 300


def test_what_is_in_use_is_compiled_first_and_then_the_first_of_each(tmp_path):
    card = FakeCard()
    both, progress = searches(card, tmp_path / "p.json", CAUSAL)
    for search in both:
        assert search.ask()
    expected = [search.lacking() for search in both]
    Together(both, card, progress, lambda line: None).compile(both, math.inf)
    assert card.compiled[:2] == [name_of(search.in_use) for search in both]
    assert card.compiled[2:4] == [names[1] for names in expected]
    assert sorted(card.compiled) == sorted(name for names in expected for name in names)


def test_compiling_ends_in_time(tmp_path):
    card = FakeCard()
    [search], progress = searches(card, tmp_path / "p.json")
    search.ask()
    Together([search], card, progress, lambda line: None).compile([search], 3.5 * COMPILING_S)
    assert len(search.found["compiled"]) == 3
    assert card.clock_s == 3.5 * COMPILING_S


def test_the_slowest_beside_the_peer_come_first(tmp_path):
    """And those last that it does not compute."""
    card = FakeCard()
    card.peer_s = {ASKED: 3e-3, OTHERS[1]: 1e-3}
    *_, said = tuned(card, tmp_path / "p.json", Batch((ASKED, *OTHERS)), generations=1, beside_peer=True)
    assert card.problems == [OTHERS[1], ASKED, OTHERS[0]]
    assert said[-1].startswith(
        "geometric means of 2 shapes, bfloat16, timed anew together: in_use_over_peer 1.604, new_over_peer 1.604"
    )


def test_there_is_time_left_to_time_all_beside_the_peer(tmp_path):
    problems = (ASKED, *OTHERS)
    for limit in (60, 100, 200):
        card = FakeCard()
        card.peer_s = dict.fromkeys(problems, 0.05)
        _, found, _ = tuned(card, tmp_path / "p.json", Batch(problems), limit_s=limit, beside_peer=True)
        assert [one.beside is not None for one in found] == [True] * 3
        assert card.clock_s <= limit


def test_without_time_none_of_the_next_generation_is_begun(tmp_path):
    for left_s, generations in ((together.LEAST_OF_A_GENERATION_S - 1, 1), (math.inf, 2)):
        card, said = FakeCard(), list[str]()
        looking = One(card, tmp_path / "p.json", said=said)

        def hurry(looking: One = looking, card: FakeCard = card, left_s: float = left_s) -> None:
            looking.progress.until = card.clock_s + left_s

        looking.together.run(2, hurry)
        assert len([line for line in said if line.startswith("  generation")]) == generations
        assert ("no time for more" in said) == (generations == 1)


def test_if_one_config_in_use_fails_the_others_go_on(tmp_path):
    card = FakeCard()
    both, progress = searches(card, tmp_path / "p.json", CAUSAL)
    failing = pick_config(CAUSAL, H200)
    assert name_of(failing) != name_of(IN_USE)
    card.fails = {"compile": {name_of(failing): Failed("no")}}
    seen: list[bool] = []
    running = Together(both[::-1], card, progress, lambda line: None)
    running.run(6, lambda: seen.append(both[0].is_measured))
    assert [str(failure).rpartition(": ")[2] for failure in running.failures] == ["no"]
    assert both[0].chosen == name_of(BEST)
    assert both[0].choices == CHOICES
    assert seen[:2] == [False, True]


@pytest.mark.parametrize("first", [1, 4])
def test_so_many_configs_to_begin_with(tmp_path, first):
    card = FakeCard()
    tuned(card, tmp_path / "p.json", first=first, generations=1)
    able = [name_of(c) for c in CHOICES.first() if c != IN_USE and CHOICES.why_pruned(c) is None]
    assert card.compiled == [name_of(IN_USE), *able[:first]]
