"""The search for the fastest config for a problem: generations of configs, which are compiled, tried and timed."""

import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from bench.ahead import Failed
from gluon_attn.backward.configs import HopperBackward
from gluon_attn.forward.configs import ForwardConfig
from gluon_attn.problem import Problem
from gluon_attn.resources import Resources
from gluon_attn.tuning import Measured

STAGES = (3, 6, 12)  # rounds that a config has been timed in before half of them are dropped
CONFIRMING = 9  # rounds in which the winner alone is timed against the config in use
GENERATIONS = 4
# Of the time that is left to a problem, for compiling and for trying; the rest is for timing.
SHARE_OF_COMPILING = 0.6
SHARE_OF_TRYING = 0.75
LEAST_OF_A_GENERATION_S = 10.0  # with less time left, none is begun
FIRST_CONFIRMING_S = 5.0  # that confirming may take, before anything was timed

Config = ForwardConfig | HopperBackward
C = TypeVar("C", bound=Config)


class Stop(Exception):
    """Ends the run, with what to do."""


class Again(Exception):
    """Ends the process: something took it along, which another, with what this one has left, passes over."""


class Choices(Protocol[C]):
    """What can be chosen for a problem."""

    MOST_SPILLS: ClassVar[int]

    @property
    def problem(self) -> Problem: ...

    @property
    def title(self) -> str: ...

    @property
    def in_use(self) -> C: ...

    def name(self, config: C) -> str: ...

    def first(self) -> Sequence[C]: ...

    def neighbours(self, config: C) -> Iterator[C]: ...

    def why_pruned(self, config: C) -> str | None: ...


class Card(Protocol):
    """What a search needs of the card; tests have another one."""

    def compile(self, problem: Problem, configs: Sequence[Config]) -> Iterator[tuple[int, Resources | Failed]]:
        """(which of the configs, what it takes), as they end."""

    def try_out(self, problem: Problem, config: Config, in_use: Config) -> str | None:
        """Run it once. What is wrong with what it computes; None if nothing is."""

    def works(self) -> bool:
        """Whether anything still runs, after something failed."""

    def time(self, problem: Problem, configs: Sequence[Config], rounds: int) -> list[Sequence[float]]:
        """Seconds of each config in each round, interleaved."""


@dataclass(frozen=True)
class Estimate:
    """The time of a config as a multiple of that of the one in use, and how far it may be off on either side."""

    ratio: float
    noise: float

    @staticmethod
    def of(ratios: Sequence[float]) -> "Estimate":
        """Of rounds. In each both ran, so that clocks drift for both alike."""
        deviation = statistics.stdev(ratios) if len(ratios) > 1 else math.inf
        return Estimate(statistics.median(ratios), 2 * deviation / math.sqrt(len(ratios)))

    def faster_than(self, other: "Estimate") -> bool:
        """Beyond the noise."""
        return self.ratio + self.noise < other.ratio - other.noise


IN_USE = Estimate(1.0, 0.0)


class Progress:
    """What was found so far, in a file; and how long that took, over all runs that resumed it."""

    def __init__(self, path: Path, found: dict[str, Any], now: Callable[[], float]) -> None:
        self.path, self.found, self.now = path, found, now
        self.started = now() - found["spent_s"]

    @staticmethod
    def begin(
        path: Path, key: Mapping[str, Any], resume: bool, now: Callable[[], float] = time.monotonic
    ) -> "Progress":
        """key: what a run must have in common with the one that it resumes. Raises Stop if it has not."""
        found: dict[str, Any] = {"key": dict(key), "spent_s": 0.0, "shapes": {}}
        if resume and path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            for name, value in found["key"].items():
                if before["key"].get(name) != value:
                    raise Stop(
                        f"--resume: expected {path} to have {name} {value!r}, got {before['key'].get(name)!r}; leave "
                        "--resume out, or give another --out"
                    )
            found = before
        return Progress(path, found, now)

    @property
    def spent_s(self) -> float:
        return self.now() - self.started

    def of(self, title: str) -> dict[str, Any]:
        empty: dict[str, Any] = {
            "failed": {},
            "compiled": {},
            "right": [],
            "ms": {},
            "ratios": {},
            "confirmed": {},
            "trying": None,
        }
        of_shape: dict[str, Any] = self.found["shapes"].setdefault(title, empty)
        if of_shape["trying"] is not None:
            of_shape["failed"][of_shape["trying"]] = "the process ended while it ran for the first time"
            of_shape["trying"] = None
        return of_shape

    def save(self) -> None:
        self.found["spent_s"] = self.spent_s
        other = self.path.with_suffix(".new")  # so that an interruption leaves one or the other
        other.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
        other.replace(self.path)


class Search(Generic[C]):
    """For the fastest config for one problem.

    limit_s: seconds that it may take; when they are over, the fastest so far is confirmed.
    """

    def __init__(
        self,
        choices: Choices[C],
        card: Card,
        progress: Progress,
        say: Callable[[str], None],
        limit_s: float = math.inf,
    ) -> None:
        self.choices, self.problem, self.card, self.progress = choices, choices.problem, card, progress
        self.say, self.name = say, choices.name
        self.in_use = choices.in_use
        self.found = progress.of(choices.title)
        self.configs = {self.name(self.in_use): self.in_use}
        self.until = progress.now() + limit_s

    def left_s(self) -> float:
        """Before the fastest has to be confirmed."""
        ms = self.found["ms"].get(self.name(self.in_use))
        confirming = FIRST_CONFIRMING_S if ms is None else 1 + CONFIRMING * 2 * 25 * (statistics.median(ms) + 0.2) / 1e3
        return self.until - self.progress.now() - confirming

    def run(self, generations: int) -> Measured:
        """The winner, which is the config in use if none is faster beyond the noise."""
        in_use = self.name(self.in_use)
        asked = [self.in_use, *self.choices.first()]
        leader = in_use
        for generation in range(generations):
            if generation and self.left_s() < LEAST_OF_A_GENERATION_S:
                self.say("  no time for more")
                break
            new = {self.name(c): c for c in asked if self.choices.why_pruned(c) is None}
            new = {name: c for name, c in new.items() if generation == 0 or name not in self.configs}
            if not new:
                break
            self.configs |= new
            begun = self.progress.now()
            left = self.left_s()
            self.compile(new, begun + SHARE_OF_COMPILING * left)
            able = [name for name in new if self.runs(name, begun + SHARE_OF_TRYING * left)]
            if in_use in self.found["failed"]:
                raise Stop(f"{self.choices.title}: the config in use fails: {self.found['failed'][in_use]}")
            before = leader
            leader = self.race(list(dict.fromkeys([in_use, leader, *able])))
            self.say(f"  generation {generation}: {len(able)} configs, the fastest is {leader}: {self.gain(leader)}")
            if generation and leader == before:
                break
            asked = list(self.choices.neighbours(self.configs[leader]))
        return self.confirmed(leader)

    def compile(self, configs: Mapping[str, C], until: float) -> None:
        """Those that were not; which spill in their loops, have failed."""
        done = {*self.found["compiled"], *self.found["failed"]}
        names = [name for name in configs if name not in done]
        start = self.progress.now()
        if not names or start >= until:
            return
        answers = self.card.compile(self.problem, [configs[n] for n in names])
        with contextlib.closing(answers):  # type: ignore[type-var]  # they are a generator's
            for i, (number, answer) in enumerate(answers, 1):
                name, now = names[number], self.progress.now()
                if isinstance(answer, Failed):
                    self.found["failed"][name] = answer.why
                else:
                    self.found["compiled"][name] = asdict(answer)
                    spills = max((loop.spills for loop in answer.loops), default=0)
                    if spills > self.choices.MOST_SPILLS and name != self.name(self.in_use):
                        self.found["failed"][name] = f"spills: {spills} in a loop"
                self.progress.save()
                left = min((now - start) / i * (len(names) - i), until - now)
                self.say(f"  [{left:3.0f} s left] compiled {i} of {len(names)}: {name}")
                if now >= until:
                    return

    def runs(self, name: str, until: float) -> bool:
        """Whether it does, with the right numbers; not whether it would have, had there been time."""
        found = self.found
        if name in found["failed"] or name not in found["compiled"]:
            return False
        if name not in found["right"]:
            if self.progress.now() >= until:
                return False
            found["trying"] = name  # if it takes the process along, the next one passes over it
            self.progress.save()
            try:
                wrong = self.card.try_out(self.problem, self.configs[name], self.in_use)
            except Exception as error:  # any failure is the candidate's
                wrong = f"{type(error).__name__}: {error}".splitlines()[0]
                if not self.card.works():
                    found["failed"][name], found["trying"] = wrong, None
                    self.progress.save()
                    raise Again(f"{name} broke the connection to the card ({wrong})") from error
            found["trying"] = None
            if wrong is None:
                found["right"].append(name)
            else:
                found["failed"][name] = wrong
                self.say(f"  passed over {name}: {wrong}")
            self.progress.save()
        return name in found["right"]

    def race(self, names: Sequence[str]) -> str:
        """The fastest by successive halving: all are timed a little, the faster half of them more, and so on; until the
        first is faster than every other beyond the noise, or time is up."""
        alive = list(names)
        for rounds in STAGES:
            start = self.progress.now()
            whole = self.time([name for name in alive if name != self.name(self.in_use)], rounds)
            estimates = {name: self.estimate(name, rounds) for name in alive if self.is_timed(name)}
            alive = sorted(estimates, key=lambda name: estimates[name].ratio)
            first, *others = alive
            self.say(
                f"  [{self.progress.now() - start:3.0f} s] timed {len(alive)} in {rounds} rounds, first {first}: "
                f"{self.gain(first)}"
            )
            if not whole or all(estimates[first].faster_than(estimates[name]) for name in others):
                break
            alive = alive[: max(2, -(-len(alive) // 2))]
        return alive[0]

    def time(self, names: Sequence[str], rounds: int) -> bool:
        """Until each was timed in so many rounds beside the config in use. Whether there was time for it."""
        in_use, ratios = self.name(self.in_use), self.found["ratios"]
        while lacking := [name for name in names if len(ratios.get(name, ())) < rounds]:
            if self.left_s() <= 0:
                return False
            together = [in_use, *lacking]
            seconds = self.card.time(self.problem, [self.configs[name] for name in together], 1)
            for name, taken in zip(together, seconds, strict=True):
                self.found["ms"].setdefault(name, []).extend(1e3 * s for s in taken)
            for name, taken in zip(lacking, seconds[1:], strict=True):
                ratios.setdefault(name, []).extend(s / base for s, base in zip(taken, seconds[0], strict=True))
            self.progress.save()
        return True

    def is_timed(self, name: str) -> bool:
        return name == self.name(self.in_use) or name in self.found["ratios"]

    def estimate(self, name: str, rounds: int) -> Estimate:
        if name == self.name(self.in_use):
            return IN_USE
        return Estimate.of(self.found["ratios"][name][:rounds])

    def gain(self, name: str) -> str:
        """Over the config in use, as it was timed."""
        if name == self.name(self.in_use):
            return "it is in use"
        found = Estimate.of(self.found["ratios"][name])
        return f"{1 / found.ratio - 1:+.1%} ±{found.noise:.1%}"

    def confirmed(self, leader: str) -> Measured:
        """Timed anew, as the fastest of many was also the luckiest. The config in use, if it is not faster then."""
        in_use, confirmed = self.name(self.in_use), self.found["confirmed"]
        estimate = IN_USE
        if leader != in_use:
            if leader not in confirmed:
                base, taken = self.card.time(self.problem, [self.in_use, self.configs[leader]], CONFIRMING)
                confirmed[leader] = [s / b for s, b in zip(taken, base, strict=True)]
                self.progress.save()
            estimate = Estimate.of(confirmed[leader])
            if not estimate.faster_than(IN_USE):
                leader, estimate = in_use, IN_USE
        return Measured(
            shape=shape_of(self.problem),
            ms={name: statistics.median(taken) for name, taken in self.found["ms"].items()}
            or {in_use: 1e3 * statistics.median(self.card.time(self.problem, [self.in_use], STAGES[0])[0])},
            chosen=leader,
            in_use=in_use,
            gain=1 / estimate.ratio - 1,
            spread=estimate.noise / estimate.ratio**2,
        )


def shape_of(problem: Problem) -> dict[str, Any]:
    names = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "head_dim_v", "causal")
    return {name: getattr(problem, name) for name in names} | {"dtype": str(problem.dtype).removeprefix("torch.")}
