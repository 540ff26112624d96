"""Times the backward pass against cuDNN's, and deterministic against what torch runs when it is asked for that.

    python -m bench.gradients --out FILE          # on a Hopper card, some minutes
    python -m bench.gradients --show FILE         # anywhere

A backward pass is all of its kernels, called through autograd. Its FLOPs count as two and a half times those of the
forward pass: five products for two.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.points import LENGTHS, Point
from bench.provenance import provenance
from bench.timing import time_interleaved
from gluon_attn import attention

GRAD_FLOPS = 2.5  # over those of the forward pass


def points(head_dims: list[int], lengths: list[int], kv_heads: int | None) -> list[Point]:
    """B·S = 16384 tokens, H·D = 2048, full and causal; with kv_heads, 64 query heads."""
    grouped: dict[str, Any] = {"heads": 64, "heads_per_kv_head": 64 // kv_heads} if kv_heads else {}
    return [
        Point(head_dim=head_dim, causal=causal, length=length, **grouped)
        for head_dim in head_dims
        for causal in (False, True)
        for length in lengths
    ]


def backward_of(out: Tensor, inputs: list[Tensor], dout: Tensor) -> Callable[[], object]:
    return partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)


def deterministic(call: Callable[[], object]) -> object:
    """As torch runs it when it may use no other than deterministic kernels."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # which would take time
    try:
        return call()
    finally:
        torch.use_deterministic_algorithms(False)


def calls_of(point: Point, with_deterministic: bool) -> dict[str, Callable[[], object]]:
    """cuDNN's backward pass and ours; and, if asked for, FlashAttention-2's and ours with a fixed order of sums."""
    dout = torch.randn_like(point.tensors()[0])

    def inputs() -> list[Tensor]:
        return [t.detach().requires_grad_() for t in point.tensors()]

    def by_torch(backend: SDPBackend) -> Callable[[], object]:
        q, k, v = tensors = inputs()
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=point.causal, enable_gqa=point.heads_per_kv_head > 1
            )
        return backward_of(out, tensors, dout)

    def ours(**options: Any) -> Callable[[], object]:
        q, k, v = tensors = inputs()
        out = attention(q, k, v, causal=point.causal, **options)
        assert isinstance(out, Tensor)
        return backward_of(out, tensors, dout)

    calls = {"cudnn": by_torch(SDPBackend.CUDNN_ATTENTION), "ours": ours()}
    if with_deterministic:
        calls["ours, deterministic"] = ours(deterministic=True)
        calls["fa2, deterministic"] = partial(deterministic, by_torch(SDPBackend.FLASH_ATTENTION))
    return calls


def measure(point: Point, rounds: int, with_deterministic: bool) -> dict[str, Any]:
    timings = time_interleaved(calls_of(point, with_deterministic), rounds=rounds)
    flops = GRAD_FLOPS * point.flops
    return {
        "point": asdict(point),
        "name": point.name,
        "results": {
            name: {
                "ms": t.median * 1e3,
                "tflops": flops / t.median / 1e12,
                "spread": t.spread,
                "ratio_to_cudnn": timings["cudnn"].median / t.median,
            }
            for name, t in timings.items()
        },
    }


def show(found: dict[str, Any]) -> None:
    names = list(found["points"][0]["results"])
    print("| TFLOP/s | " + " | ".join(names) + " | ours / cudnn |")
    print("|---" * (len(names) + 2) + "|")
    for point in found["points"]:
        results = point["results"]
        rates = " | ".join(f"{results[name]['tflops']:.0f}" for name in names)
        print(f"| {point['name']} | {rates} | {results['ours']['ratio_to_cudnn']:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gradients", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, help="result file to write (JSON)")
    parser.add_argument("--show", type=Path, help="print the table of a result file, and time nothing")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--kv-heads", type=int, help="64 query heads, and so many KV heads")
    parser.add_argument("--deterministic", action="store_true", help="time that too")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--commit", help="of the tree that is measured, if git cannot tell")
    args = parser.parse_args()
    if args.show:
        show(json.loads(args.show.read_text(encoding="utf-8")))
        return
    if not torch.cuda.is_available():
        sys.exit("bench.gradients: expected a Hopper card, got none; use --show FILE to see a result file")
    found: dict[str, Any] = {"provenance": provenance(args.commit), "points": []}
    for point in points(args.head_dims, args.lengths, args.kv_heads):
        found["points"].append(measure(point, args.rounds, args.deterministic))
        if args.out:
            args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    show(found)


if __name__ == "__main__":
    main()
