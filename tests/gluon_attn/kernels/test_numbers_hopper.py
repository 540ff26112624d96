"""The project's Hopper kernel: the numbers of float64 within rounding, and no finding under any policy."""

import itertools
import math
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import gluon_cpu
from bench.candidates import label
from gluon_attn.device import Device
from gluon_attn.forward.configs import HopperConfig
from gluon_attn.forward.launch import launches_of
from gluon_attn.forward.plan import Plan
from gluon_attn.forward.table import HOPPER, Row, hopper_config
from gluon_attn.problem import Problem
from gluon_attn.testing import config_for_reuse
from tests.gluon_cpu.attention import Run, TransposeRun, kv_scales, normal_qkv
from tests.slow import slow_if

ROOT = Path(__file__).parents[3]

# Edges first. Each with 1 and 2 CTAs, full and causal.
ROWS: dict[str, dict[str, Any]] = {
    "one row, one key": {"q_len": 1},
    "one key block": {"q_len": 64},
    "two key blocks": {"q_len": 128, "kv_len": 256},
    "odd lengths": {"q_len": 129, "kv_len": 333},
    "more queries than keys": {"q_len": 300, "kv_len": 70},
    "several row blocks": {"q_len": 700, "kv_len": 260},
    "fp16": {"q_len": 197, "dtype": torch.float16},
    "GQA": {"q_len": 100, "heads": 6, "kv_heads": 2, "batch": 2},
    "D=40": {"q_len": 130, "head_dim": 40},
    "D=128": {"q_len": 200, "head_dim": 128, "kv_len": 300},
    "D=128, fp16, GQA": {"q_len": 65, "head_dim": 128, "dtype": torch.float16, "heads": 4, "kv_heads": 1},
    "D=256": {"q_len": 130, "head_dim": 256, "kv_len": 200},
    "e4m3": {"q_len": 300, "kv_len": 333, "dtype": torch.float8_e4m3fn},
    "e5m2, D=16, GQA": {
        "q_len": 100,
        "head_dim": 16,
        "dtype": torch.float8_e5m2,
        "heads": 6,
        "kv_heads": 2,
        "batch": 2,
    },
    "e4m3, D=112": {"q_len": 65, "kv_len": 300, "head_dim": 112, "dtype": torch.float8_e4m3fn},
    "e5m2, D=256": {"q_len": 130, "kv_len": 200, "head_dim": 256, "dtype": torch.float8_e5m2},
}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
CASES = {
    f"{name}, {'causal' if causal else 'full'}, {num_ctas} CTA{'s' * (num_ctas - 1)}": (row, causal, num_ctas)
    for (name, row), num_ctas, causal in itertools.product(ROWS.items(), (1, 2), (False, True))
}


def small_configs_fit(row: dict[str, Any]) -> bool:
    return row.get("head_dim", 64) <= 128 and row.get("dtype", torch.bfloat16) not in FP8


def hopper_inputs(**row: Any) -> tuple[torch.Tensor, ...]:
    """q, k, v, and in fp8 their scales."""
    q, k, v = normal_qkv(**row)
    return (q, k, v, *(kv_scales(q.shape[0], k.shape[1]) if q.dtype in FP8 else ()))


def checked(run: Run | TransposeRun, what: str, **options: Any) -> None:
    run(**options)
    run.check(what)


# A kernel takes two to four seconds to compile, one of a CTA pair a dozen: in `make test` few, and each for several
# cases. Of some kinds the masked one alone, which has both loops.
SLOW = pytest.mark.slow
BOTH_MASKS = {(64, torch.bfloat16)}
CAUSAL_ALONE = {(128, torch.bfloat16), (256, torch.bfloat16), (64, torch.float8_e4m3fn)}


def is_slow(name: str) -> bool:
    row, causal, num_ctas = CASES[name]
    if num_ctas == 2:
        return not name.startswith("odd lengths, causal")
    head_dim = row.get("head_dim", 64)
    kind = (64 if head_dim <= 64 else 128 if head_dim <= 128 else 256, row.get("dtype", torch.bfloat16))
    return kind not in BOTH_MASKS and not (causal and kind in CAUSAL_ALONE)


@pytest.mark.parametrize("name", slow_if(is_slow, CASES))
def test_against_float64(name):
    row, causal, num_ctas = CASES[name]
    run = Run(*hopper_inputs(**row), causal=causal, num_ctas=num_ctas)
    checked(run, name, schedule=gluon_cpu.Schedule("random", seed=zlib.crc32(name.encode()) % 1000))


IN_FP8 = [name for name, (row, _, _) in CASES.items() if row.get("dtype") in FP8]


@pytest.mark.parametrize("layout", slow_if(lambda layout: layout == "bshd", ["bhsd", "bshd"]))
@pytest.mark.parametrize("name", slow_if(lambda name: not name.startswith("e4m3, D=112, causal, 1"), IN_FP8))
def test_fp8_with_values_transposed_before(name, layout):
    row, causal, num_ctas = CASES[name]
    q, k, v, *scales = hopper_inputs(**row)
    config = config_for_reuse(Problem.of(q, k, v, causal=causal), Device.hopper(), num_ctas)
    assert config.transposes_before(1)
    if layout == "bshd":
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    run = Run(q, k, v, *scales, causal=causal, layout=layout, num_ctas=num_ctas, config=config)
    checked(run, name, schedule=gluon_cpu.Schedule("random", seed=zlib.crc32(name.encode()) % 1000))
    assert run.before is not None
    run.before.check(name)


@pytest.mark.parametrize("policy", gluon_cpu.POLICIES)
@pytest.mark.parametrize("head_dim", [16, 64, 112, 128, 256])
def test_values_are_transposed_under_every_policy(policy, head_dim):
    q, k, v = normal_qkv(heads=4, kv_heads=2, batch=2, q_len=1, kv_len=333, head_dim=head_dim, dtype=FP8[1])
    problem = Problem.of(q, k, v)
    plan = Plan.of(problem, config_for_reuse(problem, Device.hopper(), 1), Device.hopper())
    run = TransposeRun(plan, v, launches_of(plan, q, k, v, torch.empty_like(q, dtype=torch.bfloat16))[0])
    for mode in (None, "lowered"):
        checked(run, f"{policy}, D={head_dim}", schedule=gluon_cpu.Schedule(policy, seed=0), mode=mode)


IN_SMALL_CONFIGS = [name for name, (row, _, n) in CASES.items() if n == 1 and small_configs_fit(row)]


@pytest.mark.parametrize("roles", slow_if(lambda roles: roles == 2, [1, 2]))
@pytest.mark.parametrize("name", slow_if(lambda name: "fp16" in name, IN_SMALL_CONFIGS))
@pytest.mark.slow_but(
    "D=128, causal, 1 CTA-1",
    "odd lengths, causal, 1 CTA-1",
    "odd lengths, full, 1 CTA-1",
    "D=40, full, 1 CTA-1",
    "more queries than keys, full, 1 CTA-1",
    "several row blocks, causal, 1 CTA-1",
    "GQA, causal, 1 CTA-1",
)
def test_against_float64_in_small_configs(name, roles):
    """The configs of the table for little work, which attention() picks for problems of these sizes."""
    sizes, causal, _ = CASES[name]
    little = {row.config for row in HOPPER if row.one_round and isinstance(row.config, HopperConfig)}
    (config,) = (config for config in little if config.softmax_roles == roles)
    run = Run(*hopper_inputs(**sizes), causal=causal, config=config)
    checked(run, name, schedule=gluon_cpu.Schedule("random", seed=zlib.crc32(name.encode()) % 1000))


@pytest.mark.parametrize("num_ctas", [1, 2])
def test_rows_that_see_no_key(num_ctas):
    """Causal with more queries than keys: the first rows have O = 0 and LSE = -inf."""
    run = Run(*normal_qkv(q_len=400, kv_len=100), causal=True, num_ctas=num_ctas)
    checked(run, "fully masked rows")
    assert (run.out[:, :, :300] == 0).all()
    assert (run.lse[:, :, :300] == -float("inf")).all()


@pytest.mark.parametrize(
    ("causal", "num_ctas"),
    [(True, 1), (True, 2), (False, 1), pytest.param(False, 2, marks=SLOW)],
    ids=["causal, 1 CTA", "causal, 2 CTAs", "full, 1 CTA", "full, 2 CTAs"],
)
def test_persistent_programs(num_ctas, causal):
    """Three and more row blocks to a program: every channel lives on from one to the next."""
    run = Run(*normal_qkv(q_len=500, heads=3, kv_len=300), causal=causal, num_ctas=num_ctas, programs=2)
    checked(run, "persistent")


LAST_HEADS_LONGEST_FIRST = [
    row for row in HOPPER if isinstance(row.config, HopperConfig) and row.config.last_heads_longest_first
]


def name_of(row: Row) -> str:
    return f"D={row.padded_head_dim}, {8 * row.element_bytes} bits, {label(row.config)}"


@pytest.mark.parametrize(
    "row",
    slow_if(lambda row: row is not LAST_HEADS_LONGEST_FIRST[0], LAST_HEADS_LONGEST_FIRST),
    ids=map(name_of, LAST_HEADS_LONGEST_FIRST),
)
def test_items_of_two_and_then_single_row_blocks(row):
    """Two programs: of two heads each two items of two row blocks and a single one; then the third's one by one."""
    dtype = torch.bfloat16 if row.element_bytes == 2 else FP8[0]
    q_len = 5 * row.config.block_m - 15
    inputs = hopper_inputs(heads=3, q_len=q_len, kv_len=333, head_dim=row.padded_head_dim, dtype=dtype)
    run = Run(*inputs, causal=True, config=row.config, programs=2)
    assert (run.plan.blocks_per_item, run.plan.heads_longest_first) == (2, 1)
    checked(run, "the last heads longest first")


INTEGER_MAX = hopper_config(2, 128, 2, 2, 232, turns=True, early_exp=2, integer_max=True)

# Largest scores of key blocks in the order in which they are walked, in log2 units.
BLOCK_MAXIMA = {
    "above 0": (1, 2, 0.5, 3, 0.2),
    "a little below 0": (-5, -4, -7, -3, -6),
    "a little below 0, then above": (-7, -3, 2, -5, 9),
    "a little below 0, then far": (-6, -200, -90, -300, -20),
    "above 0, then far below": (3, -100, -300, -50, -2),
    "a little below 0, then at 0": (-7.8, -0.1, -5, -0.2, -3),
    "far below 0": (-300, -280, -310, -170, -250),
    "far below 0, then above": (-300, 5, -20, 7, -1),
    "just this side of the limit": (-7.8, -40, -9, -6, -8),
    "just that side of the limit": (-8.2, -40, -9, -7, -8),
}


def with_block_maxima(maxima: tuple[float, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k and v whose scores are near `maxima` in two rows of three, in the third a tenth of that."""
    q, k, v = normal_qkv(q_len=300, kv_len=128 * len(maxima), head_dim=128, dtype=torch.float32)
    q, k = 0.05 * q, 0.05 * k
    q[..., 0] = torch.where(torch.arange(300) % 3 == 2, 0.1, 1.0)
    k[..., 0] = torch.tensor(maxima[::-1]).repeat_interleave(128) * 128**0.5 * math.log(2)
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("causal", slow_if(lambda causal: not causal, [False, True]), ids=["full", "causal"])
@pytest.mark.parametrize(
    "dtype", slow_if(lambda dtype: dtype != torch.float16, [torch.bfloat16, torch.float16]), ids=["bf16", "fp16"]
)
@pytest.mark.parametrize("maxima", BLOCK_MAXIMA.values(), ids=BLOCK_MAXIMA.keys())
def test_maxima_as_integers(maxima, dtype, causal):
    """What is compared as an integer, and where scores are so far below 0 that it must not be."""
    checked(Run(*with_block_maxima(maxima, dtype), causal=causal, config=INTEGER_MAX, programs=2), "maxima as integers")


@pytest.mark.parametrize("first", [-7.8, -19.0], ids=["within the limit", "beyond it"])
def test_a_score_near_0_among_some_far_below(first):
    """As an integer the largest is one of those far below, and the maximum stays as the first block had it: P of the
    score near 0 is up to 2^8; beyond the limit it would be 2^19, which fp16 does not have."""
    q, k, v = normal_qkv(q_len=64, kv_len=384, head_dim=128, dtype=torch.float32)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0], k[..., 0], k[..., 256:, 0] = 1, -40, first
    k[..., 77, 0] = k[..., 200, 0] = -0.1
    k *= 128**0.5 * math.log(2)
    checked(Run(*(x.half() for x in (q, k, v)), causal=False, config=INTEGER_MAX), f"after {first}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_maxima_as_integers_lose_no_small_probability(dtype):
    """One key at -7.9, and 2047 so far below it that, with P any smaller, they would be 0 in fp16 but for their sum."""
    q, k, v = normal_qkv(q_len=64, kv_len=2048, head_dim=128, dtype=torch.float32)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0], k[..., 0], k[..., -1, 0] = 1, -25.2, -7.9
    k *= 128**0.5 * math.log(2)
    checked(Run(q.to(dtype), k.to(dtype), v.abs().to(dtype), causal=False, config=INTEGER_MAX), "small probabilities")


@pytest.mark.slow
@pytest.mark.parametrize("policy", slow_if(lambda policy: policy != "random", gluon_cpu.POLICIES))
@pytest.mark.parametrize("num_ctas", [1, 2])
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        (64, torch.bfloat16),
        pytest.param(128, torch.bfloat16, marks=SLOW),
        pytest.param(256, torch.bfloat16, marks=SLOW),
        pytest.param(64, FP8[0], marks=SLOW),
        pytest.param(128, FP8[0], marks=SLOW),
    ],
)
def test_silent_and_right_under_every_policy(policy, num_ctas, head_dim, dtype):
    """D = 64 takes turns, 256 stages O in the tile of Q, fp8 has a role more: as many different wirings."""
    inputs = hopper_inputs(q_len=390, kv_len=330, head_dim=head_dim, dtype=dtype)
    turns = hopper_config(3, 128, 2, 2, 160, turns=True, early_exp=1, num_ctas=num_ctas)
    config = turns if (head_dim, dtype) == (64, torch.bfloat16) else None
    run = Run(*inputs, causal=True, num_ctas=num_ctas, config=config, programs=1)
    for seed, mode in enumerate((None, "lowered")):
        checked(run, f"{policy}, seed {seed}", schedule=gluon_cpu.Schedule(policy, seed=seed), mode=mode)


def test_schedules_do_not_change_the_numbers():
    """Bit by bit: nothing in the kernel depends on who comes first."""
    run = Run(*normal_qkv(q_len=260), causal=True, num_ctas=2)
    results = []
    for policy in gluon_cpu.POLICIES:
        run(schedule=gluon_cpu.Schedule(policy, seed=3))
        results.append((run.out.clone(), run.lse.clone()))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_a_race_on_global_memory_is_caught():
    """O over K: what one row block has stored, the next one loads, in whichever order."""
    run = Run(*normal_qkv(q_len=512), causal=False, programs=1)
    run()
    run.tensors["out"] = run.k
    for policy in gluon_cpu.POLICIES:
        with pytest.raises(gluon_cpu.DataRace) as caught:
            run(schedule=gluon_cpu.Schedule(policy, seed=0))
        assert "load" in str(caught.value)
        assert "softmax" in str(caught.value)
