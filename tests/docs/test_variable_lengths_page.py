"""docs/variable_lengths.md: its script runs as it stands on a card, and elsewhere on smaller tensors on the CPU."""

import functools
import re
import runpy
from pathlib import Path

import pytest

import gluon_attn
from gluon_attn.device import Device

PAGE = (Path(__file__).parents[2] / "docs" / "variable_lengths.md").read_text(encoding="utf-8")
(SCRIPT,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_script_under_the_stand_in(monkeypatch, tmp_path):
    on_cpu = functools.partial(gluon_attn.attention_varlen, device=Device.hopper())
    monkeypatch.setattr(gluon_attn, "attention_varlen", on_cpu)
    small = SCRIPT.replace('"cuda"', '"cpu"').replace("700", "70").replace("250", "25").replace("50]", "5]")
    path = tmp_path / "script.py"
    path.write_text(small.replace("1000", "100"), encoding="utf-8")
    names = runpy.run_path(str(path))
    assert names["out"].shape == (100, 8, 128)
    assert names["lse"].shape == (8, 100)
    assert names["out"].isfinite().all()


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_the_script_on_a_card(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    runpy.run_path(str(path))
