"""`python -m bench`: attention forward on this card against cuDNN (through torch's SDPA), timed in one process."""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.candidates import CANDIDATES, label
from bench.precompile import precompile
from bench.provenance import clocks, provenance
from bench.timing import host_seconds, time_interleaved
from gluon_attn import attention
from gluon_attn.launch import compiled
from gluon_attn.resources import resources
from gluon_attn.tile import HopperTile
from gluon_attn.tuning import HOPPER

TOKENS = 16384  # B * S of every point
MODEL_DIM = 2048  # H * D of every point
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Point:
    """One problem of the sweep: self-attention over `length` tokens, TOKENS in the batch, MODEL_DIM over all heads."""

    dtype: str
    head_dim: int
    causal: bool
    length: int

    @property
    def flops(self) -> float:
        """4 B H S² D for the two products, half of it under a causal mask."""
        return 4 * TOKENS * self.length * MODEL_DIM / (2 if self.causal else 1)

    @property
    def name(self) -> str:
        return f"D={self.head_dim} {'causal' if self.causal else 'full'} {self.length}"

    def tensors(self) -> list[torch.Tensor]:
        shape = (TOKENS // self.length, MODEL_DIM // self.head_dim, self.length, self.head_dim)
        torch.manual_seed(0)
        return [torch.randn(shape, dtype=DTYPES[self.dtype], device="cuda") for _ in range(3)]


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def calls_of(point: Point, tiles: list[HopperTile]) -> dict[str, Callable[[], object]]:
    """What is timed at a point: cuDNN, then ours as the table picks it, with 1 and 2 CTAs, or with each of `tiles`."""
    q, k, v = point.tensors()
    calls: dict[str, Callable[[], object]] = {"cudnn": lambda: cudnn(q, k, v, point.causal)}
    if tiles:
        return calls | {label(t): partial(attention, q, k, v, causal=point.causal, tile=t) for t in tiles}
    ours = partial(attention, q, k, v, causal=point.causal)
    return calls | {"ours": ours} | {f"ours {n}cta": partial(ours, num_ctas=n) for n in (1, 2)}


def tiles_of_table(head_dim: int, causal: bool, element_bytes: int) -> list[HopperTile]:
    kind = (head_dim, causal, element_bytes)
    rows = (row for row in HOPPER if (row.padded_head_dim, row.causal, row.element_bytes) == kind)
    return [row.tile for row in rows if isinstance(row.tile, HopperTile)]


def measure(point: Point, tiles: list[HopperTile], rounds: int) -> dict[str, Any]:
    timings = time_interleaved(calls_of(point, tiles), rounds=rounds)
    return {
        "point": vars(point),
        "clocks": clocks(),
        "results": {
            name: {
                "ms": t.median * 1e3,
                "tflops": point.flops / t.median / 1e12,
                "spread": t.spread,
                "ratio_to_cudnn": timings["cudnn"].median / t.median,
            }
            for name, t in timings.items()
        },
    }


def host_times() -> dict[str, float]:
    """Host microseconds of a call on small work, (1, 16, 512, 128) bf16."""
    q, k, v = (torch.randn(1, 16, 512, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    return {
        "ours": host_seconds(lambda: attention(q, k, v)) * 1e6,
        "cudnn": host_seconds(lambda: cudnn(q, k, v, causal=False)) * 1e6,
    }


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--head-dim", type=int, nargs="+", choices=sorted(CANDIDATES), default=[64, 128])
    parser.add_argument("--mask", nargs="+", choices=["full", "causal"], default=["full", "causal"])
    parser.add_argument("--length", type=int, nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--candidates", action="store_true", help="time every tile of bench/candidates.py instead")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("bench/results/latest.json"), help="the result file, JSON")
    parser.add_argument("--commit", help="commit of the measured tree, where git cannot tell")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if not torch.cuda.is_available():
        sys.exit("bench: needs a Hopper card, found no CUDA device; nothing was timed")
    points = [Point(args.dtype, d, m == "causal", n) for d in args.head_dim for m in args.mask for n in args.length]
    tiles = {d: CANDIDATES[d] if args.candidates else [] for d in args.head_dim}
    kernels = {
        (DTYPES[args.dtype], d, causal, t)
        for d, causal in {(p.head_dim, p.causal) for p in points}
        for t in tiles[d] or tiles_of_table(d, causal, DTYPES[args.dtype].itemsize)
    }
    for i, _ in enumerate(precompile(kernels), start=1):
        print(f"\rcompiled {i} of {len(kernels)} kernels", end="", flush=True)
    print()

    args.out.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"provenance": provenance(args.commit), "method": time_interleaved.__doc__, "points": []}
    report["kernels"] = [
        {"head_dim": d, "causal": causal, "tile": label(t), **asdict(resources(compiled(dtype, d, causal, t)))}
        for dtype, d, causal, t in sorted(kernels, key=str)
    ]
    report["host_us"] = host_times()
    print("host µs per call at (1, 16, 512, 128):", {k: round(v, 1) for k, v in report["host_us"].items()})
    start = time.time()
    for i, point in enumerate(points, start=1):
        report["points"].append(measure(point, tiles[point.head_dim], args.rounds))
        results = report["points"][-1]["results"]
        cells = (
            f"{n} {r['tflops']:.0f} ({r['ratio_to_cudnn']:.3f} ±{r['spread'] / 2:.1%})" for n, r in results.items()
        )
        left = (time.time() - start) / i * (len(points) - i)
        print(f"[{left:3.0f} s left] {point.name:20} " + " | ".join(cells), flush=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {args.out}")
    if not args.candidates:
        ratios = [p["results"]["ours"]["ratio_to_cudnn"] for p in report["points"]]
        print(f"geometric mean of ours / cuDNN over {len(ratios)} points: {geometric_mean(ratios):.3f}")


if __name__ == "__main__":
    main()
