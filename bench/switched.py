"""What torch's SDPA gains or loses by `torch_sdpa.enabled()`, at shapes that the other sweeps leave out.

    python -m bench.switched --out FILE                     # on a Hopper card, some minutes
    python -m bench.switched --sets "head dims" small       # some of the sets below
    python -m bench.switched --show FILE                    # anywhere

Each call of F.scaled_dot_product_attention is made as torch chooses it, and within `enabled()`. Both are captured in a
CUDA graph, so that the card alone is timed. Of little work a row of plain calls is timed too, as a user has them: there
the host's time counts. Beside them are calls that go through Python to torch's own kernels. Ratios are torch's time
over that within `enabled()`: below 1, we are slower.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.ahead import cores
from bench.gradients import save
from bench.provenance import SEED, provenance
from bench.report import markdown
from bench.timing import time_interleaved, wall_seconds
from gluon_attn import torch_sdpa
from gluon_attn.device import Device

PASSES = ("forward", "backward")


def hand_on(original: Callable[..., Any], device: Device | None, *args: Any, **kw: Any) -> Any:
    return original(*args, **kw)


@contextlib.contextmanager
def handing_on(key: str = "CUDA") -> Iterator[None]:
    """Within it, torch's operators are functions in Python that hand each call to the kernel that was there: the least
    that any hook in Python takes. key: the dispatch key of those kernels."""
    overrides = torch_sdpa.override(key, replacements=dict.fromkeys(torch_sdpa.FLASH | torch_sdpa.CUDNN, hand_on))
    try:
        yield
    finally:
        overrides.remove()


Switch = Callable[[], contextlib.AbstractContextManager[None]]
SWITCH: dict[str, Switch] = {"torch": contextlib.nullcontext, "enabled": torch_sdpa.enabled}
IN_A_ROW = SWITCH | {"handed on": handing_on}
WALL_ROUNDS = 7


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A call in bf16. set: it is one of."""

    set: str
    head_dim: int
    q_len: int
    kv_len: int
    batch: int = 1
    heads: int = 16
    kv_heads: int = 16
    causal: bool = False

    @property
    def name(self) -> str:
        lengths = f"{self.q_len}" if self.q_len == self.kv_len else f"{self.q_len} of {self.kv_len} keys"
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        mask = "causal" if self.causal else "full"
        return f"D={self.head_dim} {mask} {lengths}, B={self.batch} H={heads}"

    def tensors(self) -> list[Tensor]:
        torch.manual_seed(SEED)
        keys = (self.batch, self.kv_heads, self.kv_len, self.head_dim)
        shapes = ((self.batch, self.heads, self.q_len, self.head_dim), keys, keys)
        return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.heads != self.kv_heads)


def shapes() -> list[Shape]:
    """All sets: as many tokens to a batch as fill the card, but for little work."""
    found = [
        Shape(set="head dims", head_dim=d, q_len=s, kv_len=s, batch=8192 // s, causal=causal)
        for d, causal, s in itertools.product((32, 40, 72, 80, 96, 112, 160, 224), (False, True), (1024, 4096))
    ]
    found += [
        Shape(set="few queries", head_dim=d, q_len=rows, kv_len=8192, batch=batch, heads=32, kv_heads=8)
        for d, rows, batch in itertools.product((64, 128), (2, 16, 64, 256, 1024), (1, 8))
    ]
    found += [
        Shape(
            set="grouped", head_dim=d, q_len=s, kv_len=s, batch=16384 // s, heads=32, kv_heads=kv_heads, causal=causal
        )
        for d, kv_heads, causal, s in itertools.product((64, 128), (8, 1), (False, True), (2048,))
    ]
    found += [
        Shape(set="small", head_dim=d, q_len=s, kv_len=s, batch=batch, heads=heads, kv_heads=heads, causal=causal)
        for d, causal, (batch, heads, s) in itertools.product(
            (64, 128), (False, True), ((1, 8, 128), (1, 16, 512), (1, 16, 1024), (4, 16, 256))
        )
    ]
    # Of models of images: patches and a token for the class.
    found += [
        Shape(set="small", head_dim=64, q_len=s, kv_len=s, batch=b, heads=h, kv_heads=h)
        for s, b, h in ((197, 64, 12), (257, 32, 16), (577, 16, 16))
    ]
    return found


def passes_of(shape: Shape) -> dict[str, Callable[[], Any]]:
    """Each pass as a call; the forward one is not recorded."""
    q, k, v = inputs = shape.tensors()
    leaves = [t.clone().requires_grad_() for t in inputs]
    out = shape.call(*leaves)
    dout = torch.randn_like(out)
    return {
        "forward": partial(shape.call, q, k, v),
        "backward": partial(torch.autograd.grad, out, leaves, dout, retain_graph=True),
    }


def capture(call: Callable[[], object], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph of the call, of which the card alone is timed. stream: it has to be current."""
    for _ in range(2):  # compiles, and loads
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


def captured(shape: Shape, switch: str) -> tuple[dict[str, torch.cuda.CUDAGraph], Any]:
    """(each pass as a CUDA graph, what must live as long as they do: their inputs). Torch runs a backward pass on the
    stream of its forward pass, so it is one for all."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), SWITCH[switch]():
        calls = passes_of(shape)
        graphs = {name: capture(call, stream) for name, call in calls.items()}
    torch.cuda.current_stream().wait_stream(stream)
    return graphs, calls


def ours(shape: Shape) -> dict[str, bool]:
    """Whether a pass runs a kernel of ours within `enabled()`."""
    made: set[str] = set()
    originals = {name: getattr(torch_sdpa, name) for name in ("forward_pass", "backward_pass")}

    def noting(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kw: Any) -> Any:
            computed = fn(*args, **kw)
            if computed is not None:
                made.add(name)
            return computed

        return run

    try:
        for name, fn in originals.items():
            setattr(torch_sdpa, name, noting(name, fn))
        with torch_sdpa.enabled():
            for call in passes_of(shape).values():
                call()
    finally:
        for name, fn in originals.items():
            setattr(torch_sdpa, name, fn)
    return {which: name in made for which, name in zip(PASSES, originals, strict=True)}


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    graphs = {switch: captured(shape, switch) for switch in SWITCH}
    found: dict[str, Any] = {"name": shape.name, "shape": asdict(shape), "ours": ours(shape), "passes": {}}
    for which in PASSES:
        timings = time_interleaved({s: graphs[s][0][which].replay for s in SWITCH}, rounds=rounds)
        found["passes"][which] = {
            s: {"us": timing.median * 1e6, "spread": timing.spread} for s, timing in timings.items()
        }
    if shape.set == "small":
        found["in_a_row"] = in_a_row(shape)
    return found


def in_a_row(shape: Shape) -> dict[str, dict[str, dict[str, float]]]:
    """Microseconds of each of many plain calls."""
    seconds: dict[str, dict[str, list[float]]] = {which: {s: [] for s in IN_A_ROW} for which in PASSES}
    for _ in range(WALL_ROUNDS):
        for switch, context in IN_A_ROW.items():
            with context():
                for which, call in passes_of(shape).items():
                    seconds[which][switch].append(wall_seconds(call))
    return {
        which: {s: {"us": statistics.median(of) * 1e6} for s, of in by_switch.items()}
        for which, by_switch in seconds.items()
    }


def compile_ahead(shape: Shape) -> None:
    """Into Triton's cache on disk."""
    with torch_sdpa.enabled():
        for call in passes_of(shape).values():
            call()
    torch.cuda.synchronize()


def ratio(times: dict[str, dict[str, float]]) -> float:
    return times["torch"]["us"] / times["enabled"]["us"]


def rows(found: dict[str, Any]) -> dict[str, list[str]]:
    def cell(point: dict[str, Any], part: str, which: str) -> str:
        if part not in point:
            return "–"
        left = "" if point["ours"][which] else " (torch's)"
        return f"{ratio(point[part][which]):.2f}{left}"

    parts = ("passes", "in_a_row")
    return {p["name"]: [cell(p, part, which) for part in parts for which in PASSES] for p in found["points"]}


def show(found: dict[str, Any]) -> None:
    print(markdown(["call", "forward", "backward", "forward, in a row", "backward, in a row"], rows(found)))
    in_rows = {
        p["name"]: [f"{of['us']:.0f}" for which in PASSES for of in p["in_a_row"][which].values()]
        for p in found["points"]
        if "in_a_row" in p
    }
    if in_rows:
        print(markdown(["us of each, in a row", *(f"{which}, {s}" for which in PASSES for s in IN_A_ROW)], in_rows))
    for which in PASSES:
        slower = [p for p in found["points"] if ratio(p["passes"][which]) < 1]
        lowest = min(ratio(p["passes"][which]) for p in found["points"])
        print(f"{which}: slower at {len(slower)} of {len(found['points'])} calls, lowest {lowest:.2f}")


def parser_of(command: str, description: str | None) -> argparse.ArgumentParser:
    """Of a command that times calls and writes a result file."""
    parser = argparse.ArgumentParser(prog=f"python -m {command}", description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, help="result file to write (JSON)")
    parser.add_argument("--show", type=Path, help="print the table of a result file, and time nothing")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commit", help="of the tree that is measured, if git cannot tell")
    return parser


def is_to_time(command: str, args: argparse.Namespace, show: Callable[[dict[str, Any]], None]) -> bool:
    """Whether it is, and not shows a result file, which is done here. Exits if there is no card."""
    if args.show:
        show(json.loads(args.show.read_text(encoding="utf-8")))
        return False
    if not torch.cuda.is_available():
        sys.exit(f"{command}: expected a Hopper card, got none; use --show FILE to see a result file")
    return True


def main() -> None:
    parser = parser_of("bench.switched", __doc__)
    sets = list(dict.fromkeys(shape.set for shape in shapes()))
    parser.add_argument("--sets", nargs="+", choices=sets, default=sets)
    args = parser.parse_args()
    if not is_to_time("bench.switched", args, show):
        return
    chosen = [shape for shape in shapes() if shape.set in args.sets]
    with ProcessPoolExecutor(cores(), mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_ahead, chosen))
    found: dict[str, Any] = {"provenance": provenance(args.commit), "points": []}
    for shape in chosen:
        found["points"].append(measure(shape, args.rounds))
        save(found, args.out)
        print("timed", shape.name, flush=True)
    show(found)


if __name__ == "__main__":
    main()
