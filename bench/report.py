"""What result files say: tables in Markdown, and plots of TFLOP/s by length.

python -m bench tables bench/results/h200_forward.json
python -m bench plot bench/results/h200_forward.json --to docs/speed    writes docs/speed.svg and .png

Of several files, a point that more than one has is the last one's.
"""

import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.points import LENGTHS, MODEL_DIM, TOKENS

Found = dict[str, Any]  # a point of a result file
OURS = "ours"
LABELS = {"ours": "gluon-attn", "cudnn": "cuDNN", "fa2": "FlashAttention-2", "flex": "FlexAttention"}


def read(path: Path) -> dict[str, Any]:
    """Raises SystemExit, with what to do, for a file that is not one of `python -m bench`."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        report["provenance"], report["points"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{path}: expected a result file of `python -m bench`, got {error!r}; run it, or name another file")
    return report


def read_all(paths: Sequence[Path]) -> dict[str, Any]:
    """One report of several: the points in the order of the first that has them, each as the last that has it says; the
    provenance of the first, and of the others in `further`."""
    reports = [read(path) for path in paths]
    points = {found["name"]: found for report in reports for found in report["points"]}
    further = [report["provenance"] for report in reports[1:]]
    return reports[0] | {"points": list(points.values()), "further": further}


def swept(report: dict[str, Any]) -> list[Found]:
    """The points of the sweeps: as many heads as KV heads, TOKENS tokens, compared with no plainer problem."""
    return [
        found
        for found in report["points"]
        if (p := found["point"])["baseline_length"] is None
        and p["heads_per_kv_head"] == 1
        and (p["batch"] * p["length"], p["heads"] * p["head_dim"]) == (TOKENS, MODEL_DIM)
    ]


def series(report: dict[str, Any]) -> Iterator[tuple[str, dict[int, Found]]]:
    """By dtype, head dim, mask and layout: (what it is called, the points by length)."""
    kinds: dict[str, dict[int, Found]] = {}
    for found in swept(report):
        p = found["point"]
        layout = f" {p['layout']}" * (p["layout"] != "bhsd")
        title = f"{p['dtype']} D={p['head_dim']} {'causal' if p['causal'] else 'full'}{layout}"
        kinds.setdefault(title, {})[p["length"]] = found
    yield from kinds.items()


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def rates(report: dict[str, Any]) -> Iterator[str]:
    """TFLOP/s of ours, and how many times cuDNN's that is, in bf16 if ours is fp8."""
    yield f"| TFLOP/s (× cuDNN) | {' | '.join(map(str, LENGTHS))} |"
    yield "|---" * (len(LENGTHS) + 1) + "|"
    for title, by_length in series(report):
        cells = (
            f"{r['tflops']:.0f} ({r['ratio_to_cudnn']:.2f})" if (r := result(by_length.get(n), OURS)) else "–"
            for n in LENGTHS
        )
        yield f"| {title} | {' | '.join(cells)} |"


def result(found: Found | None, name: str) -> dict[str, float] | None:
    return found["results"].get(name) if found else None


def by_cta_count(report: dict[str, Any]) -> Iterator[str]:
    yield "| case | 1 CTA | 2 CTA | speedup |"
    yield "|---|---|---|---|"
    for title, by_length in series(report):
        for length, found in by_length.items():
            one, two = (result(found, f"ours {n}cta") for n in (1, 2))
            if one and two:
                rate_1, rate_2 = one["tflops"], two["tflops"]
                yield f"| {title} {length} | {rate_1:.0f} | {rate_2:.0f} | {rate_2 / rate_1:.2f} |"


def means(report: dict[str, Any]) -> Iterator[str]:
    """By dtype, head dims and layout: the geometric mean over the points of the sweeps, without the small and the odd
    ones."""
    for layout, points in itertools.groupby(sorted(swept(report), key=layout_of), layout_of):
        yield from means_in(points, "" if layout == "bhsd" else f" {layout}")


def layout_of(found: Found) -> str:
    layout: str = found["point"]["layout"]
    return layout


def means_in(points: Iterable[Found], layout: str) -> Iterator[str]:
    for dtype, group in itertools.groupby(points, lambda f: f["point"]["dtype"]):
        ran = [found for found in group if OURS in found["results"]]
        if not ran:  # of candidates
            continue
        ratios = [found["results"][OURS]["ratio_to_cudnn"] for found in ran]
        head_dims = " and ".join(str(d) for d in dict.fromkeys(found["point"]["head_dim"] for found in ran))
        mean = geometric_mean(ratios)
        times = f"{mean:.3f} times cuDNN over {len(ratios)} points, at least {min(ratios):.3f}"
        yield f"{dtype}{layout}, D={head_dims}: {times}"


def plainer(report: dict[str, Any]) -> Iterator[str]:
    """Ours on problems with something to them, compared with plainer ones."""
    for p in report["points"]:
        if "ours, plainer" in p["results"]:
            rate, plain = (p["results"][name]["tflops"] for name in (OURS, "ours, plainer"))
            yield f"{p['name']}: {rate / plain:.3f} of the rate on the plainer problem"


def tables(report: dict[str, Any]) -> str:
    heads = [
        f"{p['card']}, {p['date']}, torch {p['torch']}, Triton {p['triton']}, cuDNN {p['cudnn']}, commit {p['commit']}"
        for p in (report["provenance"], *report.get("further", ()))
    ]
    parts = (rates(report), means(report), plainer(report), by_cta_count(report))
    return "\n\n".join("\n".join(part) for part in (heads, *parts))


def plot(report: dict[str, Any], out: Path) -> list[Path]:
    """One panel for each dtype, head dim, mask and layout. Raises SystemExit, with what to do, if it cannot draw."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("plot: needs matplotlib, found none; install it with: pip install -e '.[bench]'")

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib import pyplot

    kinds = list(series(report))
    if not kinds:
        sys.exit("plot: expected points of a sweep, got none; time some with: python -m bench --sets sweep")
    columns = 4
    rows = -(-len(kinds) // columns)
    size = 4 * columns, 3 * rows
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, sharex=True, layout="constrained")
    for axis, (title, by_length) in zip(axes.flat, kinds, strict=False):
        for name, label in LABELS.items():
            line = [(n, r["tflops"]) for n, found in by_length.items() if (r := result(found, name))]
            if line:
                axis.plot(*zip(*line, strict=True), marker="o", markersize=4, label=label)
        axis.set_title(title)
        axis.set_xscale("log", base=2)
        axis.set_xticks(LENGTHS, [f"{n / 1024:g}k" for n in LENGTHS])
        axis.set_ylim(bottom=0)
        axis.set_ylabel("TFLOP/s")
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(kinds) :]:
        axis.set_visible(False)
    axes.flat[0].legend(loc="lower right", fontsize="small")
    p = report["provenance"]
    dates = " and ".join(dict.fromkeys([p["date"], *(q["date"] for q in report.get("further", ()))]))
    figure.suptitle(f"Attention forward, {TOKENS // 1024}k tokens, {p['card']}, {dates} (peers of fp8: in bf16)")
    written = [out.with_suffix(suffix) for suffix in (".svg", ".png")]
    for path in written:
        figure.savefig(path, dpi=80)
    return written
