"""Times packed sequences of unlike lengths against a batch of equal ones, FlashAttention-2's packed call and cuDNN.

`python -m bench --sets varlen`; one process, interleaved. FlashAttention-2 is torch's `varlen_attn`. Points are of
equal lengths, where a batch can be timed beside the same numbers packed, and a mix of log-normal lengths.
"""

import argparse
import itertools
import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.features import by_cudnn
from bench.provenance import SEED, provenance
from bench.timing import host_seconds, time_interleaved
from gluon_attn import attention, attention_varlen
from gluon_attn.kernels.common.mask import Mask, visible_pairs

PASSES = ("forward", "backward")
TOKENS = 16384
SETS = ("varlen",)
# Of torch: cuDNN's and FlashAttention-2's words for a call or a card, Python's for an older `varlen_attn`.
REFUSALS = ("not supported", "only supports", "no available kernel", "unexpected keyword argument")
Call = Callable[[], Any]


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


SHAPES = (
    *(
        Shape(
            name=f"D={d} {'causal' if causal else 'full'} {TOKENS // n} x {n}",
            lengths=(n,) * (TOKENS // n), heads=2048 // d, head_dim=d, causal=causal,
        )
        for d, causal, n in itertools.product((64, 128), (True, False), (512, 2048, 8192))
    ),
    *(
        Shape(name=f"D={d} causal mix of 64", lengths=mixed(), heads=2048 // d, head_dim=d, causal=True)
        for d in (64, 128)
    ),
)  # fmt: skip


def forwards_of(shape: Shape, tensors: list[Tensor], device: str = "cuda") -> dict[str, Call]:
    """What computes O, by name."""
    starts = torch.tensor([0, *itertools.accumulate(shape.lengths)], dtype=torch.int32, device=device)
    longest = max(shape.lengths)
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
    return calls


def by_torch(q: Tensor, k: Tensor, v: Tensor, *lengths: Any, causal: bool) -> Any:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(q, k, v, *lengths, window_size=(-1, 0 if causal else -1))


def gradients_of(forward: Call, tensors: list[Tensor]) -> Call:
    """All kernels of the backward pass, through autograd."""
    out = forward()
    return partial(torch.autograd.grad, out, tensors, torch.randn_like(out), retain_graph=True)


def calls_of(shape: Shape, which: str, device: str = "cuda") -> tuple[dict[str, Call], dict[str, str]]:
    """(the calls of a pass, why others are not among them)."""
    tensors = shape.tensors(device)
    if which == "backward":
        tensors = [t.requires_grad_() for t in tensors]
    calls, missing = {}, {}
    for name, forward in forwards_of(shape, tensors, device).items():
        try:
            forward()
            calls[name] = forward if which == "forward" else gradients_of(forward, tensors)
        except (ImportError, RuntimeError, TypeError) as error:
            if not is_refusal(error):
                raise
            missing[name] = str(error)
    return calls, missing


def is_refusal(error: Exception) -> bool:
    """Whether it says that something is not there, or does not take the call, and not that the call failed."""
    said = str(error).lower()
    return isinstance(error, ImportError | NotImplementedError) or any(words in said for words in REFUSALS)


def measure(shape: Shape, which: str, rounds: int) -> dict[str, Any]:
    calls, missing = calls_of(shape, which)
    flops = shape.flops * (1 if which == "forward" else 2.5)
    timings = time_interleaved(calls, rounds=rounds)
    results: dict[str, Any] = {
        name: {"ms": t.median * 1e3, "spread": t.spread, "tflops": flops / t.median / 1e12}
        for name, t in timings.items()
    }
    if which == "forward":
        for name, call in calls.items():
            results[name]["host_us"] = host_seconds(call) * 1e6
    return {
        "name": f"{shape.name} {which}", "shape": asdict(shape), "pass": which, "results": results, "missing": missing
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    """TFLOP/s, in Markdown."""
    names = list(dict.fromkeys(name for p in found["points"] for name in p["results"]))
    lines = ["| TFLOP/s | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for point in found["points"]:
        cells = (point["results"].get(name) for name in names)
        lines.append(
            f"| {point['name']} | " + " | ".join("–" if c is None else f"{c['tflops']:.0f}" for c in cells) + " |"
        )
    return "\n".join(lines)


def run(args: argparse.Namespace) -> None:
    """args: of `python -m bench`."""
    found: dict[str, Any] = {"provenance": provenance(args.commit), "points": []}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for shape, which in itertools.product(SHAPES, PASSES):
        found["points"].append(measure(shape, which, args.rounds))
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print("timed", found["points"][-1]["name"], flush=True)
    print(table(found))
    print(f"written: {args.out}")
