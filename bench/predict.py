"""What the time of a config is expected to be, from its cut alone; and how far that is off where it was timed.

    python -m bench.predict               # fit and judge by bench/results/h200_candidates.json; no card is needed
    python -m bench.predict --out FILE    # and write what was found

A key block costs a CTA what its tensor cores, its exponential and issue units and its loads of K and V take, and no
less than what one role does one after the other. A launch takes as long as the program with the most blocks. The few
constants are fitted to what was timed; a config is judged by a fit to others.
"""

import argparse
import itertools
import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from bench.points import DTYPES, Point
from gluon_attn.device import Device
from gluon_attn.forward.configs import ForwardConfig, HopperConfig
from gluon_attn.forward.plan import Plan
from gluon_attn.forward.table import hopper_config
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.problem import Problem

ROOT = Path(__file__).parents[1]
TIMED = ROOT / "bench" / "results" / "h200_candidates.json"
PREDICTED = ROOT / "bench" / "results" / "h200_predicted.json"
CLOCK_GHZ = 1.7  # that cycles are counted at; what the card's own is beside it is in the constants
FLOPS_PER_CYCLE = {2: 4096, 1: 8192}  # of a processor's tensor cores, by bytes of an element
EXP2_PER_CYCLE = 16
COPY_BYTES_PER_S = 3e12  # of the kernel that transposes V
LABEL = re.compile(
    r"(?P<roles>\d)x(?P<keys>\d+) q(?P<queries>\d)kv(?P<slots>\d)(?P<turns>[Tt]?)(?:e(?P<early>\d))?(?P<integer>i?)"
    r"(?P<staged>s?)(?P<transpose>(?: v)?)(?P<longest>l?) (?P<ctas>\d)cta"
)
SOFTMAX_REGISTERS = {1: 232, 2: 232, 3: 160, 4: 112}

AnyConstants = TypeVar("AnyConstants", bound=Any)  # dataclasses of floats
AnySample = TypeVar("AnySample", bound="Timed")


class Timed(Protocol):
    """What an error table asks of a sample."""

    @property
    def point(self) -> Point: ...

    @property
    def ms(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Fitted. tensor, issue, exp2: multiples of what the units take at least; exposed: likewise, of the softmax of a
    role beside which nothing runs. load: bytes of K and V that a processor gets in a cycle. sharpness: how well one
    unit's time is hidden behind another's, the p of a p-norm. turns, early (a quarter), cluster: factors of a block's
    time. row_block, row_block_column: cycles for one, and for a column of O. transpose_us: for a kernel before."""

    tensor: float = 1.1
    issue: float = 1.0
    exp2: float = 0.7
    exposed: float = 1.0
    load: float = 32.0
    sharpness: float = 3.0
    turns: float = 1.0
    early: float = 1.0
    cluster: float = 1.0
    row_block: float = 1000.0
    row_block_column: float = 10.0
    launch_us: float = 4.0
    transpose_us: float = 3.0


@dataclass(frozen=True)
class Counts:
    """Of a config at a shape. For a CTA and a key block: tensor, exp2: cycles of these units; issue, masked_issue:
    issue slots, where keys are hidden more of them; bytes: loaded. roles: that do it. Of the program that has most to
    do: blocks, masked, row_blocks. columns: of O. transposed_bytes: of V, read and written before; 0 for none."""

    roles: int
    tensor: float
    issue: float
    masked_issue: float
    exp2: float
    bytes: float
    blocks: float
    masked: float
    row_blocks: float
    columns: int
    turns: bool
    early: int
    cluster: bool
    transposed_bytes: float

    @staticmethod
    def of(problem: Problem, config: HopperConfig, device: Device) -> "Counts":
        d, d_v, size = problem.padded_head_dim, problem.padded_head_dim_v, problem.dtype.itemsize
        rows, keys, roles = config.ROWS_PER_CTA, config.block_n, config.softmax_roles
        slots = issue_slots(keys, d_v, size, config.integer_max)
        blocks, masked, row_blocks = most_of_a_program(Plan.of(problem, config, device))
        values = problem.batch * problem.kv_heads * problem.kv_len * d_v * size
        return Counts(
            roles=roles,
            tensor=roles * 2 * rows * keys * (d + d_v) / FLOPS_PER_CYCLE[size],
            issue=roles * slots,
            masked_issue=roles * (issue_slots(keys, d_v, size, False) + 0.85 * keys),
            exp2=roles * rows * keys / EXP2_PER_CYCLE,
            bytes=keys * (d + d_v) * size / config.num_ctas,
            blocks=blocks,
            masked=masked,
            row_blocks=row_blocks,
            columns=d_v,
            turns=config.turns,
            early=config.early_exp,
            cluster=config.num_ctas > 1,
            transposed_bytes=2 * values if config.transposes_before(size) else 0,
        )


def issue_slots(keys: int, head_dim_v: int, element_bytes: int, integer_max: bool) -> float:
    """Instructions of a warp for a key block: for each score of a thread, and each number of O; as counted in the
    kernels of the result file, within 7 %."""
    of_score = 5.2 if element_bytes == 2 else 4.6
    return 46 + (of_score - 0.45 * integer_max) * keys / 2 + 1.5 * head_dim_v / 2


def most_of_a_program(plan: Plan) -> tuple[int, int, int]:
    """(key blocks, of which some keys are hidden in so many, row blocks) of the program with most key blocks."""
    problem, config = plan.problem, plan.config
    row_blocks = -(-problem.q_len // config.block_m)
    heads = problem.batch * problem.heads

    def cost(index: int) -> tuple[int, int, int]:
        first = index * config.block_m
        last = min(first + config.block_m, problem.q_len) - 1
        seen = -(-problem.mask.keys_seen(first, last, problem.q_len, problem.kv_len) // config.block_n)
        whole = problem.mask.keys_seen(first, first, problem.q_len, problem.kv_len) // config.block_n
        return seen, seen - whole, 1

    costs = np.array([cost(i) for i in range(row_blocks)])
    one_by_one = plan.heads_longest_first
    if plan.blocks_per_item == 2:
        light = costs[: row_blocks // 2]
        heavy = costs[::-1][: row_blocks // 2]
        middle = costs[row_blocks // 2 : row_blocks // 2 + row_blocks % 2]
        items = np.concatenate([heavy + light, middle])
    else:
        items, one_by_one = costs, 0
    order = [items] * (heads - one_by_one) + [np.repeat(costs[::-1], one_by_one, axis=0)] * (one_by_one > 0)
    every = np.concatenate(order)
    every = np.concatenate([every, np.zeros((-len(every) % plan.programs, 3), dtype=every.dtype)])
    of_programs = every.reshape(-1, plan.programs, 3).sum(0)
    blocks, masked, whole = of_programs[of_programs[:, 0].argmax()]
    return int(blocks), int(masked), int(whole)


def predicted_ms(counts: Sequence[Counts], c: Constants) -> np.ndarray:
    """Of each."""
    columns = {f.name: np.array([getattr(one, f.name) for one in counts], dtype=float) for f in fields(Counts)}

    def block(issue: np.ndarray) -> np.ndarray:
        softmax = c.issue * issue + c.exp2 * columns["exp2"]
        alone = (columns["tensor"] + c.exposed * (issue + columns["exp2"])) / columns["roles"]
        units = [c.tensor * columns["tensor"], softmax, columns["bytes"] / c.load, alone]
        together = np.sum([unit**c.sharpness for unit in units], axis=0) ** (1 / c.sharpness)
        factors = c.turns ** columns["turns"] * c.early ** columns["early"] * c.cluster ** columns["cluster"]
        return np.asarray(together * factors)

    cycles = block(columns["issue"]) * (columns["blocks"] - columns["masked"])
    cycles += block(columns["masked_issue"]) * columns["masked"]
    cycles += columns["row_blocks"] * (c.row_block + c.row_block_column * columns["columns"])
    before_ms = (columns["transposed_bytes"] > 0) * c.transpose_us / 1e3
    before_ms += 1e3 * columns["transposed_bytes"] / COPY_BYTES_PER_S
    return np.asarray(cycles / CLOCK_GHZ / 1e6 + c.launch_us / 1e3 + before_ms)


def fitted(counts: Sequence[Counts], ms: Sequence[float]) -> Constants:
    return fitted_by(lambda c: predicted_ms(counts, c), Constants(), ms)


def fitted_by(
    predict: Callable[[AnyConstants], np.ndarray], start: AnyConstants, ms: Sequence[float], sweeps: int = 60
) -> AnyConstants:
    """By the mean square of the logarithm's error: each constant in turn a little more or less, in steps that become
    smaller. predict: milliseconds of each, by constants, a dataclass of which one is the `sharpness`."""
    wanted = np.log(np.array(ms))

    def loss(c: AnyConstants) -> float:
        return float(np.mean((np.log(predict(c)) - wanted) ** 2))

    best = start
    least, step = loss(best), 1.5
    for _ in range(sweeps):
        before = least
        for f, factor in itertools.product(fields(start), (step, 1 / step)):
            tried = replace(best, **{f.name: getattr(best, f.name) * factor})
            if f.name == "sharpness" and not 1 <= getattr(tried, f.name) <= 20:
                continue
            found = loss(tried)
            if found < least:
                best, least = tried, found
        if least > before * 0.999:
            step = step**0.6
    return best


def constants(path: Path = PREDICTED) -> Constants:
    """Those fitted to all that was timed."""
    return Constants(**json.loads(path.read_text(encoding="utf-8"))["constants"])


def can_order(problem: Problem, device: Device) -> bool:
    """Whether what is predicted says which configs to try first: for kinds whose error table has it so."""
    kinds = (64, 64, False), (64, 64, True), (128, 128, False)
    kind = problem.padded_head_dim, problem.padded_head_dim_v, problem.mask.causal
    return device.arch == 90 and kind in kinds and problem.dtype == torch.bfloat16


def in_order(configs: Iterable[HopperConfig], problem: Problem, device: Device) -> list[HopperConfig]:
    """Those predicted to be the fastest first."""
    listed = list(configs)
    ms = predicted_ms([Counts.of(problem, config, device) for config in listed], constants())
    return [listed[i] for i in np.argsort(ms, kind="stable")]


def is_plain(problem: Problem, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether it is of one of these dtypes, and like the points that were timed: without a mask or causal, with as many
    keys as queries, and with scores as they are."""
    plain = problem.mask == Mask(causal=problem.causal) and problem.scores is None and problem.score_mod is None
    alike = problem.sequences is None and problem.sinks is None and problem.q_len == problem.kv_len
    return plain and alike and problem.bias is None and problem.dtype in dtypes


def expected_ms(configs: Sequence[ForwardConfig], problem: Problem, device: Device) -> Sequence[float] | None:
    """Of each; None for a problem of a kind of which nothing was judged."""
    d, d_v = problem.padded_head_dim, problem.padded_head_dim_v
    judged = d == d_v != 192 and is_plain(problem, (torch.bfloat16, torch.float8_e4m3fn))
    listed = [config for config in configs if isinstance(config, HopperConfig)]
    if device.arch != 90 or not judged or len(listed) < len(configs):
        return None
    return [float(ms) for ms in predicted_ms([Counts.of(problem, c, device) for c in listed], constants())]


def config_of(label: str, element_bytes: int) -> HopperConfig:
    """The config that a result file names so. It leaves registers out, which the counts do not need."""
    found = LABEL.fullmatch(label)
    if found is None:
        raise ValueError(f"label: expected one as '2x128 q2kv2Te2il 1cta', got {label!r}")
    roles, transpose = int(found["roles"]), bool(found["transpose"])
    return hopper_config(
        roles, int(found["keys"]), int(found["queries"]), int(found["slots"]),
        216 if transpose else SOFTMAX_REGISTERS[roles], turns=bool(found["turns"]), early_exp=int(found["early"] or 0),
        integer_max=bool(found["integer"]), stage_in_queries=bool(found["staged"]), num_ctas=int(found["ctas"]),
        transpose_registers=56 if transpose else 0, last_heads_longest_first=bool(found["longest"]),
    )  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """What was timed. part: of four, by halves of the configs and of the lengths. Configs that differ in the number of
    CTAs alone are in one half."""

    point: Point
    label: str
    part: int
    counts: Counts
    ms: float

    @property
    def kind(self) -> str:
        return f"{self.point.dtype} D={self.point.head_dim} {'causal' if self.point.causal else 'full'}"


def samples(found: Mapping[str, Any], device: Device) -> list[Sample]:
    timed = [(Point(**p["point"]), p["results"]) for p in found["points"]]
    names: dict[tuple[str, int], dict[str, None]] = defaultdict(dict)
    for point, results in timed:
        names[point.dtype, point.head_dim] |= {label.rpartition(" ")[0]: None for label in results if label != "cudnn"}
    half = {(*kind, name): i % 2 for kind, of_kind in names.items() for i, name in enumerate(sorted(of_kind))}
    lengths = {length: i % 2 for i, length in enumerate(sorted({point.length for point, _ in timed}))}
    return [
        Sample(
            point,
            label,
            2 * half[point.dtype, point.head_dim, label.rpartition(" ")[0]] + lengths[point.length],
            Counts.of(problem_of(point), config_of(label, DTYPES[point.dtype].itemsize), device),
            result["ms"],
        )
        for point, results in timed
        for label, result in results.items()
        if label != "cudnn"
    ]


def problem_of(point: Point) -> Problem:
    return Problem(
        dtype=DTYPES[point.dtype], batch=point.batch, heads=point.heads,
        kv_heads=point.heads // point.heads_per_kv_head, q_len=point.length, kv_len=point.length,
        head_dim=point.head_dim, head_dim_v=point.head_dim_v, causal=point.causal, scale=1.0, layout="bhsd",
    )  # fmt: skip


def rates(every: Sequence[Sample], ms: Sequence[float]) -> dict[str, dict[str, float]]:
    """TFLOP/s, by the name of the point and of the config."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for s, m in zip(every, ms, strict=True):
        found[s.point.name][s.label] = round(s.point.flops / m / 1e9, 1)
    return found


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's. Those that are equal share the mean of their ranks; 0 where all are."""

    def ranks(values: Sequence[float]) -> list[float]:
        return [sum((b < a) + (b <= a) for b in values) / 2 for a in values]

    if len(set(one)) == 1 or len(set(other)) == 1:
        return 0.0
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def judged(every: Sequence[Sample]) -> tuple[list[Constants], list[float]]:
    """The constants of each part, fitted to the one that has neither its configs nor its lengths; and what they make of
    each sample."""
    fits = []
    ms = np.zeros(len(every))
    for part in range(4):
        known = [s for s in every if s.part == part ^ 3]
        fits.append(fitted([s.counts for s in known], [s.ms for s in known]))
        unseen = [i for i, s in enumerate(every) if s.part == part]
        ms[unseen] = predicted_ms([every[i].counts for i in unseen], fits[-1])
    return fits, [float(m) for m in ms]


def error_table(
    every: Sequence[AnySample], ms: Sequence[float], of: Callable[[AnySample], str]
) -> list[dict[str, Any]]:
    """By kind: errors of configs at lengths, of which the fit has seen neither, and rank correlations among all configs
    of a point, if it has several."""
    table = []
    for kind in dict.fromkeys(map(of, every)):
        errors = [m / s.ms - 1 for s, m in zip(every, ms, strict=True) if of(s) == kind]
        points: dict[Point, list[tuple[float, float]]] = defaultdict(list)
        for s, m in zip(every, ms, strict=True):
            if of(s) == kind:
                points[s.point].append((s.ms, m))
        several = [pairs for pairs in points.values() if len(pairs) > 1]
        correlations = [rank_correlation(*zip(*pairs, strict=True)) for pairs in several]
        lost = [lost_by_choice(pairs) for pairs in several]
        table.append(
            {
                "kind": kind,
                "points": len(points),
                "samples": len(errors),
                "mean_error": statistics.mean(map(abs, errors)),
                "max_error": max(map(abs, errors)),
                "within_tenth": statistics.mean(float(abs(error) < 0.1) for error in errors),
                "rank_correlation": statistics.mean(correlations),
                "lost_by_choice": statistics.mean(lost),
                "fastest_among_first_half": statistics.mean(float(in_first_half(pairs)) for pairs in several),
            }
        )
    return table


def lost_by_choice(pairs: Sequence[tuple[float, float]]) -> float:
    """By how much the config that is predicted to be the fastest is slower than the one that is; of several, the
    slowest."""
    return min(pairs, key=lambda pair: (pair[1], -pair[0]))[0] / min(pairs)[0] - 1


def in_first_half(pairs: Sequence[tuple[float, float]]) -> bool:
    """Whether the fastest is in the half that is predicted to be the faster; of equal ones it is the last."""
    ordered = sorted(pairs, key=lambda pair: (pair[1], -pair[0]))
    return min(pairs) in ordered[: -(-len(ordered) // 2)]


def named(file: Path) -> str:
    """Within the checkout, if it is there."""
    return file.resolve().relative_to(ROOT).as_posix() if file.resolve().is_relative_to(ROOT) else str(file)


def lines(table: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    yield "| kind | error | largest | within 10 % | rank correlation | lost by its choice | fastest in first half |"
    yield "|---|---|---|---|---|---|---|"
    for row in table:
        yield (
            f"| {row['kind']} | {row['mean_error']:.0%} | {row['max_error']:.0%} | {row['within_tenth']:.0%} | "
            f"{row['rank_correlation']:.2f} | {row['lost_by_choice']:.1%} | {row['fastest_among_first_half']:.0%} |"
        )


def came_from(file: Path, found: Mapping[str, Any]) -> dict[str, Any]:
    """What times these are. found: the file's contents."""
    return {"file": named(file), **{name: found["provenance"][name] for name in ("date", "card", "commit")}}


def write(
    out: Path, timed: Any, of_all: Any, of_parts: Sequence[Any], errors: Any, rates: Mapping[str, Mapping[str, float]]
) -> None:
    """The result file. of_all, of_parts: constants, dataclasses, fitted to all times and to each part."""
    written = {
        "timed": timed,
        "constants": asdict(of_all),
        "constants_of_parts": [asdict(fit) for fit in of_parts],
        "errors": errors,
        "predicted_tflops": rates,
    }
    out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(f"written: {out}")


def main(arguments: Sequence[str]) -> None:
    command = argparse.ArgumentParser(
        prog="python -m bench.predict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("--timed", type=Path, default=TIMED, help=f"by what is judged (default: {named(TIMED)})")
    command.add_argument("--out", type=Path, help="result file to write (JSON)")
    args = command.parse_args(arguments)
    found = json.loads(args.timed.read_text(encoding="utf-8"))
    every = samples(found, Device.hopper())
    fits, ms = judged(every)
    table = error_table(every, ms, lambda s: s.kind) + error_table(every, ms, lambda s: "all")
    for line in lines(table):
        print(line)
    if args.out:
        of_all = fitted([s.counts for s in every], [s.ms for s in every])
        write(args.out, came_from(args.timed, found), of_all, fits, table, rates(every, ms))


if __name__ == "__main__":
    main(sys.argv[1:])
