"""What gradients are expected to take, from a config's cut alone; and how far that is off where it was timed.

    python -m bench.predict_gradients               # fit and judge by what was timed; no card is needed
    python -m bench.predict_gradients --out FILE    # and write what was found

As in predict.py. A step is a row block of a key block: five products, exponentials and the other instructions. Loads
and sums are left out: in a fit they cost nothing. Before and after the main kernel were others when it was timed, which
take what their bytes take. To times of an H200 it is fitted; those of an H100 are predicted by that.
"""

import argparse
import heapq
import json
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import predict
from bench.points import Point
from bench.predict import (
    CLOCK_GHZ,
    EXP2_PER_CYCLE,
    FLOPS_PER_CYCLE,
    came_from,
    error_table,
    fitted_by,
    lines,
    problem_of,
    write,
)
from gluon_attn.backward.configs import HopperBackward
from gluon_attn.backward.plan import BackwardPlan, row_blocks_of
from gluon_attn.backward.table import padded_head_dims
from gluon_attn.device import Device
from gluon_attn.problem import Problem

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
FITTED = tuple(RESULTS / f"h200_{name}.json" for name in ("tune", "gradients_dq_slots"))
OTHER_CARD = (RESULTS / "h100_tune_gradients.json",)
CARD = "H200"  # that is fitted
PREDICTED = RESULTS / "h200_predicted_gradients.json"
LABEL = re.compile(
    r"(?P<block_m>\d+)x(?P<keys>\d+) q(?P<query_slots>\d)do(?P<dout_slots>\d)ds(?P<ds_slots>\d)"
    r"(?:dq(?P<dq_slots>\d))?(?P<in_step> in step)? r(?P<load_registers>\d+)"
)


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Fitted. tensor, issue, exp2: multiples of what the units take at least; sharpness: as in predict.py. in_step,
    two_ds, deep: factors of a step's time, of rings in step, two tiles of dS, more than two slots of Q. step: cycles
    that each costs besides. key_block, key_block_column: cycles for one, and for a column of dK and dV. around: bytes
    that the kernels before and after move in a nanosecond."""

    tensor: float = 1.1
    issue: float = 1.0
    exp2: float = 0.7
    sharpness: float = 3.0
    in_step: float = 1.0
    two_ds: float = 1.0
    deep: float = 1.0
    step: float = 100.0
    key_block: float = 1000.0
    key_block_column: float = 10.0
    launch_us: float = 8.0
    around: float = 2500.0


@dataclass(frozen=True)
class Counts:
    """Of a config at a shape. For a step: tensor, exp2: cycles of these units; issue, masked_issue: issue slots, where
    keys are hidden more of them. Of the program that has most to do: steps, masked, key_blocks. columns: of dK and dV.
    around_bytes: that the kernels before and after move."""

    tensor: float
    issue: float
    masked_issue: float
    exp2: float
    steps: float
    masked: float
    key_blocks: float
    columns: int
    in_step: bool
    two_ds: bool
    deep: bool
    around_bytes: float

    @staticmethod
    def of(problem: Problem, config: HopperBackward, device: Device) -> "Counts":
        d, d_v = padded_head_dims(problem.head_dim, problem.head_dim_v)
        rows, keys = config.block_m, config.keys
        scores = rows * keys / (HopperBackward.WARPS * 32)  # of a thread
        slots = issue_slots(config, d)
        steps, masked, key_blocks = most_of_a_program(BackwardPlan.of(problem, config, device))
        all_rows = problem.batch * problem.heads * problem.q_len
        return Counts(
            tensor=2 * rows * keys * (3 * d + 2 * d_v) / FLOPS_PER_CYCLE[2],
            issue=2 * slots,  # of two warpgroups, a warp of each on a scheduler
            masked_issue=2 * (slots + 2.2 * scores),
            exp2=rows * keys / EXP2_PER_CYCLE,
            steps=steps,
            masked=masked,
            key_blocks=key_blocks,
            columns=d + d_v,
            in_step=config.rings_in_step,
            two_ds=config.ds_slots > 1,
            deep=config.query_slots > 2,
            around_bytes=all_rows * (2 * 2 * d_v + (4 + 2) * d),  # O and dO; sums of dQ, and dQ
        )


def issue_slots(config: HopperBackward, head_dim: int) -> float:
    """Instructions of a warp for a step: for each score of a thread, and each number of dQ; as counted in the compiled
    kernels, within 5 %."""
    threads = HopperBackward.WARPS * 32
    return 144 + (4.5 * config.block_m * config.keys + 4.1 * config.block_m * head_dim) / threads


def most_of_a_program(plan: BackwardPlan) -> tuple[float, float, float]:
    """(steps, of which some keys are hidden in so many, key blocks) of the program with most steps, if who is free
    has the next item. Without a window, chunks or other limits."""
    problem, config = plan.problem, plan.config
    of_head = -(-problem.kv_len // config.keys)
    heads, group = problem.batch * problem.kv_heads, problem.heads // problem.kv_heads
    late = problem.q_len - problem.kv_len

    def cost(index: int) -> np.ndarray:
        steps = row_blocks_of(problem, config, index)
        last = min((index + 1) * config.keys, problem.kv_len) - 1 + late
        whole = max(0, -(-problem.q_len // config.block_m) - max(0, -(-last // config.block_m)))
        return np.array([group * steps, group * max(0, steps - whole) if problem.causal else 0, 1.0])

    costs = [cost(index) for index in range(of_head)]
    items = list(costs)
    if plan.blocks_per_item == 2:
        items = [costs[i] + (costs[-1 - i] if i != of_head - 1 - i else 0) for i in range(-(-of_head // 2))]
    whole_heads = items * (heads - plan.last_heads)
    order = whole_heads[: len(whole_heads) - plan.shared]
    left = plan.last_heads
    while left > 0:
        order += [one for one in costs for _ in range(min(left, plan.heads_at_once))]
        left -= plan.heads_at_once
    if plan.shared:
        order += [np.sum(whole_heads[-plan.shared :], axis=0) / plan.shared_parts] * plan.shared_parts
    done = [(0.0, i) for i in range(plan.programs)]
    found = np.zeros((plan.programs, 3))
    for item in order:
        busy, program = heapq.heappop(done)
        found[program] += item
        heapq.heappush(done, (busy + float(item[0]), program))
    steps, masked, key_blocks = found[found[:, 0].argmax()]
    return float(steps), float(masked), float(key_blocks)


def predicted_ms(counts: Sequence[Counts], c: Constants) -> np.ndarray:
    """Of each."""
    columns = {f.name: np.array([getattr(one, f.name) for one in counts], dtype=float) for f in fields(Counts)}

    def step(issue: np.ndarray) -> np.ndarray:
        arithmetic = c.issue * issue + c.exp2 * columns["exp2"]
        units = [c.tensor * columns["tensor"], arithmetic]
        together = np.sum([unit**c.sharpness for unit in units], axis=0) ** (1 / c.sharpness)
        factors = c.in_step ** columns["in_step"] * c.two_ds ** columns["two_ds"] * c.deep ** columns["deep"]
        return np.asarray((together + c.step) * factors)

    cycles = step(columns["issue"]) * (columns["steps"] - columns["masked"])
    cycles += step(columns["masked_issue"]) * columns["masked"]
    cycles += columns["key_blocks"] * (c.key_block + c.key_block_column * columns["columns"])
    return np.asarray(cycles / CLOCK_GHZ / 1e6 + c.launch_us / 1e3 + columns["around_bytes"] / c.around / 1e6)


def fitted(counts: Sequence[Counts], ms: Sequence[float]) -> Constants:
    return fitted_by(lambda c: predicted_ms(counts, c), Constants(), ms)


def constants(path: Path = PREDICTED) -> Constants:
    """Those fitted to all that was timed on one card."""
    return Constants(**json.loads(path.read_text(encoding="utf-8"))["constants"])


def expected_ms(configs: Sequence[HopperBackward], problem: Problem, device: Device) -> Sequence[float] | None:
    """Of each; None for a problem of a kind of which nothing was judged."""
    kind = padded_head_dims(problem.head_dim, problem.head_dim_v)
    if device.arch != 90 or kind not in ((64, 64), (128, 128)) or not predict.is_plain(problem, (torch.bfloat16,)):
        return None
    counts = [Counts.of(problem, config, device) for config in configs]
    return [float(ms) for ms in predicted_ms(counts, constants())]


def config_of(label: str) -> HopperBackward:
    """The config that a table file names so."""
    found = LABEL.fullmatch(label)
    if found is None:
        raise ValueError(f"label: expected one as '64x128 q2do2ds2 in step r24', got {label!r}")
    return HopperBackward(
        block_m=int(found["block_m"]), keys=int(found["keys"]), query_slots=int(found["query_slots"]),
        dout_slots=int(found["dout_slots"]), ds_slots=int(found["ds_slots"]), rings_in_step=bool(found["in_step"]),
        dq_slots=int(found["dq_slots"] or 1), load_registers=int(found["load_registers"]),
    )  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """What was timed. part: of four, by halves of the configs and of the lengths."""

    card: str
    point: Point
    label: str
    part: int
    counts: Counts
    ms: float

    @property
    def kind(self) -> str:
        return f"{self.card} D={self.point.head_dim} {'causal' if self.point.causal else 'full'}"


def samples(files: Sequence[Mapping[str, Any]], device: Device) -> list[Sample]:
    """Of table files: all configs where a row was found, and elsewhere the one in use. Of result files: the configs of
    each point, with sums in any order. Of times of the same config, the last file's count."""
    timed: dict[tuple[str, Point], dict[str, float]] = defaultdict(dict)
    for found in files:
        card = found["provenance"]["card"].split()[1]
        if "points" in found:
            for one in found["points"]:
                if not one["in_order"]:
                    timed[card, Point(**one["point"])] |= {name: t["ms"] for name, t in one["results"].items()}
            continue
        of_gradients = [one for one in found["provenance"]["shapes"] if one.get("of_gradients")]
        for one in [*of_gradients, *(row["measured"] for row in found["backward"])]:
            shape = one["shape"]
            point = Point(
                head_dim=shape["head_dim"], causal=shape["causal"], length=shape["q_len"], batch=shape["batch"],
                heads=shape["heads"],
            )  # fmt: skip
            timed[card, point] |= one["ms"]
    names: dict[int, dict[str, None]] = defaultdict(dict)
    for (_, point), ms in timed.items():
        names[point.head_dim] |= dict.fromkeys(ms)
    half = {(d, name): i % 2 for d, of_dim in names.items() for i, name in enumerate(sorted(of_dim))}
    lengths = {length: i % 2 for i, length in enumerate(sorted({point.length for _, point in timed}))}
    return [
        Sample(
            card,
            point,
            label,
            2 * half[point.head_dim, label] + lengths[point.length],
            Counts.of(problem_of(point), config_of(label), device),
            ms,
        )
        for (card, point), of_point in timed.items()
        for label, ms in of_point.items()
    ]


def judged(every: Sequence[Sample], card: str) -> tuple[list[Constants], list[float]]:
    """The constants of each part, fitted to the one that has neither its configs nor its lengths, on that card; and
    what they make of each sample, of any card."""
    fits, ms = [], np.zeros(len(every))
    for part in range(4):
        known = [s for s in every if s.part == part ^ 3 and s.card == card]
        fits.append(fitted([s.counts for s in known], [s.ms for s in known]))
        unseen = [i for i, s in enumerate(every) if s.part == part]
        ms[unseen] = predicted_ms([every[i].counts for i in unseen], fits[-1])
    return fits, [float(m) for m in ms]


def errors(every: Sequence[Sample], ms: Sequence[float], card: str) -> list[dict[str, Any]]:
    """By kind, on the card that was fitted; and of all on others."""
    here = [(s, m) for s, m in zip(every, ms, strict=True) if s.card == card]
    others = [(s, m) for s, m in zip(every, ms, strict=True) if s.card != card]
    found = []
    for pairs, of in ((here, lambda s: s.kind), (here, lambda s: f"{s.card} all"), (others, lambda s: f"{s.card} all")):
        found += error_table([s for s, _ in pairs], [m for _, m in pairs], of)
    return found


def rates(every: Sequence[Sample], ms: Sequence[float]) -> dict[str, dict[str, float]]:
    """TFLOP/s, by card and point, and by config."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for s, m in zip(every, ms, strict=True):
        found[f"{s.card} {s.point.name}"][s.label] = round(s.point.backward_flops / m / 1e9, 1)
    return found


def main(arguments: Sequence[str]) -> None:
    command = argparse.ArgumentParser(
        prog="python -m bench.predict_gradients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--out", type=Path, help="result file to write (JSON)")
    args = command.parse_args(arguments)
    paths = (*FITTED, *OTHER_CARD)
    files = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    every = samples(files, Device.hopper())
    fits, ms = judged(every, CARD)
    table = errors(every, ms, CARD)
    for line in lines(table):
        print(line)
    if args.out:
        here = [s for s in every if s.card == CARD]
        of_all = fitted([s.counts for s in here], [s.ms for s in here])
        timed = [came_from(path, found) for path, found in zip(paths, files, strict=True)]
        write(args.out, timed, of_all, fits, table, rates(every, ms))


if __name__ == "__main__":
    main(sys.argv[1:])
