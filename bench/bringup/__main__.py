"""`python -m bench.bringup`: what must be seen before the kernels can be trusted on a new card, safest first."""

import argparse
import atexit
import fnmatch
import os
import sys
from pathlib import Path

from . import report
from .runner import Result, run_steps

try:
    from .steps import STEPS
except ModuleNotFoundError as missing:  # a host that brings its own Python may lack what the tests need
    sys.exit(f"bring-up: expected the Python package {missing.name!r} beside torch and Triton; install it")

REFERENCE = "bench.bringup.steps:STEPS"


def main() -> None:
    # Triton 3.9's bindings leak a few objects and say so on exit in thirty lines.
    atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno()))
    parser = argparse.ArgumentParser(prog="python -m bench.bringup", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".out/bringup"), help="folder of the report")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="names or patterns; the first two steps always run")
    parser.add_argument("--list", action="store_true", help="list the steps and their time limits, run nothing")
    args = parser.parse_args()
    if args.list:
        for step in STEPS:
            print(f"{step.seconds:>6} s at most  {step.name}")
        return
    steps = [
        step
        for i, step in enumerate(STEPS)
        if i < 2 or not args.only or any(fnmatch.fnmatch(step.name, pattern) for pattern in args.only)
    ]
    planned = [step.name for step in steps]
    width = max(map(len, planned))

    def done(results: list[Result]) -> None:
        print(f"[{len(results):2} of {len(steps)}] {report.heading(results[-1], width)}")
        for line in results[-1].lines:
            print(f"    {line}")
        sys.stdout.flush()
        report.write(args.out, results, planned)

    results = run_steps(steps, REFERENCE, done)
    print(f"\n{report.as_text(results, planned).splitlines()[-1]}")
    print(f"written: {args.out / 'report.json'} (to send back) and {args.out / 'report.txt'} (to read)")
    sys.exit(any(result.verdict == "failed" for result in results))


if __name__ == "__main__":
    main()
