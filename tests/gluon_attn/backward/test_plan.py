"""How a backward is laid out over a card, and what a configuration may be."""

import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from gluon_attn.backward.launch import Choices, builds_of, compiled_backward, main_of, workspaces
from gluon_attn.backward.plan import BackwardPlan
from gluon_attn.backward.table import HOPPER, PACKAGED, RESULT_FILES, pick_config, rows_by_default
from gluon_attn.device import Device
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.resources import resources
from tests.gluon_attn.problems import problem
from tests.slow import slow_if

CONFIG = HOPPER[128]


def plan_of(*, deterministic: bool = False, **fields: Any) -> BackwardPlan:
    asked = problem(**({"q_len": 1000, "kv_len": 1000} | fields))
    return BackwardPlan.of(asked, pick_config(asked), Device.hopper(), deterministic=deterministic)


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        ({"q_len": 200, "kv_len": 200, "head_dim": 64}, 132),  # L2 has room for the rows of more
        ({"q_len": 512, "kv_len": 512, "head_dim": 128}, 37),  # three eighths of L2, 50 MiB, in 8 * 128 bytes a row
        ({"q_len": 512, "kv_len": 512, "head_dim": 128, "kv_heads": 4, "heads": 8}, 18),  # of two query heads each
        ({"q_len": 8192, "kv_len": 2048, "head_dim": 128}, 16),  # 8 programs of a head, half of its key blocks
        ({"q_len": 8192, "kv_len": 1000, "head_dim": 128}, 17),  # 8
        ({"q_len": 8192, "kv_len": 8192, "head_dim": 128}, 4),  # half of 64 key blocks
        ({"q_len": 8192, "kv_len": 10**6, "head_dim": 128}, 2),  # L2 has room for 2
        ({"q_len": 8192, "kv_len": 8192, "head_dim": 128, "heads": 32, "kv_heads": 4}, 4),  # of a KV head, as without
        ({"q_len": 8192, "kv_len": 8192, "head_dim": 128, "causal": True, "left": 500}, 17),  # in a window 8 again
        ({"q_len": 2**17, "kv_len": 2**17, "head_dim": 128}, 1),
        ({"q_len": 8192, "kv_len": 8192, "head_dim": 128, "left": 500, "right": 500}, 17),
        ({"q_len": 8192, "kv_len": 8192, "head_dim": 128, "causal": True}, 16),  # an eighth
        ({"q_len": 2000, "kv_len": 2000, "head_dim": 128, "causal": True}, 33),  # 4 programs of a head
        ({"q_len": 200, "kv_len": 200, "head_dim": 64, "batch": 2}, "all"),
    ],
)
def test_in_order_as_many_heads_at_a_time_as_l2_has_room_for(fields, heads):
    plan = plan_of(deterministic=True, **({"batch": 40} | fields))
    all_heads = plan.problem.batch * plan.problem.kv_heads
    assert plan.heads_at_once == (all_heads if heads == "all" else heads)


@pytest.mark.parametrize(
    ("fields", "programs", "blocks_per_item"),
    [
        ({}, 132, 1),
        ({"batch": 1, "kv_len": 100, "q_len": 500}, 32, 1),  # 16 key blocks, each in 2 parts of 4 row blocks
        ({"causal": True}, 128, 2),  # 256 key blocks: 128 pairs
        ({"causal": True, "batch": 1}, 128, 1),  # there is a processor for each
        ({"causal": True, "deterministic": True}, 132, 1),
        ({"deterministic": True}, 132, 1),
    ],
)
def test_programs(fields, programs, blocks_per_item):
    plan = plan_of(**fields)
    assert (plan.programs, plan.blocks_per_item) == (programs, blocks_per_item)


LLAMA: dict[str, Any] = {"causal": True, "batch": 1, "heads": 32, "kv_heads": 8}


@pytest.mark.parametrize(
    ("fields", "shared", "shared_parts"),
    [
        ({"batch": 1}, 0, 0),  # 128 key blocks: a processor for each, and 4 are too few to help
        ({}, 0, 0),  # 256: two rounds, but for 8
        ({"batch": 5}, 0, 0),  # 640: four rounds and 112, which 20 more are too few to help
        ({"batch": 5, "q_len": 4000}, 112, 132),
        ({"batch": 5, "causal": True, "q_len": 4000}, 0, 0),  # pairs end together
        ({"batch": 5, "deterministic": True, "q_len": 4000}, 0, 0),
        ({"batch": 1, "kv_len": 100}, 16, 64),  # 16 row blocks, of which each share has four
        ({"batch": 1, "kv_len": 100, "q_len": 2**14}, 16, 132),
        ({"batch": 1, "kv_len": 100, "q_len": 2**14, "deterministic": True}, 16, 128),
        ({"batch": 1, "kv_len": 100, "q_len": 400}, 0, 0),
        ({"batch": 1, "heads": 1, "kv_heads": 1, "kv_len": 100, "q_len": 2**14}, 1, 64),
        # Causal: the first key blocks cost the most, so there may be more parts than programs.
        (LLAMA | {"q_len": 2048, "kv_len": 2048}, 128, 256),
        (LLAMA | {"q_len": 1024, "kv_len": 1024}, 64, 192),
        (LLAMA | {"q_len": 1024, "kv_len": 1024, "deterministic": True}, 64, 128),
        (LLAMA | {"q_len": 1024, "kv_len": 1024, "heads": 16, "kv_heads": 16}, 0, 0),  # too few steps for parts to pay
        (LLAMA | {"q_len": 4096, "kv_len": 4096}, 0, 0),  # pairs end together
    ],
)
def test_shares_fill_the_card(fields, shared, shared_parts):
    plan = plan_of(**fields)
    assert (plan.shared, plan.shared_parts) == (shared, shared_parts)
    assert ("handed_in" in workspaces(plan)) == (shared > 0)
    if shared == plan.key_blocks:
        assert plan.programs == min(132, shared_parts)
    assert shared == 0 or (plan.last_heads, plan.blocks_per_item) == (0, 1)


def test_shared_key_blocks_are_somebodys():
    """Whatever the limits and lengths: of few queries most of many key blocks are seen by none."""
    rng, are_shared = random.Random(0), 0
    limits: list[dict[str, Any]] = [{}] + [{name: 2**n} for name in ("left", "chunk") for n in (0, 6, 9, 12)]
    for _ in range(2000):
        kv_heads = rng.choice([1, 2, 8])
        sizes = {name: round(2 ** rng.uniform(0, 16)) for name in ("q_len", "kv_len")}
        heads = {"batch": rng.choice([1, 5]), "kv_heads": kv_heads, "heads": kv_heads * rng.choice([1, 4])}
        fields = sizes | heads | rng.choice(limits) | {"causal": rng.random() < 0.7, "head_dim": rng.choice([64, 128])}
        plan = plan_of(deterministic=rng.random() < 0.3, **fields)
        assert plan.shared < plan.shared_parts or plan.shared == plan.shared_parts == 0, fields
        are_shared += plan.shared > 0
    assert are_shared > 200


def test_how_many_row_blocks_see_the_last_of_many_key_blocks():
    """All of the queries are in one chunk, with the last 32 of 4096 key blocks, of which 4 have no processor."""
    fields: dict[str, Any] = {"batch": 1, "heads": 8, "kv_heads": 1, "causal": True, "chunk": 4096}
    plan = plan_of(**fields, q_len=4096, kv_len=2**19)
    assert (plan.key_blocks, plan.shared, plan.shared_parts) == (4096, 4, 64)


def test_a_plan_in_which_nobody_shares_is_refused():
    plan = plan_of(batch=1, kv_len=100)
    for shared_parts in (0, 16):
        with pytest.raises(
            ValueError, match=r"self.shared_parts=\d+ parts must be more than the self.shared=16 key blocks"
        ):
            dataclasses.replace(plan, shared_parts=shared_parts)


@pytest.mark.parametrize("sm_count", [132, 7])
@pytest.mark.parametrize("causal", [False, True])
def test_single_key_blocks_are_those_of_the_last_heads(causal, sm_count):
    problem = plan_of(causal=causal).problem
    plan = BackwardPlan.of(problem, CONFIG, dataclasses.replace(Device.hopper(), sm_count=sm_count))
    pairs = causal and plan.key_blocks // 2 > sm_count
    assert plan.last_heads == (2 if pairs else 0)
    assert plan.last_heads * 4 >= sm_count * pairs  # a round of items at least


def test_workspaces_have_whole_blocks_of_rows():
    plan = plan_of(q_len=1)
    assert (plan.row_blocks, plan.rows, plan.row_programs) == (1, CONFIG.block_m, 32)


@pytest.mark.parametrize("length", ["q_len", "kv_len"])
def test_what_cannot_be_counted_is_refused(length):
    too_long: dict[str, Any] = {length: 2**31}
    with pytest.raises(ValueError, match=f"^{length[0]}: expected at most"):
        plan_of(**too_long)
    too_many: dict[str, Any] = {length: 2**22, "batch": 2**12}
    with pytest.raises(ValueError, match=r"expected fewer than 2\^31 blocks"):
        plan_of(**too_many)


@pytest.mark.parametrize("head_dim", HOPPER)
def test_each_row_was_timed_beside_cudnn(head_dim):
    path = Path(__file__).parents[3] / "bench" / "results" / RESULT_FILES[head_dim]
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["provenance"]["card"] == "NVIDIA H200"
    timed = [point for point in found["points"] if point["point"]["head_dim"] == head_dim]
    assert {point["point"]["causal"] for point in timed} == {False, True}
    assert all({"ours", "ours, deterministic", "cudnn"} <= set(point["results"]) for point in timed)


@pytest.mark.parametrize("row", PACKAGED)
def test_the_day_of_a_row_is_that_of_its_file(row):
    path = Path(__file__).parents[3] / "bench" / "results" / row.result_file
    provenance = json.loads(path.read_text(encoding="utf-8"))["provenance"]
    assert (row.date, row.card) == (provenance["date"], provenance["card"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_m": 32}, "block_m=32 must be 64 or 128"),
        ({"keys": 256}, "keys=256 must be 64 or 128"),
        ({"query_slots": 0}, "query_slots=0 must be at least 1"),
        ({"dout_slots": 0}, "dout_slots=0 must be at least 1"),
        ({"rings_in_step": True, "dout_slots": 1}, "rings_in_step=True needs as many query_slots as dout_slots"),
        ({"ds_slots": 3}, "ds_slots=3 must be 1 or 2"),
        ({"load_registers": 25}, "load_registers=25 must be a multiple of 8"),
    ],
)
def test_wrong_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


@pytest.mark.parametrize("head_dim", HOPPER)
def test_a_config_fits_a_card(head_dim):
    assert HOPPER[head_dim].smem_bytes(head_dim) <= Device.hopper().smem_bytes


# Of packed sequences, by whether in order: two slots of dQ leave them fewer registers. A step takes 4000 cycles.
PACKED_SPILLS = {(128, False): 1, (128, True): 6}


@pytest.mark.parametrize(
    ("head_dim", "waits", "spills"), slow_if(lambda case: case[0] != 128, [(64, 5, 1), (128, 5, 0), (256, 6, 2)])
)
@pytest.mark.parametrize(("packed", "deterministic"), slow_if(any, [(False, False), (True, False), (True, True)]))
def test_products_overlap_and_loops_hardly_spill(packed, deterministic, head_dim, waits, spills):
    """The assembler makes a kernel wait after each product if it has too few registers. At D=256 dQ comes in halves,
    and so has a wait more."""
    if packed:
        spills = PACKED_SPILLS.get((head_dim, deterministic), spills)
    for causal, finishes in itertools.product((False, True), (False, True)):
        config = rows_by_default((head_dim, head_dim), causal)[0].config
        if finishes and not config.can_finish(head_dim):
            continue
        choices = Choices(
            dtype=torch.bfloat16,
            padded_head_dims=(head_dim, head_dim),
            mask=Mask(causal=causal),
            config=config,
            packed=packed,
            deterministic=deterministic,
            finishes=finishes,
        )
        (main,) = main_of(choices, compiled_backward(choices)).values()
        found = resources(main)
        assert found.smem_bytes <= config.smem_bytes(head_dim, finishes=finishes)
        loops = [loop for loop in found.loops if loop.products > 4]
        assert len(loops) == 2  # masked and not
        assert all(loop.waits <= waits and loop.spills <= spills for loop in loops), loops


def test_the_order_of_sums_is_a_choice_at_compile_time():
    choices = Choices(dtype=torch.bfloat16, padded_head_dims=(64, 64), mask=Mask(), config=HOPPER[64], finishes=True)
    in_any, in_one = builds_of(choices), builds_of(dataclasses.replace(choices, deterministic=True))
    assert in_any[1].constants["DETERMINISTIC"] is False
    assert in_one[1].constants["DETERMINISTIC"] is True
