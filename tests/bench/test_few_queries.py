"""bench.few_queries without a card: its calls, and what it shows of a result file."""

import json
import sys
from pathlib import Path

import pytest
import torch

from bench import few_queries
from gluon_attn.forward.table import COSTS_OF_ROW_BLOCKS

RESULT = Path(__file__).parents[2] / "bench/results/h200_few_queries.json"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_there_is_a_config_of_each_height(head_dim):
    found = few_queries.configs(head_dim)
    assert {name: config.block_m for name, config in found.items()} == {
        f"{rows} rows": rows for rows, _ in COSTS_OF_ROW_BLOCKS[head_dim]
    }


def test_the_result_file_has_all_calls(monkeypatch, capsys):
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    assert [point["shape"] for point in found["points"]] == few_queries.shapes()
    for point in found["points"]:
        assert {"cudnn", "chosen", *few_queries.configs(point["shape"]["head_dim"])} == set(point["results"])
    monkeypatch.setattr(sys, "argv", ["bench.few_queries", "--show", str(RESULT)])
    few_queries.main()
    assert capsys.readouterr().out.count("\n| D=") == len(found["points"])


def test_without_a_card(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench.few_queries"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="expected a Hopper card, got none"):
        few_queries.main()
