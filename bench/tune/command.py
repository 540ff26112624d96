"""`python -m bench tune`: look for the fastest configs for your shapes on this card, and write them as a table file.

docs/tuning.md says how such a file is used. What was compiled and timed is kept beside it until it is whole, so that
the same command with --resume goes on where one was interrupted.
"""

import argparse
import functools
import hashlib
import json
import math
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.ahead import cores
from bench.provenance import provenance
from bench.tune.beside import fa3_over_cudnn, means_of_sets, ratios, table
from bench.tune.card import RealCard
from bench.tune.forward import Forward
from bench.tune.gradients import Gradients
from bench.tune.rows import Chosen, rows_for_all
from bench.tune.search import Again, Card, Progress, Search, Stop, shape_of
from bench.tune.sweeps import SWEEPS
from bench.tune.together import GENERATIONS, LEAST_OF_A_GENERATION_S, Together
from bench.tune.watch import Watch, run_watched
from gluon_attn import tuning
from gluon_attn.backward import table as backward_table
from gluon_attn.demo import while_read
from gluon_attn.device import Device
from gluon_attn.explain import DEVICES, add_problem_options, problem_of, shape
from gluon_attn.forward.table import PACKAGED
from gluon_attn.gradients import ARCHS
from gluon_attn.problem import Problem
from gluon_attn.tensors import FP8_DTYPES
from gluon_attn.tuning import Measured

OUT = Path("table.json")
REACH = 1.25
MOST_REACH = 2**20
# Of the sweep's points, which are lengths that double: rows of neighbours meet and do not overlap.
REACH_OF_SWEEP = 2**0.5
FIRST_OF_SWEEP = 14
AGAIN = 3  # what a process ends with, for another to go on
MOST_PROCESSES = 12  # one after the other, each ended by what its successor passes over
STARTING_S = 20.0  # with less time left, no other process is begun
GRACE_S = 20.0  # beyond the limit, after which the process is ended


@dataclass(frozen=True)
class Batch:
    """Problems that are searched together, or their gradients. for_package: the file that is written will take the
    place of one of the package; otherwise that of one that was loaded."""

    problems: tuple[Problem, ...]
    of_gradients: bool = False
    for_package: bool = False

    def choices(self, problem: Problem, device: Device) -> Any:
        """`Forward` or `Gradients`."""
        if self.of_gradients:
            of_gradients = backward_table.PACKAGED if self.for_package else tuning.backward_rows_for(device, ())
            return Gradients(problem, device, tuning.backward_rows_for(device), of_gradients)
        beneath = PACKAGED if self.for_package else tuning.rows_for(device, ())
        return Forward(problem, device, tuning.rows_for(device), beneath)


@dataclass(frozen=True)
class Found:
    """Of one problem, or its gradients. beside: milliseconds of the peer, of the config in use and of what serves now,
    timed together after the search; None if they were not."""

    measured: Measured
    of_gradients: bool
    beside: dict[str, float] | None


def tune(
    batches: Sequence[Batch],
    device: Device,
    card: Card,
    progress: Progress,
    *,
    limit_s: float = math.inf,
    generations: int = GENERATIONS,
    reach: float = REACH,
    first: int | None = None,
    beside_peer: bool = False,
    say: Callable[[str], None] = print,
    keep: Callable[[Sequence[Chosen], Sequence[Chosen], Sequence[Found]], None] = lambda *_: None,
) -> None:
    """Rows for the problems, or their gradients, for which the table in use is not the fastest.

    limit_s: seconds from now. first: configs of the first generation, at most. beside_peer: time the peer too. keep: is
    given the rows of the forward pass and of gradients, and what was found of every problem, whenever that has changed.
    Raises Stop at the end if a config in use failed.
    """
    until = progress.now() + limit_s
    every: list[tuple[Batch, Search[Any]]] = []
    ended: dict[int, dict[str, float]] = {}
    failures: list[Exception] = []

    def rows(of_gradients: bool) -> list[Chosen]:
        searches = [s for batch, s in every if batch.of_gradients == of_gradients and s.is_measured]
        return rows_for_all([(s.choices, s.configs[s.chosen], s.measured()) for s in searches], reach)

    def found() -> list[Found]:
        return [Found(s.measured(), batch.of_gradients, ended.get(id(s))) for batch, s in every if s.is_measured]

    def kept() -> None:
        keep(rows(False), rows(True), found())

    for batch in batches:
        if every and until - progress.now() < LEAST_OF_A_GENERATION_S:
            say("no time for the next set")
            break
        searches = [Search(batch.choices(p, device), card, progress, say, first) for p in batch.problems]
        every += [(batch, search) for search in searches]
        together = Together(searches, card, progress, say, until=until, beside_peer=beside_peer)
        together.run(generations, kept)
        failures += together.failures
        if beside_peer:
            serving = [chosen.row for chosen in rows(batch.of_gradients)]
            for search, times in together.end(serving):
                fa3 = None if batch.of_gradients else fa3_over_cudnn(shape_of(search.problem))
                ended[id(search)] = times if fa3 is None else times | {"fa3_over_cudnn": fa3}
        kept()
    for line in lines(found()):
        say(line)
    if failures:
        raise Stop("; ".join(map(str, failures)))


def lines(found: Sequence[Found]) -> Iterator[str]:
    """What is said in the end, of each problem and of all."""
    for one in found:
        measured = one.measured
        title = ", ".join(f"{name} {value}" for name, value in measured.shape.items())
        title = f"gradients of {title}" if one.of_gradients else title
        if measured.chosen == measured.in_use:
            yield f"{title}: the table in use stays, with {measured.in_use}"
        else:
            yield (
                f"{title}: {measured.chosen} {measured.gain:+.1%} ±{measured.spread:.1%} over the table in use, "
                f"{measured.in_use}"
            )
        if one.beside:
            of, fa3 = ratios(one.beside), one.beside.get("fa3_over_cudnn")
            yield (
                f"  {of['in_use_over_peer']:.3f} x cuDNN with the table in use, {of['new_over_peer']:.3f} with the new"
                + (f"; FA3's line {fa3:.2f}" if fa3 else "")
            )
    if found:
        gains = statistics.geometric_mean(1 + one.measured.gain for one in found) - 1
        yield f"gain over the table in use, geometric mean of {len(found)} shapes: {gains:+.1%}"
    for name, means in means_of_sets([summary(one) for one in found]).items():
        said = ", ".join(f"{of} {value:.3f}" for of, value in means.items() if of != "shapes")
        yield f"geometric means of {means['shapes']} shapes, {name}, timed anew together: {said}"


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="python -m bench tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = command.add_mutually_exclusive_group()
    what.add_argument(
        "--shape", type=shape, nargs="+", default=[], metavar="B,H,S,D", help="of q: batch, heads, queries, head dim"
    )
    what.add_argument(
        "--sweep",
        nargs="+",
        choices=SWEEPS,
        default=[],
        help="sets of problems that a packaged table is for, beside cuDNN where it computes them; a later set has the "
        "time that an earlier one leaves",
    )
    what.add_argument("--show", type=Path, metavar="FILE", help="what a table file was chosen from; time nothing")
    add_problem_options(command)
    command.add_argument("--backward", action="store_true", help="of their gradients, instead of the forward pass")
    command.add_argument("--out", type=Path, default=OUT, help=f"the table file (default: {OUT})")
    command.add_argument("--table", metavar="FILE", help="a table file that is in use already, to be improved on")
    command.add_argument(
        "--minutes", type=float, default=math.inf, metavar="N", help="end by then, with the best so far (default: none)"
    )
    command.add_argument(
        "--reach",
        type=float,
        help=f"how much larger or smaller a row may serve (default: {REACH}, with --sweep {REACH_OF_SWEEP:.2f})",
    )
    command.add_argument(
        "--first", type=int, metavar="N", help=f"configs to begin with (default: all, with --sweep {FIRST_OF_SWEEP})"
    )
    command.add_argument(
        "--generations", type=int, default=GENERATIONS, help=f"of configs, at most (default: {GENERATIONS})"
    )
    command.add_argument("--resume", action="store_true", help="go on with what an interrupted run has left")
    command.add_argument("--list", action="store_true", help="show the first configs, and those pruned; time nothing")
    command.add_argument("--device", choices=DEVICES, help="with --list: for this one, no card is needed")
    command.add_argument(
        "--jobs", type=int, default=cores(), metavar="N", help="to compile at once (default: one a core)"
    )
    command.add_argument(
        "--limit", type=float, default=120.0, metavar="S", help="seconds to compile one (default: 120)"
    )
    command.add_argument("--commit", help="commit of the measured tree, where git cannot tell")
    return command


def main(arguments: Sequence[str]) -> None:
    began = time.monotonic()
    command = parser()
    args = command.parse_args(arguments)
    if args.show:
        try:
            lines_of_table = shown(args.show)
        except (OSError, ValueError) as error:
            command.error(str(error))
        with while_read():
            print("\n".join(lines_of_table))
        return
    if not (args.shape or args.sweep):
        command.error("the following arguments are required: --shape or --sweep")
    if args.reach is None:
        args.reach = REACH_OF_SWEEP if args.sweep else REACH
    if args.first is None and args.sweep:
        args.first = FIRST_OF_SWEEP
    for option, given, least in (
        ("--reach", args.reach, 1), ("--generations", args.generations, 1), ("--jobs", args.jobs, 1),
        ("--limit", args.limit, 1), ("--minutes", args.minutes, 1), ("--first", args.first, 1),
    ):  # fmt: skip
        if given is not None and not given >= least:
            command.error(f"{option}: expected {least} or more, got {given:g}")
    if args.reach > MOST_REACH:
        command.error(f"--reach: expected {MOST_REACH} or less, which is as good as any size, got {args.reach:g}")
    if args.out.is_dir() or args.out.suffix != ".json":
        command.error(f"--out: expected a file name that ends in .json, got {args.out}")
    if args.out.resolve().parent == tuning.TABLES.resolve():
        command.error(
            f"--out: expected a file elsewhere than in {tuning.TABLES}, whose files are in use, got {args.out}; copy "
            "it there when it is whole"
        )
    sources = [table.source for table in tuning.active()] + [args.table] * bool(args.table)
    if not args.list and args.out.resolve() in [Path(source).resolve() for source in sources]:
        command.error(
            f"--out: expected another file than a table in use, as --resume compares what that holds, got {args.out}; "
            "give another name"
        )
    if args.device and not args.list:
        command.error("--device: expected with --list only, as only the card here can be timed; add --list")
    try:
        batches = batches_of(args)
        in_use = tuning.read(args.table) if args.table else None
    except (NotImplementedError, OSError, ValueError) as error:
        command.error(str(error))
    if not args.device and not torch.cuda.is_available():
        sys.exit("bench tune: needs a Hopper or Blackwell card, found no CUDA device; nothing was timed")
    if not args.list:
        until = began + 60 * args.minutes
        sys.exit(last_of(lambda resume: process(args, resume, until), args.resume, until))
    try:
        device = DEVICES[args.device] if args.device else here()
        improve_on(in_use, device)
        require(device, batches)
        with while_read():
            for batch in batches:
                for problem in batch.problems:
                    show(batch.choices(problem, device), args.first)
    except (NotImplementedError, RuntimeError, Stop, ValueError) as error:
        sys.exit(f"bench tune: {error}")


def shown(path: Path) -> list[str]:
    """What --show prints. ValueError for a file that serves, but says nothing of what it was chosen from."""
    try:
        return list(table(tuning.read(path).provenance))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"--show: expected a file with provenance.shapes, as python -m bench tune writes them, got {path}, which "
            f"has no such ones ({type(error).__name__}: {error}); give one as it was written"
        ) from None


def batches_of(args: argparse.Namespace) -> list[Batch]:
    """What is asked for. Raises ValueError for what attention() refuses."""
    if not args.sweep:
        problems = tuple(dict.fromkeys(problem_of(of_q, args) for of_q in args.shape))
        if args.backward and problems[0].dtype in FP8_DTYPES:
            raise ValueError("--backward: expected --dtype fp16 or bf16, as fp8 has no gradients")
        if args.backward and args.bias:
            raise ValueError(
                "--backward: expected none with --bias, of which gradients have no rows, got both; leave one out"
            )
        return [Batch(problems, args.backward)]
    given: dict[str, Any] = {"kv_heads": None, "kv_length": None, "head_dim_v": None, "dtype": "bf16", "causal": False}
    given |= {"window": (None, None), "chunk": None, "softcap": None, "alibi": False, "bias": False, "backward": False}
    for name, default in given.items():
        if getattr(args, name) != default:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option}: expected none with --sweep, which says what is tuned, got it; leave it out")
    sweeps = [SWEEPS[name] for name in dict.fromkeys(args.sweep)]
    return [Batch(sweep.problems(), sweep.of_gradients, for_package=True) for sweep in sweeps]


def here() -> Device:
    """The card here. RuntimeError if there is no kernel for it."""
    device = Device.of(torch.device("cuda", torch.cuda.current_device()))
    device.require_supported()
    return device


def improve_on(found: tuning.TableFile | None, device: Device) -> None:
    """Puts the table file of --table in use, if there is one. Stop if it is for other cards."""
    if found is None:
        return
    if not found.serves(device):
        raise Stop(
            f"--table: expected a table file for {device.title}, got {found.source}, which is for {found.cards}; leave "
            "it out, or give one for this card"
        )
    tuning.load(found.source)


def require(device: Device, batches: Sequence[Batch]) -> None:
    """NotImplementedError for what a card has no kernel for, before anything is timed."""
    if any(batch.of_gradients for batch in batches) and device.arch not in ARCHS:
        raise NotImplementedError(f"--backward: expected a Hopper card, as no other has gradients, got {device.name}")
    for batch in batches:
        for problem in batch.problems:
            choices = batch.choices(problem, device)
            choices.name(choices.in_use)  # for which a config is looked up


def show(choices: Any, first: int | None) -> None:
    """The first configs, and beside those that can be timed what bench/predict.py expects of them."""
    print(choices.title)
    configs = {config: choices.why_pruned(config) for config in dict.fromkeys([choices.in_use, *choices.first()])}
    able = [config for config, why in configs.items() if why is None]
    expected = dict(zip(able, choices.expected_ms(able) or (), strict=False))
    passed = 0
    for config, why in configs.items():
        in_use = config == choices.in_use
        passed += why is None and not in_use
        late = first is not None and passed > first
        kind = "in use" if in_use else "pruned" if why else "late" if late else ""
        line = f"  {kind:<7} {choices.name(config)}" + (f": {why}" if why else "")
        print(f"{line:<48}predicted for an H200: {expected[config]:.3f} ms" if config in expected else line)


def last_of(start: Callable[[bool], int | None], resume: bool, until: float = math.inf) -> int | str | None:
    """What the last of several processes ends with: one that was taken along, by a signal or because something in it
    hung, is followed by another, which resumes what it has left. start: runs one, and gives its exit status. until: of
    `time.monotonic`."""
    for _ in range(MOST_PROCESSES):
        status = start(resume)
        if status is None or (status >= 0 and status != AGAIN) or -status in (signal.SIGINT, signal.SIGTERM):
            return status
        if time.monotonic() + STARTING_S > until:
            return "bench tune: its process ended, and no time is left for another; the table file has what was found"
        print("bench tune: its process ended; goes on in another", file=sys.stderr, flush=True)
        resume = True
    return f"bench tune: {MOST_PROCESSES} processes ended by what they ran; the same command with --resume goes on"


def process(args: argparse.Namespace, resume: bool, until: float) -> int | None:
    watch = Watch()
    return run_watched(run_here, (args, resume, until, watch), watch, until + GRACE_S)


def run_here(args: argparse.Namespace, resume: bool, until: float, watch: Watch) -> None:
    """`run`, in a process that this is all for."""
    try:
        batches = batches_of(args)
        in_use = tuning.read(args.table) if args.table else None
        device = here()
        improve_on(in_use, device)
        require(device, batches)
        with RealCard(device, args.jobs, args.limit, watch) as card:
            run(batches, device, card, args, resume, until - time.monotonic())
    except Again as error:
        print(f"bench tune: {error}", file=sys.stderr, flush=True)
        sys.exit(AGAIN)
    except (NotImplementedError, OSError, RuntimeError, Stop, ValueError) as error:
        sys.exit(f"bench tune: {error}")


def run(
    batches: Sequence[Batch],
    device: Device,
    card: Card,
    args: argparse.Namespace,
    resume: bool,
    limit_s: float = math.inf,
) -> None:
    """Writes the table file after each problem."""
    source = provenance(args.commit)
    key = {name: source[name] for name in ("commit", "card", "driver", "torch", "triton")}
    key["changed"] = source.get("changed", [])
    # Of what they hold, not of their names; short, as a message may have it.
    key["tables_sha256"] = [
        hashlib.sha256(Path(table.source).read_bytes()).hexdigest()[:16] for table in tuning.active()
    ]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    partial = args.out.with_suffix(".partial.json")
    progress = Progress.begin(partial, key, resume)
    written = 0

    def keep(forward: Sequence[Chosen], backward: Sequence[Chosen], found: Sequence[Found]) -> None:
        nonlocal written
        written = len(forward) + len(backward)
        of_file = source | {"command": command_of(args, progress), "shapes": [summary(one) for one in found]}
        if means := means_of_sets(of_file["shapes"]):
            of_file["geometric_means"] = means
        rows: Any = [[chosen.row for chosen in one] for one in (forward, backward)]
        of_rows = [[chosen.measured for chosen in one] for one in (forward, backward)]
        whole = tuning.as_json([device], of_file, rows[0], of_rows[0], rows[1], of_rows[1])
        other = args.out.with_suffix(".new")
        other.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        tuning.read(other)
        other.replace(args.out)

    say = functools.partial(print, flush=True)
    tune(
        batches, device, card, progress, limit_s=limit_s, generations=args.generations, reach=args.reach,
        first=args.first, beside_peer=bool(args.sweep), say=say, keep=keep,
    )  # fmt: skip
    partial.unlink(missing_ok=True)
    say(f"written: {args.out}, {written} rows; use it with gluon_attn.tuning.load({str(args.out)!r})")


def command_of(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """What was asked for, and the minutes that it took."""
    limit = {"limit_minutes": args.minutes} if math.isfinite(args.minutes) else {}
    sweep = {"sweep": args.sweep} if args.sweep else {"backward": args.backward}
    return (
        sweep
        | {
            "reach": args.reach,
            "generations": args.generations,
            "minutes": progress.spent_s / 60,
        }
        | limit
    )


def summary(found: Found) -> dict[str, Any]:
    """Of every problem, that the table in use is the fastest for too."""
    measured = found.measured
    ms = {name: measured.ms[name] for name in dict.fromkeys([measured.in_use, measured.chosen])}
    beside = {} if found.beside is None else {"beside": found.beside}
    of_gradients = {"of_gradients": True} if found.of_gradients else {}
    return asdict(measured) | {"ms": ms, "configs": len(measured.ms)} | of_gradients | beside
