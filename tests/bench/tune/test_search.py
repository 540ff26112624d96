"""The search for one problem."""

import dataclasses
import random
import re
from collections import Counter

import pytest

from bench.ahead import Failed
from bench.tune import search as searching
from bench.tune.forward import Forward
from bench.tune.search import Again, Estimate, InUseFails, Progress, Search, Stop
from gluon_attn.forward.table import PACKAGED, Row
from tests.bench.tune.fakes import BEST, CHOICES, H200, IN_USE, KEY, FakeCard, Killed, One, name_of, taken

CUDA_ERROR = RuntimeError("CUDA error: an illegal memory access")


def test_the_fastest_is_found_and_its_gain(tmp_path):
    card, said = FakeCard(), list[str]()
    looking = One(card, tmp_path / "p.json", said=said)
    found = looking.run(6)
    assert found.chosen == name_of(BEST)
    assert card.rounds[found.chosen] == len(looking.found["ratios"][found.chosen]) + searching.CONFIRMING
    assert len(looking.found["confirmed"][found.chosen]) == searching.CONFIRMING
    assert found.in_use == name_of(IN_USE)
    assert found.gain == pytest.approx(card.seconds(IN_USE) / card.seconds(BEST) - 1, abs=0.01)
    assert 0 < found.spread < 0.02
    assert found.ms[found.chosen] < found.ms[found.in_use]
    assert BEST not in CHOICES.first()  # neighbours of neighbours led to it
    assert re.match(r"  compiled 1 of \d+, about \d+ s for the others: ", said[0])
    assert any(re.match(r"  timed \d+ in 3 rounds, which took \d+ s; the fastest is ", line) for line in said)


def test_progress_says_the_time_that_the_run_has_left_if_it_is_limited(tmp_path):
    """In lines of both kinds, and of the run, whatever the line is about."""
    card, left = FakeCard(), list[tuple[str, str, float]]()
    looking = One(card, tmp_path / "p.json", limit_s=1000)

    def say(line: str) -> None:
        if found := re.match(r"  \[ *(\d+) s left\] (compiled|timed)", line):
            left.append((found[2], found[1], 1000 - card.clock_s))

    looking.search.say = looking.together.say = say
    looking.run(1)
    assert {kind for kind, *_ in left} == {"compiled", "timed"}
    assert [said for _, said, _ in left] == [f"{really:.0f}" for *_, really in left]


def test_halving_times_the_slow_ones_the_least(tmp_path):
    card = FakeCard()
    One(card, tmp_path / "p.json").run(1)
    first = {name_of(c): c for c in CHOICES.first() if CHOICES.why_pruned(c) is None}
    order = sorted((name for name in first if name != name_of(IN_USE)), key=lambda name: card.seconds(first[name]))
    assert {card.rounds[name] for name in order[len(order) // 2 + 1 :]} == {searching.STAGES[0]}
    assert card.rounds[order[0]] > searching.STAGES[0]


def test_a_race_ends_when_the_first_is_out_of_the_noise(tmp_path):
    """Two that are far apart, and two that are alike."""
    other = dataclasses.replace(BEST, softmax_registers=224)
    for alike, rounds in ((False, searching.STAGES[0]), (True, searching.STAGES[-1])):
        card = FakeCard()
        if alike:
            card.seconds = lambda config: 1e-3  # type: ignore[method-assign]
        looking = One(card, tmp_path / "p.json").search
        looking.configs |= {name_of(BEST): BEST, name_of(other): other}
        looking.race([name_of(IN_USE), name_of(BEST), name_of(other)])
        assert card.rounds[name_of(IN_USE)] == rounds


def test_luck_alone_is_no_gain(tmp_path):
    """All take the same time: the first of many is ahead by luck, and is found out when it is timed anew."""
    kept = 0
    for seed in range(10):
        card = FakeCard()
        card.random = random.Random(seed)
        card.seconds = lambda config: 1e-3  # type: ignore[method-assign]
        found = One(card, tmp_path / "p.json").run(1)
        kept += found.chosen == found.in_use
        assert (found.chosen == found.in_use) == (found.gain == 0)
    assert kept >= 8


def test_an_interrupted_run_goes_on_without_doing_anything_twice(tmp_path):
    path = tmp_path / "p.json"
    whole = FakeCard()
    expected = One(whole, tmp_path / "whole.json").run(3)
    parts: list[FakeCard] = []
    while True:
        card = FakeCard()
        card.calls_left = 4  # interrupted whenever it times a fifth time
        parts.append(card)
        try:
            found = One(card, path, resume=len(parts) > 1).run(3)
            break
        except KeyboardInterrupt:
            assert len(parts) < 50
    assert len(parts) > 2
    for kind in ("compiled", "tried"):
        done = [name for card in parts for name in getattr(card, kind)]
        assert len(done) == len(set(done))
    assert sum((card.rounds for card in parts), Counter[str]())[found.chosen] <= (
        searching.STAGES[-1] + len(expected.ms) * searching.CONFIRMING
    )
    assert found.chosen == expected.chosen


def test_a_finished_shape_is_not_timed_again(tmp_path):
    One(FakeCard(), tmp_path / "p.json").run(3)
    again = FakeCard()
    One(again, tmp_path / "p.json", resume=True).run(3)
    assert not again.compiled
    assert not again.tried
    assert not again.rounds


def test_resuming_asks_for_the_same_tree(tmp_path):
    path = tmp_path / "p.json"
    Progress.begin(path, KEY, resume=False).save()
    with pytest.raises(Stop, match=r"^--resume: expected .* to have commit 'other', got 'abc'; leave --resume out"):
        Progress.begin(path, {"commit": "other"}, resume=True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "JSONDecodeError: Expecting value"),
        ("{}", "KeyError: 'key'"),
        ("[]", "TypeError: list indices"),
        ('{"key": {}, "spent_s": 0.0, "shapes": [], "ended": {}}', "other parts"),
    ],
)
def test_resuming_what_is_damaged_says_what_to_do(tmp_path, text, why):
    path = tmp_path / "p.json"
    path.write_text(text)
    says = rf"^--resume: expected .*p\.json to be as an interrupted run .*\({why}.*\); leave --resume out, or give"
    with pytest.raises(Stop, match=says):
        Progress.begin(path, KEY, resume=True)
    Progress.begin(path, KEY, resume=False)


def test_time_counts_over_all_processes(tmp_path):
    card = FakeCard()
    card.calls_left = 6
    with pytest.raises(KeyboardInterrupt):
        One(card, tmp_path / "p.json").run(6)
    after = FakeCard()
    progress = Progress.begin(tmp_path / "p.json", KEY, True, lambda: after.clock_s)
    assert 0 < progress.spent_s <= card.clock_s


@pytest.mark.parametrize(
    ("when", "outcome", "why"),
    [
        ("compile", Failed("took more than 9 s"), "took more than 9 s"),
        ("compile", taken(spills=3), "spills: 3 in a loop"),
        ("try_out", RuntimeError("no room"), "RuntimeError: no room"),
        ("try_out", "O is off by 1", "O is off by 1"),
    ],
)
def test_a_candidate_that_fails_is_passed_over(tmp_path, when, outcome, why):
    card = FakeCard()
    card.fails = {when: {name_of(BEST): outcome}}
    looking = One(card, tmp_path / "p.json")
    found = looking.run(6)
    assert found.chosen not in (name_of(BEST), name_of(IN_USE))
    assert looking.found["failed"] == {name_of(BEST): why}
    assert name_of(BEST) not in card.rounds


def test_a_candidate_that_breaks_the_card_is_passed_over_by_the_next_run(tmp_path):
    card = FakeCard()
    card.fails = {"try_out": {name_of(BEST): CUDA_ERROR}}
    card.broken = True
    with pytest.raises(Again, match=r"broke the connection to the card \(RuntimeError: CUDA error: an illegal memory"):
        One(card, tmp_path / "p.json").run(6)
    after = FakeCard()
    assert One(after, tmp_path / "p.json", resume=True).run(6).chosen != name_of(BEST)
    assert name_of(BEST) not in after.tried


def test_a_candidate_that_hung_is_passed_over_by_the_next_run(tmp_path):
    """What ended the process left no word but that it was being tried."""
    card = FakeCard()
    card.fails = {"try_out": {name_of(BEST): Killed()}}
    with pytest.raises(Killed):
        One(card, tmp_path / "p.json").run(6)
    after = FakeCard()
    looking = One(after, tmp_path / "p.json", resume=True)
    assert looking.found["failed"] == {name_of(BEST): searching.ENDED}
    looking.run(6)
    assert name_of(BEST) not in after.tried


@pytest.mark.parametrize("outcome", [Killed(), CUDA_ERROR], ids=["hang", "error"])
def test_what_takes_the_process_along_while_it_is_timed_is_found_out(tmp_path, outcome):
    """Any of those that were timed by turns may have been it: the next process times each alone, and the one after
    that passes over it."""
    path = tmp_path / "p.json"
    failing = {"time": {name_of(BEST): outcome}}
    for process in range(2):
        card = FakeCard()
        card.fails = failing
        looking = One(card, path, resume=process > 0)
        with pytest.raises((Killed, Again)):
            looking.run(6)
        assert not looking.found["failed"]
        assert name_of(BEST) not in card.rounds
    looking = One(FakeCard(), path, resume=True)
    assert looking.found["failed"] == {name_of(BEST): searching.ENDED}
    assert looking.run(6).chosen not in (name_of(BEST), name_of(IN_USE))
    assert name_of(IN_USE) in looking.found["cleared"]


def test_what_takes_the_process_along_among_others_alone_is_passed_over_with_them(tmp_path):
    """Timed alone each runs: the second time, all that were running have failed."""
    path = tmp_path / "p.json"

    class Together(FakeCard):
        def time(self, problem, configs, rounds):
            if BEST in configs and len(configs) > 1:
                raise Killed
            return super().time(problem, configs, rounds)

    for process in range(2):
        with pytest.raises(Killed):
            One(Together(), path, resume=process > 0).run(6)
    looking = One(Together(), path, resume=True)
    assert looking.found["failed"][name_of(BEST)] == "the process ended twice while it was timed with others"
    assert name_of(IN_USE) not in looking.found["failed"]
    assert looking.run(6).chosen != name_of(BEST)


def test_what_took_a_process_along_is_not_tried_for_other_problems_of_the_kind(tmp_path):
    """For those of another kind it is another kernel; and what is in use is tried anyway."""
    card = FakeCard()
    card.fails = {"try_out": {name_of(BEST): Killed()}}
    with pytest.raises(Killed):
        One(card, tmp_path / "p.json").run(6)
    progress = Progress.begin(tmp_path / "p.json", KEY, True)
    failed = []
    for asked, rows in (
        (dataclasses.replace(CHOICES.problem, batch=1), PACKAGED),
        (dataclasses.replace(CHOICES.problem, causal=True), PACKAGED),
        (dataclasses.replace(CHOICES.problem, batch=1, q_len=512), (Row(128, False, BEST),)),
    ):
        failed.append(Search(Forward(asked, H200, rows), card, progress, print).found["failed"])
    assert failed == [{name_of(BEST): searching.ENDED}, {}, {}]


def test_an_interruption_is_nobodys_fault(tmp_path):
    for when in ("try_out", "time"):
        card = FakeCard()
        card.fails = {when: {name_of(BEST): KeyboardInterrupt()}}
        with pytest.raises(KeyboardInterrupt):
            One(card, tmp_path / "p.json").run(6)
        looking = One(FakeCard(), tmp_path / "p.json", resume=True)
        assert (looking.found["failed"], looking.found["suspected"]) == ({}, [])
        assert looking.run(6).chosen == name_of(BEST)


def test_the_config_in_use_must_run(tmp_path):
    card = FakeCard()
    card.fails = {"try_out": {name_of(IN_USE): "O is off by 1"}}
    looking = One(card, tmp_path / "p.json")
    looking.together.run(1, lambda: None)
    [failure] = looking.together.failures
    assert isinstance(failure, InUseFails)
    assert str(failure).endswith("no mask: the config in use fails: O is off by 1")
    assert not looking.search.is_measured


def test_beside_a_peer_a_config_is_timed_once(tmp_path):
    card = FakeCard()
    looking = One(card, tmp_path / "p.json").search
    assert looking.beside_peer("start", IN_USE) is None  # which has none for it
    card.peer_s[looking.problem] = 2e-3
    found = looking.beside_peer("end", BEST)
    assert found == pytest.approx({"peer": 2.0, "in_use": 1e3 * card.seconds(IN_USE), "new": 1e3 * card.seconds(BEST)})
    took = card.clock_s
    assert looking.beside_peer("end", BEST) == found
    assert card.clock_s == took
    assert looking.beside_peer("end", IN_USE) != found


def test_estimates():
    assert Estimate.of([1.0, 1.0, 1.0]) == Estimate(1.0, 0.0)
    assert Estimate.of([0.9, 0.91, 0.92]).faster_than(Estimate(1.0, 0.0))
    assert not Estimate.of([0.8, 1.0, 1.2]).faster_than(Estimate(1.0, 0.0))
    assert not Estimate.of([0.5]).faster_than(Estimate(1.0, 0.0))  # one round says nothing of the noise


def test_what_takes_the_process_along_beside_the_peer_fails_with_the_second_time(tmp_path):
    class Peerless(FakeCard):
        def time_beside_peer(self, problem, configs, rounds):
            raise Killed

    for process in range(2):
        looking = One(Peerless(), tmp_path / "p.json", resume=process > 0)
        assert not looking.found["failed"]
        with pytest.raises(Killed):
            looking.search.beside_peer("start", IN_USE)
    looking = One(Peerless(), tmp_path / "p.json", resume=True)
    with pytest.raises(InUseFails, match="the config in use fails: the process ended twice"):
        looking.search.require_in_use()
