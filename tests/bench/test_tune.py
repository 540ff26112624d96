"""The tuner, on a card that is made up: its times are known, with noise that is the same in every run."""

import dataclasses
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import __main__ as bench_main
from bench.ahead import Failed
from bench.timing import Timing
from bench.tune import card as on_card
from bench.tune import command
from bench.tune import search as searching
from bench.tune.card import RealCard
from bench.tune.forward import Forward
from bench.tune.gradients import Gradients
from bench.tune.search import Again, Config, Estimate, Progress, Search, Stop
from gluon_attn import ForwardConfig, HopperConfig, tuning
from gluon_attn.backward import table as backward_table
from gluon_attn.backward.configs import HopperBackward
from gluon_attn.backward.plan import BackwardPlan
from gluon_attn.backward.table import BackwardRow
from gluon_attn.device import Device
from gluon_attn.forward import launch
from gluon_attn.forward.configs import label
from gluon_attn.forward.plan import Plan
from gluon_attn.forward.table import PACKAGED, hopper_config, pick_config
from gluon_attn.problem import Problem, empty_output
from gluon_attn.reference import reference_attention
from gluon_attn.resources import Loop, Resources
from gluon_attn.runtime.kernel import Build
from gluon_attn.tuning import Measured
from tests.gluon_attn.problems import problem

H200 = Device.hopper()
ASKED = problem(batch=3, heads=12, kv_heads=4, q_len=3000, kv_len=3000, head_dim=96)
CHOICES = Forward(ASKED, H200, PACKAGED)
IN_USE = CHOICES.in_use
OF_GRADIENTS = Gradients(ASKED, H200, backward_table.PACKAGED)


def name_of(config: Config) -> str:
    return OF_GRADIENTS.name(config) if isinstance(config, HopperBackward) else CHOICES.name(config)


BEST = hopper_config(2, 128, 1, 2, 232, turns=True, early_exp=1, integer_max=True)
COMPILING_S = 2.0  # on the card that is made up
KEY = {"commit": "abc"}
PROVENANCE = {"date": "2026-11-25", "commit": "abc", "card": "NVIDIA H200", "torch": "2.11", "triton": "3.9.0"}


def taken(spills: int = 0) -> Resources:
    loop = Loop(instructions=1, products=1, waits=1, spills=spills, exp2=1, early_exp2=0, tensor_memory_loads=0)
    return Resources(
        first_role_registers=1, smem_bytes=1, instructions=1, products=1, tma_loads=1, tma_stores=1, spills=spills,
        loops=(loop,),
    )  # fmt: skip


class FakeCard:
    """A config takes the longer, the more of its fields are unlike BEST's; 1 % of noise, and clocks that drift."""

    def __init__(self, best: Config = BEST) -> None:
        self.best = best
        self.random = random.Random(0)
        self.clock_s = 0.0
        self.compiled: list[str] = []
        self.tried: list[str] = []
        self.rounds: Counter[str] = Counter()
        self.fails: dict[str, Any] = {}  # by what: name, and what becomes of it
        self.broken = False
        self.calls_left = 10**9  # of `time`, before it is interrupted

    def seconds(self, config: Any) -> float:
        fields = [f.name for f in dataclasses.fields(config)]
        return 1e-3 * (1 + 0.04 * sum(getattr(config, name) != getattr(self.best, name) for name in fields))

    def compile(self, problem: Problem, configs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        for i, config in enumerate(configs):
            self.compiled.append(name_of(config))
            self.clock_s += COMPILING_S
            yield i, self.fails.get("compile", {}).get(name_of(config), taken())

    def try_out(self, problem: Problem, config: Any, in_use: Any) -> str | None:
        self.tried.append(name_of(config))
        outcome = self.fails.get("try_out", {}).get(name_of(config))
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def works(self) -> bool:
        return not self.broken

    def time(self, problem: Problem, configs: Sequence[Any], rounds: int) -> list[Sequence[float]]:
        if self.calls_left == 0:
            raise KeyboardInterrupt
        self.calls_left -= 1
        self.clock_s += 20 * rounds * sum(self.seconds(config) for config in configs)
        drift = [self.random.uniform(0.8, 1.2) for _ in range(rounds)]
        for config in configs:
            self.rounds[name_of(config)] += rounds
        return [[self.seconds(c) * d * self.random.gauss(1, 0.005) for d in drift] for c in configs]


@pytest.fixture(autouse=True)
def packaged_alone():
    tuning.reset()
    yield
    tuning.reset()


def search(
    card: FakeCard,
    path: Path,
    *,
    resume: bool = False,
    said: list[str] | None = None,
    limit_s: float = math.inf,
) -> Search[ForwardConfig]:
    progress = Progress.begin(path, KEY, resume, lambda: card.clock_s)
    say = (lambda line: None) if said is None else said.append
    return Search(CHOICES, card, progress, say, limit_s)


def test_the_fastest_is_found_and_its_gain(tmp_path):
    card, said = FakeCard(), list[str]()
    looking = search(card, tmp_path / "p.json", said=said)
    found = looking.run(6)
    assert found.chosen == name_of(BEST)
    assert card.rounds[found.chosen] == len(looking.found["ratios"][found.chosen]) + searching.CONFIRMING
    assert len(looking.found["confirmed"][found.chosen]) == searching.CONFIRMING
    assert found.in_use == name_of(IN_USE)
    assert found.gain == pytest.approx(card.seconds(IN_USE) / card.seconds(BEST) - 1, abs=0.01)
    assert 0 < found.spread < 0.02
    assert found.ms[found.chosen] < found.ms[found.in_use]
    assert BEST not in CHOICES.first()  # neighbours of neighbours led to it
    assert "s left] compiled" in said[0]


def test_halving_times_the_slow_ones_the_least(tmp_path):
    card = FakeCard()
    search(card, tmp_path / "p.json").run(1)
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
        looking = search(card, tmp_path / "p.json")
        looking.configs |= {name_of(BEST): BEST, name_of(other): other}
        looking.race([name_of(IN_USE), name_of(BEST), name_of(other)])
        assert card.rounds[name_of(IN_USE)] == rounds


def tuned(
    card: FakeCard, path: Path, *problems: Problem, **options: Any
) -> tuple[list[Any], list[Measured], list[str]]:
    """Rows, what they were chosen from, and what was said."""
    kept: list[tuple[list[Any], list[Measured]]] = []
    said: list[str] = []
    progress = Progress.begin(path, KEY, False, lambda: card.clock_s)
    command.tune(
        problems or [ASKED], H200, card, progress, say=said.append,
        keep=lambda rows, of_rows, _: kept.append((list(rows), list(of_rows))), **options,
    )  # fmt: skip
    assert len(kept) == max(1, len(problems))
    return *kept[-1], said


def test_what_is_no_faster_leaves_the_table_as_it_is(tmp_path):
    rows, measured, said = tuned(FakeCard(IN_USE), tmp_path / "p.json")
    assert (rows, measured) == ([], [])
    assert said[-2].endswith(f"the table in use stays, with {name_of(IN_USE)}")
    assert said[-1].endswith("geometric mean of 1 shapes: +0.0%")


def test_luck_alone_is_no_gain(tmp_path):
    """All take the same time: the first of many is ahead by luck, and is found out when it is timed anew."""
    kept = 0
    for seed in range(10):
        card = FakeCard()
        card.random = random.Random(seed)
        card.seconds = lambda config: 1e-3  # type: ignore[method-assign]
        found = search(card, tmp_path / "p.json").run(1)
        kept += found.chosen == found.in_use
        assert (found.chosen == found.in_use) == (found.gain == 0)
    assert kept >= 8


def test_an_interrupted_run_goes_on_without_doing_anything_twice(tmp_path):
    path = tmp_path / "p.json"
    whole = FakeCard()
    expected = search(whole, tmp_path / "whole.json").run(3)
    parts: list[FakeCard] = []
    while True:
        card = FakeCard()
        card.calls_left = 4  # interrupted whenever it times a fifth time
        parts.append(card)
        try:
            found = search(card, path, resume=len(parts) > 1).run(3)
            break
        except KeyboardInterrupt:
            assert len(parts) < 50
    assert len(parts) > 2
    for kind in ("compiled", "tried"):
        done = [name for card in parts for name in getattr(card, kind)]
        assert len(done) == len(set(done))
    assert (
        sum((card.rounds for card in parts), Counter[str]())[found.chosen]
        <= searching.STAGES[-1] + searching.CONFIRMING
    )
    assert found.chosen == expected.chosen


def test_a_finished_shape_is_not_timed_again(tmp_path):
    search(FakeCard(), tmp_path / "p.json").run(3)
    again = FakeCard()
    search(again, tmp_path / "p.json", resume=True).run(3)
    assert not again.compiled
    assert not again.tried
    assert not again.rounds


def test_resuming_asks_for_the_same_tree(tmp_path):
    path = tmp_path / "p.json"
    Progress.begin(path, KEY, resume=False).save()
    with pytest.raises(Stop, match=r"^--resume: expected .* to have commit 'other', got 'abc'; leave --resume out"):
        Progress.begin(path, {"commit": "other"}, resume=True)


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
    looking = search(card, tmp_path / "p.json")
    found = looking.run(6)
    assert found.chosen not in (name_of(BEST), name_of(IN_USE))
    assert looking.found["failed"] == {name_of(BEST): why}
    assert name_of(BEST) not in card.rounds


def test_a_candidate_that_breaks_the_card_is_passed_over_by_the_next_run(tmp_path):
    card = FakeCard()
    card.fails = {"try_out": {name_of(BEST): RuntimeError("CUDA error: an illegal memory access")}}
    card.broken = True
    with pytest.raises(Again, match=r"broke the connection to the card \(RuntimeError: CUDA error: an illegal memory"):
        search(card, tmp_path / "p.json").run(6)
    after = FakeCard()
    assert search(after, tmp_path / "p.json", resume=True).run(6).chosen != name_of(BEST)
    assert name_of(BEST) not in after.tried


def test_a_candidate_that_hung_is_passed_over_by_the_next_run(tmp_path):
    """What ended the process left no word but that it was being tried."""
    card = FakeCard()
    card.fails = {"try_out": {name_of(BEST): KeyboardInterrupt()}}
    with pytest.raises(KeyboardInterrupt):
        search(card, tmp_path / "p.json").run(6)
    after = FakeCard()
    looking = search(after, tmp_path / "p.json", resume=True)
    assert looking.found["failed"] == {name_of(BEST): "the process ended while it ran for the first time"}
    looking.run(6)
    assert name_of(BEST) not in after.tried


def test_a_hang_ends_the_process_with_a_word(monkeypatch, capsys):
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    with on_card.ends_if_hung("it hangs", 0.01):
        deadline = time.monotonic() + 60
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)
    assert ended == [3]
    assert "bench tune: it hangs" in capsys.readouterr().err
    with on_card.ends_if_hung("it hangs", 0.2):
        pass
    time.sleep(0.3)
    assert ended == [3]


@pytest.fixture
def stand_in(monkeypatch):
    """The card's own path, with another attention on the CPU that takes the same arguments. What it is told to get
    wrong, by config."""
    asked = problem(batch=1, heads=4, kv_heads=2, q_len=64, kv_len=32, head_dim=64, causal=True)
    wrong: dict[ForwardConfig, Callable[[torch.Tensor, torch.Tensor], None]] = {}

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, config: Any = None, **options: Any
    ) -> Any:
        assert (q.shape, k.shape, v.shape, causal) == ((1, 4, 64, 64), (1, 2, 32, 64), (1, 2, 32, 64), True)
        right, right_lse = reference_attention(q, k, v, causal=causal)
        out = options.get("out", torch.empty_like(q))
        lse = right_lse.float()
        if wrong.get(config) is not skipped:
            out.copy_(right)
        if config in wrong:
            wrong[config](out, lse)
        return (out, lse) if options.get("return_lse") else out

    monkeypatch.setattr(on_card, "attention", attend)
    return asked, RealCard(H200, 1, 1.0, where="cpu"), wrong


def skipped(out: torch.Tensor, lse: torch.Tensor) -> None:
    """Nothing is stored: what is in O's memory stays there."""


def test_what_a_config_computes_is_held_against_the_config_in_use(stand_in):
    """Some rows of the problem see no key: their LSE is -inf."""
    asked, card, wrong = stand_in
    assert card.try_out(asked, IN_USE, IN_USE) is None
    assert card.try_out(asked, BEST, IN_USE) is None
    for makes_it, says in (
        (lambda out, lse: out.mul_(1.01), None),
        (lambda out, lse: out.mul_(1.1), "O is off by 0.1"),
        (lambda out, lse: out[0, 0, 40].fill_(float("nan")), "O is off by nan"),
        (lambda out, lse: lse.mul_(1.1), "LSE is off by 0.1"),
        (skipped, "O is off by nan"),
    ):
        wrong[BEST] = makes_it
        said = card.try_out(asked, BEST, IN_USE)
        assert (said is None) == (says is None), said
        assert says is None or said.startswith(says)
    assert card.works()


def test_times_are_by_config(stand_in, monkeypatch):
    asked, card, _ = stand_in
    awake: list[object] = []

    def timed(calls: dict[str, Any], rounds: int) -> dict[str, Timing]:
        return {name: Timing(1.0, tuple(float(i) for _ in range(rounds))) for i, name in enumerate(calls)}

    monkeypatch.setattr(on_card, "time_interleaved", timed)
    monkeypatch.setattr(card, "wake", awake.append)
    for _ in range(2):
        assert card.time(asked, [BEST, IN_USE], 2) == [(0.0, 0.0), (1.0, 1.0)]
    assert len(awake) == 1  # the second time it has not idled


def test_a_kernel_that_two_shapes_share_is_compiled_once(monkeypatch):
    card = RealCard(H200, 1, 1.0, where="cpu")
    given: list[Any] = []

    def answer(jobs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        given.extend(jobs)
        yield from ((i, taken()) for i, _ in enumerate(jobs))

    monkeypatch.setattr(card.workers, "run", answer)
    other = dataclasses.replace(ASKED, q_len=64, batch=1)
    assert dict(card.compile(ASKED, [IN_USE])) == {0: taken()}
    assert dict(card.compile(other, [BEST, IN_USE])) == {0: taken(), 1: taken()}
    assert dict(card.compile(dataclasses.replace(ASKED, causal=True), [IN_USE])) == {0: taken()}
    assert [(asked.causal, config) for asked, config, _ in given] == [(False, IN_USE), (False, BEST), (True, IN_USE)]


def test_what_is_compiled_ahead_is_what_a_call_compiles(monkeypatch):
    """In the child process and in a call of attention."""
    asked = problem(batch=1, heads=4, kv_heads=2, q_len=32, kv_len=64, head_dim=64)
    config = pick_config(asked, H200)
    builds: list[tuple[Any, int]] = []
    monkeypatch.setattr(Build, "compile", lambda build, arch: builds.append((build, arch)))
    monkeypatch.setattr(on_card, "resources", lambda kernel: taken())
    launch.compiled.cache_clear()
    on_card.compile_one((asked, config, H200))
    launch.compiled.cache_clear()
    monkeypatch.setattr(launch, "CardLaunch", lambda *_: None)
    q, k, v = (torch.empty(1, n, s, 64, dtype=torch.bfloat16, device="meta") for n, s in ((4, 32), (2, 64), (2, 64)))
    plan = Plan.of(Problem.of(q, k, v, causal=False), config, H200)
    launch.launches_on_card(plan, q, k, v, empty_output(q, v))
    launch.compiled.cache_clear()
    assert len(builds) == 2
    assert builds[0] == builds[1]


def test_the_search_ends_in_time(tmp_path):
    """With less and less time: what it has found by then is confirmed, and there is always a result."""
    whole = FakeCard()
    best = search(whole, tmp_path / "whole.json").run(6)
    took = whole.clock_s
    chosen = []
    for limit in (2 * took, took / 2, took / 4, 30.0, 12.0, 6.0, 1.0):
        card, said = FakeCard(), list[str]()
        found = search(card, tmp_path / "p.json", said=said, limit_s=limit).run(6)
        chosen.append(found.chosen)
        assert card.clock_s <= max(limit, COMPILING_S + searching.FIRST_CONFIRMING_S)
        assert found.gain >= 0
        assert found.chosen == found.in_use or card.rounds[found.chosen] > searching.CONFIRMING
    assert chosen[0] == best.chosen
    assert chosen[-1] == name_of(IN_USE)
    assert len(set(chosen)) > 2


def test_time_is_shared_out_by_what_has_to_be_compiled(tmp_path):
    """The first shape of a kind has more of it; what one leaves is for the others."""
    others = [dataclasses.replace(ASKED, batch=batch) for batch in (1, 2)]
    assert command.weights_of([ASKED, *others, dataclasses.replace(ASKED, causal=True)]) == [4, 1, 1, 4]
    card = FakeCard()
    *_, said = tuned(card, tmp_path / "p.json", ASKED, *others, limit_s=120)
    shares = [float(line.split()[-2]) for line in said if line.startswith("q (")]
    assert shares[0] == 80
    assert shares[1] >= 20
    assert card.clock_s <= 120


def test_time_counts_over_all_processes(tmp_path):
    card = FakeCard()
    card.calls_left = 6
    with pytest.raises(KeyboardInterrupt):
        search(card, tmp_path / "p.json").run(6)
    after = FakeCard()
    progress = Progress.begin(tmp_path / "p.json", KEY, True, lambda: after.clock_s)
    assert 0 < progress.spent_s <= card.clock_s


def test_a_process_that_was_taken_along_is_followed_by_another(capsys):
    ends, resumed = [on_card.AGAIN, on_card.AGAIN, 0], list[bool]()

    def start(resume: bool) -> int:
        resumed.append(resume)
        return ends[len(resumed) - 1]

    assert command.last_of(start, False) == 0
    assert resumed == [False, True, True]
    assert "goes on in another process" in capsys.readouterr().err
    assert command.last_of(lambda resume: 1, True) == 1
    assert str(command.last_of(lambda resume: on_card.AGAIN, False)).endswith("the same command with --resume goes on")


def test_the_config_in_use_must_run(tmp_path):
    card = FakeCard()
    card.fails = {"try_out": {name_of(IN_USE): "O is off by 1"}}
    with pytest.raises(Stop, match="the config in use fails: O is off by 1"):
        search(card, tmp_path / "p.json").run(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (256, 256), (192, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_no_config_of_the_table_is_pruned(dtype, head_dims, causal):
    asked = problem(dtype=dtype, head_dim=head_dims[0], head_dim_v=head_dims[1], causal=causal)
    rows = [row for row in PACKAGED if row.is_of_kind(asked, H200)]
    assert rows
    assert [row for row in rows if Forward(asked, H200, PACKAGED).why_pruned(row.config) is not None] == []


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (hopper_config(3, 128, 1, 1, 160), "needs 192 registers a softmax thread, has 160"),
        (hopper_config(2, 128, 2, 4, 232), "config: expected a config that fits the 232448 bytes of shared memory"),
        (hopper_config(2, 64, 1, 2, 232, last_heads_longest_first=True), "an order of row blocks"),
        (hopper_config(1, 64, 1, 2, 232, turns=True), "turns of one role"),
        (hopper_config(2, 64, 1, 2, 216, transpose_registers=24), "config: expected transpose_registers=0"),
    ],
)
def test_what_is_pruned_before_it_is_compiled(config, why):
    assert str(CHOICES.why_pruned(config)).startswith(why)


@pytest.mark.parametrize("row", PACKAGED, ids=lambda row: label(row.config))
def test_neighbours_differ_and_have_names_of_their_own(row):
    found = list(CHOICES.neighbours(row.config))
    assert row.config not in found
    assert len({name_of(config) for config in [row.config, *found]}) == len(set(found)) + 1 == len(found) + 1


def test_a_neighbour_with_more_roles_has_the_registers_for_it():
    found = [c for c in CHOICES.neighbours(hopper_config(2, 64, 2, 2, 232)) if isinstance(c, HopperConfig)]
    assert {c.softmax_roles: c.softmax_registers for c in found if c.softmax_roles != 2} == {1: 232, 3: 160, 4: 120}


def test_what_is_written_serves_what_is_like_the_shape(tmp_path):
    rows, measured, _ = tuned(FakeCard(), tmp_path / "p.json", generations=6)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(tuning.as_json([H200], PROVENANCE, rows, measured)))
    tuning.load(path)
    served = []
    others: list[dict[str, Any]] = [
        {},
        {"q_len": 3300, "kv_len": 2500},
        {"batch": 2},
        {"kv_len": 4096},
        {"kv_heads": 12},
    ]
    for unlike in others:
        asked = dataclasses.replace(ASKED, **unlike)
        served.append(pick_config(asked, H200, None, tuning.rows_for(H200)) == BEST)
    assert served == [True, True, False, False, False]


def test_a_reach_of_one_is_the_shape_alone():
    row = CHOICES.row(BEST, 1)
    assert (row.min_kv_len, row.max_kv_len, row.q_lens, row.sequence_heads) == (3000, 3000, (3000, 3000), (36, 36))
    assert Forward(problem(q_len=1), H200, PACKAGED).row(BEST, 1.25).q_lens == (1, 1)


GRADIENTS = dataclasses.replace(ASKED, batch=1)  # D=128, where they have 2 slots for each of Q and dO, and 2 tiles
BEST_OF_GRADIENTS = dataclasses.replace(backward_table.HOPPER[128], query_slots=3, ds_slots=1, load_registers=32)


def test_gradients_are_searched_too(tmp_path):
    rows, measured, said = tuned(
        FakeCard(BEST_OF_GRADIENTS), tmp_path / "p.json", GRADIENTS, generations=6, of_gradients=True
    )
    [row] = rows
    assert row == BackwardRow(
        (128, 128), BEST_OF_GRADIENTS, False, min_kv_len=2400, max_kv_len=3750, q_lens=(2400, 3750),
        sequence_heads=(10, 15), heads_per_kv_head=3,
    )  # fmt: skip
    [found] = measured
    assert (found.chosen, found.in_use) == ("64x128 q3do2ds1 r32", "64x128 q2do2ds2 r24")
    assert said[0] == "gradients of q (1, 12, 3000, 96), k (1, 4, 3000, 96), bf16, no mask"


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (256, 256), (192, 128)])
def test_configs_of_gradients(head_dims):
    """None of the table's is pruned; neighbours have names of their own; some of the first are no neighbours."""
    asked = problem(head_dim=head_dims[0], head_dim_v=head_dims[1])
    choices = Gradients(asked, H200, backward_table.PACKAGED)
    first, beside = choices.first(), list(choices.neighbours(choices.in_use))
    assert choices.in_use in first
    assert choices.why_pruned(choices.in_use) is None
    assert choices.in_use not in beside
    for found in (first, beside):
        assert len({choices.name(config) for config in found}) == len(set(found)) == len(found)
    assert len([config for config in first if choices.why_pruned(config) is None]) > 3
    assert {*first} - {*beside, choices.in_use}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"block_m": 128, "query_slots": 1, "dout_slots": 1, "ds_slots": 1}, "needs 288 registers a thread that comp"),
        ({"query_slots": 4, "dout_slots": 4}, "config: expected a config that fits the 232448 bytes of shared memory"),
        ({"keys": 64}, "config: expected keys=128 at head_dim 128, got 64"),
        ({"dq_slots": 2}, "config: expected at most as many dq_slots as q_pieces, 1, got 2"),
    ],
)
def test_what_is_pruned_of_gradients(fields, why):
    config = dataclasses.replace(backward_table.HOPPER[128], **fields)
    assert str(OF_GRADIENTS.why_pruned(config)).startswith(why)


def test_gradients_on_the_cards_path(stand_in, monkeypatch):
    """By other kernels on the CPU: inputs once, all three gradients looked at, in memory of NaN."""
    asked, card, _ = stand_in
    config = backward_table.HOPPER[64]
    other = dataclasses.replace(config, load_registers=32)
    calls: list[tuple[HopperBackward, bool]] = []
    off = {"dQ": 0.0, "dK": 0.0, "dV": 0.0}

    def call_of(config: HopperBackward, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, **options: Any) -> Any:
        assert options.pop("causal") is True
        assert (dout.shape, out.shape, lse.shape) == (q.shape, q.shape, q.shape[:3])
        calls.append((config, bool(options)))
        if options:
            assert options["output"](q).isnan().all()
            assert options["workspaces"]("lse", lse).isnan().all()
            whole = torch.zeros(3, dtype=torch.int32)
            assert options["workspaces"]("added", whole) is whole
        error = [off[name] if config == other else 0.0 for name in ("dQ", "dK", "dV")]
        return lambda: tuple(t * (1 + e) for t, e in zip((q, k, v), error, strict=True))

    monkeypatch.setattr(on_card, "backward_call", call_of)
    assert card.try_out(asked, other, config) is None
    for name in off:
        off[name] = 0.1
        assert str(card.try_out(asked, other, config)).startswith(f"{name} is off by 0.1")
        off[name] = 0.0
    assert [timed for timed in calls if not timed[1]] == [(other, False)]  # what is timed is made once
    assert len([timed for timed in calls if timed[0] == config]) == 1


def test_kernels_of_gradients_depend_on_whether_key_blocks_are_shared():
    config = backward_table.HOPPER[128]
    asked = problem(batch=1, kv_len=100, q_len=2**14)
    plain = problem()
    assert [BackwardPlan.of(p, config, H200).shared > 0 for p in (asked, plain)] == [True, False]
    assert on_card.kernel_of(asked, config, H200) != on_card.kernel_of(plain, config, H200)
    assert on_card.kernel_of(asked, BEST, H200) == on_card.kernel_of(plain, BEST, H200)


def test_estimates():
    assert Estimate.of([1.0, 1.0, 1.0]) == Estimate(1.0, 0.0)
    assert Estimate.of([0.9, 0.91, 0.92]).faster_than(Estimate(1.0, 0.0))
    assert not Estimate.of([0.8, 1.0, 1.2]).faster_than(Estimate(1.0, 0.0))
    assert not Estimate.of([0.5]).faster_than(Estimate(1.0, 0.0))  # one round says nothing of the noise


def test_a_process_of_its_own_gets_what_was_asked_and_says_what_it_lacks(capfd):
    args = command.parser().parse_args(["--shape", "1,2,3,64", "--table", "none.json"])
    assert command.process([ASKED], args, False) == 1
    assert "bench tune: [Errno 2] No such file or directory: 'none.json'" in capfd.readouterr().err


def run(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "tune", *arguments])
    bench_main.main()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--shape", "1,2,3"], "expected four numbers from 1 on, as 4,16,4096,128, got '1,2,3'"),
        (["--shape", "1,2,3,64", "--reach", "0.5"], "--reach: expected 1 or more, got 0.5"),
        (["--shape", "1,2,3,64", "--generations", "0"], "--generations: expected 1 or more, got 0"),
        (["--shape", "1,2,3,64", "--minutes", "0"], "--minutes: expected 1 or more, got 0"),
        (["--shape", "1,2,3,64", "--backward", "--dtype", "e4m3"], "--backward: expected --dtype fp16 or bf16"),
        (["--shape", "1,2,3,64", "--out", "table"], "--out: expected a file name that ends in .json, got table"),
        (["--shape", "1,2,3,64", "--device", "h100"], "--device: expected with --list only"),
        (["--shape", "1,2,3,300"], "q: expected a head_dim that is a multiple of 8 from 8 to 256, got 300"),
        (["--shape", "1,2,3,64", "--table", "none.json"], "No such file or directory: 'none.json'"),
    ],
)
def test_nonsense_is_refused(monkeypatch, capsys, arguments, says):
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *arguments)
    assert says in capsys.readouterr().err


def test_without_a_card_nothing_is_timed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a Hopper or Blackwell card, found no CUDA device; nothing was timed"):
        run(monkeypatch, "--shape", "1,2,3,64")


def test_the_first_configs_are_listed(monkeypatch, capsys):
    run(monkeypatch, "--shape", "3,12,3000,96", "--kv-heads", "4", "--device", "h100", "--list")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "q (3, 12, 3000, 96), k (3, 4, 3000, 96), bf16, no mask"
    assert lines[1].split() == ["in", "use", *name_of(IN_USE).split()]
    assert any(line.startswith("  pruned  ") and "which without a mask are alike" in line for line in lines)


def test_the_first_configs_of_gradients_are_listed(monkeypatch, capsys):
    run(monkeypatch, "--shape", "4,16,4096,128", "--device", "h100", "--list", "--backward")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split(maxsplit=2) == ["in", "use", name_of(backward_table.HOPPER[128])]
    assert "pruned  128x128 q1do1ds1 r24: needs 288 registers" in lines[-2]
    with pytest.raises(SystemExit, match="--backward: expected a Hopper card"):
        run(monkeypatch, "--shape", "4,16,4096,128", "--device", "b200", "--list", "--backward")


def test_a_run_for_gradients_writes_rows_of_theirs(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "provenance", lambda commit: PROVENANCE | {"driver": "1"})
    out = tmp_path / "table.json"
    args = command.parser().parse_args(["--shape", "1,2,3,64", "--out", str(out), "--generations", "6", "--backward"])
    command.run([GRADIENTS], H200, FakeCard(BEST_OF_GRADIENTS), args, resume=False)
    table = tuning.read(out)
    assert table.rows == ()
    assert [row.config for row in table.backward_rows] == [BEST_OF_GRADIENTS]
    assert table.provenance["command"]["backward"] is True


def test_a_whole_run_writes_a_table_file_that_loads(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "provenance", lambda commit: PROVENANCE | {"driver": "1"})
    out = tmp_path / "made" / "table.json"
    args = command.parser().parse_args(["--shape", "1,2,3,64", "--out", str(out), "--generations", "6"])
    other = dataclasses.replace(ASKED, causal=True)
    for best, configs in ((BEST, [BEST]), (IN_USE, [])):
        command.run([ASKED], H200, FakeCard(best), args, resume=False)
        table = tuning.read(out)
        assert [row.config for row in table.rows] == configs
        assert table.provenance["command"]["reach"] == 1.25
        [shape] = table.provenance["shapes"]
        assert shape["chosen"] == name_of(best)
        assert set(shape["ms"]) == {name_of(best), name_of(IN_USE)}
        assert [p.name for p in out.parent.iterdir()] == ["table.json"]
        assert f"written: {out}, {len(configs)} rows" in capsys.readouterr().out
    card = FakeCard()
    card.fails = {"try_out": {name_of(pick_config(other, H200)): "O is off by 1"}}
    with pytest.raises(Stop, match="the config in use fails"):
        command.run([ASKED, other], H200, card, args, resume=False)
    assert [row.config for row in tuning.read(out).rows] == [BEST]  # of the first shape, before the second failed
