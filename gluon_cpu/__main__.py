"""`python -m gluon_cpu check file.py::fn`: many schedules of whatever a function launches.

Exit status: 0 no finding, 1 a finding, 2 a mistake in the command, 3 nothing was checked, as the function launched no
kernel, 4 the function, or its file, raised something else.
"""

import argparse
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from . import POLICIES, Accept, Finding, NothingChecked, check
from .compat import JITFunction
from .context import findings_in
from .front import MODES, arch_of
from .given import file_name
from .timeline import Timeline
from .verdicts import Verdicts

FOUND, MISTAKE, NOTHING, CRASHED = 1, 2, 3, 4


def load(spec: str) -> Callable[[], Any]:
    """The function that `file.py::name` names."""
    path, separator, name = spec.partition("::")
    if not separator or not name:
        raise Mistake(f"{spec}: expected file.py::function")
    if not os.path.isfile(path):
        raise Mistake(f"{path}: no such file")
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    module_spec = importlib.util.spec_from_file_location(os.path.basename(path).removesuffix(".py"), path)
    if module_spec is None or module_spec.loader is None:
        raise Mistake(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise Unloadable(error) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise Mistake(f"{path} has no function {name}")
    if isinstance(function, JITFunction):
        raise Mistake(
            f"{spec}: expected a function that launches kernels, got a kernel; write one that makes its inputs"
        )
    required = [p.name for p in inspect.signature(function).parameters.values() if is_required(p)]
    if required:
        raise Mistake(f"{spec}: expected a function without arguments, got one that needs {', '.join(required)}")
    return function


def is_required(parameter: inspect.Parameter) -> bool:
    optional = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not optional


class Mistake(Exception):
    """A mistake in the command, as opposed to a finding."""


class Unloadable(Exception):
    """The file raised something while it was loaded."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gluon_cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    c = commands.add_parser("check", help="run a function under many schedules; stops at the first finding")
    c.add_argument("function", help="file.py::name of a function without arguments that launches kernels")
    c.add_argument("--schedules", type=int, default=200, help="how many; default: 200")
    c.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES,
                   help="who goes next; default: all, one after the other")  # fmt: skip
    c.add_argument("--seed", type=int, default=0, help="first seed; to replay, with --schedules 1 and one policy")
    c.add_argument("--target", default="sm_90a", help="sm_90a (default), sm_100a or sm_103a")
    c.add_argument("--mode", choices=MODES, help="default: fast for one CTA, but for the last schedule")
    c.add_argument("--trace", help="write a Chrome trace of the last launch to this file")
    c.add_argument("--skip", nargs="+", metavar="KIND", help="kinds of findings not to look for, as UninitialisedRead")
    c.add_argument("--accept", nargs="+", metavar="KIND@PLACE=REASON",
                   help="known findings: 'DataRace@kernel.py:120=why it may stay'; PLACE is file.py:line, file.py or a "
                   "function")  # fmt: skip
    c.add_argument("--outputs", nargs="+", metavar="NAME", help="parameters whose tensors must be written in full")
    c.add_argument("--keep-going", action="store_true", help="run all schedules and print every distinct finding")
    c.add_argument("--timeline", help="draw the last launch into this file, .svg or .png")
    c.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, help="how far it is, on stderr; default: on a terminal"
    )
    options = parser.parse_args(arguments)
    try:
        arch_of(options.target)
        if options.schedules < 1:
            raise Mistake(f"--schedules: expected at least 1, got {options.schedules}; none would check nothing")
        accept = [Accept.parse(text) for text in options.accept or ()]
        Verdicts(options.skip or ())
        if options.trace:
            file_name("--trace", options.trace)
        if options.timeline:
            Timeline(options.timeline)
        function = load(options.function)
    except (Mistake, ValueError) as mistake:
        print(mistake, file=sys.stderr)
        return MISTAKE
    except Unloadable as unloadable:
        error = unloadable.error
        found, rest = findings_in(error)
        for finding in found:
            print(f"{type(finding).__name__} while the file of {options.function} was loaded:\n{finding}")
        if rest is not None:
            crashed(rest, f"{options.function} could not be loaded, as its file raised")
        return FOUND if found else CRASHED
    names = ("mode", "trace", "timeline", "skip", "keep_going", "outputs")
    extra = {name: value for name in names if (value := getattr(options, name))}
    extra |= {"accept": accept} if accept else {}
    try:
        check(
            function, options.schedules, options.policies, seed=options.seed, target=options.target,
            progress=options.progress, **extra,
        )  # fmt: skip
    except Finding:
        return FOUND  # check has printed it
    except NothingChecked as nothing:
        print(nothing, file=sys.stderr)
        return NOTHING
    except (Exception, SystemExit) as error:
        found, rest = findings_in(error)
        if rest is not None:
            crashed(rest, f"{options.function} raised")
        return FOUND if found else CRASHED
    return 0


def crashed(error: BaseException, what: str) -> None:
    """Say on stderr where an exception came from, and that it is no finding."""
    if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:  # what `check` raised beside findings
        error = error.exceptions[0]
    traceback.print_exception(error)
    print(f"{what} {type(error).__name__}: that is no finding", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
