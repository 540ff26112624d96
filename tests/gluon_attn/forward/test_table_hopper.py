"""Each Hopper row of the tuning table fits the card and says where it was measured; the picker always has an answer.

The rows for Blackwell have other limits, tensor memory among them: test_table_blackwell.py.
"""

import dataclasses
import datetime
import functools
import itertools
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.candidates import CANDIDATES, label
from bench.points import DTYPES, SETS, Point
from gluon_attn import HopperConfig
from gluon_attn.device import Device
from gluon_attn.explain_times import of_search
from gluon_attn.forward.table import COSTS_OF_ROW_BLOCKS, HOPPER, OTHER_HEAD_DIMS, Row, pick_config, pick_row
from gluon_attn.problem import Problem
from tests.gluon_attn.problems import problem
from tests.slow import slow_if

RESULTS = Path(__file__).parents[3] / "bench" / "results"

# Of an H100 or H200, from CUDA's programming guide.
SMEM_BYTES = 232448
REGISTERS = 65536
MAX_THREADS = 1024
MAX_REGISTERS_PER_THREAD = 255

WARPGROUP = 128
QUERY_ROWS = 64  # query rows of a softmax warpgroup in each CTA

# What a compiled kernel has beside its tiles: mbarriers, and what the compiler itself needs.
OTHER_SMEM_BYTES = 8192


def name_of(i: int, row: Row) -> str:
    return f"row {i}: D={row.padded_head_dim}, {row.config.num_ctas} CTAs"


ROWS: dict[str, Any] = {name_of(i, row): row for i, row in enumerate(HOPPER)}


def tile_bytes(config: HopperConfig, head_dim: int, element_bytes: int) -> int:
    """The tiles of one CTA: Q in its slots; K and V in theirs, and V transposed in as many more if a role does that;
    O, in 16 bits, in a buffer of its own unless it is staged in Q's."""
    queries = config.query_slots * config.softmax_roles * QUERY_ROWS * head_dim * element_bytes
    results = 0 if config.stage_in_queries else config.softmax_roles * QUERY_ROWS * head_dim * 2
    kinds = 3 if config.transpose_registers else 2
    return queries + results + kinds * config.kv_slots * config.block_n * head_dim * element_bytes


def test_there_are_rows():
    assert {(row.padded_head_dim, row.config.num_ctas) for row in HOPPER} == set(
        itertools.product((64, 128, 256), (1, 2))
    )


def test_rows_fit_shared_memory():
    for name, row in ROWS.items():
        assert tile_bytes(row.config, row.padded_head_dim, row.element_bytes) <= SMEM_BYTES, name
        assert row.config.smem_bytes(row.padded_head_dim, row.element_bytes) <= SMEM_BYTES, name


def test_rows_fit_the_registers():
    for name, row in ROWS.items():
        # Registers are handed out by warpgroup: the one load warp takes those of four.
        per_thread = [row.config.softmax_registers] * row.config.softmax_roles + [row.config.load_registers]
        if row.config.transpose_registers:
            per_thread.append(row.config.transpose_registers)
        assert sum(WARPGROUP * registers for registers in per_thread) <= REGISTERS, name
        assert all(24 <= each <= MAX_REGISTERS_PER_THREAD and each % 8 == 0 for each in per_thread), name


def test_rows_fit_the_threads():
    for name, row in ROWS.items():
        transposing = 1 if row.config.transpose_registers else 0
        assert WARPGROUP * (row.config.softmax_roles + 1 + transposing) <= MAX_THREADS, name


def test_rows_say_where_they_were_measured():
    for name, row in ROWS.items():
        if row.result_file is None:  # waits for its measurement, and then claims no card and no date either
            assert (row.card, row.date) == (None, None), name
            continue
        assert re.search(r"H[12]00", row.card), name
        assert datetime.date.fromisoformat(row.date) >= datetime.date(2026, 1, 1), name
        result = RESULTS / row.result_file
        assert result.parent == RESULTS, name
        assert result.is_file(), f"{name}: {result} is missing"
        assert result.stat().st_size > 0, name


def test_rows_of_other_head_dims_are_not_measured_and_have_no_choice_by_length():
    """But for those of (192, 128)."""
    rows = [row for row in OTHER_HEAD_DIMS if row.result_file is None]
    kinds = [(row.head_dims, row.causal, row.element_bytes, row.config.num_ctas) for row in rows]
    assert len(set(kinds)) == len(kinds) > 100
    for row in rows:
        assert (row.min_kv_len, row.min_reuse, row.one_round, row.is_limited) == (1, 1, False, False)
    assert {row.head_dims for row in OTHER_HEAD_DIMS if row not in rows} == {(192, 128)}


def test_rows_of_192_columns_and_128_of_v_are_the_fastest_candidates():
    """To 1 %. Each is faster by 2 % at least than the other one of its mask, in the points that it serves."""
    device, candidates = Device.hopper(), CANDIDATES[192, 128, 2]
    gains: dict[Row, list[float]] = {}
    for _, asked, results in timed("h200_candidates_d192.json"):
        row = pick_row(asked, device, None, OTHER_HEAD_DIMS)
        kind = [other for other in OTHER_HEAD_DIMS if other.result_file and other.causal == row.causal]
        (other,) = (other for other in kind if other is not row)
        own = results[label(row.config)]["ms"]
        assert own <= 1.01 * min(results[label(c)]["ms"] for c in candidates if label(c) in results)
        gains.setdefault(row, []).append(results[label(other.config)]["ms"] / own)
    assert len(gains) == 4
    assert all(statistics.geometric_mean(of_row) > 1.02 for of_row in gains.values())


OF_CANDIDATES = [row for row in HOPPER if row.result_file == "h200_candidates.json"]
# Rows that serve no point of their file, and why they are there.
UNTIMED = {
    ("2x128 q2kv4 v 1cta", 64, True, 1): "queries of less than 512 to a key, and the shortest timed are 512",
    ("3x128 q2kv2Te1i 1cta", 64, False, 2): "what is masked by row; without a mask another row has the same config",
    ("4x64 q2kv4 1cta", 64, False, 2): "the same",
}


@functools.cache
def timed(result_file: str) -> list[tuple[Point, Problem, dict[str, Any]]]:
    """The points of a result file, and each candidate's results by its label."""
    found = []
    for entry in json.loads((RESULTS / result_file).read_text())["points"]:
        point = Point(**entry["point"])
        asked = Problem(
            dtype=DTYPES[point.dtype],
            batch=point.batch,
            heads=point.heads,
            kv_heads=point.heads // point.heads_per_kv_head,
            q_len=point.length,
            kv_len=point.length,
            head_dim=point.head_dim,
            head_dim_v=point.head_dim_v,
            causal=point.causal,
            scale=0.1,
            layout=point.layout,
        )
        found.append((point, asked, entry["results"]))
    return found


def row_for(asked: Problem, num_ctas: int | None) -> Row:
    """Of the table, whose config `pick_config` takes."""
    row = next(row for row in HOPPER if row.fits(asked, Device.hopper(), num_ctas))
    assert row.config == pick_config(asked, Device.hopper(), num_ctas)
    return row


# Points at which the chosen config was more than 2 % slower than the best. All are long: there the card's power makes
# the times of a config differ by more than that from round to round, and a row more would win less than the noise.
WITHIN_THE_NOISE = {"D=128 causal 16384", "D=256 full 16384", "D=256 causal 16384", "D=256 full 16384 e4m3"}


@pytest.mark.parametrize("num_ctas", [None, 2])
def test_each_row_is_within_two_percent_of_the_best_candidate(num_ctas):
    """By default among all candidates that are still there; on two CTAs among those of two, and at the lengths of the
    sweep. The points that are named above: within half the sum of the two spreads."""
    late, seen = set(), 0
    sweep = {point.name for point in SETS["sweep"] + SETS["d256"]}
    for point, asked, results in timed("h200_candidates.json"):
        if num_ctas == 2 and point.name not in sweep:
            continue
        candidates = CANDIDATES[*point.padded_head_dims, asked.dtype.itemsize]
        rivals = [results[label(c)] for c in candidates if label(c) in results and num_ctas in (None, c.num_ctas)]
        row = row_for(asked, num_ctas)
        assert row.result_file == "h200_candidates.json"
        own, best = results[label(row.config)], min(rivals, key=lambda one: one["ms"])
        slower = own["ms"] / best["ms"] - 1
        if slower > 0.02:
            late.add(point.name)
            assert slower < (own["spread"] + best["spread"]) / 2, f"{point.name}: {label(row.config)}, {slower:.1%}"
        seen += 1
    assert late == (WITHIN_THE_NOISE if num_ctas is None else set())
    assert seen > 40


def test_each_row_serves_a_point_that_was_timed():
    serving = [row_for(asked, n) for _, asked, _ in timed("h200_candidates.json") for n in (None, 1, 2)]
    idle = {
        (label(row.config), row.padded_head_dim, row.causal, row.element_bytes)
        for row in OF_CANDIDATES
        if row not in serving
    }
    assert idle == set(UNTIMED)


def uncertainty(*results: dict[str, Any]) -> float:
    """Of the ratio of two medians: two standard errors. A spread is the range of seven rounds, which for normal numbers
    is 2.7 standard deviations; the error of their median is 1.25 deviations over the root of seven."""
    return 2 * 1.25 / 2.7 / math.sqrt(7) * math.hypot(*(result["spread"] for result in results))


def test_each_row_wins_over_the_one_that_would_serve_without_it():
    """By 1 % at least, and more than its file's noise, in the geometric mean of the points it serves; or no other
    row serves them, by default or with that number of CTAs asked for."""
    device, judged = Device.hopper(), 0
    for row in OF_CANDIDATES:
        gains, noise, needed = [], [], False
        for n, (_, asked, results) in itertools.product((None, 1, 2), timed("h200_candidates.json")):
            if row_for(asked, n) is not row:
                continue
            others = [other for other in HOPPER if other is not row and other.fits(asked, device, n)]
            needed |= not others
            if others and label(others[0].config) in results:
                other, own = results[label(others[0].config)], results[label(row.config)]
                gains.append(other["ms"] / own["ms"])
                noise.append(uncertainty(other, own))
        name = (label(row.config), row.padded_head_dim, row.causal, row.element_bytes)
        judged += bool(gains)
        if not needed and name not in UNTIMED:
            assert statistics.geometric_mean(gains) > 1 + max(0.01, math.hypot(*noise) / len(noise)), name
    assert judged > 30


FEW_QUERIES = json.loads((RESULTS / "h200_few_queries.json").read_text())["points"]


def few_queries(shape: dict[str, int]) -> Problem:
    """Of that file: 8 KV heads to 32 query heads."""
    batch, head_dim = shape["heads"] // 32, shape["head_dim"]
    return problem(
        batch=batch, heads=32, kv_heads=8, q_len=shape["q_len"], kv_len=shape["kv_len"], head_dim=head_dim, causal=False
    )


def test_row_blocks_end_soonest_as_their_costs_say():
    """Of 160 calls: the choice is at most 2.1 % behind the best, and much better than any one height for all."""
    ratios: dict[str, list[float]] = {}
    for point in FEW_QUERIES:
        config = pick_config(few_queries(point["shape"]), Device.hopper())
        assert isinstance(config, HopperConfig)
        us = {name: found["us"] for name, found in point["results"].items() if name.endswith(" rows")}
        own = us[f"{config.block_m} rows"]
        assert own <= 1.021 * min(us.values()), point["shape"]
        for name, one in us.items():
            ratios.setdefault(name, []).append(one / own)
    assert len(FEW_QUERIES) == 160
    assert all(statistics.geometric_mean(of_height) > 1.03 for of_height in ratios.values()), ratios


@pytest.mark.parametrize(("head_dim", "rows"), [(64, {64, 128, 192, 256}), (128, {64, 128})])
def test_each_height_of_row_blocks_serves_a_call_that_was_timed(head_dim, rows):
    shapes = [point["shape"] for point in FEW_QUERIES if point["shape"]["head_dim"] == head_dim]
    chosen = [pick_config(few_queries(shape), Device.hopper()) for shape in shapes]
    assert {config.block_m for config in chosen if isinstance(config, HopperConfig)} == rows
    assert {of for of, _ in COSTS_OF_ROW_BLOCKS[head_dim]} == rows


@pytest.mark.parametrize("limits", [{"left": 127, "right": 127}, {"chunk": 256}, {"left": 300}, {"kv_len": 77}])
def test_where_row_blocks_are_unlike_low_ones_serve_one_round_alone(limits):
    device = Device.hopper()
    few, many = (
        pick_config(problem(head_dim=64, causal=False, batch=1, heads=heads, kv_heads=heads, **limits), device)
        for heads in (8, 64)
    )
    assert (few.block_m, many.block_m) == (64, 256)


def with_left(left: int | None, **other: Any) -> Problem:
    shape = {"batch": 2, "heads": 32, "kv_heads": 4, "q_len": 8192, "kv_len": 8192, "head_dim": 64, "causal": True}
    return problem(left=left, **shape | other)


def test_rows_of_windows_are_those_that_a_search_chose():
    """Or as fast as those to 1 %. They are faster by 5 % at least, and by more than its spread, than what served."""
    rows = [row for row in HOPPER if row.in_limits]
    for row in rows:
        assert row.result_file is not None
        found, name = of_search(RESULTS / row.result_file, row)
        assert found.ms[name] <= 1.01 * found.ms[found.chosen]
        assert found.ms[found.in_use] / found.ms[name] > 1 + max(0.05, found.spread)
        assert row_for(problem(**dict(found.shape) | {"dtype": torch.bfloat16}), None) is row
    assert len(rows) == 3


@pytest.mark.parametrize(
    "other",
    [
        {"left": None},
        {"left": 1448},
        {"causal": False, "right": 3},
        {"dtype": torch.float8_e4m3fn},
        {"left": None, "kv_len": 128},
        {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 512, "kv_len": 512},
    ],
    ids=["none", "of many keys", "to both sides", "fp8", "few keys without", "little work"],
)
def test_other_problems_than_those_of_small_windows_keep_their_rows(other):
    assert row_for(with_left(127), None).in_limits
    assert not row_for(with_left(**{"left": 127} | other), None).in_limits


def test_chunks_are_served_as_windows_are():
    assert row_for(with_left(None, chunk=128), None) is row_for(with_left(127), None)


def test_smem_bytes_covers_the_tiles():
    for (name, row), head_dim, element_bytes in itertools.product(ROWS.items(), (64, 128, 256), (1, 2)):
        tiles = tile_bytes(row.config, head_dim, element_bytes)
        assert tiles < row.config.smem_bytes(head_dim, element_bytes) <= tiles + OTHER_SMEM_BYTES, (name, head_dim)


LENGTHS = (1, 63, 64, 65, 127, 128, 129, 512, 1000, 4097, 16384, 1 << 20)


@pytest.mark.parametrize("head_dim", slow_if(lambda head_dim: head_dim % 64, range(8, 257, 8)))
def test_a_config_for_every_problem(head_dim):
    padded = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 192 if head_dim <= 192 else 256
    for dtype, causal, q_len, kv_len, layout in itertools.product(
        (torch.float16, torch.bfloat16, torch.float8_e4m3fn), (False, True), LENGTHS, LENGTHS, ("bhsd", "bshd")
    ):
        if head_dim * dtype.itemsize % 16:
            continue  # TMA cannot address it
        asked = problem(dtype=dtype, causal=causal, q_len=q_len, kv_len=kv_len, head_dim=head_dim, layout=layout)
        for num_ctas in (None, 1, 2):
            config = pick_config(asked, Device.hopper(), num_ctas)
            assert isinstance(config, HopperConfig)
            assert num_ctas in (None, config.num_ctas), asked
            assert config.transpose_registers == 0 or dtype.itemsize == 1, asked
            assert config.smem_bytes(padded, dtype.itemsize) <= SMEM_BYTES, asked
            assert tile_bytes(config, padded, dtype.itemsize) <= SMEM_BYTES, asked


@pytest.mark.parametrize("batch", [1, 7, 512])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (32, 8), (5, 1), (128, 128)])
def test_a_config_for_any_number_of_heads(batch, heads, kv_heads):
    for causal, head_dim in itertools.product((False, True), (64, 128, 256)):
        asked = problem(batch=batch, heads=heads, kv_heads=kv_heads, causal=causal, head_dim=head_dim)
        assert isinstance(pick_config(asked, Device.hopper()), HopperConfig)


@pytest.mark.parametrize(
    ("head_dim", "causal", "heads", "length", "rows"),
    [
        (64, False, 16, 512, 64),  # 128 row blocks of 64 rows for 132 processors
        (64, False, 17, 512, 128),
        (64, False, 32, 1024, 256),
        (64, True, 16, 1024, 64),  # 128 items of two row blocks
        (64, True, 32, 1024, 256),
        (64, True, 32, 2048, 256),
        (64, False, 32, 8192, 192),
        (128, False, 32, 256, 64),
        (128, False, 32, 512, 128),
        (128, True, 16, 1024, 64),
        (128, True, 16, 2048, 128),
    ],
)
def test_little_work_has_small_row_blocks(head_dim, causal, heads, length, rows):
    kind = {"head_dim": head_dim, "causal": causal, "q_len": length, "kv_len": length}
    asked = problem(batch=1, heads=heads, kv_heads=heads, **kind)
    assert pick_config(asked, Device.hopper()).block_m == rows


@pytest.mark.parametrize(
    ("head_dim", "causal", "kv_len", "queries", "of_two_ctas"),
    [
        (64, False, 1000, 1024, 1024),
        (64, False, 16384, 1024, 1024),
        (64, True, 1000, 512, None),  # on two CTAs only from 4096 keys on
        (64, True, 4095, 512, None),
        (64, True, 4096, 512, 2048),
        (64, True, 16384, 512, 2048),
        (128, False, 1000, 1024, 1024),
        (128, False, 16384, 1024, 1024),
        (128, True, 1000, 4096, 4096),
        (128, True, 16384, 4096, 4096),
    ],
)
def test_values_are_transposed_before_where_many_queries_use_each_key(head_dim, causal, queries, of_two_ctas, kv_len):
    """As many of one head as of four that share a KV head, a quarter as long."""
    kind = {"dtype": torch.float8_e4m3fn, "head_dim": head_dim, "causal": causal, "kv_len": kv_len}
    for group, (num_ctas, enough) in itertools.product((1, 4), ((1, queries), (2, of_two_ctas))):
        most = 2**20 if enough is None else enough
        for q_len, before in ((most // group - 1, False), (most // group, enough is not None)):
            asked = problem(**kind, q_len=q_len, kv_heads=16 // group)
            assert pick_config(asked, Device.hopper(), num_ctas).transposes_before(1) == before, asked


@pytest.mark.parametrize(
    ("dtype", "head_dim", "from_keys", "from_keys_of_two_ctas"),
    [
        (torch.bfloat16, 64, 1280, 2560),
        (torch.float16, 128, 1280, 1280),
        (torch.bfloat16, 256, None, None),
        (torch.float8_e5m2, 64, 4096, 4096),
        (torch.float8_e4m3fn, 128, 1, 1),
        (torch.float8_e4m3fn, 256, 1, 1),
    ],
)
def test_long_causal_problems_end_with_the_lightest_row_blocks(dtype, head_dim, from_keys, from_keys_of_two_ctas):
    """With 4096 queries to a key; and never without a mask."""
    for num_ctas, least in ((None, from_keys), (1, from_keys), (2, from_keys_of_two_ctas)):
        for kv_len in (1, 2**20) if least is None else (least - 1, least, 2**20):
            kind = {"dtype": dtype, "head_dim": head_dim, "kv_len": max(1, kv_len), "q_len": 4096}
            config, of_full = (pick_config(problem(**kind, causal=c), Device.hopper(), num_ctas) for c in (True, False))
            assert isinstance(config, HopperConfig)
            assert isinstance(of_full, HopperConfig)
            assert config.last_heads_longest_first == (least is not None and kind["kv_len"] >= least), (
                num_ctas,
                kv_len,
            )
            assert not of_full.last_heads_longest_first


@pytest.mark.parametrize(
    ("kv_len", "head_dim", "causal", "block_n", "integer_max"),
    [
        (767, 128, True, 64, True),
        (768, 128, True, 128, True),
        (512, 128, False, 128, True),
        (1279, 64, True, 64, False),
        (1280, 64, True, 64, True),
        (12287, 64, True, 64, True),
        (12288, 64, True, 128, True),
        (2048, 64, False, 64, False),
        (4096, 256, False, 64, False),
    ],
)
def test_where_maxima_are_integers_and_blocks_small(kv_len, head_dim, causal, block_n, integer_max):
    asked = problem(dtype=torch.float16, head_dim=head_dim, causal=causal, kv_len=kv_len, q_len=4096)
    one, two = (pick_config(asked, Device.hopper(), num_ctas) for num_ctas in (None, 2))
    assert isinstance(one, HopperConfig)
    assert isinstance(two, HopperConfig)
    assert (one.num_ctas, one.block_n, one.integer_max) == (1, block_n, integer_max)
    assert (two.num_ctas, two.integer_max) == (2, False)


def test_picking_is_pure(monkeypatch):
    asked = problem(causal=True)
    first = pick_config(asked, Device.hopper())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", None)
    monkeypatch.setattr(torch.cuda, "is_available", None)
    assert pick_config(asked, Device.hopper()) == first
    # The name of a card says nothing of what fits it.
    assert pick_config(asked, dataclasses.replace(Device.hopper(), name="NVIDIA H100")) == first


def test_a_card_with_less_shared_memory_gets_what_fits_or_an_error():
    small = dataclasses.replace(Device.hopper(), smem_bytes=1024)
    with pytest.raises(ValueError, match="1024"):
        pick_config(problem(), small)
