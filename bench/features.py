"""Times what changes a causal call, masks and changed scores, against the plain call, cuDNN's and FlexAttention.

`python -m bench --sets masks`, forward and backward; one process, interleaved. FlexAttention is left out with `--peers`
and nothing after it. All calls are compiled before, each in a process of its own.

Times are also given over those of calls of the same run: our own plain causal one, cuDNN's, FlexAttention's of the same
case; and over FlashAttention-4's, which was timed in another run beside cuDNN's plain causal call. A set is a list of
`Case`s; to add one, say what attention() is given for it, and what FlexAttention is.
"""

import argparse
import gc
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.ahead import Failed, Workers, cores
from bench.mask_mods import near, near_keys, near_rows
from bench.passes import PASSES, Call, by_cudnn, gradients_of, inputs_of
from bench.passes import run as run_points
from bench.provenance import SEED
from bench.report import markdown
from bench.timing import Timing, time_interleaved
from gluon_attn import MaskMod, attention

CUDNN, PLAIN = "cudnn causal", "ours causal"
MAX_PROCESSES = 16  # each has a few GB of the card
COMPILE_LIMIT_S = 240.0
# Of FlashAttention-4 on an H200, bf16: time over that of cuDNN's plain causal call in the same run, by head dim (of
# SHAPES) and pass.
FA4_OVER_CUDNN = {
    (128, "forward"): {"causal": 0.88, "window 128": 0.076, "window 1024": 0.148, "softcap 30": 2.11},
    (128, "backward"): {"causal": 0.87, "window 128": 0.067, "window 1024": 0.150, "softcap 30": 1.36},
    (64, "forward"): {"causal": 0.83, "window 128": 0.123, "window 1024": 0.275, "softcap 30": 2.18, "sinks": 0.84},
    (64, "backward"): {"causal": 0.75, "window 128": 0.129, "window 1024": 0.275, "softcap 30": 2.03, "sinks": 0.75},
}
# What the result has of each call: the title of its table, and its name.
RATIOS = {
    "time over ours, causal": "over_ours_causal",
    "time over FlexAttention's": "over_flex",
    "time over FlashAttention-4's, carried": "over_fa4_carried",
    "share of the ideal": "of_ideal",
}
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

    data: for a shape on a device, the tensor that the others are given; None: there is none.
    options: what attention() is given besides `causal`.
    keeps: of FlexAttention, which keys a query sees besides the causal ones, as its mask_mod.
    score_mod: likewise how scores are changed; None: they are not, or it has no way to compute that.
    learned: a backward pass has the gradient of the data too.
    """

    name: str
    options: Callable[[Any], Options]
    data: Callable[[Shape, str], Tensor | None] = lambda shape, device: None
    keeps: Callable[[Any], Callable[..., Any]] | None = None
    score_mod: Callable[[Any], Callable[..., Any]] | None = None
    learned: bool = False
    passes: tuple[str, ...] = PASSES

    @property
    def is_in_flex(self) -> bool:
        """FlexAttention has no sinks: nothing that enters the denominator alone."""
        return self.keeps is not None or self.score_mod is not None


CAUSAL = Case(name="causal", options=lambda _: {})


def slopes(shape: Shape, device: str) -> Tensor:
    """Those of ALiBi's paper: a geometric sequence over the heads."""
    return 2.0 ** (-8 * torch.arange(1, shape.heads + 1, device=device) / shape.heads)


def window(left: int) -> Case:
    """The `left` keys before a query, and its own."""
    return Case(
        name=f"window {left}",
        options=lambda _: {"window": (left, 0)},
        keeps=lambda _: lambda b, h, i, j: i - left <= j,
    )


def chunk(size: int) -> Case:
    return Case(
        name=f"chunk {size}",
        options=lambda _: {"chunk": size},
        keeps=lambda _: lambda b, h, i, j: i // size == j // size,
    )


def soft_cap(cap: float) -> Case:
    return Case(
        name=f"softcap {cap:g}",
        options=lambda _: {"softcap": cap},
        score_mod=lambda _: lambda score, b, h, i, j: cap * torch.tanh(score / cap),
    )


ALIBI = Case(
    name="alibi",
    data=slopes,
    options=lambda of_heads: {"alibi_slopes": of_heads},
    score_mod=lambda of_heads: lambda score, b, h, i, j: score - of_heads[h] * (i - j),
)


def bias_of(shape: Shape, device: str, heads: int = 1) -> Tensor:
    """(heads, S, S), of all batches; 1: of all heads too."""
    generator = torch.Generator(device).manual_seed(SEED)
    return torch.randn((heads, shape.length, shape.length), generator=generator, dtype=torch.bfloat16, device=device)


BIAS = Case(
    name="bias",
    data=lambda shape, device: bias_of(shape, device)[0],
    options=lambda bias: {"bias": bias[None, None]},
    score_mod=lambda bias: lambda score, b, h, i, j: score + bias[i, j],
)
# Without a score_mod: FlexAttention reads outside of memory with the 2^32 elements that this has at D=128 (torch 2.11).
BIAS_OF_EACH_HEAD = Case(
    name="bias of each head",
    data=lambda shape, device: bias_of(shape, device, shape.heads),
    options=lambda bias: {"bias": bias[None]},
)


def learned(case: Case) -> Case:
    return replace(case, name=f"{case.name} with its gradient", learned=True, passes=("backward",))


LEARNED_BIAS = learned(BIAS)
SINKS = Case(
    name="sinks",
    data=lambda shape, device: torch.randn(shape.heads, device=device),
    options=lambda sinks: {"sinks": sinks},
    learned=True,
)


def documents_of(shape: Shape, device: str) -> Tensor:
    """Ids of packed documents, (B, S) int32: lengths from 1 on, 2048 on average, others in each batch."""
    generator = torch.Generator().manual_seed(SEED)
    begins = torch.rand((shape.batch, shape.length), generator=generator) < 1 / 2048
    return begins.cumsum(1, dtype=torch.int32).to(device)


DOCUMENTS = Case(
    name="documents",
    data=documents_of,
    options=lambda ids: {"segment_ids": ids},
    keeps=lambda ids: lambda b, h, i, j: ids[b, i] == ids[b, j],
)


def window_by_function(left: int) -> Case:
    """`window` as a mask_mod, with ranges."""
    mod = MaskMod(near, keys=near_keys, rows=near_rows, constants=(left,), most_keys=left + 1)
    return replace(window(left), name=f"mask_mod {left}", options=lambda _: {"mask_mod": mod})


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
        LEARNED_BIAS,
    ),
    # Of these alone. A bias of each head is larger than all else together: 9 GB at D=128.
    "bias": (BIAS, LEARNED_BIAS, BIAS_OF_EACH_HEAD, learned(BIAS_OF_EACH_HEAD)),
}


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def visible_share(case: Case, shape: Shape, device: str) -> float:
    """Of the pairs that a causal mask leaves, those that are seen here."""
    if case.keeps is None:
        return 1.0
    keeps = case.keeps(case.data(shape, device))
    seen, j = 0, torch.arange(shape.length, device=device)
    for b, rows in itertools.product(range(shape.batch), j.split(1024)):
        i = rows[:, None]
        seen += int((keeps(b, 0, i, j) & (j <= i)).sum())
    return seen / (shape.batch * shape.length * (shape.length + 1) / 2)


def flex(case: Case, shape: Shape, tensors: list[Tensor], data: Tensor | None, device: str) -> Callable[[], Tensor]:
    """FlexAttention, compiled for these shapes; its block mask is made beforehand and not timed."""
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config
    from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 256  # after so many of one function torch computes it without fusion
    torch._functorch.config.donated_buffer = False  # or a graph is differentiated once only
    torch._inductor.config.compile_threads = 1  # there is a process for each compilation already
    keeps = causal if case.keeps is None else and_masks(causal, case.keeps(data))
    mask = create_block_mask(keeps, shape.batch, None, shape.length, shape.length, device=device)
    score_mod = None if case.score_mod is None else case.score_mod(data)
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)
    grouped = shape.heads != shape.kv_heads
    return partial(compiled, *tensors, score_mod=score_mod, block_mask=mask, enable_gqa=grouped)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A call to be timed. Picklable. who: "ours", "cudnn" or "flex". case: its name."""

    who: str
    case: str
    shape: Shape
    which: str

    @property
    def name(self) -> str:
        return f"{self.who} {self.case}"

    def call(self, tensors: list[Tensor], device: str = "cuda") -> Call:
        """tensors: of the shape, to be differentiated if the pass is a backward one."""
        case = case_called(self.case)
        data = case.data(self.shape, device)
        inputs = list(tensors)
        if case.learned and self.which == "backward" and data is not None:
            inputs.append(data.requires_grad_())
        forward: Call
        if self.who == "cudnn":
            forward = partial(by_cudnn, *tensors)
        elif self.who == "ours":
            forward = partial(attention, *tensors, causal=True, **case.options(data))
        else:
            forward = flex(case, self.shape, tensors, data, device)
        return forward if self.which == "forward" else gradients_of(forward, inputs)


def case_called(name: str) -> Case:
    return next(case for case in (CAUSAL, *itertools.chain(*SETS.values())) if case.name == name)


def timed(cases: tuple[Case, ...], shape: Shape, which: str, with_flex: bool) -> Iterator[Timed]:
    """cuDNN and ours of a plain causal call, and each case by ours and by FlexAttention."""
    of = partial(Timed, shape=shape, which=which)
    yield of(who="cudnn", case=CAUSAL.name)
    yield of(who="ours", case=CAUSAL.name)
    for case in cases:
        if which in case.passes:
            yield of(who="ours", case=case.name)
            if with_flex and case.is_in_flex:
                yield of(who="flex", case=case.name)


def call_once(job: Timed) -> None:
    """In a process of its own: leaves the kernels in the caches of Triton and of torch on disk."""
    job.call(inputs_of(job.which, job.shape.tensors()))()
    torch.cuda.synchronize()
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()  # for the other processes


def compile_ahead(jobs: list[Timed]) -> None:
    # FlexAttention's take longest.
    jobs = sorted(jobs, key=lambda job: job.who != "flex")
    with Workers(call_once, at_once=min(cores(), MAX_PROCESSES), limit_s=COMPILE_LIMIT_S) as workers:
        for ended, (number, answer) in enumerate(workers.run(jobs), start=1):
            print(f"\rcompiled {ended} of {len(jobs)} calls", end="", flush=True)
            if isinstance(answer, Failed):
                print(f"\n{jobs[number].name}, {jobs[number].which}: {answer.why}; it is tried again", flush=True)
    print()


def ratios(job: Timed, timings: Mapping[str, Timing], share: float) -> dict[str, float]:
    """A call's time over others' of the same run; over FlexAttention's only what that computes too. share: what it sees
    of what a causal mask leaves: `of_ideal` is 1 if it takes as much less time."""
    time = timings[job.name].median
    over_ours, over_cudnn = time / timings[PLAIN].median, time / timings[CUDNN].median
    found = {"over_ours_causal": over_ours, "over_cudnn_causal": over_cudnn}
    if job.who == "ours":
        found["of_ideal"] = share / over_ours
        fa4 = FA4_OVER_CUDNN.get((job.shape.head_dim, job.which), {}).get(job.case)
        if fa4 is not None:
            found["over_fa4_carried"] = over_cudnn / fa4
        if f"flex {job.case}" in timings:
            found["over_flex"] = time / timings[f"flex {job.case}"].median
    return found


def calls_of(jobs: list[Timed], tensors: list[Tensor]) -> tuple[dict[str, Call], dict[str, str]]:
    """(the calls, each made once; why FlexAttention's are not among them)."""
    calls: dict[str, Call] = {}
    missing: dict[str, str] = {}
    for job in jobs:
        try:
            call = job.call(tensors)
            call()
            calls[job.name] = call
        except Exception as error:  # of FlexAttention, which ours is timed without then
            if job.who != "flex":
                raise
            missing[job.name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return calls, missing


def measure(jobs: list[Timed], rounds: int, device: str = "cuda") -> dict[str, Any]:
    """jobs: of one shape and pass."""
    shape, which = jobs[0].shape, jobs[0].which
    torch.compiler.reset()  # what the last point has left
    calls, missing = calls_of(jobs, inputs_of(which, shape.tensors(device)))
    timings = time_interleaved(calls, rounds=rounds)
    results = {
        job.name: {
            "ms": timings[job.name].median * 1e3,
            "spread": timings[job.name].spread,
            **ratios(job, timings, visible_share(case_called(job.case), shape, device)),
        }
        for job in jobs
        if job.name in timings
    }
    return {
        "name": f"{shape.name} {which}", "shape": asdict(shape), "pass": which, "results": results, "missing": missing
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    """A table for each of RATIOS that some call has, in Markdown; and what could not be timed."""
    points = found["points"]
    tables = [rows_of(title, ratio, points) for title, ratio in RATIOS.items()]
    missing = {f"{p['name']}: no {name}: {why}" for p in points for name, why in p["missing"].items()}
    return "\n\n".join([*filter(None, tables), *sorted(missing)])


def rows_of(title: str, ratio: str, points: list[dict[str, Any]]) -> str:
    """A row for each call that has this ratio, a column for each point; empty if none has."""
    rows = {}
    for name in dict.fromkeys(name for p in points for name in p["results"]):
        cells = [p["results"].get(name, {}).get(ratio) for p in points]
        if any(cell is not None for cell in cells):
            rows[name] = ["–" if c is None else f"{c:.3f}" for c in cells]
    return markdown([title, *(p["name"] for p in points)], rows) if rows else ""


def run(args: argparse.Namespace) -> None:
    """args: of `python -m bench`; its `sets` are of SETS."""
    cases = tuple(case for name in args.sets for case in SETS[name])
    with_flex = args.peers is None or "flex" in args.peers
    points = [list(timed(cases, *point, with_flex)) for point in itertools.product(SHAPES, PASSES)]
    compile_ahead(list(itertools.chain(*points)))
    run_points(args, (measure(jobs, args.rounds) for jobs in points), table)
