"""`python -m bench`: attention forward on this card against cuDNN (through torch's SDPA), timed in one process.

`python -m bench tables` and `python -m bench plot` show what a result file says. `python -m bench learn` times the
kernels of the course instead, `python -m bench tune` looks for the fastest configs for your shapes.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import features, learn, report, sweep, unlike, varlen
from bench.points import DTYPES, LENGTHS, SETS, Point
from bench.tune import command as tune

RESULT = Path("bench/results/latest.json")
COMMITTED = Path("bench/results/h200_forward.json")  # what is shown where nothing was timed yet

APART: tuple[Any, ...] = (features, varlen, unlike)  # whose sets are timed otherwise than those of bench/points.py

# What can be chosen of the sets' points: the option, and what it is of a point.
FILTERS: dict[str, Callable[[Point], Any]] = {
    "dtype": lambda p: p.dtype,
    "head_dim": lambda p: p.head_dim,
    "mask": lambda p: "causal" if p.causal else "full",
    "length": lambda p: p.length,
}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument(
        "--sets",
        nargs="+",
        choices=[*SETS, *features.SETS, *varlen.SETS, *unlike.SETS],
        default=["sweep"],
        help="of bench/points.py; or of bench/features.py, varlen.py and unlike.py, then without those; of several of "
        "these each has a result file, named after it",
    )
    top.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=["bf16"], help="of these sets, what has these")
    top.add_argument("--head-dim", type=int, nargs="+", help="only these")
    top.add_argument("--mask", nargs="+", choices=["full", "causal"], help="only one of them")
    top.add_argument("--length", type=int, nargs="+", help=f"only these; a sweep has {LENGTHS}")
    top.add_argument("--layout", nargs="+", choices=["bhsd", "bshd"], default=["bhsd"], help="of the tensors")
    top.add_argument(
        "--ctas", type=int, nargs="+", choices=[1, 2], default=[1, 2], help="to time, beside the table's pick"
    )
    top.add_argument("--candidates", action="store_true", help="time every config of bench/candidates.py instead")
    top.add_argument(
        "--peers", nargs="*", choices=["fa2", "flex"], help="to time beside cuDNN; default: none, with masks flex"
    )
    top.add_argument("--sustained", action="store_true", help="also long loops at S=8192, of every kind")
    top.add_argument("--alone", action="store_true", help="also time cuDNN and ours for 100 ms on end each")
    top.add_argument("--rounds", type=int, default=9, help="of 15 runs of each call, interleaved")
    top.add_argument("--out", type=Path, default=RESULT, help="the result file, JSON")
    top.add_argument(
        "--resume", action="store_true", help="keep the points that --out has from an interrupted run of this commit"
    )
    top.add_argument("--commit", help="commit of the measured tree, where git cannot tell")
    shown = top.add_subparsers(dest="show", metavar="tables, plot", help="of result files, instead of timing anything")
    for name, description in (("tables", "Markdown"), ("plot", "TFLOP/s by length, a picture")):
        command = shown.add_parser(
            name, help=description, description=report.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_argument(
            "files", type=Path, nargs="*", help=f"default: that of the last run, {RESULT}, or else {COMMITTED}"
        )
        if name == "plot":
            command.add_argument("--to", type=Path, default=Path("speed.png"), help="the picture, .png or .svg")
            command.add_argument("--all", action="store_true", help="every kind of problem, not the README's four")
    return top


def chosen(args: argparse.Namespace, error: Callable[[str], Any]) -> list[Point]:
    """The points to time. Calls `error` for a choice that none of the sets has."""
    points = list(dict.fromkeys(p for name in args.sets for p in SETS[name]))
    points = [p for q in points for p in q.in_layouts(args.layout)]
    for option, of in FILTERS.items():
        wanted: Sequence[Any] | None = getattr(args, option)
        if wanted is None:
            continue
        there = sorted({of(p) for p in points})
        for value in wanted:
            if value not in there:
                flag = f"--{option.replace('_', '-')}"
                error(f"{flag}: expected some of {', '.join(map(str, there))}, which these sets have, got {value}")
        points = [p for p in points if of(p) in wanted]
    return points


def module_sets(module: Any, sets: Sequence[str]) -> list[str]:
    """Those of these sets that the module has."""
    return [name for name in sets if name in module.SETS]


def show(args: argparse.Namespace, error: Callable[[str], Any]) -> None:
    """Print or plot result files. Calls `error` for sets apart that are to be plotted, or are one of several files."""
    if not args.files and not RESULT.exists():
        print(f"bench: there is no run of yours ({RESULT}); shown is {COMMITTED}", file=sys.stderr)
    files = args.files or [RESULT if RESULT.exists() else COMMITTED]
    read = [report.read(file) for file in files]
    modules = [module_of(found) for found in read]
    for file, module in zip(files, modules, strict=True):
        if module is not None and (args.show == "plot" or len(files) > 1):
            wanted = "only files of lengths" if args.show == "plot" else "no other file beside it"
            error(f"{args.show}: {file}: expected {wanted}, got one of {', '.join(module.SETS)}")
    if args.show == "plot":
        print("written:", report.plot(report.read_all(files), args.to, args.all))
    elif modules[0] is not None:
        print(*report.heads(read[0]), "", modules[0].table(read[0]), sep="\n")
    else:
        print(report.tables(report.read_all(files)))


def module_of(found: dict[str, Any]) -> Any | None:
    """Of APART, the one whose sets this result file has; None if they are those of bench/points.py."""
    point: dict[str, Any] = next(iter(found["points"]), {})
    if "pass" not in point:
        return None
    return varlen if "ours_over" in point else features if "shape" in point else unlike


def main() -> None:
    if sys.argv[1:2] == ["learn"]:
        learn.main(sys.argv[2:])
        return
    if sys.argv[1:2] == ["tune"]:
        tune.main(sys.argv[2:])
        return
    command = parser()
    args = command.parse_args()
    if args.show and sys.argv[1] != args.show:
        command.error(f"expected {args.show} as the first word, without options of what is timed, got {sys.argv[1]}")
    if args.show:
        show(args, command.error)
    else:
        apart = [module for module in APART if module_sets(module, args.sets)]
        of_apart = [name for module in apart for name in module_sets(module, args.sets)]
        if apart and len(of_apart) < len(args.sets):
            others = ", ".join(name for name in args.sets if name not in of_apart)
            command.error(f"--sets: expected no others with {', '.join(of_apart)}, got {others}; run them apart")
        points = [] if apart else chosen(args, command.error)
        if args.rounds < 1:
            command.error(f"--rounds: expected 1 or more, got {args.rounds}")
        if args.out.is_dir() or args.out.suffix != ".json":
            command.error(f"--out: expected a file name that ends in .json, got {args.out}")
        if not torch.cuda.is_available():
            sys.exit("bench: needs a Hopper or Blackwell card, found no CUDA device; nothing was timed")
        if apart:
            for module in apart:
                names = module_sets(module, args.sets)
                out = args.out if len(apart) == 1 else args.out.with_stem(f"{args.out.stem}_{'_'.join(names)}")
                module.run(argparse.Namespace(**vars(args) | {"sets": names, "out": out}))
        else:
            args.peers = args.peers or []
            sweep.run(points, args)


if __name__ == "__main__":
    main()
