"""What result files say: tables in Markdown, and plots of TFLOP/s by length.

python -m bench tables bench/results/h200_forward.json
python -m bench plot bench/results/h200_forward.json --to docs/speed.png    the four panels of the README
python -m bench plot bench/results/h200_forward.json --to all.svg --all     every kind of problem, every peer

Of several files, a point that more than one has is the last one's. A file of masks, biases, packed sequences or unlike
head dims is shown by itself, and not plotted.
"""

import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.points import LENGTHS, MODEL_DIM, TOKENS

Found = dict[str, Any]  # a point of a result file
OURS = "ours"
LABELS = {"ours": "gluon-attn", "cudnn": "cuDNN", "fa2": "FlashAttention-2", "flex": "FlexAttention"}
COLOURS = {"ours": "#d1495b", "cudnn": "#2e6f95", "fa2": "#7a7a7a", "flex": "#e0a030"}
FRONT = {"dtype": ("bf16",), "head_dim": (64, 128), "layout": ("bhsd",)}  # what the README's picture shows
FRONT_PEERS = ("ours", "cudnn", "fa2")
FP8 = ("e4m3", "e5m2")
SUFFIXES = (".png", ".svg")


def markdown(head: list[str], rows: dict[str, list[str]]) -> str:
    """A table; a row is its first cell, and the others."""
    lines = [head, ["---"] * len(head), *([name, *cells] for name, cells in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def read(path: Path) -> dict[str, Any]:
    """Raises SystemExit, with what to do, for a file that is not one of `python -m bench`."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        report["provenance"]
        for point in report["points"]:
            point["name"], point["results"]
            point["shape" if "pass" in point and "point" not in point else "point"]
        is_here = "method" in report or all("pass" in point for point in report["points"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{path}: expected a result file of `python -m bench`, got {error!r}; run it, or name another file")
    if not is_here:
        shown = f"the command that made it prints it, as python -m bench.gradients --show {path}"
        sys.exit(f"{path}: expected a result file of `python -m bench`, got one of another benchmark; {shown}")
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
    """TFLOP/s of ours."""
    yield from by_length(report, "TFLOP/s", lambda r: f"{r['tflops']:.0f}")


def ratios(report: dict[str, Any]) -> Iterator[str]:
    """How many times cuDNN's rate that is; cuDNN's in bf16 if ours is fp8."""
    if any(found["point"]["dtype"] in FP8 for found in swept(report)):
        yield "cuDNN computes in bf16 for e4m3 and e5m2 too: torch offers it no fp8."
        yield ""
    yield from by_length(report, "× cuDNN", lambda r: f"{r['ratio_to_cudnn']:.2f}")


def by_length(report: dict[str, Any], what: str, cell: Callable[[dict[str, float]], str]) -> Iterator[str]:
    """A table with a row for each kind of problem and a column for each length."""
    yield f"| {what} | {' | '.join(map(str, LENGTHS))} |"
    yield "|---" * (len(LENGTHS) + 1) + "|"
    for title, points in series(report):
        cells = (cell(r) if (r := result(points.get(n), OURS)) else "–" for n in LENGTHS)
        yield f"| {title} | {' | '.join(cells)} |"


def result(found: Found | None, name: str) -> dict[str, float] | None:
    return found["results"].get(name) if found else None


def by_cta_count(report: dict[str, Any]) -> Iterator[str]:
    yield "TFLOP/s of ours with one CTA to a cluster and with two, and the rate of two over that of one:"
    yield ""
    yield "| case | 1 CTA | 2 CTA | speedup |"
    yield "|---|---|---|---|"
    for title, points in series(report):
        for length, found in points.items():
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


def heads(report: dict[str, Any]) -> list[str]:
    """Where and of what each run was, a line each."""
    return [
        f"{p['card']}, {p['date']}, torch {p['torch']}, Triton {p['triton']}, cuDNN {p['cudnn']}, commit {p['commit']}"
        for p in (report["provenance"], *report.get("further", ()))
    ]


def tables(report: dict[str, Any]) -> str:
    parts = (rates(report), ratios(report), means(report), plainer(report), by_cta_count(report))
    return "\n\n".join("\n".join(part) for part in (heads(report), *parts))


def plot(report: dict[str, Any], out: Path, every: bool = False) -> Path:
    """Draw TFLOP/s by length into `out`, a panel for each kind of problem: those of FRONT, or every one.

    Raises SystemExit, with what to do, if it cannot draw.
    """
    if out.suffix not in SUFFIXES:
        sys.exit(f"plot: --to: expected a file name that ends in {' or '.join(SUFFIXES)}, got {out}")
    try:
        import matplotlib
    except ImportError:
        sys.exit("plot: needs matplotlib, found none; install it with: pip install -e '.[bench]'")

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib import pyplot

    shown = report if every else report | {"points": [found for found in report["points"] if is_front(found)]}
    kinds = list(series(shown))
    if not kinds:
        kind = "" if every else " in bf16 with D = 64 or 128 (--all: of every kind)"
        sys.exit(f"plot: expected points of a sweep{kind}, got none; time some with: python -m bench --sets sweep")
    peers = tuple(LABELS) if every else FRONT_PEERS
    columns = 4 if every else min(2, len(kinds))
    rows = -(-len(kinds) // columns)
    size = 4 * columns, 2.6 * rows + 0.5
    figure, axes = pyplot.subplots(
        rows, columns, figsize=size, squeeze=False, sharex=True, sharey=True, layout="constrained", facecolor="white"
    )
    for axis, (title, points) in zip(axes.flat, kinds, strict=False):
        for name in peers:
            line = [(n, r["tflops"]) for n, found in points.items() if (r := result(found, name))]
            if line:
                width = 2.2 if name == OURS else 1.4
                axis.plot(
                    *zip(*line, strict=True),
                    marker="o",
                    markersize=4,
                    linewidth=width,
                    color=COLOURS[name],
                    label=LABELS[name],
                )
        axis.set_title(title, fontsize="medium")
        axis.set_xscale("log", base=2)
        axis.set_xticks(LENGTHS, [str(n) for n in LENGTHS], fontsize="small")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes.flat[0].set_ylim(bottom=0)  # after all lines: the panels share it
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    for axis in axes.flat[len(kinds) :]:
        axis.set_visible(False)
    axes.flat[0].legend(loc="lower right", fontsize="small")
    p = report["provenance"]
    dates = " and ".join(dict.fromkeys([p["date"], *(q["date"] for q in report.get("further", ()))]))
    note = " (peers of fp8: in bf16)" if every else ""
    figure.suptitle(f"Attention forward, {TOKENS // 1024}k tokens, {p['card']}, {dates}{note}", fontsize="medium")
    figure.savefig(out, dpi=100)
    pyplot.close(figure)
    return out


def is_front(found: Found) -> bool:
    return all(found["point"][field] in values for field, values in FRONT.items())
