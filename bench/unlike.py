"""Times V's head dim unlike Q's, (192, 128), forward and backward, against cuDNN and FlashAttention-4.

`python -m bench --sets unlike`; one process, interleaved. cuDNN is torch's `scaled_dot_product_attention`, which may
refuse such head dims or their gradients: then the result says why, and there is no ratio to it.

FlashAttention-4 was measured on an H200, in a run that had cuDNN's plain causal call at D=128 too. That call is timed
here as well, and what FlashAttention-4 has reached is carried over by the ratio of these two times.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend

from bench.features import SHAPES, by_cudnn
from bench.peers import sdpa
from bench.points import Point
from bench.provenance import provenance
from bench.timing import time_interleaved
from bench.varlen import gradients_of, is_refusal
from gluon_attn import attention

SETS = ("unlike",)
PASSES = ("forward", "backward")
POINTS = tuple(
    Point(head_dim=192, head_dim_v=128, causal=causal, length=8192, batch=1, heads=16) for causal in (True, False)
)
ANCHOR = SHAPES[0]  # D=128, B=1, H=16, 16384 tokens, causal
ANCHOR_NAME = f"cudnn causal {ANCHOR.name}"
# Of an H200: milliseconds of cuDNN's call at ANCHOR, and TFLOP/s of FlashAttention-4 at POINTS in the same run.
ANCHOR_MS = {"forward": 1.758, "backward": 5.138}
FA4_TFLOPS = {
    ("forward", True): 679.0,
    ("forward", False): 726.0,
    ("backward", True): 457.0,
    ("backward", False): 485.0,
}
Call = Callable[[], Any]


def flops_of(point: Point, which: str) -> float:
    return point.flops if which == "forward" else point.backward_flops


def forwards_of(point: Point, tensors: list[Tensor]) -> dict[str, Call]:
    """What computes O, by name."""
    q, k, v = tensors
    return {
        "ours": partial(attention, q, k, v, causal=point.causal),
        "cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION, q, k, v, point.causal),
    }


def calls_of(point: Point, which: str, device: str = "cuda") -> tuple[dict[str, Call], dict[str, str]]:
    """(the calls of a pass, the anchor among them; why others are not)."""
    calls: dict[str, Call] = {}
    missing: dict[str, str] = {}
    tensors, of_anchor = point.tensors(device), ANCHOR.tensors(device)
    if which == "backward":
        tensors, of_anchor = ([t.requires_grad_() for t in given] for given in (tensors, of_anchor))
    forwards = {n: (call, tensors) for n, call in forwards_of(point, tensors).items()}
    forwards[ANCHOR_NAME] = partial(by_cudnn, *of_anchor), of_anchor
    for name, (forward, inputs) in forwards.items():
        try:
            call = forward if which == "forward" else gradients_of(forward, inputs)
            call()
            calls[name] = call
        except RuntimeError as error:
            if name == "ours" or not is_refusal(error):
                raise
            missing[name] = str(error)
    return calls, missing


def measure(point: Point, which: str, rounds: int) -> dict[str, Any]:
    calls, missing = calls_of(point, which)
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
    if ANCHOR_NAME in results:
        carried = FA4_TFLOPS[which, point.causal] * ANCHOR_MS[which] / results[ANCHOR_NAME]["ms"]
        found |= {"fa4_carried_tflops": carried, "ours_over_fa4_carried": results["ours"]["tflops"] / carried}
    return found


def table(found: dict[str, Any]) -> str:
    """TFLOP/s and ratios, in Markdown."""
    lines = ["| TFLOP/s | ours | cuDNN | ours ÷ cuDNN | FA4, carried | ours ÷ FA4, carried |", "|---" * 6 + "|"]
    for point in found["points"]:
        tflops = [point["results"].get(name, {}).get("tflops") for name in ("ours", "cudnn")]
        cells = (
            (tflops[0], ".0f"),
            (tflops[1], ".0f"),
            (point.get("ours_over_cudnn"), ".3f"),
            (point.get("fa4_carried_tflops"), ".0f"),
            (point.get("ours_over_fa4_carried"), ".3f"),
        )
        lines.append(f"| {point['name']} | " + " | ".join("–" if x is None else f"{x:{f}}" for x, f in cells) + " |")
    refused = {f"{p['name']}: no {name}: {why}" for p in found["points"] for name, why in p["missing"].items()}
    return "\n".join([*lines, *sorted(refused)])


def run(args: argparse.Namespace) -> None:
    """args: of `python -m bench`."""
    found: dict[str, Any] = {"provenance": provenance(args.commit), "points": []}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for point, which in itertools.product(POINTS, PASSES):
        found["points"].append(measure(point, which, args.rounds))
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print("timed", found["points"][-1]["name"], flush=True)
    print(table(found))
    print(f"written: {args.out}")
