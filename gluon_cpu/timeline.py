"""A picture of one program of a run: a row for each role and each engine, and who ends whose wait.

From left to right are the steps of the scheduler, as in a trace: order, not time. A step in which other programs ran
takes no room. Needs matplotlib.
"""

import html
import importlib.util
import io
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .findings import Deadlock
from .given import file_name
from .ops.mbarrier import Barrier, plural
from .trace import Box, Row, Trace, Wait

SUFFIXES = (".svg", ".png")
MOST_COLUMNS = 240  # more would be no picture but a film; the trace has them all
# In inches: of a column, of a row, and of a letter at each size (in points).
COLUMN, ROW = 0.13, 0.86
SMALL, MIDDLE = 6.5, 8.0
LETTER = 0.6 / 72  # for each point of its size
BOX = 0.88  # of a row's height
MOST_LETTERS = int(BOX * ROW / (LETTER * SMALL)) - 1

ROLE, COPY, PRODUCT, STUCK, GREY, ARROW = "#3b6ea5", "#d98b2b", "#4d8f53", "#c0392b", "#9a9a9a", "#222222"
PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # behind text, over hatching and lines
PRODUCTS = ("wgmma", "tcgen05")
# Where what the messages say is too long for a box, or says too little beside a wait's hatching.
BRIEF = {
    "waits": "wait over",
    "expects bytes": "expects",
    "fence_async_shared": "fence",
    "mbarrier.init": "init",
    "mbarrier.invalidate": "invalidate",
    "mbarrier.inval": "invalidate",
    "warp_specialize": "roles",
    "warpgroup_mma_wait": "mma wait",
    "tensor memory load": "tmem load",
    "tensor memory store": "tmem store",
    "cluster barrier": "cluster",
}
LEGEND = (
    (ROLE, "", "role: one operation, with its line"),
    (COPY, "", "copy engine"),
    (PRODUCT, "", "tensor cores"),
    ("none", GREY, "waits"),
    ("none", STUCK, "waits for ever"),
    (STUCK, "", "where the finding showed"),
)


class TimelineError(ValueError):
    """No picture can be made: said before anything runs."""


class Timeline:
    """Where a picture goes. later: draw only when told to, what was taken last."""

    def __init__(self, path: Any, *, later: bool = False) -> None:
        try:
            file_name("timeline", path)
        except ValueError as error:
            raise TimelineError(str(error)) from None
        self.path = Path(path)
        self.later = later
        self.taken: tuple[Trace, Any] | None = None
        if self.path.suffix not in SUFFIXES:
            raise TimelineError(f"timeline: expected a file name that ends in {' or '.join(SUFFIXES)}, got {path}")
        if importlib.util.find_spec("matplotlib") is None:
            raise TimelineError("timeline: needs matplotlib, found none; install it with: pip install matplotlib")

    @staticmethod
    def of(given: Any) -> "Timeline":
        return given if isinstance(given, Timeline) else Timeline(given)

    def take(self, trace: Trace, machine: Any) -> None:
        self.taken = (trace, machine)
        if not self.later:
            self.draw()

    def draw(self) -> None:
        if self.taken is not None and self.taken[0].boxes:
            Picture(*self.taken).save(self.path)


@dataclass
class Span:
    """Where a step is in the picture: its first column, and how many it has."""

    start: int
    width: int

    @property
    def end(self) -> int:
        return self.start + self.width


def text_of(info: Any, row: Row, times: int) -> str:
    """What a box says: the line, what is done, and how often."""
    if info is None:
        return "starts"
    frames = info.site.frames
    # Of a chain of calls the innermost that is beside the kernel, not in a library that it uses.
    line = next((f.line for f in frames if Path(f.file).is_relative_to(Path(frames[-1].file).parent)), 0)
    doing = BRIEF.get(info.what, info.what).replace("initialises ", "init ")
    doing = doing.removeprefix(row.engine or "tcgen05").lstrip("_. ")
    text, often = f"{line or ''} {doing}".strip(), f" ×{times}" if times > 1 else ""
    room = MOST_LETTERS - len(often)
    return (text if len(text) <= room else text[: room - 1] + "…") + often


def what(box: Box) -> tuple[Any, ...]:
    """To tell whether two boxes say the same."""
    return (None if box.info is None else (box.info.what, box.info.site), box.finding)


def stuck_text(wait: Wait) -> str:
    """What a wait that never ended is for, and what is missing."""
    target = wait.target
    if not isinstance(target, Barrier):
        return f"for ever: {target.describe()}"
    missing = [plural(target.pending, "arrival")] if target.pending else []
    missing += [plural(target.tx, "byte")] if target.tx else []
    return f"for ever: {name_of(target)}, phase {wait.phase}: {' and '.join(missing)} missing"


def name_of(target: Any) -> str:
    """As short as it can be: the row says the CTA, the hatching that it is a wait."""
    return target.name.removesuffix(".barrier") if isinstance(target, Barrier) else target.describe()


def width_of(text: str, size: float) -> float:
    """About, in inches: who opens the picture has another font."""
    return len(text) * size * LETTER


class Picture:
    """The program to draw, its rows and its columns; then the drawing."""

    def __init__(self, trace: Trace, machine: Any) -> None:
        self.trace = trace
        self.machine = machine
        self.stuck = isinstance(trace.finding, Deadlock)
        self.program = self.choose()
        boxes = [b for b in trace.boxes if b.row.program == self.program]
        waits = [w for w in (*trace.waits, *trace.open.values()) if w.row.program == self.program]
        boxes, self.times = self.together(boxes, waits)
        self.spans = self.columns(boxes, waits)
        self.all_columns = sum(s.width for s in self.spans.values())
        if self.all_columns > MOST_COLUMNS:
            self.cut()
        self.boxes = [b for b in boxes if b.step in self.spans]
        self.waits = [w for w in waits if self.reach(w)[0] < self.reach(w)[1]]
        self.rows = sorted({b.row for b in self.boxes} | {w.row for w in self.waits})
        self.end = max(s.end for s in self.spans.values())
        # Room for what is said of who is stuck.
        for wait in self.waits:
            if wait.end is None and self.stuck:
                self.end = max(self.end, self.reach(wait)[0] + int(width_of(stuck_text(wait), MIDDLE) / COLUMN) + 2)

    def choose(self) -> int:
        """The program in which the finding showed, else the first."""
        trace, at = self.trace, self.machine.at
        if self.stuck and trace.open:
            return min(w.row.program for w in trace.open.values())
        if trace.finding is not None and trace.boxes[-1].finding:
            return int(at.cluster.number)
        return min(b.row.program for b in trace.boxes)

    def together(self, boxes: list[Box], waits: list[Wait]) -> tuple[list[Box], Counter[Box]]:
        """What a role does over and over, while nobody else does anything, is one box; and how often it does it."""
        marks = sorted(step for w in waits for step in (w.start, w.end) if step is not None)
        alone = Counter(b.step for b in boxes)
        kept: list[Box] = []
        times: Counter[Box] = Counter()
        for box in boxes:
            last = kept[-1] if kept else None
            same = last is not None and last.row == box.row and what(last) == what(box)
            between = last is not None and bisect_left(marks, last.step) < bisect_right(marks, box.step)
            if last is None or not same or between or alone[box.step] > 1:
                kept.append(last := box)
            times[last] += 1
        return kept, times

    def columns(self, boxes: list[Box], waits: list[Wait]) -> dict[int, Span]:
        """The steps of this program in order, each as wide as the most that one row does in it."""
        widths = {w.start: 1 for w in waits}
        for box in boxes:
            widths[box.step] = max(widths.get(box.step, 1), box.nth + 1)
        spans, start = {}, 0
        for step in sorted(widths):
            spans[step] = Span(start, widths[step])
            start += widths[step]
        return spans

    def cut(self) -> None:
        """Keep the beginning, or the end of a run that has a finding."""
        first = self.all_columns - MOST_COLUMNS if self.trace.finding is not None else 0
        kept = {s: x for s, x in self.spans.items() if first <= x.start and x.end <= first + MOST_COLUMNS}
        offset = min(x.start for x in kept.values())
        self.spans = {s: Span(x.start - offset, x.width) for s, x in kept.items()}

    def reach(self, wait: Wait) -> tuple[int, int]:
        """From column to column, as far as it is in the picture."""
        first, last = min(self.spans), max(self.spans)
        if wait.start > last or (wait.end is not None and wait.end < first):
            return 0, 0
        start = self.spans[wait.start].start if wait.start >= first else 0
        if wait.end is not None and wait.end <= last:
            return start, self.spans[wait.end].end
        return start, getattr(self, "end", max(s.end for s in self.spans.values()))

    def place(self, row: Row, step: int, nth: int) -> tuple[float, float]:
        """(first column, columns) of a box: a role takes the whole step, engines share it."""
        span = self.spans[step]
        return (span.start + nth, 1) if row.engine else (span.start, span.width)

    def title(self) -> str:
        machine, finding = self.machine, self.trace.finding
        parts = [machine.compiled.name]
        if machine.programs > 1:
            parts.append(f"program {self.program} of {machine.programs}")
        parts.append(f"schedule {machine.schedule.policy} {machine.schedule.seed}")
        shown = sum(s.width for s in self.spans.values())
        if shown < self.all_columns:
            parts.append(f"the {'last' if finding else 'first'} {shown} of {self.all_columns} steps")
        return ", ".join(parts) + (f": {type(finding).__name__}" if finding else "")

    def save(self, path: Path) -> None:
        import matplotlib
        from matplotlib.figure import Figure

        # Text stays text, and nothing in the file depends on when it was made.
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gluon_cpu", "hatch.linewidth": 0.6}):
            left = 0.2 + max(width_of(row.name, MIDDLE) for row in self.rows)
            handles = self.handles()
            legend = sum(0.5 + width_of(handle.get_label(), MIDDLE) for handle in handles)
            title = self.title()
            width = max(left + self.end * COLUMN + 0.4, legend, 0.2 + width_of(title, MIDDLE + 2))
            top, bottom = 0.4, 0.62
            height = top + len(self.rows) * ROW + bottom
            figure = Figure(figsize=(width, height), facecolor="white")
            axis = figure.add_axes((0, bottom / height, 1, len(self.rows) * ROW / height))
            axis.set_axis_off()
            axis.set_xlim(-left / COLUMN, (width - left) / COLUMN)
            axis.set_ylim(len(self.rows) - 0.5, -0.5)
            tips = dict(self.fill(axis))
            figure.text(0.1 / width, 1 - 0.25 / height, title, fontsize=MIDDLE + 1, weight="bold")
            figure.text(left / width, 0.42 / height, "steps of the scheduler →  (order, not time)", fontsize=MIDDLE)
            figure.legend(
                handles=handles, loc="lower left", ncols=len(handles), frameon=False, fontsize=MIDDLE - 0.5,
                handlelength=1.6, columnspacing=1.2, borderaxespad=0.2,
            )  # fmt: skip
            buffer = io.BytesIO()
            metadata = {"Date": None} if path.suffix == ".svg" else {}
            figure.savefig(buffer, format=path.suffix[1:], dpi=120, metadata=metadata)
        data = buffer.getvalue()
        path.write_bytes(with_tips(data.decode(), tips).encode() if path.suffix == ".svg" else data)

    def fill(self, axis: Any) -> Iterator[tuple[str, str]]:
        """Draw all; yields what a browser shows of each part under the mouse: (name of the part, text)."""
        height = {row: i for i, row in enumerate(self.rows)}
        for row, y in height.items():
            axis.text(-1, y, row.name, fontsize=MIDDLE, ha="right", va="center")
            axis.plot([0, self.end], [y, y], color="#dddddd", linewidth=0.6, zorder=0)
        for i, wait in enumerate(self.waits):
            yield f"wait-{i}", self.draw_wait(axis, wait, height[wait.row], f"wait-{i}")
        for i, box in enumerate(self.boxes):
            yield f"box-{i}", self.draw_box(axis, box, height[box.row], f"box-{i}")
        for row, step in self.trace.ends.items():
            if row in height and step in self.spans:
                x = self.spans[step].end + 0.4
                axis.text(x, height[row], "done", fontsize=SMALL, va="center", color=GREY, bbox=PAPER)
        for i, wait in enumerate(self.waits):
            if wait.ended_by is not None and wait.end in self.spans and wait.ended_by[0] in height:
                yield f"arrow-{i}", self.draw_arrow(axis, wait, height, f"arrow-{i}")

    def draw_box(self, axis: Any, box: Box, y: int, name: str) -> str:
        from matplotlib.patches import Rectangle

        engine = box.row.engine
        colour = STUCK if box.finding else PRODUCT if engine in PRODUCTS else COPY if engine else ROLE
        x, width = self.place(box.row, box.step, box.nth)
        axis.add_patch(Rectangle((x + 0.06, y - BOX / 2), width - 0.12, BOX, color=colour, linewidth=0, gid=name))
        text = text_of(box.info, box.row, self.times[box])
        axis.text(x + width / 2, y, text, fontsize=SMALL, rotation=90, ha="center", va="center", color="white")
        if box.info is None:
            return f"{box.row.name} starts"
        here = f"{type(self.trace.finding).__name__} showed here\n" if box.finding else ""
        return f"{here}{box.row.name}: {box.info.what}\nat {box.info.site.where}\n{box.info.site.source}"

    def draw_wait(self, axis: Any, wait: Wait, y: int, name: str) -> str:
        from matplotlib.patches import Rectangle

        start, end = self.reach(wait)
        forever = wait.end is None and self.stuck
        colour = STUCK if forever else GREY
        text, size = (stuck_text(wait), MIDDLE) if forever else (name_of(wait.target), SMALL)
        axis.add_patch(
            Rectangle((start + 0.06, y - BOX / 2), end - start - 0.12, BOX, facecolor="white", edgecolor=colour,
                      hatch="////", linewidth=0.8, gid=name)
        )  # fmt: skip
        room = (end - start) * COLUMN
        if width_of(text, size) < room:
            way = 0
        elif width_of(text, SMALL) < BOX * ROW and room > SMALL / 72:
            way = 90
        else:
            return f"{wait.row.name} waits: {text}"
        axis.text(
            (start + end) / 2, y, text, fontsize=size, rotation=way, ha="center", va="center", bbox=PAPER,
            color=STUCK if forever else "black",
        )  # fmt: skip
        return f"{wait.row.name} waits: {text}"

    def draw_arrow(self, axis: Any, wait: Wait, height: dict[Row, int], name: str) -> str:
        assert wait.ended_by is not None
        row, step, nth = wait.ended_by
        x, width = self.place(row, step, nth)
        up = -1 if height[wait.row] < height[row] else 1
        arrow = axis.annotate(
            "", (x + width / 2, height[wait.row] - up * BOX / 2), (x + width / 2, height[row] + up * BOX / 2),
            arrowprops={"arrowstyle": "-|>", "color": ARROW, "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0,
                        "mutation_scale": 7},
        )  # fmt: skip
        arrow.arrow_patch.set_gid(name)
        return f"{row.name} ends the wait of {wait.row.name} for {name_of(wait.target)}"

    def handles(self) -> list[Any]:
        """What the legend shows: of the colours, those that are in the picture."""
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        engines = {("copy", "product")[b.row.engine in PRODUCTS] for b in self.boxes if b.row.engine}
        needed = (
            True,
            "copy" in engines,
            "product" in engines,
            any(w.end is not None or not self.stuck for w in self.waits),
            self.stuck and any(w.end is None for w in self.waits),
            any(b.finding for b in self.boxes),
        )
        handles: list[Any] = [
            Patch(facecolor=face, edgecolor=edge or face, hatch="////" if edge else None, label=label)
            for (face, edge, label), wanted in zip(LEGEND, needed, strict=True)
            if wanted
        ]
        if any(w.ended_by for w in self.waits):
            handles.append(Line2D([], [], color=ARROW, marker=">", markersize=4, linewidth=1, label="ends the wait"))
        return handles


def with_tips(svg: str, tips: dict[str, str]) -> str:
    """A title in each named part, which a browser shows under the mouse."""

    def titled(match: re.Match[str]) -> str:
        text = tips.get(match[1])
        return match[0] if text is None else f"{match[0]}<title>{html.escape(text)}</title>"

    return re.sub(r'<g id="([\w-]+)">', titled, svg)
