"""`python -m bench.timeline`: where each role of a Hopper kernel waits, by clocks that are read inside the kernel.

    python -m bench.timeline --head-dim 64 --mask causal --length 512 --out .out/timeline
    python -m bench.timeline --backward --head-dim 128 --length 8192 --batch 1 --heads 8 --out .out/timeline

One warp of each role notes the clock before and after each of its waits (see bench/scopes.py). That costs time, and how
much is printed first: shares are to be read with it in mind. As in the benchmarks, the L2 cache is cold.

Written to --out: timeline.json, the figures; timeline.chrome_trace, a few CTAs as the profiler wrote them, which counts
cycles and calls a thousand of them a microsecond, for ui.perfetto.dev; timeline.svg, one CTA, by matplotlib. Without a
card and elsewhere, --redraw draws other CTAs of these and other windows.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.candidates import label
from bench.points import DTYPES, Point
from bench.provenance import provenance
from bench.scopes import (
    WAIT_BYTES,
    attention_of,
    bytes_per_role,
    first_warps,
    first_warps_of_gradients,
    gradients_of,
    mode_of,
    profile,
    tensors_of,
    tensors_of_gradients,
)
from bench.timing import time_interleaved
from bench.waits import cta_of, spread, summarise, waits_of
from gluon_attn import attention
from gluon_attn.backward.configs import label as label_of_gradients
from gluon_attn.backward.plan import BackwardPlan
from gluon_attn.backward.table import pick_config as pick_backward
from gluon_attn.device import Device
from gluon_attn.forward.configs import HopperConfig
from gluon_attn.forward.plan import Plan
from gluon_attn.forward.table import pick_config
from gluon_attn.problem import Problem

REPORT, TRACE, PICTURE = "timeline.json", "timeline.chrome_trace", "timeline.svg"


def table(everywhere: dict[str, Any], single: dict[int, dict[str, Any]]) -> str:
    """Per CTA, over all CTAs; and the shares in single ones."""
    lines = [
        "role, what it waits for | times | cycles each | longest | share | " + " | ".join(f"CTA {c}" for c in single)
    ]
    for role, of in everywhere.items():
        waiting = sum(kind["share"] for kind in of["waits"].values())
        lines.append(f"{role}: {of['cycles'] / of['ctas'] / 1e3:.1f} kcycles, {waiting:.0%} of them waiting")
        for name, kind in of["waits"].items():
            shares = (f"{one[role]['waits'].get(name, {}).get('share', 0.0):6.1%}" for one in single.values())
            lines.append(
                f"  {name:22} | {kind['number'] / of['ctas']:5.0f} | {kind['cycles'] / kind['number']:6.0f} | "
                f"{kind['longest']:6.0f} | {kind['share']:5.1%} | {' | '.join(shares)}"
            )
    return "\n".join(lines)


def draw(folder: Path, cta: int, window: tuple[float, float]) -> None:
    """timeline.svg, from the other two files: a row for each role, a box for each wait. window: kcycles."""
    try:
        import matplotlib
    except ImportError:
        sys.exit(f"{PICTURE}: needs matplotlib, which is not installed; --redraw draws it where it is, from {folder}")
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib import pyplot

    report = json.loads((folder / REPORT).read_text())
    waits = [w for w in waits_of(json.loads((folder / TRACE).read_text()))[0] if w.cta == cta]
    if not waits:
        sys.exit(f"--cta: expected one that {folder / TRACE} has, got {cta}; run it again with this one")
    warps = report["warps"]
    seen = [w for w in waits if w.start < window[1] * 1e3 and w.start + w.cycles > window[0] * 1e3]
    figure, axis = pyplot.subplots(figsize=(16, 1 + 0.6 * len(warps)), layout="constrained")
    colours = pyplot.get_cmap("tab20")
    for i, name in enumerate(sorted({w.name for w in seen})):
        for row, warp in enumerate(warps.values()):
            boxes = [(w.start / 1e3, w.cycles / 1e3) for w in seen if (w.name, w.warp) == (name, warp)]
            axis.broken_barh(boxes, (row - 0.4, 0.8), color=colours(i), label=name if row == 0 else None)
    axis.set_yticks(range(len(warps)), list(warps))
    axis.invert_yaxis()
    axis.set_xlim(*window)
    axis.set_xlabel("kcycles since the first wait; white: not waiting")
    axis.set_title(f"{report['name']}, {report['config']}, CTA {cta}")
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    figure.savefig(folder / PICTURE)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.timeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-dim", type=int, choices=[64, 128, 256], default=64)
    parser.add_argument("--mask", choices=["full", "causal"], default="full")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--batch", type=int, default=0, help="default: 16k tokens in all")
    parser.add_argument("--heads", type=int, default=0, help="default: 2048 columns in all")
    parser.add_argument("--num-ctas", type=int, choices=[1, 2], help="default: as the tuning table has it")
    parser.add_argument("--backward", action="store_true", help="of the main kernel of gradients")
    parser.add_argument("--deterministic", action="store_true", help="with --backward: dQ in a fixed order")
    parser.add_argument("--cta", type=int, default=0, help="the one to draw")
    parser.add_argument(
        "--window", type=float, nargs=2, default=(0.0, 40.0), help="kcycles of it; default: the first 40"
    )
    parser.add_argument("--redraw", action="store_true", help="run nothing, draw what --out has")
    parser.add_argument("--out", type=Path, required=True, help="folder of what is written")
    parser.add_argument("--commit", help="commit of the measured tree, where git cannot tell")
    return parser.parse_args()


@dataclass(frozen=True)
class Looked:
    """At a kernel. config: its label. warps: the first of each role. launch: compiles it and returns its launch."""

    config: str
    warps: dict[str, int]
    ctas: int
    launch: Callable[[], Callable[[], None]]


def of_attention(point: Point, device: Device, num_ctas: int | None) -> Looked:
    tensors = point.arguments(point.tensors())
    problem = Problem.of(*tensors, causal=point.causal)
    config = pick_config(problem, device, num_ctas)
    if not isinstance(config, HopperConfig):
        sys.exit(f"timeline: needs a Hopper card, found {device.name}; nothing was run")
    plan = Plan.of(problem, config, device)
    launch = partial(attention_of, plan, tensors_of(plan, *tensors))
    return Looked(label(config), first_warps(config), plan.programs * config.num_ctas, launch)


def of_gradients(point: Point, device: Device, deterministic: bool) -> Looked:
    q, k, v = point.arguments(point.tensors())
    problem = Problem.of(q, k, v, causal=point.causal)
    config = pick_backward(problem)
    out, lse = attention(q, k, v, causal=point.causal, return_lse=True)
    plan = BackwardPlan.of(problem, config, device, deterministic=deterministic)
    tensors = tensors_of_gradients(plan, q=q, k=k, v=v, out=out, dout=torch.randn_like(out), lse=lse)
    name = label_of_gradients(config) + " in a fixed order" * deterministic
    return Looked(
        name, first_warps_of_gradients(finishes=plan.finishes), plan.programs, partial(gradients_of, plan, tensors)
    )


def measure(
    point: Point,
    num_ctas: int | None,
    cta: int,
    folder: Path,
    commit: str | None,
    *,
    backward: bool = False,
    deterministic: bool = False,
) -> None:
    """Writes the figures and the trace of a few CTAs, `cta` among them, to `folder`, and prints the figures."""
    try:
        import triton.profiler  # noqa: F401
    except ImportError as error:
        sys.exit(f"timeline: needs Triton's profiler (proton), which Triton's own wheels bring along, got: {error}")
    device = Device.of(torch.device("cuda", torch.cuda.current_device()))
    of = of_gradients(point, device, deterministic) if backward else of_attention(point, device, num_ctas)
    as_it_is = of.launch()
    with tempfile.TemporaryDirectory() as scratch:
        instrumented = profile(of.launch, mode_of(of.warps, of.ctas), f"{scratch}/trace")
        trace = json.loads(Path(f"{scratch}/trace.chrome_trace").read_text())
    times = time_interleaved({"as it is": as_it_is, "instrumented": instrumented}, rounds=3)
    slower = times["instrumented"].median / times["as it is"].median

    waits, spans = waits_of(trace)
    most = max(Counter((w.cta, w.warp) for w in waits).values())
    room = bytes_per_role(len(of.warps), of.ctas) // WAIT_BYTES
    if most >= room - 1:  # the first ones were written over
        sys.exit(f"timeline: expected at most {room - 2} waits of a role, got more; give a shorter --length")
    chosen = sorted({0, 1, cta, max(spans)} & set(spans))
    everywhere = summarise(waits, of.warps)
    single = {c: summarise([w for w in waits if w.cta == c], of.warps) for c in chosen}
    report: dict[str, Any] = {
        "provenance": provenance(commit),
        "name": point.name,
        "point": asdict(point),
        "config": of.config,
        "slower": slower,
        "us": spread(spans),
        "warps": of.warps,
        "all CTAs": everywhere,
        **{f"CTA {c}": one for c, one in single.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REPORT).write_text(json.dumps(report, indent=1) + "\n")
    few = [e for e in trace["traceEvents"] if cta_of(e) in chosen]
    (folder / TRACE).write_text(json.dumps(trace | {"traceEvents": few}) + "\n")
    print(f"{point.name}, {of.config}: {slower:.2f} times as long as without clocks")
    for what, t in report["us"].items():
        print(f"CTAs {what} after {t['min']:.1f} to {t['max']:.1f} us, median {t['median']:.1f}")
    print(table(everywhere, single))


def main() -> None:
    args = arguments()
    if not args.redraw:
        if not torch.cuda.is_available():
            sys.exit("timeline: needs a Hopper card, found no CUDA device; nothing was run")
        causal = args.mask == "causal"
        point = Point(
            dtype=args.dtype, head_dim=args.head_dim, causal=causal, length=args.length, batch=args.batch,
            heads=args.heads,
        )  # fmt: skip
        measure(
            point, args.num_ctas, args.cta, args.out, args.commit, backward=args.backward,
            deterministic=args.deterministic,
        )  # fmt: skip
    draw(args.out, args.cta, args.window)
    print(f"written: {', '.join(str(args.out / name) for name in (REPORT, TRACE, PICTURE))}")


if __name__ == "__main__":
    main()
