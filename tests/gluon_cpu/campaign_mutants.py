"""Every synchronisation operation of the kernels, broken one by one: is it found?

    python -m tests.gluon_cpu.campaign_mutants [--kernel NAME] [--seeds 3] [--only TEXT] [--without TEXT] [--shard 1/4]

Each wait, arrive, commit, fence, expect, init, invalidation, cluster barrier and store wait is deleted; each count,
byte count, number of pending operations and phase is changed; each barrier of a product is dropped; each atomic load
has what it waits for at once. A mutant runs under a few schedules of each policy until the machine reports a finding,
and under many more if none does. Of the gradients, other bits than the right kernel's count as found, as these must not
depend on the schedule. Prints a line for each, and ends with status 1 if one survives that explained_mutants.py does
not explain, or if one is found that it does.
"""

import argparse
import contextlib
import itertools
import sys
import time
import unittest.mock
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

import gluon_cpu
from gluon_cpu import front
from gluon_cpu.compat import GluonASTSource
from gluon_cpu.generate import generate
from gluon_cpu.ir.parse import parse_module
from tests.gluon_cpu.arguments import at_least_one, shard
from tests.gluon_cpu.attention import BackwardRun
from tests.gluon_cpu.explained_mutants import reason_of
from tests.gluon_cpu.features import FeatureBackwardRun
from tests.gluon_cpu.mutants import Mutant, mutants
from tests.gluon_cpu.mutated_kernels import KERNELS, AnyRun


@contextlib.contextmanager
def instead_of_compiling(replacement: Callable[..., Any]) -> Iterator[None]:
    """Within it, launches get what `replacement` returns, called with the arguments of gluon_cpu's compile step."""
    with unittest.mock.patch.object(sys.modules["gluon_cpu.launch"], "compile_source", replacement):
        yield


class Recorded(Exception):
    """The text is there: nothing is to be run."""


def is_launched(run: AnyRun, kernel: Any, constants: Mapping[Any, Any]) -> bool:
    """Whether this is `run.launch`, and not another of its launches; of one kernel, these differ in their config."""
    build = run.launch.build
    return kernel is build.kernel.fn and build.constants.get("CONFIG") in (None, *constants.values())


def text_of(run: AnyRun) -> str:
    """The lowered text of `run.launch`: with the compiler's memory offsets, fences and cluster barriers."""
    texts: list[str] = []

    def record(kernel: Any, signature: Any, constants: Any, attrs: Any, options: Any, arch: int, mode: str) -> Any:
        if is_launched(run, kernel, constants):
            texts.append(front.build_text(GluonASTSource(kernel, signature, constants, attrs), arch, options, True))
            raise Recorded
        return front.compile_source(kernel, signature, constants, attrs, options, arch, mode)

    with instead_of_compiling(record), contextlib.suppress(Recorded):
        run(mode="lowered")
    return texts[0]


def verdict(runs: Sequence[AnyRun], mutant: Mutant, seeds: Iterable[int]) -> str:
    """What was found first, and under which schedule; "" if nothing was."""
    compiled = front.Compiled(generate(parse_module(mutant.text), True))

    def instead(kernel: Any, signature: Any, constants: Any, *rest: Any) -> Any:
        if is_launched(runs[0], kernel, constants):
            return compiled
        return front.compile_source(kernel, signature, constants, *rest)

    with instead_of_compiling(instead):
        for seed, run, policy in itertools.product(seeds, runs, gluon_cpu.POLICIES):
            schedule = gluon_cpu.Schedule(policy, seed=seed)
            try:
                run(schedule=schedule, mode="lowered")
            except gluon_cpu.Finding as finding:
                return f"{type(finding).__name__} ({policy}, seed {seed})"
            try:
                run.check()
            except AssertionError:
                return f"WRONG NUMBERS, no finding ({policy}, seed {seed})"
            if isinstance(run, BackwardRun | FeatureBackwardRun) and not run.has_kept_bits():
                return f"other bits ({policy}, seed {seed})"
    return ""


def campaign(
    kernel: str,
    seeds: int,
    hunt: int,
    only: str,
    shard: tuple[int, int] = (1, 1),
    before: int = 0,
    without: Sequence[str] = (),
) -> tuple[int, int, int]:
    """(mutants, those tried, unexplained survivors). Of `parts` mutants one is tried, counting on from the `before` of
    the kernels before this one."""
    part, parts = shard
    runs = KERNELS[kernel].runs()
    there = tried = survived = 0
    for mutant in mutants(text_of(runs[0])):
        if only not in mutant.name or any(text in mutant.name for text in without):
            continue
        there += 1
        if (before + there - part) % parts:
            continue
        tried += 1
        start = time.perf_counter()
        found = verdict(runs, mutant, range(seeds))
        reason = reason_of(kernel, mutant.name)
        if not found and not reason:
            found = verdict(runs, mutant, range(seeds, hunt))
        caught = found and not found.startswith("WRONG")
        if caught and reason:
            print(f"{kernel} | {mutant.name} | is found, but explained as harmless: {reason}")
            survived += 1
        survived += not (caught or reason)
        result = found if caught else f"{found or 'survived'}: {reason or 'NOT EXPLAINED'}"
        print(f"{kernel} | {mutant.name} | {result} | {time.perf_counter() - start:.1f} s", flush=True)
    return there, tried, survived


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="", help="only kernels whose names begin like this; default: all")
    parser.add_argument("--seeds", type=at_least_one, default=3, help="schedules of each policy")
    parser.add_argument("--only", default="", help="only mutants with this in their name")
    parser.add_argument("--without", nargs="+", default=(), help="no mutants with one of these in their name")
    parser.add_argument("--hunt", type=int, default=40, help="as many for those that survive without an explanation")
    parser.add_argument("--shard", type=shard, default=(1, 1), help="I/N: part I of N, to run on several machines")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    there = total = survivors = 0
    names = [name for name in KERNELS if name.startswith(options.kernel)]
    if not names:
        parser.error(f"--kernel: no name begins with {options.kernel!r}; there are {', '.join(KERNELS)}")
    for name in names:
        of_kernel, tried, survived = campaign(
            name, options.seeds, options.hunt, options.only, options.shard, there, options.without
        )
        there, total, survivors = there + of_kernel, total + tried, survivors + survived
    if not total:
        part, parts = options.shard
        print(f"part {part} of {parts} has no mutant: {there} have {options.only!r} in their names")
        return 2
    print(f"{total} mutants, {survivors} survived without an explanation")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
