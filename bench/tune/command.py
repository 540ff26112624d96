"""`python -m bench tune`: look for the fastest configs for your shapes on this card, and write them as a table file.

docs/tuning.md says how such a file is used. What was compiled and timed is kept beside it until it is whole, so that
the same command with --resume goes on where one was interrupted.
"""

import argparse
import functools
import json
import math
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.ahead import cores
from bench.provenance import provenance
from bench.tune.card import AGAIN, RealCard
from bench.tune.forward import Forward
from bench.tune.gradients import Gradients
from bench.tune.search import GENERATIONS, Again, Card, Progress, Search, Stop
from gluon_attn import tuning
from gluon_attn.backward.table import BackwardRow
from gluon_attn.device import Device
from gluon_attn.explain import DEVICES, add_problem_options, problem_of, shape
from gluon_attn.forward.table import Row
from gluon_attn.gradients import ARCHS
from gluon_attn.problem import FP8_DTYPES, Problem
from gluon_attn.tuning import Measured

OUT = Path("table.json")
REACH = 1.25
MOST_PROCESSES = 6  # one after the other, each ended by what its successor passes over
# Of a problem whose kernels no earlier one has compiled, over the others: its share of the time.
WEIGHT_OF_COMPILING = 4


def tune(
    problems: Sequence[Problem],
    device: Device,
    card: Card,
    progress: Progress,
    *,
    limit_s: float = math.inf,
    generations: int = GENERATIONS,
    reach: float = REACH,
    of_gradients: bool = False,
    say: Callable[[str], None] = print,
    keep: Callable[[list[Any], list[Measured], list[Measured]], None] = lambda *_: None,
) -> None:
    """Rows for the problems, or their gradients, for which the table in use is not the fastest.

    limit_s: seconds, of this run and those that it resumes. keep: is given the rows after each problem, what each was
    chosen from, and what was found of every problem.
    """
    rows: list[Row | BackwardRow] = []
    of_rows: list[Measured] = []
    measured: list[Measured] = []
    weights = weights_of(problems)
    for i, problem in enumerate(problems):
        share = (limit_s - progress.spent_s) * weights[i] / sum(weights[i:])
        choices = choices_for(problem, device, of_gradients)
        say(choices.title + (f", in {share:.0f} s" if math.isfinite(share) else ""))
        search = Search(choices, card, progress, say, share)
        found = search.run(generations)
        measured.append(found)
        if found.chosen == found.in_use:
            say(f"  the table in use stays, with {found.in_use}")
        else:
            say(f"  {found.chosen}: {found.gain:+.1%} ±{found.spread:.1%} over the table in use, {found.in_use}")
            rows.append(choices.row(search.configs[found.chosen], reach))
            of_rows.append(found)
        keep(rows, of_rows, measured)
    say(
        f"gain over the table in use, geometric mean of {len(problems)} shapes: "
        f"{statistics.geometric_mean(1 + found.gain for found in measured) - 1:+.1%}"
    )


def choices_for(problem: Problem, device: Device, of_gradients: bool) -> Any:
    """`Forward` or `Gradients`."""
    if of_gradients:
        return Gradients(problem, device, tuning.backward_rows_for(device))
    return Forward(problem, device, tuning.rows_for(device))


def weights_of(problems: Sequence[Problem]) -> list[int]:
    seen = set()
    weights = []
    for problem in problems:
        kernels = problem.dtype, problem.padded_head_dim, problem.padded_head_dim_v, problem.mask
        weights.append(1 if kernels in seen else WEIGHT_OF_COMPILING)
        seen.add(kernels)
    return weights


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="python -m bench tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument(
        "--shape", type=shape, nargs="+", required=True, metavar="B,H,S,D", help="of q: batch, heads, queries, head dim"
    )
    add_problem_options(command)
    command.add_argument("--backward", action="store_true", help="of their gradients, instead of the forward pass")
    command.add_argument("--out", type=Path, default=OUT, help=f"the table file (default: {OUT})")
    command.add_argument("--table", metavar="FILE", help="a table file that is in use already, to be improved on")
    command.add_argument(
        "--minutes", type=float, default=math.inf, metavar="N", help="end by then, with the best so far (default: none)"
    )
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
        "--jobs", type=int, default=cores(), metavar="N", help="to compile at once (default: one a core)"
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
        ("--limit", args.limit, 1), ("--minutes", args.minutes, 1),
    ):  # fmt: skip
        if not given >= least:
            command.error(f"{option}: expected {least} or more, got {given:g}")
    if args.out.is_dir() or args.out.suffix != ".json":
        command.error(f"--out: expected a file name that ends in .json, got {args.out}")
    if args.device and not args.list:
        command.error("--device: expected with --list only, as only the card here can be timed; add --list")
    try:
        problems = list(dict.fromkeys(problem_of(of_q, args) for of_q in args.shape))
        if args.backward and problems[0].dtype in FP8_DTYPES:
            raise ValueError("--backward: expected --dtype fp16 or bf16, as fp8 has no gradients")
        if args.table:
            tuning.load(args.table)
    except (OSError, ValueError) as error:
        command.error(str(error))
    if not args.device and not torch.cuda.is_available():
        sys.exit("bench tune: needs a Hopper or Blackwell card, found no CUDA device; nothing was timed")
    if not args.list:
        sys.exit(last_of(lambda resume: process(problems, args, resume), args.resume))
    try:
        device = DEVICES[args.device] if args.device else here()
        require(device, args.backward)
        for problem in problems:
            show(choices_for(problem, device, args.backward))
    except (NotImplementedError, RuntimeError) as error:
        sys.exit(f"bench tune: {error}")


def here() -> Device:
    """The card here. RuntimeError if there is no kernel for it."""
    device = Device.of(torch.device("cuda", torch.cuda.current_device()))
    device.require_supported()
    return device


def require(device: Device, of_gradients: bool) -> None:
    if of_gradients and device.arch not in ARCHS:
        raise NotImplementedError(f"--backward: expected a Hopper card, as no other has gradients, got {device.name}")


def show(choices: Any) -> None:
    print(choices.title)
    for config in dict.fromkeys([choices.in_use, *choices.first()]):
        why = choices.why_pruned(config)
        kind = "in use" if config == choices.in_use else "pruned" if why else ""
        print(f"  {kind:<7} {choices.name(config)}" + (f": {why}" if why else ""))


def last_of(start: Callable[[bool], int | None], resume: bool) -> int | str | None:
    """What the last of several processes ends with: one that a kernel took along is followed by another, which resumes
    what it has left. start: runs one, and gives its exit status."""
    for _ in range(MOST_PROCESSES):
        status = start(resume)
        if status != AGAIN:
            return status
        print("bench tune: goes on in another process", file=sys.stderr, flush=True)
        resume = True
    return f"bench tune: {MOST_PROCESSES} processes ended by what they ran; the same command with --resume goes on"


def process(problems: Sequence[Problem], args: argparse.Namespace, resume: bool) -> int | None:
    child = multiprocessing.get_context("spawn").Process(target=run_here, args=(problems, args, resume))
    child.start()
    child.join()
    return child.exitcode


def run_here(problems: Sequence[Problem], args: argparse.Namespace, resume: bool) -> None:
    """`run`, in a process that this is all for."""
    try:
        if args.table:
            tuning.load(args.table)
        device = here()
        require(device, args.backward)
        with RealCard(device, args.jobs, args.limit) as card:
            run(problems, device, card, args, resume)
    except Again as error:
        print(f"bench tune: {error}", file=sys.stderr, flush=True)
        sys.exit(AGAIN)
    except (NotImplementedError, OSError, RuntimeError, Stop) as error:
        sys.exit(f"bench tune: {error}")


def run(problems: Sequence[Problem], device: Device, card: Card, args: argparse.Namespace, resume: bool) -> None:
    """Writes the table file after each problem."""
    source = provenance(args.commit)
    key = {name: source[name] for name in ("commit", "card", "driver", "torch", "triton")}
    key["tables"] = [Path(table.source).read_text(encoding="utf-8") for table in tuning.active()]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    partial = args.out.with_suffix(".partial.json")
    progress = Progress.begin(partial, key, resume)
    written: list[Any] = []

    def keep(rows: list[Any], of_rows: list[Measured], measured: list[Measured]) -> None:
        written[:] = rows
        found = source | {"command": command_of(args, progress), "shapes": [summary(m) for m in measured]}
        of_forward: Any = ([], []) if args.backward else (rows, of_rows)
        of_gradients: Any = (rows, of_rows) if args.backward else ([], [])
        table = tuning.as_json([device], found, *of_forward, *of_gradients)
        args.out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        tuning.read(args.out)

    say = functools.partial(print, flush=True)
    tune(
        problems, device, card, progress, limit_s=60 * args.minutes, generations=args.generations, reach=args.reach,
        of_gradients=args.backward, say=say, keep=keep,
    )  # fmt: skip
    partial.unlink(missing_ok=True)
    say(f"written: {args.out}, {len(written)} rows; use it with gluon_attn.tuning.load({str(args.out)!r})")


def command_of(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """What was asked for, and the minutes that it took."""
    limit = {"limit_minutes": args.minutes} if math.isfinite(args.minutes) else {}
    return {
        "backward": args.backward,
        "reach": args.reach,
        "generations": args.generations,
        "minutes": progress.spent_s / 60,
    } | limit


def summary(found: Measured) -> dict[str, Any]:
    """Of every problem, that the table in use is the fastest for too."""
    ms = {name: found.ms[name] for name in dict.fromkeys([found.in_use, found.chosen])}
    return asdict(found) | {"ms": ms, "configs": len(found.ms)}
