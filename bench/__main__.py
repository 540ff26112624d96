"""`python -m bench`: attention forward on this card against cuDNN (through torch's SDPA), timed in one process."""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench import ceilings, sustained
from bench.candidates import CANDIDATES, label
from bench.ceilings import MATRIX, Ceilings
from bench.peers import backend_chosen, calls_of, ours
from bench.points import DTYPES, LENGTHS, SETS, Point
from bench.precompile import Job, precompile
from bench.provenance import clocks, provenance
from bench.report import means, read
from bench.timing import host_seconds, seconds_alone, time_interleaved, wall_seconds
from gluon_attn import TileConfig
from gluon_attn.device import Device
from gluon_attn.launch import compiled
from gluon_attn.problem import Problem
from gluon_attn.resources import resources
from gluon_attn.tuning import TABLE

ROUNDS_ALONE = 5


def tiles_of_table(device: Device, head_dim: int, causal: bool, element_bytes: int) -> list[TileConfig]:
    kind = (head_dim, causal, element_bytes)
    rows = (row for row in TABLE if (row.padded_head_dim, row.causal, row.element_bytes) == kind)
    return [row.tile for row in rows if device.arch in row.tile.archs]


def candidates(point: Point) -> list[TileConfig]:
    """Those of bench/candidates.py for the point. Without a mask no order is the longest first."""
    tiles = CANDIDATES[Problem.padded(point.head_dim), DTYPES[point.dtype].itemsize]
    return [tile for tile in tiles if point.causal or not tile.longest_first]


def measure(
    point: Point, tiles: Sequence[TileConfig], peers: Sequence[str], rounds: int, limits: Ceilings, *, alone: bool
) -> dict[str, Any]:
    calls = calls_of(point, tiles, peers)
    timings = time_interleaved(calls, rounds=rounds)
    plainer = point.plainer()
    results = {}
    for name, t in timings.items():
        flops = plainer.flops if plainer and name == "ours, plainer" else point.flops
        results[name] = {
            "ms": t.median * 1e3,
            "tflops": flops / t.median / 1e12,
            "spread": t.spread,
            "ratio_to_cudnn": timings["cudnn"].median / t.median * flops / point.flops,
        }
    found: dict[str, Any] = {"point": asdict(point), "name": point.name, "clocks": clocks(), "results": results}
    ceiling = limits.tflops(point.intensity)  # of bf16: fp8 products can be twice as fast
    found["roofline"] = {"flops_per_byte": point.intensity, "ceiling_tflops": ceiling}
    if "ours" in results:
        found["roofline"]["share"] = results["ours"]["tflops"] / ceiling
    if alone:
        found["alone"] = measure_alone(point, {name: calls[name] for name in ("cudnn", "ours") if name in calls})
    if point in SETS["small"]:
        found["host_us"], found["wall_us"] = {}, {}
        for name, call in calls.items():
            with backend_chosen(call) as chosen:
                found["host_us"][name] = host_seconds(chosen) * 1e6
                found["wall_us"][name] = wall_seconds(chosen) * 1e6
    return found


def measure_alone(point: Point, calls: Mapping[str, Callable[[], object]]) -> dict[str, Any]:
    """Medians over ROUNDS_ALONE rounds, in which each call has its turn of 100 ms."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _, (name, call) in itertools.product(range(ROUNDS_ALONE), calls.items()):
        seconds[name].append(seconds_alone(call))
    return {
        name: {"ms": 1e3 * statistics.median(taken), "tflops": point.flops / statistics.median(taken) / 1e12}
        for name, taken in seconds.items()
    }


def measure_sustained() -> dict[str, Any]:
    """cuBLAS, cuDNN and ours in long loops, S=8192."""
    a, b = (torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    found = {"cublas": sustained.measure(lambda: a @ b, 2 * MATRIX**3)}
    for point in (p for p in SETS["bf16"] if p.length == 8192):
        calls = calls_of(point, [], ["fa2"])
        for name in ("cudnn", "fa2", "ours"):
            found[f"{point.name} {name}"] = sustained.measure(calls[name], point.flops)
    for point in (p for p in SETS["e4m3"] if p.length == 8192):
        found[f"{point.name} ours"] = sustained.measure(ours(point, point.tensors()), point.flops)
    for name, s in found.items():
        print(
            f"sustained {name:28} {s.tflops:5.0f} TFLOP/s {s.watts:4.0f} W {s.sm_mhz:5.0f} MHz "
            f"{s.joules_per_tflop:.2f} J/TFLOP",
            flush=True,
        )
    return {name: asdict(s) | {"joules_per_tflop": s.joules_per_tflop} for name, s in found.items()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=["bf16"], help="of bench/points.py")
    parser.add_argument("--head-dim", type=int, nargs="+", help="of these sets, only these head dims")
    parser.add_argument("--mask", nargs="+", choices=["full", "causal"], default=["full", "causal"])
    parser.add_argument("--length", type=int, nargs="+", help=f"only these lengths; those of a sweep are {LENGTHS}")
    parser.add_argument("--candidates", action="store_true", help="time every tile of bench/candidates.py instead")
    parser.add_argument("--peers", nargs="*", choices=["fa2", "flex"], default=[], help="to time beside cuDNN")
    parser.add_argument("--sustained", action="store_true", help="also long loops, with power and clocks")
    parser.add_argument("--alone", action="store_true", help="also time cuDNN and ours for 100 ms on end each, in turn")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("bench/results/latest.json"), help="the result file, JSON")
    parser.add_argument(
        "--resume", action="store_true", help="keep the points that --out has from an interrupted run of this commit"
    )
    parser.add_argument("--commit", help="commit of the measured tree, where git cannot tell")
    return parser.parse_args()


def jobs_of(points: list[Point], tiles: dict[Point, list[TileConfig]], device: Device) -> list[Job]:
    """Every kernel that the points need, once."""
    jobs: dict[Job, None] = {}
    for p in points:
        dtype = DTYPES[p.dtype]
        padded = Problem.padded(p.head_dim)
        for t in tiles[p] or tiles_of_table(device, padded, p.causal, dtype.itemsize):
            jobs[dtype, padded, p.causal, t] = None
    return list(jobs)


def line(found: dict[str, Any], seconds_left: float) -> str:
    cells = (
        f"{n} {r['tflops']:.0f} ({r['ratio_to_cudnn']:.3f} ±{r['spread'] / 2:.1%})" for n, r in found["results"].items()
    )
    times = "".join(
        f" | {kind} " + ", ".join(f"{n} {us:.1f}" for n, us in found[kind].items())
        for kind in ("host_us", "wall_us")
        if kind in found
    )
    return f"[{seconds_left:3.0f} s left] {found['name']:20} " + " | ".join(cells) + times


def summary(report: dict[str, Any]) -> str:
    """The geometric means of ours / cuDNN, and ours on problems with something to them against plainer ones."""
    lines = list(means(report))
    for p in report["points"]:
        if "ours, plainer" in p["results"]:
            rate, plain = (p["results"][name]["tflops"] for name in ("ours", "ours, plainer"))
            lines.append(f"{p['name']}: {rate / plain:.3f} of the rate on the plainer problem")
    return "\n".join(lines)


def resumed(out: Path, now: dict[str, Any]) -> list[dict[str, Any]]:
    """The points that an interrupted run left in `out`. now: the provenance of this run.

    Raises SystemExit if they are of another tree, machine or kind.
    """
    if not out.exists():
        return []
    before = read(out)
    for key in ("commit", "card", "driver", "torch", "triton", "cudnn", "command"):
        if before["provenance"].get(key) != now[key]:
            sys.exit(
                f"--resume: expected {out} to have {key} {now[key]!r}, got {before['provenance'].get(key)!r}; "
                "give another --out"
            )
    return before["points"]


def main() -> None:
    args = arguments()
    if not torch.cuda.is_available():
        sys.exit("bench: needs a Hopper or Blackwell card, found no CUDA device; nothing was timed")
    device = Device.of(torch.device("cuda", torch.cuda.current_device()))
    points = [
        p
        for p in dict.fromkeys(p for name in args.sets for p in SETS[name])
        if (args.head_dim is None or p.head_dim in args.head_dim)
        and (args.length is None or p.length in args.length)
        and ("causal" if p.causal else "full") in args.mask
    ]
    tiles = {p: candidates(p) if args.candidates else [] for p in points}
    jobs = jobs_of(points, tiles, device)
    for i, _ in enumerate(precompile(jobs, device.arch), start=1):
        print(f"\rcompiled {i} of {len(jobs)} kernels", end="", flush=True)
    print()

    args.out.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"provenance": provenance(args.commit), "method": time_interleaved.__doc__, "points": []}
    # What the same points may differ in.
    report["provenance"]["command"] = {
        "candidates": args.candidates,
        "peers": args.peers,
        "rounds": args.rounds,
        "alone": args.alone,
    }
    if args.resume:
        report["points"] = resumed(args.out, report["provenance"])
    done = {found["name"] for found in report["points"]}
    points = [p for p in points if p.name not in done]
    limits = ceilings.measure()
    report["ceilings"] = asdict(limits)
    report["kernels"] = [
        {
            "dtype": str(dtype),
            "head_dim": d,
            "causal": causal,
            "tile": label(t),
            **asdict(resources(compiled(dtype, d, causal, t, arch=device.arch))),
        }
        for dtype, d, causal, t in jobs
    ]
    start = time.time()
    for i, point in enumerate(points, start=1):
        report["points"].append(measure(point, tiles[point], args.peers, args.rounds, limits, alone=args.alone))
        print(line(report["points"][-1], (time.time() - start) / i * (len(points) - i)), flush=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.sustained:
        report["sustained"] = measure_sustained()
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(summary(report))
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
