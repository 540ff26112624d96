"""`python -m gluon_cpu check file.py::fn`: many schedules of whatever a function launches."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

from . import POLICIES, Finding, check
from .front import MODES
from .timeline import Timeline, TimelineError

MISTAKE = 2


def load(spec: str) -> Callable[[], Any]:
    """The function that `file.py::name` names."""
    path, separator, name = spec.partition("::")
    if not separator or not name:
        raise SystemExit2(f"{spec}: expected file.py::function")
    if not os.path.isfile(path):
        raise SystemExit2(f"{path}: no such file")
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    module_spec = importlib.util.spec_from_file_location(os.path.basename(path).removesuffix(".py"), path)
    if module_spec is None or module_spec.loader is None:
        raise SystemExit2(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    module_spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise SystemExit2(f"{path} has no function {name}")
    return function


class SystemExit2(Exception):
    """A mistake in the command, as opposed to a finding."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gluon_cpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    c = commands.add_parser("check", help="run a function under many schedules; stops at the first finding")
    c.add_argument("function", help="file.py::name of a function without arguments that launches kernels")
    c.add_argument("--schedules", type=int, default=200)
    c.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    c.add_argument("--seed", type=int, default=0, help="first seed; to replay, with --schedules 1 and one policy")
    c.add_argument("--target", default="sm_90a", help="sm_90a, sm_100a or sm_103a")
    c.add_argument("--mode", choices=MODES, help="default: fast for one CTA, but for the last schedule")
    c.add_argument("--trace", help="write a Chrome trace of the last launch to this file")
    c.add_argument("--timeline", help="draw the last launch into this file, .svg or .png")
    c.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, help="how far it is, on stderr; default: on a terminal"
    )
    options = parser.parse_args(arguments)
    try:
        function = load(options.function)
        if options.timeline:
            Timeline(options.timeline)
    except (SystemExit2, TimelineError) as mistake:
        print(mistake, file=sys.stderr)
        return MISTAKE
    extra = {name: value for name in ("mode", "trace", "timeline") if (value := getattr(options, name))}
    try:
        check(
            function, options.schedules, options.policies, seed=options.seed, target=options.target,
            progress=options.progress, **extra,
        )  # fmt: skip
    except Finding:
        return 1  # check has printed it
    return 0


if __name__ == "__main__":
    sys.exit(main())
