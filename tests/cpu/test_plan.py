"""How problems are laid out over a card."""

import dataclasses

import pytest
import torch

from gluon_attn.device import Device
from gluon_attn.plan import Plan
from gluon_attn.problem import Problem
from gluon_attn.tuning import hopper_tile

H200 = Device.hopper()
TILE = hopper_tile(2, 128, 2, 2, 240, take_turns=False)  # 128 rows
PAIR_TILE = hopper_tile(2, 128, 2, 2, 240, take_turns=False, num_ctas=2)  # 256 rows
PREFILL = Problem(
    dtype=torch.bfloat16, batch=1, heads=32, kv_heads=8, q_len=4096, kv_len=4096, head_dim=128,
    causal=True, scale=0.1, layout="bhsd",
)  # fmt: skip


def plan(chosen=TILE, **changes) -> Plan:
    return Plan.of(dataclasses.replace(PREFILL, **changes), chosen, H200)


def test_one_program_for_each_cluster_that_fits_the_card():
    assert plan().programs == 132
    assert plan(PAIR_TILE).programs == 66


def test_never_more_programs_than_items():
    assert plan(heads=2, q_len=300).programs == 6  # three row blocks of each head
    assert plan(heads=1, q_len=1).programs == 1


@pytest.mark.parametrize(
    ("blocks_per_item", "changes"),
    [
        pytest.param(2, {}, id="causal"),
        pytest.param(1, {"causal": False}, id="no mask: row blocks cost the same"),
        pytest.param(1, {"heads": 4}, id="a program for each row block"),
        pytest.param(1, {"kv_len": 65536}, id="few queries at the end of many keys: row blocks cost about the same"),
        pytest.param(2, {"q_len": 8192, "kv_len": 4096}, id="more queries than keys: the first ones see nothing"),
    ],
)
def test_pairs_only_where_they_even_something_out(blocks_per_item, changes):
    assert plan(**changes).blocks_per_item == blocks_per_item


def test_scores_are_scaled_for_exp2():
    assert plan().scale_log2 == pytest.approx(0.1 * 1.4426950408889634, rel=1e-15)


def test_more_row_blocks_than_the_kernel_counts():
    with pytest.raises(
        ValueError, match=r"^q: expected fewer than 2\^31 row blocks .*, got 4294967296; split the batch"
    ):
        plan(batch=65536, heads=65536, q_len=1)
