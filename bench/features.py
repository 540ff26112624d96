"""Times what changes a causal call, masks and changed scores, against the plain call, cuDNN's and FlexAttention.

`python -m bench --sets masks`, forward and backward; one process, interleaved. FlexAttention is left out with `--peers`
and nothing after it.

Times are also given over those of three calls of the same run: our own plain causal one, cuDNN's, and FlexAttention's
of the same case. A set is a list of
`Case`s; to add one, say what attention() is given for it, and what FlexAttention is.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.mask_mods import near, near_keys, near_rows
from bench.provenance import SEED, provenance
from bench.timing import Timing, time_interleaved
from gluon_attn import MaskMod, attention

CUDNN, PLAIN = "cudnn causal", "ours causal"
PASSES = ("forward", "backward")
Call = Callable[[], object]
Options = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Self-attention over `length` tokens, bf16."""

    head_dim: int
    batch: int
    heads: int
    kv_heads: int
    length: int

    @property
    def name(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return f"D={self.head_dim} B={self.batch} H={heads} {self.length}"

    def tensors(self, device: str = "cuda") -> list[Tensor]:
        """q, k and v (B, H, S, D), normal."""
        torch.manual_seed(SEED)
        of_heads = (self.heads, self.kv_heads, self.kv_heads)
        shapes = [(self.batch, heads, self.length, self.head_dim) for heads in of_heads]
        return [torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in shapes]


SHAPES = (
    Shape(head_dim=128, batch=1, heads=16, kv_heads=16, length=16384),
    Shape(head_dim=64, batch=2, heads=32, kv_heads=4, length=8192),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A causal call with something more.

    options: what attention() is given besides `causal`, for a shape on a device.
    keeps: of FlexAttention, for a shape on a device, which keys a query sees besides the causal ones, as its mask_mod.
    score_mod: likewise how scores are changed; None: they are not, or it has no way to say so.
    """

    name: str
    options: Callable[[Shape, str], Options]
    keeps: Callable[[Shape, str], Callable[..., Any]] | None = None
    score_mod: Callable[[Shape, str], Callable[..., Any]] | None = field(default=None)

    @property
    def is_in_flex(self) -> bool:
        """FlexAttention has no sinks: nothing that enters the denominator alone."""
        return self.keeps is not None or self.score_mod is not None


def slopes(shape: Shape, device: str) -> Tensor:
    """Those of ALiBi's paper: a geometric sequence over the heads."""
    return 2.0 ** (-8 * torch.arange(1, shape.heads + 1, device=device) / shape.heads)


def window(left: int) -> Case:
    """The `left` keys before a query, and its own."""
    return Case(
        name=f"window {left}",
        options=lambda shape, device: {"window": (left, 0)},
        keeps=lambda shape, device: lambda b, h, i, j: i - j <= left,
    )


def chunk(size: int) -> Case:
    return Case(
        name=f"chunk {size}",
        options=lambda shape, device: {"chunk": size},
        keeps=lambda shape, device: lambda b, h, i, j: i // size == j // size,
    )


def soft_cap(cap: float) -> Case:
    return Case(
        name=f"softcap {cap:g}",
        options=lambda shape, device: {"softcap": cap},
        score_mod=lambda shape, device: lambda score, b, h, i, j: cap * torch.tanh(score / cap),
    )


def alibi_of_flex(shape: Shape, device: str) -> Callable[..., Any]:
    of_heads = slopes(shape, device)
    return lambda score, b, h, i, j: score - of_heads[h] * (i - j)


ALIBI = Case(
    name="alibi", options=lambda shape, device: {"alibi_slopes": slopes(shape, device)}, score_mod=alibi_of_flex
)


def bias_of(shape: Shape, device: str) -> Tensor:
    """One for all batches and heads: of each head its own would be larger than all else together."""
    generator = torch.Generator(device).manual_seed(SEED)
    size = (1, 1, shape.length, shape.length)
    return torch.randn(size, generator=generator, dtype=torch.bfloat16, device=device)


def bias_of_flex(shape: Shape, device: str) -> Callable[..., Any]:
    bias = bias_of(shape, device)[0, 0]
    return lambda score, b, h, i, j: score + bias[i, j]


BIAS = Case(name="bias", options=lambda shape, device: {"bias": bias_of(shape, device)}, score_mod=bias_of_flex)
SINKS = Case(name="sinks", options=lambda shape, device: {"sinks": torch.randn(shape.heads, device=device)})


def documents_of(shape: Shape, device: str) -> Tensor:
    """Ids of packed documents, (B, S) int32: lengths from 1 on, 2048 on average, others in each batch."""
    generator = torch.Generator().manual_seed(SEED)
    begins = torch.rand((shape.batch, shape.length), generator=generator) < 1 / 2048
    return begins.cumsum(1, dtype=torch.int32).to(device)


def same_document(shape: Shape, device: str) -> Callable[..., Any]:
    ids = documents_of(shape, device)
    return lambda b, h, i, j: ids[b, i] == ids[b, j]


DOCUMENTS = Case(
    name="documents",
    options=lambda shape, device: {"segment_ids": documents_of(shape, device)},
    keeps=same_document,
)


def window_by_function(left: int) -> Case:
    """`window` as a mask_mod, with ranges."""
    mod = MaskMod(near, keys=near_keys, rows=near_rows, constants=(left,))
    return Case(
        name=f"mask_mod {left}",
        options=lambda shape, device: {"mask_mod": mod},
        keeps=lambda shape, device: lambda b, h, i, j: i - j <= left,
    )


SETS: dict[str, tuple[Case, ...]] = {
    "masks": (
        window(128),
        window(1024),
        chunk(2048),
        SINKS,
        soft_cap(30.0),
        ALIBI,
        DOCUMENTS,
        window_by_function(1024),
        BIAS,
    ),
}


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def flex(case: Case, shape: Shape, tensors: list[Tensor], device: str = "cuda") -> Callable[[], Tensor]:
    """FlexAttention, compiled for these shapes; its block mask is made beforehand and not timed."""
    from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention

    torch.compiler.reset()  # or, after some shapes, torch would compile no more and compute it without fusion
    keeps = causal if case.keeps is None else and_masks(causal, case.keeps(shape, device))
    mask = create_block_mask(keeps, None, None, shape.length, shape.length, device=device)
    score_mod = None if case.score_mod is None else case.score_mod(shape, device)
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)
    grouped = shape.heads != shape.kv_heads
    return partial(compiled, *tensors, score_mod=score_mod, block_mask=mask, enable_gqa=grouped)


def by_cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )


def forwards_of(
    cases: tuple[Case, ...], shape: Shape, tensors: list[Tensor], with_flex: bool, device: str = "cuda"
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What computes O, by name: cuDNN and ours of a plain causal call, and each case by ours and by FlexAttention."""
    yield CUDNN, partial(by_cudnn, *tensors)
    yield PLAIN, partial(attention, *tensors, causal=True)
    for case in cases:
        yield f"ours {case.name}", partial(attention, *tensors, causal=True, **case.options(shape, device))
        if with_flex and case.is_in_flex:
            yield f"flex {case.name}", flex(case, shape, tensors, device)


def calls_of(which: str, forwards: Mapping[str, Callable[[], Any]], tensors: list[Tensor]) -> dict[str, Call]:
    """The calls of a pass. which: one of PASSES; a backward one is of all kernels, through autograd."""
    if which == "forward":
        return dict(forwards)
    calls: dict[str, Call] = {}
    for name, forward in forwards.items():
        out = forward()
        calls[name] = partial(torch.autograd.grad, out, tensors, torch.randn_like(out), retain_graph=True)
    return calls


def ratios(name: str, timings: Mapping[str, Timing]) -> dict[str, float]:
    """A call's time over others' of the same run; over FlexAttention's only what that computes too."""
    found = {
        "over_ours_causal": timings[name].median / timings[PLAIN].median,
        "over_cudnn_causal": timings[name].median / timings[CUDNN].median,
    }
    by_flex = timings.get(name.replace("ours", "flex")) if name.startswith("ours") else None
    return found if by_flex is None else found | {"over_flex": timings[name].median / by_flex.median}


def measure(cases: tuple[Case, ...], shape: Shape, which: str, rounds: int, with_flex: bool) -> dict[str, Any]:
    tensors = shape.tensors()
    if which == "backward":
        tensors = [t.requires_grad_() for t in tensors]
    timings = time_interleaved(
        calls_of(which, dict(forwards_of(cases, shape, tensors, with_flex)), tensors), rounds=rounds
    )
    results = {
        name: {
            "ms": t.median * 1e3,
            "spread": t.spread,
            **ratios(name, timings),
        }
        for name, t in timings.items()
    }
    absent = [case.name for case in cases if not case.is_in_flex]
    return {
        "name": f"{shape.name} {which}", "shape": asdict(shape), "pass": which, "results": results,
        "not_in_flex": absent,
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    """Times over our own plain causal call's; and of each case ours over FlexAttention's, in Markdown."""
    over_ours = rows_of("time over ours, causal", "over_ours_causal", found["points"])
    over_flex = rows_of("time over FlexAttention's", "over_flex", found["points"])
    if all("over_flex" not in cell for p in found["points"] for cell in p["results"].values()):
        return over_ours
    absent = ", ".join(found["points"][0]["not_in_flex"])
    return f"{over_ours}\n\n{over_flex}" + (f"\n\nFlexAttention has no {absent}." if absent else "")


def rows_of(title: str, ratio: str, points: list[dict[str, Any]]) -> str:
    """A row for each call that has this ratio, a column for each point."""
    lines = [f"| {title} | " + " | ".join(p["name"] for p in points) + " |", "|---" * (len(points) + 1) + "|"]
    for name in points[0]["results"]:
        cells = [p["results"].get(name, {}).get(ratio) for p in points]
        if any(cell is not None for cell in cells):
            lines.append(f"| {name} | " + " | ".join("–" if c is None else f"{c:.3f}" for c in cells) + " |")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> None:
    """args: of `python -m bench`; its `sets` are of SETS."""
    cases = tuple(case for name in args.sets for case in SETS[name])
    with_flex = args.peers is None or "flex" in args.peers
    found: dict[str, Any] = {"provenance": provenance(args.commit), "points": []}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for shape in SHAPES:
        for which in PASSES:
            found["points"].append(measure(cases, shape, which, args.rounds, with_flex))
            args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print("timed", found["points"][-1]["name"], flush=True)
    print(table(found))
    print(f"written: {args.out}")
