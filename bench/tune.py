"""`python -m bench tune`: look for the fastest configs for your shapes on this card, and write them as a table file.

docs/tuning.md says how such a file is used. What was compiled and timed is kept beside it until it is whole, so that
the same command with --resume goes on where one was interrupted.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from bench.ahead import Failed, run_all
from bench.candidates import CANDIDATES
from bench.provenance import SEED, provenance
from bench.timing import time_interleaved
from gluon_attn import attention, tuning
from gluon_attn.device import Device
from gluon_attn.explain import DEVICES, add_problem_options, described, problem_of, shape
from gluon_attn.forward.configs import (
    REGISTERS_PER_SM,
    WARPGROUP,
    ForwardConfig,
    HopperConfig,
    label,
    orders_heads,
)
from gluon_attn.forward.launch import compiled
from gluon_attn.forward.plan import Plan
from gluon_attn.forward.table import Row, pick_config, require_fits
from gluon_attn.problem import Problem
from gluon_attn.resources import Resources, resources
from gluon_attn.tuning import Measured

OUT = Path("table.json")
STAGES = (3, 6, 12)  # rounds that a config has been timed in before half of them are dropped
CONFIRMING = 9  # rounds in which the winner alone is timed against the config in use
HANG_S = 60.0  # a launch takes milliseconds
RUNS_OF_A_ROUND = 20  # `time_interleaved` runs each call 19 times in a round
# Of O, relative to what the config in use computes, by bytes of an element: P is rounded to 8 bits in bf16, to 4 or 3
# in fp8, in each config at another scale.
LARGEST_ERROR = {2: 0.02, 1: 0.1}
REACH = 1.25
GENERATIONS = 4
OVERHEAD_REGISTERS = 32  # of a softmax thread, at least, beside O, S and P

# What can be chosen of a config, one field at a time; the registers follow.
HOPPER: dict[str, tuple[Any, ...]] = {
    "softmax_roles": (1, 2, 3, 4),
    "block_n": (64, 128),
    "query_slots": (1, 2),
    "kv_slots": (1, 2, 3, 4, 6),
    "turns": (False, True),
    "early_exp": (0, 1, 2),
    "integer_max": (False, True),
    "stage_in_queries": (False, True),
    "last_heads_longest_first": (False, True),
    "transpose_registers": (0, 56),
    "cga_layout": ((), ((1, 0),)),
    "softmax_registers": tuple(range(104, 241, 8)),
}
BLACKWELL: dict[str, tuple[Any, ...]] = {
    "kv_slots": (2, 3, 4, 6, 8, 12),
    "load_pieces": (1, 2, 4),
    "exp_pieces": (1, 2, 4),
    "early_p": (False, True),
    "exp_turns": (False, True),
    "max_in_load": (False, True),
    "packed_arithmetic": (False, True),
    "polynomial_columns": (0, 2, 4, 6),
    "rescale_threshold": (0.0, 8.0),
    "dynamic": (False, True),
    "longest_first": (False, True),
    "cga_layout": ((), ((1, 0),), ((1, 0), (2, 0))),
    "softmax_registers": (176, 184, 192, 200),
}


class Stop(Exception):
    """Ends the run, with what to do."""


def name_of(config: ForwardConfig) -> str:
    """One for each config: `label` leaves registers out."""
    return f"{label(config)} {config.softmax_registers}/{config.load_registers}"


def changed(config: ForwardConfig, **fields: Any) -> ForwardConfig | None:
    """The config with other fields, and on Hopper the registers that then are there; None if it refuses them."""
    if isinstance(config, HopperConfig) and "softmax_registers" not in fields:
        transpose = fields.get("transpose_registers", config.transpose_registers)
        roles = fields.get("softmax_roles", config.softmax_roles)
        if (transpose, roles) != (config.transpose_registers, config.softmax_roles):
            fields["load_registers"] = 24 if transpose else 32
            left = REGISTERS_PER_SM // WARPGROUP - fields["load_registers"] - transpose
            fields["softmax_registers"] = min(232, left // roles // 8 * 8)
    try:
        return dataclasses.replace(config, **fields)
    except ValueError:
        return None


def why_pruned(config: ForwardConfig, problem: Problem, device: Device) -> str | None:
    """Why there is no use in compiling it; None if there is."""
    try:
        require_fits(config, problem, device)
        Plan.of(problem, config, device)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    if orders_heads(config) and not problem.causal:
        return "an order of row blocks, which without a mask are alike"
    if isinstance(config, HopperConfig):
        if config.turns and config.softmax_roles == 1:
            return "turns of one role"
        # O and S in fp32, P in 16 bits at most, over the threads of a warpgroup, 64 rows.
        needed = problem.padded_head_dim_v // 2 + config.block_n // 2 + config.block_n // 4 + OVERHEAD_REGISTERS
        if needed > config.softmax_registers:
            return f"needs {needed} registers a softmax thread, has {config.softmax_registers}"
    return None


def first_configs(problem: Problem, device: Device, rows: Sequence[Row]) -> list[ForwardConfig]:
    """What the search begins with: what the tables and bench/candidates.py have for the kind; and on Hopper each cut
    into roles and blocks of keys, with as many slots as there is memory for. Not pruned."""
    kind = problem.padded_head_dim, problem.padded_head_dim_v, problem.dtype.itemsize
    found = [row.config for row in rows if row.is_of_kind(problem, device)]
    if device.arch == 90:
        found += CANDIDATES.get(kind, [])
        found += cuts(problem, device)
    return list(dict.fromkeys(found))


def cuts(problem: Problem, device: Device) -> Iterator[ForwardConfig]:
    base = HopperConfig(
        block_n=64, kv_slots=1, softmax_registers=232, load_registers=32, softmax_roles=2, query_slots=1, turns=False,
        stage_in_queries=False,
    )  # fmt: skip
    for roles, block_n, cga_layout in itertools.product(
        HOPPER["softmax_roles"], HOPPER["block_n"], HOPPER["cga_layout"]
    ):
        for query_slots, staged in ((2, False), (1, False), (1, True)):
            fields = {"query_slots": query_slots, "stage_in_queries": staged, "turns": roles in (2, 3), "early_exp": 1}
            cut = changed(base, softmax_roles=roles, block_n=block_n, cga_layout=cga_layout, **fields)
            deep = [changed(cut, kv_slots=n) for n in HOPPER["kv_slots"] if 2 <= n <= 4] if cut else []
            fitting = [c for c in deep if c is not None and why_pruned(c, problem, device) is None]
            if fitting:
                yield fitting[-1]
                break


def neighbours(config: ForwardConfig) -> Iterator[ForwardConfig]:
    """Those that differ in one choice. Not pruned."""
    for name, values in (HOPPER if isinstance(config, HopperConfig) else BLACKWELL).items():
        for value in values:
            if value != getattr(config, name):
                found = changed(config, **{name: value})
                if found is not None and (name != "softmax_registers" or abs(value - getattr(config, name)) <= 8):
                    yield found


class Card(Protocol):
    """What a search needs of the card; tests have another one."""

    def compile(self, problem: Problem, configs: Sequence[ForwardConfig]) -> Iterator[tuple[int, Resources | Failed]]:
        """As `run_all` gives them."""

    def try_out(self, problem: Problem, config: ForwardConfig, in_use: ForwardConfig) -> str | None:
        """Run it once. What is wrong with what it computes; None if nothing is."""

    def works(self) -> bool:
        """Whether anything still runs, after something failed."""

    def time(self, problem: Problem, configs: Sequence[ForwardConfig], rounds: int) -> list[Sequence[float]]:
        """Seconds of each config in each round, interleaved."""


class RealCard:
    """The one that is here."""

    def __init__(self, device: Device, at_once: int, limit_s: float, where: str = "cuda") -> None:
        self.device, self.at_once, self.limit_s, self.where = device, at_once, limit_s, where
        self.of: Problem | None = None
        self.tensors: list[torch.Tensor] = []
        self.slowest_s = 0.0  # of the calls that were tried, with what the host does around one
        self.expected: torch.Tensor | None = None

    def compile(self, problem: Problem, configs: Sequence[ForwardConfig]) -> Iterator[tuple[int, Resources | Failed]]:
        jobs = [(problem, config, self.device.arch) for config in configs]
        return run_all(compile_one, jobs, at_once=self.at_once, limit_s=self.limit_s)

    def call(self, problem: Problem, config: ForwardConfig) -> Callable[[], Any]:
        if self.of != problem:
            self.of, self.expected = problem, None
            torch.manual_seed(SEED)
            sizes = (
                (problem.heads, problem.q_len, problem.head_dim),
                (problem.kv_heads, problem.kv_len, problem.head_dim),
                (problem.kv_heads, problem.kv_len, problem.head_dim_v),
            )
            self.tensors = [
                torch.randn(problem.batch, *size, dtype=torch.bfloat16, device=self.where).to(problem.dtype)
                for size in sizes
            ]
        q, k, v = self.tensors
        return lambda: attention(q, k, v, causal=problem.causal, config=config)

    def try_out(self, problem: Problem, config: ForwardConfig, in_use: ForwardConfig) -> str | None:
        with ends_if_hung(f"{name_of(config)} hangs"):
            call = self.call(problem, config)
            if self.expected is None:
                self.expected = self.call(problem, in_use)().float()
            started = time.perf_counter()
            error = float((call().float() - self.expected).norm() / self.expected.norm())
            self.slowest_s = max(self.slowest_s, time.perf_counter() - started)
        if error <= LARGEST_ERROR[problem.dtype.itemsize]:
            return None
        return f"O is off by {error:.3g}, relative to what the config in use computes"

    def works(self) -> bool:
        try:
            return float(torch.ones(1, device=self.where).sum()) == 1
        except RuntimeError:
            return False

    def time(self, problem: Problem, configs: Sequence[ForwardConfig], rounds: int) -> list[Sequence[float]]:
        calls = {name_of(config): self.call(problem, config) for config in configs}
        runs = len(calls) * rounds
        with ends_if_hung(f"one of {', '.join(calls)} hangs", HANG_S + runs * (1 + RUNS_OF_A_ROUND * self.slowest_s)):
            found = time_interleaved(calls, rounds=rounds)
        return [found[name].round_medians for name in calls]


def compile_one(job: tuple[Problem, ForwardConfig, int]) -> Resources:
    """Into Triton's cache; in a child process."""
    problem, config, arch = job
    warnings.simplefilter("ignore")  # products that the assembler has serialised: then it is slow, which is timed
    torch.set_num_threads(1)
    kernel = compiled(
        problem.dtype,
        problem.padded_head_dim,
        problem.mask,
        config,
        padded_head_dim_v=problem.padded_head_dim_v,
        arch=arch,
    )
    return resources(kernel)


@contextlib.contextmanager
def ends_if_hung(what: str, limit_s: float = HANG_S) -> Iterator[None]:
    """Ends the process if the block takes longer: a kernel that hangs can be stopped in no other way."""

    def end() -> None:
        print(f"\nbench tune: {what}; run the same command with --resume", file=sys.stderr, flush=True)
        os._exit(3)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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


class Progress:
    """What was found so far, in a file."""

    def __init__(self, path: Path, found: dict[str, Any]) -> None:
        self.path, self.found = path, found

    @staticmethod
    def begin(path: Path, key: Mapping[str, Any], resume: bool) -> "Progress":
        """key: what a run must have in common with the one that it resumes. Raises Stop if it has not."""
        found: dict[str, Any] = {"key": dict(key), "shapes": {}}
        if resume and path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            for name, value in found["key"].items():
                if before["key"].get(name) != value:
                    raise Stop(
                        f"--resume: expected {path} to have {name} {value!r}, got {before['key'].get(name)!r}; leave "
                        "--resume out, or give another --out"
                    )
            found = before
        return Progress(path, found)

    def of(self, problem: Problem) -> dict[str, Any]:
        empty: dict[str, Any] = {
            "failed": {},
            "compiled": {},
            "right": [],
            "ms": {},
            "ratios": {},
            "confirmed": {},
            "trying": None,
        }
        of_shape: dict[str, Any] = self.found["shapes"].setdefault(described(problem), empty)
        if of_shape["trying"] is not None:
            of_shape["failed"][of_shape["trying"]] = "the process ended while it ran for the first time"
            of_shape["trying"] = None
        return of_shape

    def save(self) -> None:
        other = self.path.with_suffix(".new")  # so that an interruption leaves one or the other
        other.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
        other.replace(self.path)


class Search:
    """For the fastest config for one problem."""

    def __init__(
        self,
        problem: Problem,
        device: Device,
        rows: Sequence[Row],
        card: Card,
        progress: Progress,
        say: Callable[[str], None],
    ) -> None:
        self.problem, self.device, self.rows, self.card, self.progress = problem, device, rows, card, progress
        self.say = say
        self.in_use = pick_config(problem, device, None, rows)
        self.found = progress.of(problem)
        self.configs = {name_of(self.in_use): self.in_use}

    def run(self, generations: int) -> Measured:
        """The winner, which is the config in use if none is faster beyond the noise."""
        in_use = name_of(self.in_use)
        asked = [self.in_use, *first_configs(self.problem, self.device, self.rows)]
        leader = in_use
        for generation in range(generations):
            new = {name_of(c): c for c in asked if why_pruned(c, self.problem, self.device) is None}
            new = {name: c for name, c in new.items() if generation == 0 or name not in self.configs}
            if not new:
                break
            self.configs |= new
            self.compile(new)
            able = [name for name in new if self.runs(name)]
            if in_use in self.found["failed"]:
                raise Stop(f"{described(self.problem)}: the config in use fails: {self.found['failed'][in_use]}")
            before = leader
            leader = self.race(list(dict.fromkeys([in_use, leader, *able])))
            self.say(f"  generation {generation}: {len(able)} configs, the fastest is {leader}: {self.gain(leader)}")
            if generation and leader == before:
                break
            asked = list(neighbours(self.configs[leader]))
        return self.confirmed(leader)

    def compile(self, configs: Mapping[str, ForwardConfig]) -> None:
        """Those that were not; which spill in their loops, have failed."""
        done = {*self.found["compiled"], *self.found["failed"]}
        names = [name for name in configs if name not in done]
        start = time.monotonic()
        for i, (number, answer) in enumerate(self.card.compile(self.problem, [configs[n] for n in names]), 1):
            name = names[number]
            if isinstance(answer, Failed):
                self.found["failed"][name] = answer.why
            else:
                self.found["compiled"][name] = asdict(answer)
                spills = sum(loop.spills for loop in answer.loops)
                if spills and name != name_of(self.in_use):
                    self.found["failed"][name] = f"spills: {spills} in the loops over key blocks"
            self.progress.save()
            left = (time.monotonic() - start) / i * (len(names) - i)
            self.say(f"  [{left:3.0f} s left] compiled {i} of {len(names)}: {name}")

    def runs(self, name: str) -> bool:
        """Whether it does, with the right numbers."""
        found = self.found
        if name in found["failed"]:
            return False
        if name not in found["right"]:
            found["trying"] = name  # if it takes the process along, the next one passes over it
            self.progress.save()
            try:
                wrong = self.card.try_out(self.problem, self.configs[name], self.in_use)
            except Exception as error:  # any failure is the candidate's
                wrong = f"{type(error).__name__}: {error}".splitlines()[0]
                if not self.card.works():
                    found["failed"][name], found["trying"] = wrong, None
                    self.progress.save()
                    raise Stop(
                        f"{name} broke the connection to the card ({wrong}); run the same command with --resume, "
                        "which passes over it"
                    ) from error
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
        first is faster than every other beyond the noise."""
        alive = list(names)
        for rounds in STAGES:
            start = time.monotonic()
            self.time([name for name in alive if name != name_of(self.in_use)], rounds)
            estimates = {name: self.estimate(name, rounds) for name in alive}
            alive.sort(key=lambda name: estimates[name].ratio)
            first, *others = alive
            self.say(
                f"  [{time.monotonic() - start:3.0f} s] timed {len(alive)} in {rounds} rounds, first {first}: "
                f"{self.gain(first)}"
            )
            if all(estimates[first].faster_than(estimates[name]) for name in others):
                break
            alive = alive[: max(2, -(-len(alive) // 2))]
        return alive[0]

    def time(self, names: Sequence[str], rounds: int) -> None:
        """Until each was timed in so many rounds beside the config in use."""
        in_use, ratios = name_of(self.in_use), self.found["ratios"]
        lacking = [name for name in names if len(ratios.get(name, ())) < rounds]
        if not lacking:
            return
        more = rounds - min(len(ratios.get(name, ())) for name in lacking)
        together = [in_use, *lacking]
        seconds = self.card.time(self.problem, [self.configs[name] for name in together], more)
        for name, taken in zip(together, seconds, strict=True):
            self.found["ms"].setdefault(name, []).extend(1e3 * s for s in taken)
        for name, taken in zip(lacking, seconds[1:], strict=True):
            ratios.setdefault(name, []).extend(s / base for s, base in zip(taken, seconds[0], strict=True))
        self.progress.save()

    def estimate(self, name: str, rounds: int) -> Estimate:
        if name == name_of(self.in_use):
            return Estimate(1.0, 0.0)
        return Estimate.of(self.found["ratios"][name][:rounds])

    def gain(self, name: str) -> str:
        """Over the config in use, as it was timed."""
        if name == name_of(self.in_use):
            return "it is in use"
        found = Estimate.of(self.found["ratios"][name])
        return f"{1 / found.ratio - 1:+.1%} ±{found.noise:.1%}"

    def confirmed(self, leader: str) -> Measured:
        """Timed anew, as the fastest of many was also the luckiest. The config in use, if it is not faster then."""
        in_use, confirmed = name_of(self.in_use), self.found["confirmed"]
        estimate = Estimate(1.0, 0.0)
        if leader != in_use:
            if leader not in confirmed:
                base, taken = self.card.time(self.problem, [self.in_use, self.configs[leader]], CONFIRMING)
                confirmed[leader] = [s / b for s, b in zip(taken, base, strict=True)]
                self.progress.save()
            estimate = Estimate.of(confirmed[leader])
            if not estimate.faster_than(Estimate(1.0, 0.0)):
                leader, estimate = in_use, Estimate(1.0, 0.0)
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


def row_for(problem: Problem, config: ForwardConfig, reach: float) -> Row:
    """A row for what is like the problem: lengths and heads that are at most so many times as large or as small."""

    def around(size: int) -> tuple[int, int]:
        return max(1, math.ceil(size / reach)), math.floor(size * reach)

    keys = around(problem.kv_len)
    return Row(
        problem.padded_head_dim,
        problem.causal,
        config,
        problem.dtype.itemsize,
        min_kv_len=keys[0],
        max_kv_len=keys[1],
        padded_head_dim_v=problem.padded_head_dim_v,
        q_lens=around(problem.q_len),
        sequence_heads=around(problem.batch * problem.heads),
        heads_per_kv_head=problem.heads // problem.kv_heads,
    )


def tune(
    problems: Sequence[Problem],
    device: Device,
    card: Card,
    progress: Progress,
    *,
    reach: float = REACH,
    generations: int = GENERATIONS,
    say: Callable[[str], None] = print,
) -> tuple[list[Row], list[Measured]]:
    """Rows for the problems for which the table in use is not the fastest, and what they were chosen from."""
    rows: list[Row] = []
    measured: list[Measured] = []
    gains: list[float] = []
    for problem in problems:
        say(described(problem))
        search = Search(problem, device, tuning.rows_for(device), card, progress, say)
        found = search.run(generations)
        gains.append(1 + found.gain)
        if found.chosen == found.in_use:
            say(f"  the table in use stays, with {found.in_use}")
            continue
        say(f"  {found.chosen}: {found.gain:+.1%} ±{found.spread:.1%} over the table in use, {found.in_use}")
        rows.append(row_for(problem, search.configs[found.chosen], reach))
        measured.append(found)
    say(
        f"gain over the table in use, geometric mean of {len(problems)} shapes: "
        f"{statistics.geometric_mean(gains) - 1:+.1%}"
    )
    return rows, measured


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="python -m bench tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument(
        "--shape", type=shape, nargs="+", required=True, metavar="B,H,S,D", help="of q: batch, heads, queries, head dim"
    )
    add_problem_options(command)
    command.add_argument("--out", type=Path, default=OUT, help=f"the table file (default: {OUT})")
    command.add_argument("--table", metavar="FILE", help="a table file that is in use already, to be improved on")
    command.add_argument(
        "--reach", type=float, default=REACH, help=f"how much larger or smaller a row may serve (default: {REACH})"
    )
    command.add_argument(
        "--generations", type=int, default=GENERATIONS, help=f"of configs, at most (default: {GENERATIONS})"
    )
    command.add_argument("--resume", action="store_true", help="go on with what an interrupted run has left")
    command.add_argument("--list", action="store_true", help="show the first configs, and those pruned; time nothing")
    command.add_argument("--device", choices=DEVICES, help="with --list: for this one, no card is needed")
    command.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="to compile at once (one a core)"
    )
    command.add_argument(
        "--limit", type=float, default=120.0, metavar="S", help="seconds to compile one (default: 120)"
    )
    command.add_argument("--commit", help="commit of the measured tree, where git cannot tell")
    return command


def main(arguments: Sequence[str]) -> None:
    command = parser()
    args = command.parse_args(arguments)
    for option, given, least in (
        ("--reach", args.reach, 1), ("--generations", args.generations, 1), ("--jobs", args.jobs, 1),
        ("--limit", args.limit, 1),
    ):  # fmt: skip
        if not given >= least:
            command.error(f"{option}: expected {least} or more, got {given:g}")
    if args.out.is_dir() or args.out.suffix != ".json":
        command.error(f"--out: expected a file name that ends in .json, got {args.out}")
    if args.device and not args.list:
        command.error("--device: expected with --list only, as only the card here can be timed; add --list")
    try:
        problems = list(dict.fromkeys(problem_of(of_q, args) for of_q in args.shape))
        if args.table:
            tuning.load(args.table)
    except (OSError, ValueError) as error:
        command.error(str(error))
    if not args.device and not torch.cuda.is_available():
        sys.exit("bench tune: needs a Hopper or Blackwell card, found no CUDA device; nothing was timed")
    device = DEVICES[args.device] if args.device else Device.of(torch.device("cuda", torch.cuda.current_device()))
    try:
        device.require_supported()
        if args.list:
            for problem in problems:
                show(problem, device)
        else:
            run(problems, device, args)
    except (NotImplementedError, RuntimeError, Stop) as error:
        sys.exit(f"bench tune: {error}")


def show(problem: Problem, device: Device) -> None:
    print(described(problem))
    in_use = pick_config(problem, device, None, tuning.rows_for(device))
    for config in dict.fromkeys([in_use, *first_configs(problem, device, tuning.rows_for(device))]):
        why = why_pruned(config, problem, device)
        kind = "in use" if config == in_use else "pruned" if why else ""
        print(f"  {kind:<7} {name_of(config)}" + (f": {why}" if why else ""))


def run(problems: Sequence[Problem], device: Device, args: argparse.Namespace) -> None:
    source = provenance(args.commit)
    key = {name: source[name] for name in ("commit", "card", "driver", "torch", "triton")}
    key["tables"] = [Path(table.source).read_text(encoding="utf-8") for table in tuning.active()]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    partial = args.out.with_suffix(".partial.json")
    progress = Progress.begin(partial, key, args.resume)
    start = time.monotonic()
    card = RealCard(device, args.jobs, args.limit)
    say = functools.partial(print, flush=True)
    rows, measured = tune(problems, device, card, progress, reach=args.reach, generations=args.generations, say=say)
    minutes = (time.monotonic() - start) / 60
    source["command"] = {"reach": args.reach, "generations": args.generations, "minutes": minutes}
    written = tuning.as_json([device], source, rows, measured)
    args.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    tuning.read(args.out)
    partial.unlink()
    print(f"written: {args.out}, {len(rows)} rows; use it with gluon_attn.tuning.load({str(args.out)!r})")
