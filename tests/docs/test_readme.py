"""README.md and the page on fp8: their Python runs as it is written; README's report is one that is printed, its mean
that of the result file.

The code for a card runs as it stands on a Hopper card. Elsewhere the same text runs under a stand-in for what it names:
`torch.randn` makes smaller tensors, and on the CPU, and `attention` is told to execute the kernel as on an H200.
"""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import gluon_attn
from bench import report
from gluon_attn import reference_attention
from gluon_attn.device import Device

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
FP8_PAGE = (ROOT / "docs" / "fp8.md").read_text(encoding="utf-8")
FOR_A_CARD = [block for block in BLOCKS if '"cuda"' in block]
FOR_ANY_MACHINE = [block for block in BLOCKS if '"cuda"' not in block]
HEADS_SMALLER = 8  # times
LONGEST = 130


def run(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(block, names)
    return names


def check(names: dict[str, Any]) -> None:
    """What the code for a card leaves behind, against float64."""
    q, k, v = (names[name].double().cpu() for name in "qkv")
    q = q.detach().requires_grad_()
    want, want_lse = reference_attention(q, k, v, causal=True)
    assert (names["out"].cpu() - want).abs().max() < 0.03
    assert (names["lse"].cpu() - want_lse).abs().max() < 1e-3
    want.sum().backward()
    assert (names["q"].grad.cpu() - q.grad).abs().max() < 0.03


def test_there_is_code_of_both_kinds():
    assert (len(FOR_A_CARD), len(FOR_ANY_MACHINE)) == (1, 1)


@pytest.mark.parametrize("block", FOR_ANY_MACHINE)
def test_code_for_any_machine(block):
    names = run(block)
    want, _ = reference_attention(*(names[name].double() for name in "qkv"), causal=True)
    assert (names["out"] - want).abs().max() < 0.03


@pytest.mark.parametrize("block", FOR_A_CARD)
def test_code_for_a_card_under_the_stand_in(block, monkeypatch):
    randn = torch.randn

    def smaller(batch: int, heads: int, length: int, head_dim: int, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        assert device == "cuda"
        return randn(batch, heads // HEADS_SMALLER, min(length, LONGEST), head_dim, dtype=dtype)

    monkeypatch.setattr(torch, "randn", smaller)
    monkeypatch.setattr(
        gluon_attn, "attention", functools.partial(gluon_attn.attention, device=Device.hopper()), raising=True
    )
    check(run(block))


@pytest.mark.gpu
@pytest.mark.parametrize("block", FOR_A_CARD)
def test_code_for_a_card(block):
    check(run(block))


def test_code_of_the_fp8_page():
    scales, remedy = re.findall(r"^```python\n(.*?)^```$", FP8_PAGE, re.MULTILINE | re.DOTALL)
    names = run(scales)
    want, _ = reference_attention(*(names[name].double() for name in "qkv"), scale=0.5 * 64**-0.5)
    assert (names["out"] - want / 2).abs().max() < 0.05
    names = run(scales + remedy)
    want, _ = reference_attention(*(names[name].double() for name in "qkv"))
    assert names["v"].dtype == torch.float32
    assert (names["out"] - want).abs().max() < 0.02


def test_the_report_is_one_that_is_printed():
    """That of docs/gluon_cpu.md, whose own test prints it. A line that ends in … is the beginning of one."""
    [shown] = re.findall(r"^```text\n(DataRace.*?)^```$", README, re.MULTILINE | re.DOTALL)
    page = (ROOT / "docs" / "gluon_cpu.md").read_text(encoding="utf-8")
    [printed] = [
        found
        for found in re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        if found.startswith(shown.splitlines()[0]) and "examples/race.py" in found
    ]
    pairs = list(zip(shown.splitlines(), printed.splitlines(), strict=False))
    assert len(pairs) == len(shown.splitlines())
    wrong = [line for line, real in pairs if line != real and not (line[-1] == "…" and real.startswith(line[:-1]))]
    assert wrong == []


def test_the_mean_is_that_of_the_committed_file():
    committed = report.read_all([ROOT / "bench" / "results" / "h200_forward_second.json"])
    [line] = [line for line in report.means(committed) if line.startswith("bf16, D=64 and 128:")]
    mean = float(line.split()[4])
    assert f"| against cuDNN 9.19 | {mean:.2f} × |" in README
    assert f"geometric mean of [{line.split()[8]} points]" in README
