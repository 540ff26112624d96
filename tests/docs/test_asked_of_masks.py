"""The lab log's tables of what was asked of masks, scores and packed sequences, held against the runs' files."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tests.docs.test_figures_page import ROOT, cells_below

SHAPES = {"A": "D=128 B=1 H=16 16384", "B": "D=64 B=2 H=32/4 8192"}
PASSES = ("forward", "backward")


def runs_of(name: str, *runs: str) -> list[dict[str, Any]]:
    """The points of each run, by their names."""
    files = [ROOT / "bench" / "results" / f"h200_{name}{run}.json" for run in ("", *(f"_{run}" for run in runs))]
    return [{p["name"]: p for p in json.loads(file.read_text(encoding="utf-8"))["points"]} for file in files]


def check(heading: str, rows: Mapping[str, tuple[str, Iterable[float]]], met: Callable[[float, float], bool]) -> None:
    """rows: what was asked, and what each run reached. The last cell begins with whether that was met, in how many."""
    found = cells_below("lab_log.md", heading)
    for name, (asked, reached) in rows.items():
        numbers = list(reached)
        count = sum(met(number, float(asked)) for number in numbers)
        word = {0: "missed", len(numbers): "met"}.get(count, f"met in {count} of {len(numbers)}")
        *cells, verdict = found.pop(name)
        assert cells == [asked, *(f"{number:.2f}" for number in numbers)], name
        assert verdict.split(":")[0] == word, name
    assert not found


def at_most(number: float, asked: float) -> bool:
    return number <= asked


def at_least(number: float, asked: float) -> bool:
    return number >= asked


def test_masks_and_scores():
    runs = runs_of("masks", "second", "third", "fourth", "fifth")

    def of(what: str, which: str, shape: str, over: str = "over_ours_causal") -> list[float]:
        return [run[f"{SHAPES[shape]} {which}"]["results"][f"ours {what}"][over] for run in runs]

    def each(of_one: Callable[[Iterable[float]], float], *columns: list[float]) -> list[float]:
        return [of_one(numbers) for numbers in zip(*columns, strict=True)]

    named = {"sinks": ("sinks", "1.02"), "soft cap": ("softcap 30", "1.15"), "ALiBi": ("alibi", "1.10")}
    rows = {
        f"{name}, {shape}, {which}": (asked, of(what, which, shape))
        for name, (what, asked) in named.items()
        for shape in SHAPES
        for which in PASSES
    }
    rows |= {f"bias, {shape}, forward": ("1.25", of("bias", "forward", shape)) for shape in SHAPES}
    backward = [of("bias", "backward", shape) for shape in SHAPES]
    rows["bias, backward, the greater"] = ("1.25", each(max, *backward))
    with_gradient = [of("bias with its gradient", "backward", shape) for shape in SHAPES]
    rows["bias with its gradient, the lesser"] = ("1.25", each(min, *with_gradient))
    check("| time over causal | asked ", rows, at_most)

    def over_fa4(window: int) -> list[list[float]]:
        return [of(f"window {window}", which, shape, "over_fa4_carried") for shape in SHAPES for which in PASSES]

    check(
        "| time over FA4's | asked ",
        {
            "window 128, the greatest of four": ("1.00", each(max, *over_fa4(128))),
            "window 1024, A, forward": ("1.00", over_fa4(1024)[0]),
            "window 1024, the greatest of the others": ("1.00", each(max, *over_fa4(1024)[1:])),
        },
        at_most,
    )


def test_packed_sequences():
    runs = runs_of("varlen", "second", "third", "fourth")
    fa4 = "fa4 packed, carried"
    batched = [{name: p["ours_over"].get("ours batched") for name, p in run.items()} for run in runs]
    full = [f"D=128 full {shape} backward" for shape in ("8 x 2048", "2 x 8192")]
    check(
        "| packed, rate | asked ",
        {
            **{
                f"the mix, {which}, over FlashAttention-4's line": (
                    "1.20",
                    [run[f"D=128 causal mix of 64 {which}"]["ours_over"][fa4] for run in runs],
                )
                for which in PASSES
            },
            "uniform, over the batched call, 32 x 512, lowest": (
                "0.97",
                [min(ratio for name, ratio in run.items() if " 32 x 512 " in name) for run in batched],
            ),
            "uniform, D=128 full, from 2048, backward, lowest": (
                "0.97",
                [min(run[name] for name in full) for run in batched],
            ),
        },
        at_least,
    )


def test_host_of_a_packed_forward():
    runs = [run["D=128 causal mix of 64 forward"]["results"] for run in runs_of("varlen", "second", "third", "fourth")]
    assert cells_below("lab_log.md", "| D=128, causal, mix | first ") == {
        name: [f"{run[call]['host_us']:.0f}" for run in runs]
        for name, call in (("ours", "ours packed"), ("FA2", "fa2 packed"))
    }


def test_unlike_head_dims():
    runs = runs_of("unlike", "second", "third")

    def over_fa4(mask: str, which: str) -> list[float]:
        return [run[f"D=192/128 {mask} 8192 B=1 H=16 {which}"]["ours_over_fa4_carried"] for run in runs]

    check(
        "| (192, 128), rate over FA4's | asked ",
        {
            "forward, lowest": (
                "1.00",
                map(min, zip(*(over_fa4(m, "forward") for m in ("causal", "full")), strict=True)),
            ),
            "causal, backward": ("1.00", over_fa4("causal", "backward")),
            "full, backward": ("1.00", over_fa4("full", "backward")),
        },
        at_least,
    )
