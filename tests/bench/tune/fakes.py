"""A card that is made up: its times are known, with noise that is the same in every run. What tests of the tuner have
in common."""

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.tune.command import Batch, tune
from bench.tune.forward import Forward
from bench.tune.gradients import Gradients
from bench.tune.rows import Chosen
from bench.tune.search import Config, Progress, Search
from bench.tune.together import RUNS_OF_A_ROUND, Together
from gluon_attn import ForwardConfig
from gluon_attn.backward import table as backward_table
from gluon_attn.backward.configs import HopperBackward
from gluon_attn.device import Device
from gluon_attn.forward.table import PACKAGED, hopper_config
from gluon_attn.problem import Problem
from gluon_attn.resources import Loop, Resources
from gluon_attn.tuning import Measured
from tests.gluon_attn.problems import problem

H200 = Device.hopper()
ASKED = problem(batch=3, heads=12, kv_heads=4, q_len=3000, kv_len=3000, head_dim=96)
CHOICES = Forward(ASKED, H200, PACKAGED)
IN_USE = CHOICES.in_use
OF_GRADIENTS = Gradients(ASKED, H200, backward_table.PACKAGED)
BEST = hopper_config(2, 128, 1, 2, 232, turns=True, early_exp=1, integer_max=True)
GRADIENTS = dataclasses.replace(ASKED, batch=1)  # D=128, where they have 2 slots for each of Q and dO, and a tile of dS
BEST_OF_GRADIENTS = dataclasses.replace(backward_table.HOPPER[128], query_slots=3, load_registers=32)
COMPILING_S = 2.0  # on the card that is made up
KEY = {"commit": "abc"}
PROVENANCE = {"date": "2026-11-25", "commit": "abc", "card": "NVIDIA H200", "torch": "2.11", "triton": "3.9.0"}


def name_of(config: Config) -> str:
    return OF_GRADIENTS.name(config) if isinstance(config, HopperBackward) else CHOICES.name(config)


def taken(spills: int = 0) -> Resources:
    loop = Loop(instructions=1, products=1, waits=1, spills=spills, exp2=1, early_exp2=0, tensor_memory_loads=0)
    return Resources(
        first_role_registers=1, smem_bytes=1, instructions=1, products=1, tma_loads=1, tma_stores=1, spills=spills,
        loops=(loop,),
    )  # fmt: skip


class Killed(BaseException):
    """The process is no more: nothing that it would do afterwards is done."""


class FakeCard:
    """A config takes the longer, the more of its fields are unlike the best's; 1 % of noise, and clocks that drift."""

    def __init__(self, best: Config = BEST) -> None:
        self.best = best
        self.random = random.Random(0)
        self.clock_s = 0.0
        self.compiled: list[str] = []
        self.tried: list[str] = []
        self.rounds: Counter[str] = Counter()
        self.problems: list[Problem] = []  # in the order in which they were first timed with several configs
        self.fails: dict[str, Any] = {}  # by what: name, and what becomes of it
        self.broken = False
        self.calls_left = 10**9  # of `time`, before it is interrupted
        self.peer_s: dict[Problem, float] = {}  # of those that the peer computes

    def seconds(self, config: Any) -> float:
        fields = [f.name for f in dataclasses.fields(config)]
        return 1e-3 * (1 + 0.04 * sum(getattr(config, name) != getattr(self.best, name, None) for name in fields))

    def compile(self, jobs: Sequence[tuple[Problem, Any]], within_s: float) -> Iterator[tuple[int, Any]]:
        until = self.clock_s + within_s
        for i, (_, config) in enumerate(jobs):
            if self.clock_s + COMPILING_S > until:
                self.clock_s = until
                return
            self.compiled.append(name_of(config))
            self.clock_s += COMPILING_S
            yield i, self.fails.get("compile", {}).get(name_of(config), taken())

    def try_out(self, problem: Problem, config: Any, in_use: Any) -> str | None:
        self.tried.append(name_of(config))
        fails = self.fails.get("try_out", {})
        outcome = fails.get(name_of(config)) or fails.get(name_of(in_use))  # which it is compared with
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def works(self) -> bool:
        return not self.broken

    def time(self, problem: Problem, configs: Sequence[Any], rounds: int) -> list[Sequence[float]]:
        if self.calls_left == 0:
            raise KeyboardInterrupt
        self.calls_left -= 1
        if len(configs) > 2 and problem not in self.problems:
            self.problems.append(problem)
        for config in configs:
            if name_of(config) in self.fails.get("time", {}):
                raise self.fails["time"][name_of(config)]
        self.clock_s += RUNS_OF_A_ROUND * rounds * sum(self.seconds(config) for config in configs)
        drift = [self.random.uniform(0.8, 1.2) for _ in range(rounds)]
        for config in configs:
            self.rounds[name_of(config)] += rounds
        return [[self.seconds(c) * d * self.random.gauss(1, 0.005) for d in drift] for c in configs]

    def time_beside_peer(self, problem: Problem, configs: Sequence[Any], rounds: int) -> list[Sequence[float]]:
        if problem not in self.peer_s:
            return []
        self.clock_s += (
            RUNS_OF_A_ROUND * rounds * (self.peer_s[problem] + sum(self.seconds(config) for config in configs))
        )
        return [[self.peer_s[problem]] * rounds, *([self.seconds(config)] * rounds for config in configs)]


class One:
    """A search for ASKED alone."""

    def __init__(
        self,
        card: FakeCard,
        path: Path,
        *,
        resume: bool = False,
        said: list[str] | None = None,
        limit_s: float = math.inf,
    ) -> None:
        self.progress = Progress.begin(path, KEY, resume, lambda: card.clock_s)
        say = (lambda line: None) if said is None else said.append
        self.search: Search[ForwardConfig] = Search(CHOICES, card, self.progress, say)
        self.found = self.search.found
        self.together = Together([self.search], card, self.progress, say, until=self.progress.now() + limit_s)

    def run(self, generations: int) -> Measured:
        self.together.run(generations, lambda: None)
        return self.search.measured()


def tuned(
    card: FakeCard, path: Path, *batches: Batch, resume: bool = False, **options: Any
) -> tuple[list[Chosen], list[Any], list[str]]:
    """Rows of the forward pass and of gradients, what was found, and what was said."""
    kept: list[tuple[list[Chosen], list[Any]]] = []
    said: list[str] = []
    progress = Progress.begin(path, KEY, resume, lambda: card.clock_s)
    tune(
        batches or [Batch((ASKED,))], H200, card, progress, say=said.append,
        keep=lambda rows, backward, found: kept.append(([*rows, *backward], list(found))), **options,
    )  # fmt: skip
    return *kept[-1], said
