"""Times V's head dim unlike Q's, (192, 128), forward and backward, against cuDNN and FlashAttention-4.

`python -m bench --sets unlike`; one process, interleaved. cuDNN is torch's `scaled_dot_product_attention`, which may
refuse such head dims or their gradients: then the result says why, and there is no ratio to it.

Beside our gradients are those of the config that computes all in one launch, called without autograd.

What FlashAttention-4 has reached is carried over from the run in which it was measured, see bench/passes.py.
"""

import argparse
import itertools
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from bench.passes import ANCHOR_NAME, PASSES, Call, anchor, calls_of, carried, inputs_of
from bench.passes import run as run_points
from bench.peers import sdpa
from bench.points import Point
from bench.timing import time_interleaved
from gluon_attn import attention
from gluon_attn.backward.table import IN_ONE_LAUNCH
from gluon_attn.testing import backward_call

SETS = ("unlike",)
OTHER_NAME = "ours, one launch"
POINTS = tuple(
    Point(head_dim=192, head_dim_v=128, causal=causal, length=8192, batch=1, heads=16) for causal in (True, False)
)
FA4_TFLOPS = {
    ("forward", True): 679.0,
    ("forward", False): 726.0,
    ("backward", True): 457.0,
    ("backward", False): 485.0,
}


def flops_of(point: Point, which: str) -> float:
    return point.flops if which == "forward" else point.backward_flops


def forwards_of(point: Point, which: str, device: str = "cuda") -> dict[str, tuple[Call, list[Tensor]]]:
    """What computes O, by name, and its inputs."""
    tensors = inputs_of(which, point.tensors(device))
    q, k, v = tensors
    return {
        "ours": (partial(attention, q, k, v, causal=point.causal), tensors),
        "cudnn": (partial(sdpa, SDPBackend.CUDNN_ATTENTION, q, k, v, point.causal), tensors),
        ANCHOR_NAME: anchor(which, device),
    }


def in_one_launch(point: Point, device: str = "cuda") -> Call:
    """Its gradients."""
    q, k, v = point.tensors(device)
    out, lse = attention(q, k, v, causal=point.causal, return_lse=True)
    config = IN_ONE_LAUNCH[point.head_dim, v.shape[-1]]
    return backward_call(config, torch.randn_like(out), q, k, v, out, lse, causal=point.causal)


def measure(point: Point, which: str, rounds: int) -> dict[str, Any]:
    calls, missing = calls_of(which, forwards_of(point, which))
    if which == "backward":
        calls[OTHER_NAME] = in_one_launch(point)
    timings = time_interleaved(calls, rounds=rounds)
    results: dict[str, Any] = {}
    for name, t in timings.items():
        results[name] = {"ms": t.median * 1e3, "spread": t.spread}
        if name != ANCHOR_NAME:
            results[name]["tflops"] = flops_of(point, which) / t.median / 1e12
    found: dict[str, Any] = {
        "name": f"{point.name} {which}", "point": asdict(point), "pass": which, "results": results, "missing": missing
    }  # fmt: skip
    if "cudnn" in results:
        found["ours_over_cudnn"] = results["ours"]["tflops"] / results["cudnn"]["tflops"]
    fa4 = carried(FA4_TFLOPS[which, point.causal], which, results)
    if fa4 is not None:
        found |= {"fa4_carried_tflops": fa4, "ours_over_fa4_carried": results["ours"]["tflops"] / fa4}
    return found


def table(found: dict[str, Any]) -> str:
    """TFLOP/s and ratios, in Markdown."""
    lines = [
        f"| TFLOP/s | ours | {OTHER_NAME} | cuDNN | ours ÷ cuDNN | FA4, carried | ours ÷ FA4, carried |",
        "|---" * 7 + "|",
    ]
    for point in found["points"]:
        tflops = [point["results"].get(name, {}).get("tflops") for name in ("ours", OTHER_NAME, "cudnn")]
        cells = (
            (tflops[0], ".0f"),
            (tflops[1], ".0f"),
            (tflops[2], ".0f"),
            (point.get("ours_over_cudnn"), ".3f"),
            (point.get("fa4_carried_tflops"), ".0f"),
            (point.get("ours_over_fa4_carried"), ".3f"),
        )
        lines.append(f"| {point['name']} | " + " | ".join("–" if x is None else f"{x:{f}}" for x, f in cells) + " |")
    refused = {f"{p['name']}: no {name}: {why}" for p in found["points"] for name, why in p["missing"].items()}
    return "\n".join([*lines, *sorted(refused)])


def run(args: argparse.Namespace) -> None:
    """args: of `python -m bench`."""
    points = (measure(point, which, args.rounds) for point, which in itertools.product(POINTS, PASSES))
    run_points(args, points, table)
