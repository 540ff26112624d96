"""Times points one after the other, and writes what it finds to the result file as it goes."""

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import ceilings, sustained
from bench.candidates import CANDIDATES, label, orders_heads
from bench.ceilings import MATRIX, Ceilings
from bench.peers import backend_chosen, calls_of
from bench.points import DTYPES, SETS, Point
from bench.precompile import Job, precompile
from bench.provenance import clocks, provenance
from bench.report import read, tables
from bench.timing import host_seconds, seconds_alone, time_interleaved, wall_seconds
from gluon_attn import ForwardConfig
from gluon_attn.device import Device
from gluon_attn.forward.launch import compiled
from gluon_attn.forward.table import OTHER_HEAD_DIMS, TABLE
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.resources import resources

ROUNDS_ALONE = 5
ROUNDS_OF_HOST = 25


def configs_of_table(device: Device, point: Point) -> list[ForwardConfig]:
    kind = (*point.padded_head_dims, point.causal, DTYPES[point.dtype].itemsize)
    rows = (row for row in TABLE + OTHER_HEAD_DIMS if (*row.head_dims, row.causal, row.element_bytes) == kind)
    return [row.config for row in rows if device.arch in row.config.archs]


def candidates(point: Point, ctas: Sequence[int]) -> list[ForwardConfig]:
    """Those of bench/candidates.py for the point. Without a mask no order is the longest first."""
    configs = CANDIDATES[*point.padded_head_dims, DTYPES[point.dtype].itemsize]
    return [config for config in configs if config.num_ctas in ctas and (point.causal or not orders_heads(config))]


def measure(
    point: Point, calls: Mapping[str, Callable[[], object]], rounds: int, limits: Ceilings, *, alone: bool
) -> dict[str, Any]:
    """calls: as calls_of makes them."""
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
    if dataclasses.replace(point, layout="bhsd") in SETS["small"]:
        found["host_us"] = measure_by_rounds(host_seconds, calls)
        found["wall_us"] = measure_by_rounds(wall_seconds, calls)
    return found


def measure_by_rounds(
    seconds_of: Callable[[Callable[[], object]], float], calls: Mapping[str, Callable[[], object]]
) -> dict[str, float]:
    """Microseconds: medians over ROUNDS_OF_HOST rounds, in which each is called. A host may be half as fast for a
    second, which then does not fall on one call alone."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _, (name, call) in itertools.product(range(ROUNDS_OF_HOST), calls.items()):
        with backend_chosen(call) as chosen:
            seconds[name].append(seconds_of(chosen))
    return {name: 1e6 * statistics.median(taken) for name, taken in seconds.items()}


def measure_alone(point: Point, calls: Mapping[str, Callable[[], object]]) -> dict[str, Any]:
    """Medians over ROUNDS_ALONE rounds, in which each call has 100 ms."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _, (name, call) in itertools.product(range(ROUNDS_ALONE), calls.items()):
        seconds[name].append(seconds_alone(call))
    return {
        name: {"ms": 1e3 * statistics.median(taken), "tflops": point.flops / statistics.median(taken) / 1e12}
        for name, taken in seconds.items()
    }


def measure_sustained() -> dict[str, Any]:
    """cuBLAS, and ours and its peers at S=8192, in long loops."""
    found = {}
    for dtype in ("bf16", "fp16"):
        a, b = (torch.randn(MATRIX, MATRIX, dtype=DTYPES[dtype], device="cuda") for _ in range(2))
        found[f"{dtype} cublas"] = sustained.measure(partial(torch.mm, a, b), 2 * MATRIX**3)
    for point in (p for p in SETS["sweep"] if p.length == 8192):
        for name, call in calls_of(point, [], ["fa2"], []).items():
            if name == "ours" or DTYPES[point.dtype].itemsize == 2:  # in fp8 cuDNN's would be bf16 again
                found[f"{point.name} {name}"] = sustained.measure(call, point.flops)
    for name, s in found.items():
        print(
            f"sustained {name:28} {s.tflops:5.0f} TFLOP/s {s.watts:4.0f} W {s.sm_mhz:5.0f} MHz "
            f"{s.joules_per_tflop:.2f} J/TFLOP",
            flush=True,
        )
    return {name: asdict(s) | {"joules_per_tflop": s.joules_per_tflop} for name, s in found.items()}


def jobs_of(points: list[Point], configs: dict[Point, list[ForwardConfig]], device: Device) -> list[Job]:
    """Every kernel that the points need, once."""
    jobs: dict[Job, None] = {}
    for p in points:
        for t in configs[p] or configs_of_table(device, p):
            jobs[DTYPES[p.dtype], *p.padded_head_dims, Mask(causal=p.causal), t] = None
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


def run(points: list[Point], args: argparse.Namespace) -> None:
    """args: of `python -m bench`."""
    device = Device.of(torch.device("cuda", torch.cuda.current_device()))
    configs = {p: candidates(p, args.ctas) if args.candidates else [] for p in points}
    jobs = jobs_of(points, configs, device)
    for i, _ in enumerate(precompile(jobs, device.arch), start=1):
        print(f"\rcompiled {i} of {len(jobs)} kernels", end="", flush=True)
    print()

    args.out.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"provenance": provenance(args.commit), "method": time_interleaved.__doc__, "points": []}
    # What the same points may differ in.
    options = ("candidates", "peers", "ctas", "rounds", "alone")
    report["provenance"]["command"] = {option: getattr(args, option) for option in options}
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
            "head_dim_v": d_v,
            "causal": mask.causal,
            "config": label(t),
            **asdict(resources(compiled(dtype, d, mask, t, padded_head_dim_v=d_v, arch=device.arch))),
        }
        for dtype, d, d_v, mask, t in jobs
    ]
    start = time.time()
    for i, point in enumerate(points, start=1):
        calls = calls_of(point, configs[point], args.peers, args.ctas)
        report["points"].append(measure(point, calls, args.rounds, limits, alone=args.alone))
        print(line(report["points"][-1], (time.time() - start) / i * (len(points) - i)), flush=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.sustained:
        report["sustained"] = measure_sustained()
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(tables(report))
    print(f"written: {args.out}")
