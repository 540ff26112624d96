"""Times packed sequences of unlike lengths against a batch of equal ones, FlashAttention-2's packed call and cuDNN.

`python -m bench --sets varlen`; one process, interleaved. FlashAttention-2 is torch's `varlen_attn`. Points are of
equal lengths, where a batch can be timed beside the same numbers packed, and a mix of log-normal lengths. For the mix
at D=128 what FlashAttention-4 has reached is carried over, see bench/passes.py.
"""

import argparse
import itertools
import math
import random
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.passes import ANCHOR_NAME, PASSES, Call, anchor, by_cudnn, calls_of, carried, inputs_of
from bench.passes import run as run_points
from bench.provenance import SEED
from bench.report import markdown
from bench.timing import host_seconds, time_interleaved
from gluon_attn import attention, attention_varlen
from gluon_attn.kernels.common.mask import Mask, visible_pairs

TOKENS = 16384
SETS = ("varlen",)
KINDS = ("tflops", "host_us")  # of numbers in a result
FA4_TFLOPS = {"forward": 417.0, "backward": 378.0}  # of MIX_D128


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Self-attention of sequences of these lengths, bf16."""

    name: str
    lengths: tuple[int, ...]
    heads: int
    head_dim: int
    causal: bool

    @property
    def flops(self) -> int:
        """Of the forward pass."""
        pairs = sum(visible_pairs(n, n, Mask(causal=self.causal)) for n in self.lengths)
        return 4 * self.heads * self.head_dim * pairs

    @property
    def is_uniform(self) -> bool:
        return len(set(self.lengths)) == 1

    def tensors(self, device: str = "cuda") -> list[Tensor]:
        """q, k and v (T, H, D), normal."""
        torch.manual_seed(SEED)
        shape = (sum(self.lengths), self.heads, self.head_dim)
        return [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(3)]


def mixed(count: int = 64) -> tuple[int, ...]:
    """Log-normal lengths, 8192 at most."""
    draw = random.Random(1)
    return tuple(min(8192, int(draw.lognormvariate(math.log(700), 0.85))) for _ in range(count))


MIX_D64, MIX_D128 = (
    Shape(name=f"D={d} causal mix of 64", lengths=mixed(), heads=2048 // d, head_dim=d, causal=True) for d in (64, 128)
)
SHAPES = (
    *(
        Shape(
            name=f"D={d} {'causal' if causal else 'full'} {TOKENS // n} x {n}",
            lengths=(n,) * (TOKENS // n), heads=2048 // d, head_dim=d, causal=causal,
        )
        for d, causal, n in itertools.product((64, 128), (True, False), (512, 2048, 8192))
    ),
    MIX_D64,
    MIX_D128,
)  # fmt: skip


def forwards_of(shape: Shape, which: str, device: str = "cuda") -> dict[str, tuple[Call, list[Tensor]]]:
    """What computes O, by name, and its inputs."""
    starts = torch.tensor([0, *itertools.accumulate(shape.lengths)], dtype=torch.int32, device=device)
    longest = max(shape.lengths)
    tensors = inputs_of(which, shape.tensors(device))
    q, k, v = tensors
    lengths: Any = (starts, starts, longest, longest)
    calls: dict[str, Call] = {
        "ours packed": partial(attention_varlen, q, k, v, *lengths, causal=shape.causal),
        "fa2 packed": partial(by_torch, q, k, v, *lengths, causal=shape.causal),
    }
    if shape.is_uniform:
        batch: Any = [t.view(len(shape.lengths), longest, *t.shape[1:]) for t in tensors]
        calls["ours batched"] = partial(attention, *batch, causal=shape.causal, layout="bshd")
        if shape.causal:
            calls["cudnn batched"] = partial(by_cudnn, *(t.transpose(1, 2) for t in batch))
    forwards = {name: (call, tensors) for name, call in calls.items()}
    return forwards | ({ANCHOR_NAME: anchor(which, device)} if shape == MIX_D128 else {})


def by_torch(q: Tensor, k: Tensor, v: Tensor, *lengths: Any, causal: bool) -> Any:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(q, k, v, *lengths, window_size=(-1, 0 if causal else -1))


def measure(shape: Shape, which: str, rounds: int) -> dict[str, Any]:
    calls, missing = calls_of(which, forwards_of(shape, which))
    flops = shape.flops * (1 if which == "forward" else 2.5)
    results: dict[str, Any] = {}
    for name, t in time_interleaved(calls, rounds=rounds).items():
        results[name] = {"ms": t.median * 1e3, "spread": t.spread}
        if name != ANCHOR_NAME:
            results[name]["tflops"] = flops / t.median / 1e12
            results[name]["host_us"] = host_seconds(calls[name]) * 1e6
    found = {
        "name": f"{shape.name} {which}", "shape": asdict(shape), "pass": which, "results": results, "missing": missing
    }  # fmt: skip
    rates = {name: result["tflops"] for name, result in results.items() if "tflops" in result}
    rates["fa4 packed, carried"] = carried(FA4_TFLOPS[which], which, results)
    found["ours_over"] = {
        name: rates["ours packed"] / rate for name, rate in rates.items() if rate and name != "ours packed"
    }
    return found


def table(found: dict[str, Any]) -> str:
    """TFLOP/s, ratios and the host's time, in Markdown."""
    points = found["points"]
    names = list(dict.fromkeys(name for p in points for name in p["results"] if name != ANCHOR_NAME))
    others = list(dict.fromkeys(name for p in points for name in p["ours_over"]))
    rates, host = ({p["name"]: [p["results"].get(n, {}).get(of) for n in names] for p in points} for of in KINDS)
    ratios = {p["name"]: [p["ours_over"].get(name) for name in others] for p in points}
    refused = {f"no {name}: {why}" for p in points for name, why in p["missing"].items()}
    return "\n".join(
        [
            rows_of("TFLOP/s", names, rates, ".0f"),
            rows_of("rate of ours packed over", others, ratios, ".3f"),
            rows_of("host, µs a call", names, host, ".1f"),
            *sorted(refused),
        ]
    )


def rows_of(what: str, names: list[str], rows: dict[str, list[float | None]], form: str) -> str:
    """A table, with a dash for what is not there."""
    return markdown(
        [what, *names], {row: ["–" if x is None else f"{x:{form}}" for x in cells] for row, cells in rows.items()}
    )


def run(args: argparse.Namespace) -> None:
    """args: of `python -m bench`."""
    points = (measure(shape, which, args.rounds) for shape, which in itertools.product(SHAPES, PASSES))
    run_points(args, points, table)
