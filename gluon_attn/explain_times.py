"""What `python -m gluon_attn explain` says that a row and its alternatives took: in table files and result files."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import tuning
from .backward.configs import label as backward_label
from .backward.table import BackwardRow
from .device import Device
from .forward.configs import label
from .forward.table import Row
from .kernels.common.mask import Mask
from .problem import Problem
from .table_file import Measured
from .tensors import NAMED_DTYPES

ALTERNATIVES = 8  # that are listed
# Timed beside other points to compare their clocks with those of another run: no alternative of theirs.
ANCHOR = "cudnn causal D=128 B=1 H=16 16384"
CONFIRMED = (
    "  those above it were faster in the search: of those that were timed anew beside the one in use, it is the fastest"
)
PEERS = ("cudnn", "fa2", "flex")  # in result files, where names of configs are


def rows_like(row: Row | BackwardRow, table: tuning.Table) -> Sequence[Row | BackwardRow]:
    """The file's rows of that kind."""
    return table.rows if isinstance(row, Row) else table.backward_rows


def measured_lines(row: Row | BackwardRow, problem: Problem, device: Device, results: Path) -> Iterator[str]:
    """What the row and its alternatives took."""
    for table in tuning.serving(device):
        of_rows = table.measured if isinstance(row, Row) else table.backward_measured
        for own, found in zip(rows_like(row, table), of_rows, strict=True):
            if own is row and found is not None:
                gain = f"{found.gain:+.1%} ±{found.spread:.1%} over {found.in_use}"
                if found.chosen == found.in_use:
                    gain = "it was in use already, and nothing that was timed was faster"
                yield f"measured for {table.source}, {table.provenance['date']}: {gain}"
                yield at_shape(found)
                yield from times(found.ms, found.chosen)
                if found.chosen != found.in_use and found.ms[found.chosen] > min(found.ms.values()):
                    yield CONFIRMED
                return
    if row.result_file is None:
        yield "measured: nothing, this row waits for its measurement"
        return
    file = results / row.result_file
    if not file.exists():
        yield f"measured: in bench/results/{row.result_file}, which a checkout has and an installed package has not"
        return
    content = json.loads(file.read_text(encoding="utf-8"))
    if "points" not in content:  # a table file, from which the row was taken
        assert isinstance(row, Row)
        found, name = of_search(file, row)
        yield f"measured on an {row.card}, {row.date} (bench/results/{row.result_file})"
        yield at_shape(found)
        yield from times(found.ms, name)
        return
    date = when(row.date, content)
    yield from times_of_points(content["points"], row.result_file, date, name_in_results(row), row, problem, device)
    others = results / row.candidates_file if isinstance(row, BackwardRow) and row.candidates_file else None
    if isinstance(row, BackwardRow) and others is not None and others.exists():
        content = json.loads(others.read_text(encoding="utf-8"))
        of_config = backward_label(row.config)
        date = when(content["provenance"]["date"], content)
        yield from times_of_points(content["points"], others.name, date, of_config, row, problem, device)


def when(date: str | None, content: Mapping[str, Any]) -> str | None:
    """The date, and the commit that a result file is of: kernels of another one may be slower."""
    commit = content.get("provenance", {}).get("commit")
    return f"{date}, commit {commit[:7]}" if commit else date


def times_of_points(
    points: Sequence[Mapping[str, Any]],
    name_of_file: str,
    date: str | None,
    name: str,
    row: Row | BackwardRow,
    problem: Problem,
    device: Device,
) -> Iterator[str]:
    """What the row's config, which has that name there, and others took at the nearest point of a result file."""
    point = nearest(points, name, row, problem)
    if point is None:
        yield f"measured: no point of bench/results/{name_of_file} is of that kind"
        return
    yield f"measured on an {row.card}, {date} (bench/results/{name_of_file})"
    plain = ", plain" * (problem.scores is not None or problem.mask != Mask(causal=problem.causal))
    heads = f"batch {point['point']['batch']}, {point['point']['heads']} heads"
    elsewhere = "" if serves_at(row, point["point"], problem, device) else ", which is beyond the row"
    yield f"  at the nearest point, {point['name']}, {heads}{plain}{elsewhere}"
    yield from times({n: found["ms"] for n, found in point["results"].items() if n != ANCHOR}, name)


def serves_at(row: Row | BackwardRow, given: Mapping[str, Any], problem: Problem, device: Device) -> bool:
    """Whether the row serves a problem like that one, of a point's sizes: with more work, or shorter, it may not."""
    length, heads = given["length"], given["heads"]
    kv_heads = heads // given.get("heads_per_kv_head", 1)
    sizes = replace(
        problem, batch=given["batch"], heads=heads, kv_heads=kv_heads, q_len=length, kv_len=length,
        head_dim=given["head_dim"], head_dim_v=given.get("head_dim_v") or given["head_dim"],
    )  # fmt: skip
    return (row.unmet(sizes, device, None) if isinstance(row, Row) else row.unmet(sizes)) is None


def at_shape(found: Measured) -> str:
    return f"  at {', '.join(f'{name} {value}' for name, value in found.shape.items())}"


def of_search(file: Path, row: Row) -> tuple[Measured, str]:
    """What a table file has measured for the sizes of a row that was taken from it, and the name of its config there.
    The row may serve more sizes, and have a simpler config that was as fast."""
    name = f"{label(row.config)} {row.config.softmax_registers}/{row.config.load_registers}"
    table = tuning.read(file)
    for own, found in zip(table.rows, table.measured, strict=True):
        within = row.min_kv_len <= own.min_kv_len <= (own.max_kv_len or math.inf) <= (row.max_kv_len or math.inf)
        if found is not None and name in found.ms and within and own.head_dims == row.head_dims:
            return found, name
    raise ValueError(f"{file}: expected times of {name} for its row, got none; give the row its own file")


def name_in_results(row: Row | BackwardRow) -> str:
    """What a row's result file calls its config: one of gradients times none but the table's."""
    return label(row.config) if isinstance(row, Row) else "ours"


def times(ms: Mapping[str, float], chosen: str) -> Iterator[str]:
    """The fastest first, the chosen one marked."""
    ordered = sorted(ms, key=lambda name: ms[name])
    shown = [name for i, name in enumerate(ordered) if i < ALTERNATIVES or name == chosen]
    for name in shown:
        mark, timed = "*" if name == chosen else " ", f"{ms[name]:9.4f} ms {ms[name] / ms[ordered[0]]:6.2f} x"
        yield f"  {mark} {name:<34} {timed}  {what_is(name)}".rstrip()
    if len(ordered) > len(shown):
        yield f"    and {len(ordered) - len(shown)} that are slower"


def what_is(name: str) -> str:
    """What a result file times beside configs, and in place of them; of a config nothing."""
    of, _, mode = name.partition(", ")
    if of == "ours":
        return "(ours in another mode)" if mode else "(with this row)"
    return "(a peer)" if of in PEERS else ""


def nearest(
    points: Sequence[Mapping[str, Any]], name: str, row: Row | BackwardRow, problem: Problem
) -> Mapping[str, Any] | None:
    """The point of the row's kind, where its config has that name, whose length and whose heads are nearest, as
    ratios."""

    def of_kind(point: Mapping[str, Any]) -> bool:
        given = point["point"]
        of_point = Problem.padded(given["head_dim"]), Problem.padded(given.get("head_dim_v") or given["head_dim"])
        causal = problem.causal if row.causal is None else row.causal
        kind = of_point, given["causal"], NAMED_DTYPES[given["dtype"]].itemsize
        asked = "backward" if isinstance(row, BackwardRow) else "forward"
        # Sums in a fixed order are not what is asked about.
        of_row = point.get("pass", asked) == asked and name in point["results"] and not point.get("in_order")
        return of_row and kind == (row.head_dims, causal, problem.dtype.itemsize)

    def distance(point: Mapping[str, Any]) -> float:
        given = point["point"]
        heads = given["batch"] * given["heads"] / (problem.batch * problem.heads)
        keys = problem.mask.most_keys(problem.kv_len)
        return abs(math.log2(given["length"] / keys)) + abs(math.log2(heads)) / 2

    return min(filter(of_kind, points), key=distance, default=None)
