"""`python -m bench learn`: the kernels of the course, docs/learn, each beside those of the lesson before it.

    python -m bench learn --out FILE      # on a Hopper card, under two minutes with compiling
    python -m bench learn --show FILE     # anywhere: the tables of docs/learn/README.md

Every call is checked against the first of its problem before it is timed. All calls of a problem are timed together,
in shuffled order, each run with a cold L2 cache.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.provenance import SEED, provenance
from bench.timing import time_interleaved
from gluon_attn import attention
from gluon_attn.gradients import attention_backward
from gluon_attn.lessons import load

OUT = Path("bench/results/h200_learn.json")


@dataclass(frozen=True, kw_only=True)
class Call:
    """lesson: None for a yardstick. run: writes into and returns its output."""

    lesson: int | None
    name: str
    run: Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What several calls compute. work: operations, or bytes read and written; unit: of work in 1e-12 s, or 1e-9 s."""

    name: str
    work: float
    unit: str  # "TFLOP/s" or "GB/s"
    tolerance: float
    out: Tensor  # what most calls write into; NaN before each check
    calls: tuple[Call, ...]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the problems: small ones for tests."""

    programs: int  # as many as the card has processors
    tiles: int  # of 64 rows, for each program of the copy
    heads: int
    length: int
    gemm: int
    device: str = "cuda"

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        made = torch.Generator(self.device).manual_seed(SEED)
        return torch.randn(shape, generator=made, dtype=torch.float32, device=self.device).to(dtype)


D = 128


def copies(sizes: Sizes) -> Problem:
    x = sizes.normal(sizes.programs * sizes.tiles * 64, 64, dtype=torch.float32)
    out = torch.empty_like(x)
    one, ring = load("02_copy"), load("03_ring")

    def by(run: Callable[..., object], *args: Any, **options: Any) -> Callable[[], Tensor]:
        def call() -> Tensor:
            run(*args, x, out, programs=sizes.programs, **options)
            return out

        return call

    return Problem(
        name=f"out = 2 x, {x.numel() * 4 / 2**20:.0f} MiB, one program to a processor",
        work=2.0 * x.numel() * 4,
        unit="GB/s",
        tolerance=0.0,
        out=out,
        calls=(
            Call(lesson=None, name="PyTorch, 2 * x", run=lambda: torch.mul(x, 2, out=out)),
            Call(lesson=2, name="one tile, no pipeline", run=by(one.run_double)),
            Call(lesson=3, name="a ring of 3 by hand", run=by(ring.run, ring.by_hand)),
            Call(lesson=3, name="a ring of 3, channels", run=by(ring.run, ring.by_channel)),
            Call(lesson=3, name="a ring of 1, channels", run=by(ring.run, ring.by_channel, slots=1)),
            Call(lesson=3, name="a ring of 6, channels", run=by(ring.run, ring.by_channel, slots=6)),
        ),
    )


def gemms(sizes: Sizes) -> Problem:
    n = sizes.gemm
    descriptor = load("course").descriptor
    a, b, c = sizes.normal(n, n), sizes.normal(n, n), torch.empty(n, n, dtype=torch.bfloat16, device=sizes.device)
    one, two = load("04_products"), load("06_two_ctas")

    def on_one() -> Tensor:
        one.gemm[(n // 64, n // 128)](descriptor(a, [64, 64]), descriptor(b, [128, 64]), c)
        return c

    def on_two() -> Tensor:
        descs = descriptor(a, [128, 64], [[1, 0]]), descriptor(b, [128, 64], [[0, 0]])
        two.gemm[(n // 128, n // 128)](*descs, c, SLOTS=3, HANDOVER=True, num_ctas=2)
        return c

    return Problem(
        name=f"C = A Bᵀ, {n} each way, bf16",
        work=2.0 * n**3,
        unit="TFLOP/s",
        tolerance=0.02,
        out=c,
        calls=(
            Call(lesson=None, name="PyTorch (cuBLAS)", run=lambda: torch.matmul(a, b.T, out=c)),
            Call(lesson=4, name="one consumer", run=on_one),
            Call(lesson=6, name="two CTAs share B", run=on_two),
        ),
    )


def forward(sizes: Sizes) -> Problem:
    heads, length = sizes.heads, sizes.length
    q, k, v = sizes.normal(3, heads * length, D)
    out = torch.empty_like(q)
    four = [t.view(1, heads, length, D) for t in (q, k, v)]

    def by(run: Callable[..., object], **options: Any) -> Callable[[], Tensor]:
        def call() -> Tensor:
            run(q, k, v, out, heads=heads, **options)
            return out

        return call

    def unfused() -> Tensor:
        q, k, v = four
        return (torch.softmax(q @ k.mT * D**-0.5, -1) @ v).view(-1, D)

    def library() -> Tensor:
        got = attention(*four)
        assert isinstance(got, Tensor)
        return got.view(-1, D)

    turns = load("05_turns").run
    return Problem(
        name=f"attention, {heads} heads, {length} tokens, D={D}, bf16",
        work=4.0 * heads * length**2 * D,
        unit="TFLOP/s",
        tolerance=0.05,  # PyTorch rounds the scores to bf16, the kernels do not
        out=out,
        calls=(
            Call(lesson=1, name="PyTorch, not fused", run=unfused),
            Call(lesson=4, name="one consumer", run=by(load("04_products").run)),
            Call(lesson=5, name="two consumers, no turns", run=by(turns, turns=False)),
            Call(lesson=5, name="two consumers, turns", run=by(turns)),
            Call(lesson=5, name="the same, stored by rows", run=by(turns, way="rows")),
            Call(lesson=5, name="the same, from registers", run=by(turns, way="registers")),
            Call(lesson=6, name="two CTAs", run=by(load("06_two_ctas").run)),
            Call(lesson=None, name="gluon_attn", run=library),
        ),
    )


def causal(sizes: Sizes) -> Problem:
    heads, length = sizes.heads, sizes.length
    q, k, v = sizes.normal(3, heads * length, D)
    out = torch.empty_like(q)
    four = [t.view(1, heads, length, D) for t in (q, k, v)]
    run = load("07_persistent").run

    def by(order: str, programs: int = sizes.programs) -> Callable[[], Tensor]:
        def call() -> Tensor:
            run(q, k, v, out, heads=heads, programs=programs, order=order)
            return out

        return call

    def library() -> Tensor:
        got = attention(*four, causal=True)
        assert isinstance(got, Tensor)
        return got.view(-1, D)

    return Problem(
        name=f"causal attention, {heads} heads, {length} tokens, D={D}, bf16",
        work=2.0 * heads * length**2 * D,
        unit="TFLOP/s",
        tolerance=0.02,
        out=out,
        calls=(
            Call(lesson=7, name="a program for each item, by head", run=by("by head", programs=0)),
            Call(lesson=7, name="a program for each item, longest first", run=by("longest first", programs=0)),
            Call(lesson=7, name="persistent, by head", run=by("by head")),
            Call(lesson=7, name="persistent, longest first", run=by("longest first")),
            Call(lesson=7, name="persistent, snake", run=by("snake")),
            Call(lesson=None, name="gluon_attn", run=library),
        ),
    )


def gradients(sizes: Sizes) -> Problem:
    """Of D = 64, all that one warpgroup has registers for. The output checked is dV, then dQ and dK, side by side."""
    heads, length, d = sizes.heads, sizes.length, 64
    q, k, v, do = sizes.normal(4, heads * length, d)
    q4, k4, v4, do4 = (t.view(1, heads, length, d) for t in (q, k, v, do))
    out, lse = attention(q4, k4, v4, return_lse=True)
    all_three = torch.empty(3, heads * length, d, device=sizes.device)
    dv, dq, dk = all_three
    run = load("09_backward").run

    def by(order: str) -> Callable[[], Tensor]:
        def call() -> Tensor:
            dq.zero_()
            run(q, k, v, out.view(-1, d), lse.flatten(), do, dq, dk, dv, heads=heads, order=order)
            return all_three

        return call

    def library(deterministic: bool) -> Callable[[], Tensor]:
        def call() -> Tensor:
            found = attention_backward(do4, None, q4, k4, v4, out, lse, deterministic=deterministic)
            return torch.stack([found[i].view(-1, d).float() for i in (2, 0, 1)])

        return call

    return Problem(
        name=f"gradients, {heads} heads, {length} tokens, D={d}, bf16",
        work=10.0 * heads * length**2 * d,
        unit="TFLOP/s",
        tolerance=0.02,
        out=all_three,
        calls=(
            Call(lesson=9, name="dQ in any order, delta by PyTorch", run=by("any")),
            Call(lesson=9, name="the same, dQ in a fixed order", run=by("fixed")),
            Call(lesson=None, name="gluon_attn", run=library(False)),
            Call(lesson=None, name="gluon_attn, in a fixed order", run=library(True)),
        ),
    )


def mlps(sizes: Sizes) -> Problem:
    rows, hidden = sizes.heads * sizes.length, sizes.gemm
    x, w1, w2 = sizes.normal(rows, D), sizes.normal(hidden, D), sizes.normal(D, hidden)
    out = torch.empty(rows, D, dtype=torch.bfloat16, device=sizes.device)

    def fused() -> Tensor:
        load("solution_mlp").run(x, w1, w2, out)
        return out

    return Problem(
        name=f"MLP with relu, {rows} rows, {D} to {hidden} to {D}, bf16",
        work=4.0 * rows * hidden * D,
        unit="TFLOP/s",
        tolerance=0.02,
        out=out,
        calls=(
            Call(lesson=None, name="PyTorch, two products", run=lambda: torch.relu(x @ w1.T) @ w2.T),
            Call(lesson=10, name="fused", run=fused),
        ),
    )


PROBLEMS: tuple[Callable[[Sizes], Problem], ...] = (copies, gemms, forward, causal, gradients, mlps)


def wrong(got: Tensor, want: Tensor, tolerance: float) -> str | None:
    """What is wrong with a result, or None. The errors are of rounding: they are held against the largest value."""
    error, largest = (got.float() - want.float()).abs().max().item(), want.float().abs().max().item()
    return None if error <= tolerance * largest else f"differs by {error:.3g}, of values up to {largest:.3g}"


def measure(problem: Problem, rounds: int) -> dict[str, Any]:
    """Check, then time. What is wrong is not timed, and told."""
    want = problem.calls[0].run().clone()
    refused: dict[str, str] = {}
    calls = {}
    for call in problem.calls:
        problem.out.fill_(math.nan)
        complaint = wrong(call.run(), want, problem.tolerance)
        if complaint is None:
            calls[call.name] = call.run
        else:
            refused[call.name] = complaint
    timings = time_interleaved(calls, rounds=rounds, runs=5, warmup=1)
    scale = 1e-12 if problem.unit == "TFLOP/s" else 1e-9
    results = [
        {
            "lesson": call.lesson,
            "name": call.name,
            "microseconds": timings[call.name].median * 1e6,
            "rate": problem.work / timings[call.name].median * scale,
            "spread": timings[call.name].spread,
        }
        for call in problem.calls
        if call.name in timings
    ]
    return {"problem": problem.name, "unit": problem.unit, "results": results, "refused": refused}


# Which row's time a step begins from, where it is not the row of a lesson above: the two differ in one thing.
AGAINST = {
    "a ring of 6, channels": "a ring of 3, channels",
    "the same, from registers": "two consumers, turns",
    "two CTAs": "two consumers, turns",
    "persistent, by head": "a program for each item, by head",
    "persistent, snake": "persistent, by head",
}


def tables(report: dict[str, Any]) -> Iterator[str]:
    """Markdown. *Step*: how many times as fast as the row of a lesson above it, or as that of AGAINST."""
    made = report["provenance"]
    yield f"On an {made['card'].removeprefix('NVIDIA ')}, {made['date']}, Triton {made['triton']}."
    for point in report["points"]:
        yield f"\n**{point['problem']}**\n\n| lesson | | µs | {point['unit']} | step |\n| --- | --- | --- | --- | --- |"
        times = {result["name"]: result["microseconds"] for result in point["results"]}
        above, others = "", []
        for result in point["results"]:
            name = result["name"]
            lesson, step = "–" if result["lesson"] is None else result["lesson"], "–"
            start = AGAINST.get(name, above)
            if result["lesson"] is not None:
                if start in times:
                    step = f"{times[start] / times[name]:.2f}"
                    others += [f"- *{name}*: from *{start}*"] if start != above else []
                above = name
            yield f"| {lesson} | {name} | {times[name]:.0f} | {result['rate']:.0f} | {step} |"
        if others:
            yield "\nSome steps do not begin at the row above.\n\n" + "\n".join(others)
        for name, why in point["refused"].items():
            yield f"\nNot timed: {name} {why}."


def main(arguments: list[str]) -> None:
    command = argparse.ArgumentParser(
        prog="python -m bench learn", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("--out", type=Path, default=OUT, help="the result file, JSON")
    command.add_argument("--rounds", type=int, default=9, help="of 5 runs of each call, interleaved")
    command.add_argument("--commit", help="commit of the measured tree, where git cannot tell")
    command.add_argument("--show", type=Path, metavar="FILE", help="the tables of a result file; nothing is timed")
    options = command.parse_args(arguments)
    if options.show is not None:
        print("\n".join(tables(json.loads(options.show.read_text(encoding="utf-8")))))
        return
    if options.rounds < 1:
        command.error(f"--rounds: expected 1 or more, got {options.rounds}")
    if options.out.is_dir() or options.out.suffix != ".json":
        command.error(f"--out: expected a file name that ends in .json, got {options.out}")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("bench learn: needs a Hopper card (compute capability 9.0), found none; nothing was timed")
    # Large enough that the host, which makes descriptors at each call, stays ahead of the card.
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    sizes = Sizes(programs=programs, tiles=256, heads=32, length=4096, gemm=4096)
    points = []
    for make in PROBLEMS:
        points.append(measure(make(sizes), options.rounds))
        print(f"done: {points[-1]['problem']}", flush=True)
        report = {"provenance": provenance(options.commit), "points": points}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("\n".join(tables(report)))
    bad = [f"{name} {why}" for point in points for name, why in point["refused"].items()]
    if bad:
        sys.exit("bench learn: wrong results, not timed: " + "; ".join(bad))
    assert all(math.isfinite(result["rate"]) for point in points for result in point["results"])
