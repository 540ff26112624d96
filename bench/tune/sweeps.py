"""What `bench tune --sweep` tunes: the points that are compared everywhere, and what else tables have rows for."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from bench.features import SHAPES
from bench.points import SETS, Point, d192, sweep
from bench.predict import problem_of as problem_at
from gluon_attn.explain import add_problem_options, problem_of
from gluon_attn.problem import Problem

HEAD_DIMS = (64, 128)  # of the points that are compared everywhere

# Causal calls with something more, as options of this command; with gradients if there are rows for them.
FEATURES = {
    ("--window", "127,0"): True,
    ("--window", "1023,0"): True,
    ("--softcap", "30"): True,
    ("--alibi",): True,
    ("--bias",): False,
}


@dataclass(frozen=True)
class Sweep:
    """problems: makes those to tune for. of_gradients: for theirs."""

    problems: Callable[[], tuple[Problem, ...]]
    of_gradients: bool = False


def at(points: Sequence[Point]) -> Callable[[], tuple[Problem, ...]]:
    return lambda: tuple(map(problem_at, points))


def features(of_gradients: bool) -> tuple[Problem, ...]:
    """At the shapes at which `bench --sets masks` times them."""
    command = argparse.ArgumentParser()
    add_problem_options(command)
    found = []
    for shape in SHAPES:
        of_q = shape.batch, shape.heads, shape.length, shape.head_dim
        for options, has_gradients in FEATURES.items():
            if has_gradients or not of_gradients:
                given = command.parse_args(["--causal", "--kv-heads", str(shape.kv_heads), *options])
                found.append(problem_of(of_q, given))
    return tuple(found)


SWEEPS = {
    "bf16": Sweep(at(sweep("bf16", HEAD_DIMS))),
    "e4m3": Sweep(at(sweep("e4m3", HEAD_DIMS))),
    "d256": Sweep(at(SETS["d256"])),
    "d192": Sweep(at(d192())),
    "features": Sweep(partial(features, of_gradients=False)),
    "backward": Sweep(at(sweep("bf16", HEAD_DIMS)), of_gradients=True),
    "backward_d256": Sweep(at(sweep("bf16", (256,))), of_gradients=True),
    "backward_d192": Sweep(at(d192()), of_gradients=True),
    "backward_features": Sweep(partial(features, of_gradients=True), of_gradients=True),
}
