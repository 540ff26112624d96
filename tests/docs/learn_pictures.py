"""The pictures of docs/learn: what the roles and engines of one program do, from gluon_cpu's trace, as a small SVG.

`python -m tests.docs.learn_pictures` draws all of them again.
"""

import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gluon_cpu
from gluon_attn.lessons import FOLDER, load

COLUMN, ROW, LEFT, TOP = 11, 58, 130, 24  # pixels
MOST_COLUMNS = 84
SCHEDULES = {"06_two_ctas": ("late", 3)}  # in which the lead's loader waits for the slower CTA
TARGETS = {"08_blackwell": "sm_100a"}  # of those that are not for Hopper
STYLE = (
    "text{font:11px sans-serif;fill:#222}.t{font-size:8px;fill:#fff}.w{fill:url(#h);stroke:#999}"
    ".r{fill:#3b6ea5}.c{fill:#d98b2b}.p{fill:#4d8f53}path{stroke:#222;fill:none;marker-end:url(#a)}"
)
DEFINITIONS = (
    '<defs><pattern id="h" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="5" height="5" fill="#fff"/><rect width="1.4" height="5" fill="#bbb"/></pattern>'
    '<marker id="a" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
    '<path d="M0 0 6 3 0 6z" style="fill:#222;marker-end:none"/></marker></defs>'
)
LEGEND = (("r", "a role"), ("c", "copy engine"), ("p", "tensor cores"), ("w", "waits"))
# What says nothing in a picture: a wait that passed, beginnings and ends, which are alike in all kernels.
LEFT_OUT = re.compile(r"waits|mbarrier\.inv|mbarrier\.init|initialises|starts|warp_specialize|cluster barrier|barrier")
BRIEF = {
    "expects bytes": "expect",
    "fence_async_shared": "fence",
    "local load": "load",
    "local store": "store",
    "warpgroup_mma_wait": "mma wait",
    "tensor memory load": "tmem load",
    "tensor memory store": "tmem store",
    "TMA load": "load",
    "TMA store": "store",
}


def events_of(run: Callable[[], object], target: str, schedule: Any) -> list[dict[str, Any]]:
    """Of the first program of a launch."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        with gluon_cpu.machine(target=target, schedule=schedule, trace=file):
            run()
        found = json.loads(file.read_text(encoding="utf-8"))
    found = found["traceEvents"] if isinstance(found, dict) else found
    return [event for event in found if event["pid"] == 0]


def picture(run: Callable[[], object], target: str = "sm_90a", policy: str = "random", seed: int = 0) -> str:
    events = events_of(run, target, gluon_cpu.Schedule(policy, seed=seed))
    names = {e["tid"]: e["args"]["name"].removesuffix(" of program 0") for e in events if e["name"] == "thread_name"}
    boxes, waits = [], []
    for event in (e for e in events if e["ph"] == "X"):
        what = event["name"].rpartition(" (")[0] or event["name"]
        if event["name"].startswith("wait: "):
            waits.append(event)
        elif not LEFT_OUT.match(what):
            boxes.append((event, what))
    steps = sorted({int(e["ts"]) for e, _ in boxes})[:MOST_COLUMNS]
    column = {step: i for i, step in enumerate(steps)}

    used = {e["tid"] for e, _ in boxes if int(e["ts"]) in column}
    assert used, "nothing to draw"
    # Engines below the role that they work for.
    order = sorted(used, key=lambda tid: (names[tid].rpartition(" for ")[2], " for " in names[tid], names[tid]))
    height = {tid: i for i, tid in enumerate(order)}

    def at(time: float) -> int:
        """The column of the first step from this time on."""
        return next((column[s] for s in steps if s >= time), len(steps))

    def place(tid: int) -> int:
        return TOP + height[tid] * ROW

    drawn = []
    for event in waits:
        first, last = at(event["ts"]), at(event["ts"] + event["dur"])
        if last > first and event["tid"] in height:
            drawn.append(
                f'<rect class="w" x="{first * COLUMN}" y="{place(event["tid"])}" '
                f'width="{(last - first) * COLUMN}" height="{ROW - 12}"/>'
            )
    for event, what in boxes:
        if int(event["ts"]) not in column:
            continue
        engine = " for " in names[event["tid"]]
        kind = "r" if not engine else "p" if re.match("wgmma|tcgen05", what) else "c"
        x, y = column[int(event["ts"])] * COLUMN, place(event["tid"])
        drawn.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{COLUMN - 1}" height="{ROW - 12}"/>')
        text = re.sub(r"tcgen05[._ ]", "", BRIEF.get(what, what))[:10]
        drawn.append(f'<text class="t" transform="translate({x + 8} {y + ROW - 15})rotate(-90)">{text}</text>')
    ends = {(e["ph"], e["id"]): e for e in events if e["ph"] in "sf"}
    for (phase, number), start in ends.items():
        end = ends.get(("f", number))
        if phase != "s" or end is None or int(start["ts"]) not in column or not {start["tid"], end["tid"]} <= used:
            continue
        x, down = column[int(start["ts"])] * COLUMN + COLUMN // 2, place(end["tid"]) > place(start["tid"])
        y, to = place(start["tid"]) + (ROW - 12) * down, place(end["tid"]) + (ROW - 12) * (not down)
        drawn.append(f'<path d="M{x} {y}V{to}"/>')
    width, rows = LEFT + len(steps) * COLUMN + 8, len(order)
    labels = [
        f'<text x="{LEFT - 8}" y="{place(tid) + ROW // 2 - 2}" text-anchor="end">'
        f"{names[tid].partition(' for ')[0]}</text>"
        for tid in order
    ]
    legend = [
        f'<rect class="{kind}" x="{LEFT + 105 * i}" y="6" width="10" height="10"/>'
        f'<text x="{LEFT + 105 * i + 15}" y="15">{text}</text>'
        for i, (kind, text) in enumerate(LEGEND)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {max(width, 620)} {TOP + rows * ROW + 14}">'
        f'<style>{STYLE}</style>{DEFINITIONS}<rect width="100%" height="100%" fill="#fff"/>'
        f'{"".join(legend)}{"".join(labels)}<g transform="translate({LEFT})">{"".join(drawn)}</g>'
        f'<text x="{LEFT}" y="{TOP + rows * ROW + 8}">steps of the machine, from left to right: order, not time</text>'
        "</svg>\n"
    )


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def runs() -> dict[str, Callable[[], object]]:
    """The launch that each picture is of: as small as it can be."""
    course = load("course")
    ring, turns, two = load("03_ring"), load("05_turns"), load("06_two_ctas")
    q = course.normal(384, 64)
    out = torch.empty_like(q)
    a, b = course.descriptor(course.normal(128, 192), [128, 64], [[1, 0]]), course.normal(64, 192)
    return {
        "02_copy": lambda: load("02_copy").run_double(torch.randn(192, 64), poisoned(192, 64)),
        "03_ring": lambda: ring.run(ring.by_channel, torch.randn(384, 64), poisoned(384, 64)),
        "04_products": lambda: load("04_products").run(q, q, q, out),
        "05_turns": lambda: turns.run(q, q, q, out),
        "06_two_ctas": lambda: two.gemm[(1, 1)](
            a, course.descriptor(b, [64, 64], [[0, 0]]), poisoned(128, 64), SLOTS=2, HANDOVER=True, num_ctas=2
        ),
        "07_persistent": lambda: load("07_persistent").run(q, q, q, out, programs=1),
        "08_blackwell": lambda: load("08_blackwell").run(q, q, q, out),
        "09_backward": lambda: load("09_backward").run(
            *(course.normal(128, 64) for _ in range(4)), torch.zeros(128), course.normal(128, 64),
            *(torch.zeros(128, 64) for _ in range(3)),
        ),
    }  # fmt: skip


if __name__ == "__main__":
    for name, run in runs().items():
        if not sys.argv[1:] or name in sys.argv[1:]:
            file = FOLDER / f"{name}.svg"
            file.write_text(
                picture(run, TARGETS.get(name, "sm_90a"), *SCHEDULES.get(name, ("random", 0))), encoding="utf-8"
            )
            print(f"{name}.svg", file.stat().st_size)
