"""docs/figures.md, docs/backward.md and the lab log show what the files of peers and of gradients have."""

import json
import math
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from gluon_attn.backward.plan import BackwardPlan
from gluon_attn.backward.table import pick_config
from gluon_attn.device import Device
from tests.gluon_attn.problems import problem

ROOT = Path(__file__).parents[2]
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PEERS = json.loads((ROOT / "bench" / "results" / "h200_peers.json").read_text(encoding="utf-8"))


def cells_below(page: str, heading: str) -> dict[str, list[str]]:
    """A table's rows by their first cell, without what makes them bold."""
    table = (ROOT / "docs" / page).read_text(encoding="utf-8").split(heading)[1].split("\n\n")[0]
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {name: cells for name, *cells in rows}


def rows_below(page: str, heading: str) -> dict[str, list[float]]:
    """The same of a table of numbers."""
    return {name: [float(number) for number in numbers] for name, numbers in cells_below(page, heading).items()}


def by_mask_and_length(points: dict[tuple[int, bool, int], float], digits: int) -> dict[str, list[float]]:
    """From (head dim, causal, length), as a page's table has it."""
    kinds = [(head_dim, causal) for head_dim in (128, 64) for causal in (False, True)]
    return {
        f"D={head_dim} {'causal' if causal else 'full'}": [
            round(points[head_dim, causal, length], digits) for length in LENGTHS
        ]
        for head_dim, causal in kinds
    }


def results_of_gradients(file: str) -> dict[tuple[int, bool, int], Any]:
    found = json.loads((ROOT / "bench" / "results" / file).read_text(encoding="utf-8"))["points"]
    return {(p["point"]["head_dim"], p["point"]["causal"], p["point"]["length"]): p["results"] for p in found}


def best_of_peers() -> dict[tuple[int, bool, int], float]:
    """Of FlashAttention-3 and 4, the backward pass, over cuDNN of the same run."""
    best: dict[tuple[int, bool, int], float] = {}
    runs = PEERS["backward"]
    for p in runs["first_run"]["points"] + runs["second_run"]["points"]:  # the second one has both
        best[p["head_dim"], p["causal"], p["length"]] = max(p["fa3_over_cudnn"], p.get("fa4_over_cudnn", 0.0))
    return best


def geometric_mean(ratios: Iterable[float]) -> float:
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logarithms) / len(logarithms))


def test_where_gradients_are_behind_in_two_runs():
    best = best_of_peers()
    runs = [results_of_gradients(f"h200_gradients{of_run}.json") for of_run in ("", "_second")]
    to_cudnn = [{at: found["ours"]["ratio_to_cudnn"] for at, found in run.items()} for run in runs]
    to_best = [{at: ratio / best[at] for at, ratio in run.items()} for run in to_cudnn]
    behind = [{at for at, ratio in run.items() if ratio < 0.97} for run in to_best]
    page = " ".join((ROOT / "docs" / "backward.md").read_text(encoding="utf-8").split())
    words = {3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight"}
    assert f"So ours has {geometric_mean(to_best[0].values()):.3f} of the better one's rate" in page
    assert f"behind at {words[len(behind[0])]} points by more than 3 %" in page
    means = geometric_mean(to_cudnn[1].values()), geometric_mean(to_best[1].values())
    assert "has {:.2f} times cuDNN's rate, and {:.2f} of the better one's".format(*means) in page
    of_both = "all" if behind[1] <= behind[0] else words[len(behind[0] & behind[1])]
    assert f"by more than 3 % at {words[len(behind[1])]} points, {of_both} of them also in the first" in page
    lowest = min(to_best[1], key=lambda at: to_best[1][at])
    kind = f"D={lowest[0]} {'causal' if lowest[1] else 'full'}, {lowest[2]}"
    assert f"The lowest is {kind}: by {100 * (1 - to_best[1][lowest]):.0f} %" in page


def test_what_was_asked_of_gradients():
    """The lab log's table of runs."""
    best = best_of_peers()
    rows = {"asked": ["24", "–", "0.97", "1.00, aim 1.05", "1.18"]}
    for run in ("", "_second", "_third", "_fourth", "_fifth", "_sixth", "_seventh"):
        ours = {at: found["ours"] for at, found in results_of_gradients(f"h200_gradients{run}.json").items()}
        shares = {at: found["ratio_to_cudnn"] / best[at] for at, found in ours.items()}
        with_spread = {at: share + ours[at]["spread"] / 2 for at, share in shares.items()}
        rows[run.strip("_") or "first"] = [
            str(sum(share >= 0.97 for share in with_spread.values())),
            str(sum(share >= 0.97 for share in shares.values())),
            f"{min(shares.values()):.2f}",
            f"{geometric_mean(shares.values()):.3f}",
            f"{geometric_mean(found['ratio_to_cudnn'] for found in ours.values()):.2f}",
        ]
    assert cells_below("lab_log.md", "| of the better peer's rate | points") == rows


def test_the_forward_before_and_after_masks():
    names = [f"D={d} {mask} {length}" for d in (64, 128) for mask in ("full", "causal") for length in LENGTHS]

    def over_cudnn(run: str) -> list[float]:
        found = json.loads((ROOT / "bench" / "results" / f"h200_forward{run}.json").read_text(encoding="utf-8"))
        rates = {p["name"]: p["results"]["ours"]["ratio_to_cudnn"] for p in found["points"] if is_of_sweep(p["point"])}
        return [rates[name] for name in names]

    def is_of_sweep(point: dict[str, Any]) -> bool:
        return point["dtype"] == "bf16" and point["batch"] * point["length"] == 16384

    runs = [over_cudnn(run) for run in ("", "_second", "_third", "_fourth", "_fifth", "_sixth", "_seventh")]
    assert rows_below("lab_log.md", "| forward, × cuDNN | before: K ") == {
        "geometric mean": [round(geometric_mean(run), 3) for run in runs],
        "lowest": [round(min(run), 3) for run in runs],
    }


def row_of(asked: str, reached: Iterable[float]) -> list[str]:
    """What was asked, what each run reached, and whether all did."""
    numbers = list(reached)
    met = all(number >= float(asked) for number in numbers)
    return [asked, *(f"{number:.2f}" for number in numbers), "met" if met else "missed"]


def test_what_was_asked_of_gradients_in_a_fixed_order():
    runs = [results_of_gradients(f"h200_gradients{run}.json") for run in ("", "_second", "_fifth", "_seventh")]

    def over(other: str, head_dims: tuple[int, ...], lengths: tuple[int, ...] = LENGTHS) -> list[list[float]]:
        """Of each run."""
        return [
            [
                found["ours, deterministic"]["tflops"] / found[other]["tflops"]
                for (head_dim, _, length), found in run.items()
                if head_dim in head_dims and length in lengths
            ]
            for run in runs
        ]

    fa2 = "fa2, deterministic"
    rows = {
        "of any order's rate, D=64, lowest": ("0.97", map(min, over("ours", (64,)))),
        "the same, geometric mean": ("0.97", map(geometric_mean, over("ours", (64,)))),
        "the same, D=128, lowest": ("0.92", map(min, over("ours", (128,)))),
        "the same, D=128, geometric mean": ("0.92", map(geometric_mean, over("ours", (128,)))),
        "× FlashAttention-2, 2048, lowest": ("2.0", map(min, over(fa2, (64, 128), (2048,)))),
        "the same, 8192, D=64": ("2.5", map(min, over(fa2, (64,), (8192,)))),
        "the same, 8192, D=128": ("2.5", map(min, over(fa2, (128,), (8192,)))),
    }
    assert cells_below("lab_log.md", "| a fixed order | asked ") == {name: row_of(*row) for name, row in rows.items()}


def test_what_else_was_asked_of_gradients():
    def lowest(file: str, head_dim: int, lengths: tuple[int, ...], group: int = 1) -> float:
        points = json.loads((ROOT / "bench" / "results" / file).read_text(encoding="utf-8"))["points"]
        of_group = [p for p in points if p["point"]["heads_per_kv_head"] == group]
        of = [p for p in of_group if p["point"]["head_dim"] == head_dim and p["point"]["length"] in lengths]
        return min(float(p["results"]["ours"]["ratio_to_cudnn"]) for p in of)

    grouped = [f"h200_gradients_grouped{run}.json" for run in ("", "_second", "_third")]
    wide = [f"h200_gradients_{run}.json" for run in ("wide", "d256_second", "wide_second")]
    rows = {
        "8 query heads to a KV head, 8192, D=128": ("1.10", [lowest(file, 128, (8192,), 8) for file in grouped]),
        "the same, D=64": ("1.10", [lowest(file, 64, (8192,), 8) for file in grouped]),
        "D=256, from 2048 to 8192": ("1.00", [lowest(file, 256, (2048, 4096, 8192)) for file in wide]),
    }
    assert cells_below("lab_log.md", "| × cuDNN, lowest | asked ") == {name: row_of(*row) for name, row in rows.items()}


def test_rates_of_gradients():
    results = results_of_gradients("h200_gradients.json")
    rates = {at: result["ours"]["tflops"] for at, result in results.items()}
    to_cudnn = {at: result["ours"]["ratio_to_cudnn"] for at, result in results.items()}
    best = best_of_peers()
    page = "backward.md"
    assert rows_below(page, "| TFLOP/s | 512") == by_mask_and_length(rates, 0)
    assert rows_below(page, "| × cuDNN | 512") == by_mask_and_length(to_cudnn, 2)
    assert rows_below(page, "| best / cuDNN ") == by_mask_and_length(best, 2)
    assert rows_below(page, "| ours / best ") == by_mask_and_length({at: to_cudnn[at] / best[at] for at in rates}, 2)


@pytest.mark.parametrize(
    ("heading", "file", "other"),
    [
        ("| share | 512", "h200_gradients.json", "ours"),
        ("| share, H100 | 512", "h100_gradients_in_order.json", "ours"),
        ("| × FA2 | 512", "h200_gradients.json", "fa2, deterministic"),
    ],
)
def test_rates_of_gradients_in_a_fixed_order(heading, file, other):
    results = results_of_gradients(file)
    over = {at: found["ours, deterministic"]["tflops"] / found[other]["tflops"] for at, found in results.items()}
    assert rows_below("backward.md", heading) == by_mask_and_length(over, 2)


def ratios(dtype: str) -> dict[str, list[float]]:
    points: dict[tuple[str, int], float] = {}
    for p in PEERS["fa3"]["points"]:
        if p["dtype"] == dtype:
            points[f"D={p['head_dim']} {'causal' if p['causal'] else 'full'}", p["length"]] = p["ours_over_fa3"]
    return {name: [points[name, length] for length in LENGTHS] for name, _ in points}


@pytest.mark.parametrize(
    ("page", "heading", "dtype"),
    [("figures.md", "| bf16, ours / FA3 ", "bf16"), ("lab_log.md", "| e4m3, ours / FA3 ", "e4m3")],
)
def test_ratios_to_fa3(page, heading, dtype):
    shown = rows_below(page, heading)
    assert shown == ratios(dtype)
    numbers = [number for row in shown.values() for number in row]
    mean = math.exp(sum(map(math.log, numbers)) / len(numbers))
    assert mean == pytest.approx(PEERS["fa3"]["geometric_mean_ours_over_fa3"][dtype], abs=0.002)  # of rounded ratios


def points_of(file: str) -> list[Any]:
    return json.loads((ROOT / "bench" / "results" / file).read_text(encoding="utf-8"))["points"]


def kind_of(point: dict[str, Any]) -> str:
    return f"D={point['head_dim']} {'causal' if point['causal'] else 'full'}"


def test_rates_of_an_h100():
    wanted: dict[str, list[float]] = {}
    for p in points_of("h100_forward.json") + points_of("h100_forward_e4m3.json"):
        of_kind = wanted.setdefault(f"{p['point']['dtype']} {kind_of(p['point'])}", [])
        of_kind.append(round(p["results"]["ours"]["ratio_to_cudnn"], 2))
    assert rows_below("figures.md", "| × cuDNN, H100 | 512") == wanted


def behind(file: str, dtype: str) -> list[tuple[str, int, float]]:
    """(kind, length, ours over the better of cuDNN and FA3) where that is below 1, FA3's rate being carried over. In
    fp8 there is no cuDNN."""
    carried = {
        (p["head_dim"], p["causal"], p["length"]): p["fa3_over_cudnn_bf16"]
        for p in PEERS["fa3"]["points"]
        if p["dtype"] == dtype
    }
    found = []
    for p in points_of(file):
        point = p["point"]
        fa3 = carried[point["head_dim"], point["causal"], point["length"]]
        ratio = p["results"]["ours"]["ratio_to_cudnn"] / (max(1.0, fa3) if dtype == "bf16" else fa3)
        if ratio < 1:
            found.append((kind_of(point), point["length"], round(ratio, 3)))
    return found


@pytest.mark.parametrize("card", ["H200", "H100"])
def test_points_where_e4m3_is_behind_by_the_rate_of_fa3_that_is_carried_over(card):
    found = behind(f"{card.lower()}_forward_e4m3.json", "e4m3")
    kind, length, lowest = min(found, key=lambda point: point[2])
    page = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    points = "1 point" if len(found) == 1 else f"{len(found)} points"
    assert (kind, length) == ("D=128 causal", 8192)
    assert re.search(rf"^\| \[{card}\]\S* \| {points} of 24 \| {lowest}, ", page, re.MULTILINE)


def test_points_where_it_is_behind_by_the_rate_of_fa3_that_is_carried_over():
    wanted = []
    for card, file in (("H200", "h200_forward_fourth.json"), ("H100", "h100_forward.json")):
        wanted += [(card, *point) for point in behind(file, "bf16")]
    table = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8").split("| card | kind |")[1].split("\n\n")[0]
    shown = re.findall(r"^\| \[?(H\d+)\S* \| (D=\d+ \w+) \| (\d+) \| ([\d.]+)", table, re.MULTILINE)
    assert [(card, kind, int(length), float(ratio)) for card, kind, length, ratio in shown] == wanted


def test_points_of_an_h100_where_it_is_behind():
    wanted: list[tuple[Any, ...]] = [
        (f"D={p['head_dim']} {'causal' if p['causal'] else 'full'}", p["length"], p["ratio"])
        for p in PEERS["h100"]["points_behind"]
        if p["dtype"] == "bf16"
    ]
    page = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
    table = page.split("| H100, bf16 |")[1].split("\n\n")[0]
    shown = re.findall(r"^\| (D=\d+ \w+) \| (\d+) \| ([\d.]+)", table, re.MULTILINE)
    assert [(name, int(length), float(ratio)) for name, length, ratio in shown] == wanted


def test_figures_of_the_readme():
    """H200 | H100: both means, and the points where neither cuDNN nor FlashAttention-3 is ahead. On an H100 cuDNN was
    timed beside the rows of today."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = dict(
        re.findall(r"^\| (against cuDNN|against|points)[^|]* \| ([\d.]+[^|]* \| [\d.]+)", readme, re.MULTILINE)
    )
    fa3, h100 = PEERS["fa3"], PEERS["h100"]

    def both(first: float, second: float) -> str:
        return f"{first:.2f} × | {second:.2f}"

    of_h100 = geometric_mean(p["results"]["ours"]["ratio_to_cudnn"] for p in points_of("h100_forward.json"))
    assert shown["against cuDNN"] == both(fa3["geometric_mean_ours_over_cudnn"]["bf16"], of_h100)
    to_fa3 = fa3["geometric_mean_ours_over_fa3"]["bf16"], h100["geometric_mean_bf16"]["ours_over_fa3"]
    assert shown["against"] == both(*to_fa3)
    bf16 = [p for p in fa3["points"] if p["dtype"] == "bf16"]
    ahead = sum(p["ours_over_fa3"] >= 1 and p["ours_over_fa3"] * p["fa3_over_cudnn_bf16"] >= 1 for p in bf16)
    behind = {(p["head_dim"], p["causal"], p["length"]) for p in h100["points_behind"] if p["dtype"] == "bf16"}
    assert shown["points"] == f"{ahead} | {len(bf16) - len(behind)}"


def test_means_of_gradients():
    """In README and on the page of gradients."""
    results = results_of_gradients("h200_gradients.json").values()

    def mean(of: str, over: str) -> float:
        return math.exp(sum(math.log(r[of]["tflops"] / r[over]["tflops"]) for r in results) / len(results))

    page, readme = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/backward.md", "README.md"))
    lowest = min(r["ours"]["ratio_to_cudnn"] for r in results)
    assert f"**{mean('ours', 'cudnn'):.2f} × cuDNN**, the lowest point {lowest:.2f}" in page
    assert f"[{mean('ours', 'cudnn'):.2f} × cuDNN](docs/backward.md#how-fast)" in readme
    assert f"The geometric mean is {mean('ours, deterministic', 'ours'):.2f}." in page
    assert f"geometric mean is {mean('ours, deterministic', 'fa2, deterministic'):.2f}." in page


def test_gradients_of_an_h100():
    found = results_of_gradients("h100_gradients.json")
    to_cudnn = {at: result["ours"]["ratio_to_cudnn"] for at, result in found.items()}
    assert rows_below("backward.md", "| × cuDNN, H100 | 512") == by_mask_and_length(to_cudnn, 2)
    page = (ROOT / "docs" / "backward.md").read_text(encoding="utf-8")
    mean, lowest = geometric_mean(to_cudnn.values()), min(to_cudnn.values())
    assert f"On an H100 the geometric mean is {mean:.2f}, the lowest point {lowest:.2f}" in page


def test_both_passes_together():
    found = results_of_gradients("h200_gradients_with_forward.json")
    to_cudnn = {at: result["ours"]["ratio_to_cudnn"] for at, result in found.items()}
    page = (ROOT / "docs" / "backward.md").read_text(encoding="utf-8")
    below = page.split("([results](../bench/results/h200_gradients_with_forward.json))")[1]
    assert rows_below("backward.md", below[: below.index(" | 1024")]) == by_mask_and_length(to_cudnn, 2)
    assert f"With the forward\npass it is {geometric_mean(to_cudnn.values()):.2f}." in page


def test_energy_of_gradients():
    found = json.loads((ROOT / "bench/results/h200_gradients_sustained.json").read_text(encoding="utf-8"))["points"]
    for point in found:
        ours, cudnn = point["results"]["ours"], point["results"]["cudnn"]
        joules = [round(of["joules_per_tflop"], 2) for of in (ours, cudnn)]
        rates = [round(of["tflops"]) for of in (ours, cudnn)]
        name = point["name"].removesuffix(" 8192")
        assert rows_below("backward.md", "| | ours, J per TFLOP")[name] == [*joules, *rates]


def test_waits_of_long_gradients():
    def of(problem: str) -> list[float]:
        name = f"bench/results/h200_timeline_gradients_{problem}.json"
        found = json.loads((ROOT / name).read_text(encoding="utf-8"))
        roles = {role: of["waits"] for role, of in found["all CTAs"].items()}
        halves = [roles[f"gradient, {half} half"] for half in ("first", "second")]

        def share(waits: dict[str, Any], begin: str = "") -> float:
            return 100 * sum(float(wait["share"]) for name, wait in waits.items() if name.startswith(begin))

        mean = [
            sum(share(half, begin) for half in halves) / 2
            for begin in ("", "keys values", "queries", "douts", "freed dqs", "products", "the other warpgroup")
        ]
        reduce = roles["reduce"]
        return [
            round(found["slower"], 2), round(mean[0]), *(round(number, 1) for number in mean[1:]),
            round(share(roles["load"])), round(share(reduce)), round(share(reduce, "other programs"), 1),
            round(share(reduce, "stores"), 1),
        ]  # fmt: skip

    problems = [of(problem) for problem in ("d64_full_1024_in_order", "d128_full_8192", "d64_causal_16384")]
    shown = rows_below("lab_log.md", "| | D=64 full, 1024, in order |")
    assert list(shown.values()) == [list(row) for row in zip(*problems, strict=True)]


def test_counters_of_several_query_heads():
    file = ROOT / "bench/results/h200_gradients_grouped_counters.json"
    kernels = list(json.loads(file.read_text(encoding="utf-8"))["kernels"].values())
    of = {
        "time, ms": ("gpu__time_duration.sum", 1e6, 1),
        "L2 has, % of what is asked": ("lts__t_sector_hit_rate.pct", 1, 0),
        "read from memory, GB": ("dram__bytes_read.sum", 1e9, 1),
        "written to memory, GB": ("dram__bytes_write.sum", 1e9, 1),
        "of memory's rate, %": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 1, 0),
        "of L2's rate, %": ("lts__t_bytes.sum.pct_of_peak_sustained_elapsed", 1, 0),
    }
    assert rows_below("lab_log.md", "| | full, 64 KV heads |") == {
        name: [round(kernel[metric] / unit, digits) for kernel in kernels]
        for name, (metric, unit, digits) in of.items()
    }


def test_host_time_before_and_after_gradients():
    file = ROOT / "bench/results/h200_host_before_after.json"
    shown = cells_below("lab_log.md", "| host | commit | before, median")
    for cells, session in zip(shown.values(), json.loads(file.read_text(encoding="utf-8"))["sessions"], strict=True):
        us = {when: [one for process in session["us"][when] for one in process] for when in ("before", "now")}
        found = [of(us[when]) for of in (statistics.median, min) for when in ("before", "now")]
        assert cells == [session["now"], *(f"{number:.1f}" for number in found)]


def test_parts_under_a_causal_mask():
    """The table, and the page of gradients, which has what the plan chooses: of two head dims, four of the calls."""
    points = json.loads((ROOT / "bench/results/h200_gradients_parts.json").read_text(encoding="utf-8"))["points"]
    rows = rows_below("lab_log.md", "| | cuDNN | before | no parts")
    assert rows == {p["name"].replace(" causal", ""): [round(us) for us in p["us"].values()] for p in points}
    chosen = {"1024, B=1 H=32/8": 192, "2048, B=1 H=32/8": 256, "2048, B=1 H=64/8": 256, "2048, B=1 H=8": 256}
    for head_dim in (128, 64):
        us = {p["name"].removeprefix(f"D={head_dim} causal "): p["us"] for p in points if f"D={head_dim} " in p["name"]}
        ratios = [round(us[call]["torch"] / us[call][f"{parts} parts"], 2) for call, parts in chosen.items()]
        assert rows_below("backward.md", "| × cuDNN | 32 and 8, 1024")[f"D={head_dim}"] == ratios
        for call, parts in chosen.items():
            length, heads = re.fullmatch(r"(\d+), B=1 H=(\S+)", call).groups()  # type: ignore[union-attr]
            q_heads, kv_heads = (heads.split("/") * 2)[:2]
            asked = problem(
                head_dim=head_dim, q_len=int(length), kv_len=int(length), batch=1, heads=int(q_heads),
                kv_heads=int(kv_heads), causal=True,
            )  # fmt: skip
            most = 128 if (head_dim, length) == (64, "1024") else 256  # in two parts each: 8 row blocks have no more
            assert BackwardPlan.of(asked, pick_config(asked), Device.hopper()).shared_parts == min(parts, most)


def test_costs_of_masks_in_the_readme():
    """At D=128 forward: over our own causal call, and over FlashAttention-4's time."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "bench/results/h200_masks.json").read_text(encoding="utf-8"))["points"][0]
    assert found["name"] == "D=128 B=1 H=16 16384 forward"
    calls = [found["results"][f"ours {name}"] for name in ("window 128", "window 1024", "softcap 30", "alibi", "bias")]
    for row, over in (("ours, causal", "over_ours_causal"), ("FlashAttention-4's", "over_fa4_carried")):
        cells = [call.get(over) for call in calls]
        assert f"\n| {row} | {' | '.join('–' if c is None else f'{c:.2f}' for c in cells)} |\n" in readme


def test_time_of_packed_sequences_in_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    points = json.loads((ROOT / "bench/results/h200_varlen.json").read_text(encoding="utf-8"))["points"]
    [mix] = [point["results"] for point in points if point["name"] == "D=128 causal mix of 64 forward"]
    time = mix["fa2 packed"]["tflops"] / mix["ours packed"]["tflops"]
    assert f"take {time:.2f} of FlashAttention-2's time" in readme
