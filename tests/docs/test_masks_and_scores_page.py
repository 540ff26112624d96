"""docs/masks_and_scores.md: its scripts run as they stand on a card. Elsewhere the same text runs on smaller tensors on
the CPU. Its table is what the result file says."""

import functools
import json
import re
import runpy
from pathlib import Path

import pytest

import gluon_attn
from gluon_attn.device import Device

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "masks_and_scores.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
ROWS = {
    "window of 128": "window 128",
    "window of 1024": "window 1024",
    "chunks of 2048": "chunk 2048",
    "sinks": "sinks",
    "documents of 2048 on average": "documents",
    "`window=(1024, 0)` as a `mask_mod`": "mask_mod 1024",
    "soft cap": "softcap 30",
    "ALiBi": "alibi",
    "a bias of each row, one for all heads": "bias",
    "the same, with its gradient": "bias with its gradient",
}
# The head of each table, the file that it is of, and what of a call's results.
TABLES = {
    "| |": ("h200_masks.json", "over_ours_causal"),
    "| time / FlashAttention-4's |": ("h200_masks.json", "over_fa4_carried"),
    "| time / FlexAttention's |": ("h200_masks.json", "over_flex"),
}


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_scripts_under_the_stand_in(number, monkeypatch, tmp_path):
    """From a file, as a function under `jit` has to have one."""
    monkeypatch.setattr(gluon_attn, "attention", functools.partial(gluon_attn.attention, device=Device.hopper()))
    small = SCRIPTS[number].replace('"cuda"', '"cpu"').replace("1000", "136")
    small = small.replace("[300, 20, 600, 80]", "[30, 2, 96, 8]")
    assert small.count('"cpu"') == SCRIPTS[number].count('"cuda"') > 0
    path = tmp_path / "script.py"
    path.write_text(small, encoding="utf-8")
    names = runpy.run_path(str(path))
    trained = names["sinks"] if "sinks" in names else names["q"]
    assert trained.grad.isfinite().all()
    assert trained.grad.any()


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_scripts_on_a_card(number, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPTS[number], encoding="utf-8")
    runpy.run_path(str(path))


@pytest.mark.parametrize("head", TABLES)
def test_tables_are_those_of_the_result_files(head):
    file, what = TABLES[head]
    points = json.loads((ROOT / "bench/results" / file).read_text(encoding="utf-8"))["points"]
    table = PAGE.split(f"\n{head} A, forward")[1].split("\n\n")[0]
    shown = 0
    for row, name in ROWS.items():
        calls = [point["results"].get(f"ours {name}", {}) for point in points]
        if any(what in call for call in calls):
            ratios = " | ".join(f"{call[what]:.2f}" if what in call else "–" for call in calls)
            assert f"\n| {row} | {ratios} |" in table
            shown += 1
    assert shown == table.count("\n| ") > 2


def test_what_a_soft_cap_costs_with_maxima():
    variants = json.loads((ROOT / "bench/results/h100_scores.json").read_text(encoding="utf-8"))["points"]
    with_maxima = [variants[f"forward D={head_dim}"]["cap, max"]["ratio"] for head_dim in (128, 64)]
    assert "the two forward figures are {:.2f} and {:.2f}".format(*with_maxima) in PAGE
