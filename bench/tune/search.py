"""The search for the fastest config for a problem: generations of configs, which are tried and timed.

together.py takes several such searches through their generations.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from bench.ahead import Failed
from gluon_attn.backward.configs import HopperBackward
from gluon_attn.forward.configs import ForwardConfig
from gluon_attn.problem import Problem
from gluon_attn.resources import Resources
from gluon_attn.score_mod import kind_of as scores_kind
from gluon_attn.tuning import Measured

STAGES = (3, 6, 12)  # rounds that a config has been timed in before half of them are dropped
CONFIRMING = 9  # rounds in which the winner alone is timed against the config in use
BESIDE_A_PEER = {"start": 3, "end": 7}  # rounds in which the peer is timed too, before a search and after it
ENDED = "the process ended while it ran alone"
PEER = "peer"  # where names of configs are
SHARE_OF_TRYING = 0.4  # of a generation's time for a problem; the rest is for timing
FIRST_CONFIRMING_S = 1.0  # that confirming may take, before anything was timed
PARTS = {"key": dict, "spent_s": float, "shapes": dict, "ended": dict}  # of what a run has found so far

Config = ForwardConfig | HopperBackward
C = TypeVar("C", bound=Config)


class Stop(Exception):
    """Ends the run, with what to do."""


class Again(Exception):
    """Ends the process: something took it along, which another, with what this one has left, passes over."""


class InUseFails(Exception):
    """Of a problem whose config in use does: nothing can be held against it."""


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

    def served_by(self, rows: Sequence[Any]) -> C: ...


class Card(Protocol):
    """What a search needs of the card; tests have another one."""

    def compile(
        self, jobs: Sequence[tuple[Problem, Config]], within_s: float
    ) -> Iterator[tuple[int, Resources | Failed]]:
        """(which of the jobs, what it takes), as they end; no more of them after so many seconds."""

    def try_out(self, problem: Problem, config: Config, in_use: Config) -> str | None:
        """Run it once. What is wrong with what it computes; None if nothing is."""

    def works(self) -> bool:
        """Whether anything still runs, after something failed."""

    def time(self, problem: Problem, configs: Sequence[Config], rounds: int) -> list[Sequence[float]]:
        """Seconds of each config in each round, interleaved."""

    def time_beside_peer(self, problem: Problem, configs: Sequence[Config], rounds: int) -> list[Sequence[float]]:
        """Likewise, those of the peer first; of gradients if the configs are of these. Empty if it has none for such
        a problem."""


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
    """What was found so far, in a file; and how long that took, over all runs that resumed it. until: when this
    run is to end, of its clock."""

    def __init__(self, path: Path, found: dict[str, Any], now: Callable[[], float]) -> None:
        self.path, self.found, self.now = path, found, now
        self.started = now() - found["spent_s"]
        self.until = math.inf

    @staticmethod
    def begin(
        path: Path, key: Mapping[str, Any], resume: bool, now: Callable[[], float] = time.monotonic
    ) -> "Progress":
        """key: what a run must have in common with the one that it resumes. Raises Stop if it has not."""
        found: dict[str, Any] = {"key": dict(key), "spent_s": 0.0, "shapes": {}, "ended": {}}
        if resume and path.exists():
            before = found_before(path)
            for name, value in found["key"].items():
                if before["key"].get(name) != value:
                    raise Stop(
                        f"--resume: expected {path} to have {name} {value!r}, got {before['key'].get(name)!r}; leave "
                        "--resume out, or give another --out"
                    )
            found = before
        progress = Progress(path, found, now)
        progress.settle()
        return progress

    @property
    def spent_s(self) -> float:
        return self.now() - self.started

    @property
    def left(self) -> str:
        """What a line of progress begins with: the time that this run has left, if that is limited."""
        return f"[{max(0.0, self.until - self.now()):3.0f} s left] " if math.isfinite(self.until) else ""

    def of(self, title: str, kind: str) -> dict[str, Any]:
        """What was found for one problem, whose configs mean the same kernels as those of others of the kind."""
        empty: dict[str, Any] = {
            "kind": kind, "failed": {}, "compiled": [], "right": [], "ms": {}, "ratios": {}, "confirmed": {},
            "start": None, "end": None, "trying": None, "timing": [], "suspected": [], "cleared": [],
        }  # fmt: skip
        found: dict[str, Any] = self.found["shapes"].setdefault(title, empty)
        return found

    def settle(self) -> None:
        """What was running when a process ended, has failed, for other problems of the kind too; of several that ran by
        turns, any may have been it: they are suspected, and with the second time they have failed, but for the first,
        which they were held against."""
        for found in self.found["shapes"].values():
            alone = [found["trying"]] if found["trying"] is not None else []
            running = found["timing"]
            if len(running) == 1:
                alone, running = running, []
            for name in alone:
                found["failed"][name] = ENDED
                self.found["ended"].setdefault(found["kind"], []).append(name)
            known = found["cleared"] if running[:1] != [PEER] else found["suspected"]  # beside it none is timed alone
            for i, name in enumerate(running):
                if i and name in known:
                    found["failed"][name] = "the process ended twice while it was timed with others"
                elif name not in found["suspected"]:
                    found["suspected"].append(name)
            found |= {"trying": None, "timing": []}

    def ended(self, kind: str) -> list[str]:
        """Configs that took a process along."""
        return list(self.found["ended"].get(kind, ()))

    def save(self) -> None:
        self.found["spent_s"] = self.spent_s
        other = self.path.with_suffix(".new")  # so that an interruption leaves one or the other
        other.write_text(json.dumps(self.found) + "\n", encoding="utf-8")
        other.replace(self.path)


def found_before(path: Path) -> dict[str, Any]:
    """What an interrupted run has left. Raises Stop for what no run writes."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        whole = all(isinstance(found[name], kind) for name, kind in PARTS.items())
        why = "other parts"
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        whole, why = False, f"{type(error).__name__}: {error}"
    if not whole:
        raise Stop(
            f"--resume: expected {path} to be as an interrupted run left it, got a damaged file ({why}); leave "
            "--resume out, or give another --out"
        )
    return found


class Search(Generic[C]):
    """For the fastest config for one problem, generation by generation: `ask`, then `take` for each config that was
    compiled, then `step`.

    first: so many configs of the first generation, at most.
    """

    def __init__(
        self,
        choices: Choices[C],
        card: Card,
        progress: Progress,
        say: Callable[[str], None],
        first: int | None = None,
    ) -> None:
        self.choices, self.problem, self.card, self.progress = choices, choices.problem, card, progress
        self.say, self.name, self.first = say, choices.name, first
        self.in_use = choices.in_use
        kind = f"{type(choices).__name__} {kind_of(self.problem)}"
        self.found = progress.of(choices.title, kind)
        self.leader = self.name(self.in_use)
        for name in progress.ended(kind):
            if name != self.leader:
                self.found["failed"].setdefault(name, ENDED)
        self.configs = {self.leader: self.in_use}
        self.new: dict[str, C] = {}  # of this generation
        self.generation = -1
        self.until = math.inf
        self.ended: str | None = None  # why, if there is nothing more to do

    def left_s(self) -> float:
        """Before the fastest has to be confirmed."""
        ms = self.found["ms"].get(self.name(self.in_use))
        confirming = FIRST_CONFIRMING_S if ms is None else 1 + CONFIRMING * 2 * 25 * (statistics.median(ms) + 0.2) / 1e3
        return self.until - self.progress.now() - confirming

    def ask(self) -> bool:
        """Begins a generation. Whether there is anything in it."""
        if self.ended is not None:
            return False
        self.generation += 1
        if self.generation == 0:
            able = [c for c in self.choices.first() if c != self.in_use and self.choices.why_pruned(c) is None]
            asked = [self.in_use, *able[: self.first]]
        else:
            beside = self.choices.neighbours(self.configs[self.leader])
            asked = [c for c in beside if self.name(c) not in self.configs and self.choices.why_pruned(c) is None]
        self.new = {self.name(c): c for c in asked}
        self.configs |= self.new
        if not self.new:
            self.ended = "there is nothing else beside it"
        return bool(self.new)

    def lacking(self) -> list[str]:
        """Those of this generation that are to be compiled."""
        done = {*self.found["compiled"], *self.found["failed"]}
        return [name for name in self.new if name not in done]

    def take(self, name: str, answer: Resources | Failed) -> None:
        """What compiling it gave. What spills in its loops, has failed."""
        if isinstance(answer, Failed):
            self.found["failed"][name] = answer.why
            return
        self.found["compiled"].append(name)
        spills = max((loop.spills for loop in answer.loops), default=0)
        if spills > self.choices.MOST_SPILLS and name != self.name(self.in_use):
            self.found["failed"][name] = f"spills: {spills} in a loop"

    def step(self, until: float) -> None:
        """Tries and times those of this generation that are compiled, by then. Raises InUseFails."""
        self.until = until
        in_use, before = self.name(self.in_use), self.leader
        trying_until = self.progress.now() + SHARE_OF_TRYING * self.left_s()
        if in_use in self.new:  # first: what it computes is what the others are compared with
            self.runs(in_use, trying_until)
        self.require_in_use()
        able = [name for name in self.new if self.runs(name, trying_until)]
        if in_use not in self.found["right"] or (self.generation and not able):
            self.ended = "no time was left for it"
            return
        self.leader = self.race(list(dict.fromkeys([in_use, self.leader, *able])))
        self.confirm()
        self.say(
            f"  generation {self.generation}: {len(able)} configs, the fastest is {self.leader}: "
            f"{self.gain(self.leader)}"
        )
        if self.generation and self.leader == before:
            self.ended = "nothing beside it is faster"

    def require_in_use(self) -> None:
        why = self.found["failed"].get(self.name(self.in_use))
        if why is not None:
            self.ended = f"the config in use fails: {why}"
            raise InUseFails(f"{self.choices.title}: {self.ended}")

    def runs(self, name: str, until: float) -> bool:
        """Whether it does, with the right numbers; not whether it would have, had there been time."""
        found = self.found
        if name in found["failed"] or name not in found["compiled"]:
            return False
        if name not in found["right"]:
            if self.progress.now() >= until and name != self.name(self.in_use):
                return False
            found["trying"] = name  # if it takes the process along, the next one passes over it
            self.progress.save()
            try:
                wrong = self.card.try_out(self.problem, self.configs[name], self.in_use)
            except Exception as error:  # any failure is the candidate's
                wrong = first_line(error)
                if not self.card.works():
                    raise Again(f"{name} broke the connection to the card ({wrong})") from error
            except KeyboardInterrupt:
                found["trying"] = None
                self.progress.save()
                raise
            found["trying"] = None
            if wrong is None:
                found["right"].append(name)
            else:
                found["failed"][name] = wrong
                self.say(f"  passed over {name}: {wrong}")
        return name in found["right"]

    def race(self, names: Sequence[str]) -> str:
        """The fastest by successive halving: all are timed a little, the faster half of them more, and so on; until the
        first is faster than every other beyond the noise, or time is up."""
        alive = list(names)
        for rounds in STAGES:
            start = self.progress.now()
            whole = self.time([name for name in alive if name != self.name(self.in_use)], rounds)
            estimates = {
                name: self.estimate(name, rounds)
                for name in alive
                if self.is_timed(name) and name not in self.found["failed"]
            }
            alive = sorted(estimates, key=lambda name: estimates[name].ratio)
            first, *others = alive
            self.say(
                f"  {self.progress.left}timed {len(alive)} in {rounds} rounds, which took "
                f"{self.progress.now() - start:.0f} s; the fastest is {first}: {self.gain(first)}"
            )
            if not whole or all(estimates[first].faster_than(estimates[name]) for name in others):
                break
            alive = alive[: max(2, -(-len(alive) // 2))]
        return alive[0]

    def time(self, names: Sequence[str], rounds: int) -> bool:
        """Until each was timed in so many rounds beside the config in use. Whether there was time for it."""
        in_use, ratios = self.name(self.in_use), self.found["ratios"]
        for name in [n for n in (in_use, *names) if n in self.found["suspected"]]:
            if self.left_s() <= 0:
                return False
            self.timed([name], 1)  # alone: if it takes the process along, it was that
            self.found["suspected"].remove(name)
            self.found["cleared"].append(name)
        while lacking := [name for name in names if len(ratios.get(name, ())) < rounds]:
            if self.left_s() <= 0:
                return False
            seconds = self.timed([in_use, *lacking], 1)
            for name, taken in zip(lacking, seconds[1:], strict=True):
                ratios.setdefault(name, []).extend(rounded(s / base) for s, base in zip(taken, seconds[0], strict=True))
        self.progress.save()
        return True

    def timed(self, names: Sequence[str], rounds: int, beside_peer: bool = False) -> list[Sequence[float]]:
        """Seconds, of the peer first if it is asked for and there is one. It is noted what runs: if that takes the
        process along, the next one knows."""
        configs = [self.configs[name] for name in names]
        self.found["timing"] = [PEER] * beside_peer + list(names)
        self.progress.save()
        try:
            if beside_peer:
                seconds = self.card.time_beside_peer(self.problem, configs, rounds)
            else:
                seconds = self.card.time(self.problem, configs, rounds)
        except Exception as error:  # one of them did it, after it had run well before: the process is not to be trusted
            raise Again(f"one of {len(names)} configs failed while it was timed ({first_line(error)})") from error
        except KeyboardInterrupt:
            self.found["timing"] = []
            self.progress.save()
            raise
        self.found["timing"] = []
        for name, taken in zip(names, seconds[-len(names) :], strict=False):
            self.found["ms"].setdefault(name, []).extend(rounded(1e3 * s) for s in taken)
        return seconds

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

    def confirm(self) -> None:
        """Times the leader anew, as the fastest of many was also the luckiest."""
        in_use, confirmed = self.name(self.in_use), self.found["confirmed"]
        if self.leader == in_use or self.leader in confirmed:
            return
        base, taken = self.timed([in_use, self.leader], CONFIRMING)
        confirmed[self.leader] = [rounded(s / b) for s, b in zip(taken, base, strict=True)]
        self.progress.save()

    @property
    def chosen(self) -> str:
        """The fastest of those confirmed. The config in use, if none is faster than that beyond the noise."""
        confirmed = {name: Estimate.of(ratios) for name, ratios in self.found["confirmed"].items()}
        faster = [
            name
            for name, estimate in confirmed.items()
            if estimate.faster_than(IN_USE) and name in self.configs and name not in self.found["failed"]
        ]
        return min(faster, key=lambda name: confirmed[name].ratio, default=self.name(self.in_use))

    @property
    def is_measured(self) -> bool:
        """Whether there is anything to say."""
        return bool(self.found["ms"].get(self.name(self.in_use)))

    def measured(self) -> Measured:
        """Milliseconds are those of the config in use, times the ratio to it: clocks have drifted between rounds."""
        chosen, base = self.chosen, statistics.median(self.found["ms"][self.name(self.in_use)])
        ratios = {name: statistics.median(found) for name, found in self.found["ratios"].items()}
        estimate = Estimate.of(self.found["confirmed"][chosen]) if chosen != self.name(self.in_use) else IN_USE
        return Measured(
            shape=shape_of(self.problem),
            ms={self.name(self.in_use): base} | {name: rounded(base * ratio) for name, ratio in ratios.items()},
            chosen=chosen,
            in_use=self.name(self.in_use),
            gain=1 / estimate.ratio - 1,
            spread=estimate.noise / estimate.ratio**2,
        )

    def beside_peer(self, when: str, config: C) -> dict[str, float] | None:
        """Milliseconds of the peer, of the config in use and of another, if it is another; None if there is no peer.
        when: of BESIDE_A_PEER; timed once, unless it is another config."""
        in_use, other = self.name(self.in_use), self.name(config)
        names = list(dict.fromkeys([in_use, other]))
        self.configs[other] = config
        if self.found[when] is None or self.found[when]["config"] != other:
            seconds = self.timed(names, BESIDE_A_PEER[when], beside_peer=True)
            ms = [rounded(1e3 * statistics.median(taken)) for taken in seconds]
            self.found[when] = {"config": other} | ({PEER: ms[0], "in_use": ms[1], "new": ms[-1]} if ms else {})
            self.progress.save()
        of_when = {name: value for name, value in self.found[when].items() if name != "config"}
        return of_when or None


def kind_of(problem: Problem) -> str:
    head_dims = f"{problem.padded_head_dim} {problem.padded_head_dim_v}"
    return f"{problem.dtype} {head_dims} {problem.mask} {problem.score_mod} {problem.bias}"


def rounded(value: float) -> float:
    """To six digits: files are written often."""
    return float(f"{value:.6g}")


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def shape_of(problem: Problem) -> dict[str, Any]:
    names = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "head_dim_v", "causal")
    mask = problem.mask  # without limits that hide nothing
    limits = {"left": mask.left, "right": mask.right, "chunk": mask.chunk, "scores": problem.scores}
    return (
        {name: getattr(problem, name) for name in names}
        | {"dtype": str(problem.dtype).removeprefix("torch.")}
        | {name: limit for name, limit in limits.items() if limit is not None}
        | (
            {"softcap": problem.score_mod.after}
            if problem.score_mod is not None and scores_kind(problem.score_mod) == "softcap"
            else {}
        )
    )
