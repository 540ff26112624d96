"""The project's Blackwell kernel: the numbers of float64 within rounding, and no finding under any policy."""

import dataclasses
import functools
import itertools
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

import gluon_cpu
from gluon_attn.device import Device
from gluon_attn.forward.configs import BlackwellConfig
from gluon_attn.forward.table import BLACKWELL, blackwell_config, pick_config
from gluon_attn.problem import Problem
from tests.gluon_cpu.attention import Run, kv_scales, normal_qkv
from tests.slow import slow_if

B200, B300 = Device.blackwell(), Device.blackwell_ultra()
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS_PER_CTA = 256  # two query tiles

# Edges first. Each full and causal. A row block has 256 rows for each CTA, a key block 128 keys.
LENGTHS: dict[str, dict[str, Any]] = {
    "one row, one key": {"q_len": 1},
    "one key block": {"q_len": 128},
    "two key blocks": {"q_len": 128, "kv_len": 256},
    "odd lengths": {"q_len": 129, "kv_len": 333},
    "more keys than queries": {"q_len": 70, "kv_len": 300},
    "more queries than keys": {"q_len": 300, "kv_len": 70},
    "several row blocks, rings around": {"q_len": 700, "kv_len": 660},
}
HEADS: dict[str, dict[str, Any]] = {
    "GQA": {"q_len": 100, "heads": 6, "kv_heads": 2, "batch": 2},
    "MQA": {"q_len": 65, "heads": 3, "kv_heads": 1, "kv_len": 200},
    "bshd": {"q_len": 130, "heads": 4, "kv_heads": 2, "batch": 2, "layout": "bshd"},
    "K and V expanded": {"q_len": 130, "heads": 2, "batch": 2, "expanded": True},
    "D=8": {"q_len": 130, "head_dim": 8},
    "D=24": {"q_len": 130, "head_dim": 24, "kv_len": 200},
}
WIDE: dict[str, dict[str, Any]] = {
    "D=72": {"q_len": 130, "head_dim": 72},
    "D=96": {"q_len": 200, "head_dim": 96, "kv_len": 300},
    "D=128": {"q_len": 300, "head_dim": 128, "kv_len": 500},
}
FP16: dict[str, dict[str, Any]] = {
    "fp16": {"q_len": 197, "dtype": torch.float16},
    "D=128, fp16, GQA": {"q_len": 65, "head_dim": 128, "dtype": torch.float16, "heads": 4, "kv_heads": 1},
}
FP8: dict[str, dict[str, Any]] = {
    "e4m3": {"q_len": 300, "kv_len": 333, "dtype": E4M3},
    "e4m3, GQA": {"q_len": 100, "dtype": E4M3, "heads": 6, "kv_heads": 2, "batch": 2},
    "e4m3, D=16, bshd": {"q_len": 100, "dtype": E4M3, "head_dim": 16, "heads": 2, "layout": "bshd"},
    "e4m3, D=112": {"q_len": 130, "kv_len": 300, "dtype": E4M3, "head_dim": 112},
    "e5m2": {"q_len": 300, "kv_len": 333, "dtype": E5M2},
    "e5m2, D=128, GQA": {"q_len": 130, "dtype": E5M2, "head_dim": 128, "heads": 4, "kv_heads": 2, "batch": 2},
}
# The compiler takes long over a cluster's kernels (half a minute for four CTAs), so few of them.
CASES: dict[str, tuple[dict[str, Any], bool, int]] = {
    f"{name}, {'causal' if causal else 'full'}, {num_ctas} CTA{'s' * (num_ctas > 1)}": (row, causal, num_ctas)
    for rows, num_ctas, masks in (
        (LENGTHS | HEADS | WIDE | FP16 | FP8, 1, (False, True)),
        (LENGTHS | HEADS, 2, (False, True)),
        (WIDE, 2, (True,)),
        ({"D=128": WIDE["D=128"]}, 2, (False,)),  # what the table picks first there
        ({name: FP8[name] for name in ("e4m3", "e4m3, GQA")}, 2, (False,)),
        ({name: (LENGTHS | HEADS)[name] for name in ("odd lengths", "more queries than keys", "GQA")}, 4, (True,)),
        ({"D=128": WIDE["D=128"], "e4m3": FP8["e4m3"]}, 4, (True,)),
    )
    for (name, row), causal in itertools.product(rows.items(), masks)
}


def inputs(row: dict[str, Any], seed: int = 0) -> tuple[Tensor, ...]:
    """q, k, v, and in fp8 their scales."""
    row = dict(row)
    layout, expanded = row.pop("layout", "bhsd"), row.pop("expanded", False)
    q, k, v = normal_qkv(**row, seed=seed)
    if expanded:  # stride 0 over the heads of k, over the batch of v
        k, v = k[:, :1].expand(k.shape), v[:1].expand(v.shape)
        assert 0 in k.stride()
        assert 0 in v.stride()
    if layout == "bshd":
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    scales = kv_scales(row.get("batch", 1), row.get("kv_heads", row.get("heads", 1)))
    return (q, k, v, *(scales if q.dtype in (E4M3, E5M2) else ()))


def blackwell_run(row: dict[str, Any], *, seed: int = 0, device: Device = B200, **options: Any) -> Run:
    return Run(*inputs(row, seed), layout=row.get("layout", "bhsd"), device=device, **options)


def checked(run: Run, what: str, **options: Any) -> tuple[Tensor, Tensor]:
    run(**options)
    run.check(what)
    return run.out.clone(), run.lse.clone()


# A kernel takes three seconds to compile, one of a CTA pair a dozen: in `make test` few, and each for several cases.
QUICK_KINDS = {(64, torch.bfloat16), (128, torch.bfloat16), (64, E4M3)}


def is_slow(name: str) -> bool:
    row, causal, num_ctas = CASES[name]
    if num_ctas > 1:
        return not name.startswith("odd lengths, causal, 2")
    dtype = row.get("dtype", torch.bfloat16)
    kind = (64 if row.get("head_dim", 64) <= 64 else 128, dtype)
    return kind not in QUICK_KINDS or not causal


@pytest.mark.parametrize("name", slow_if(is_slow, CASES))
def test_against_float64(name):
    row, causal, num_ctas = CASES[name]
    run = blackwell_run(row, causal=causal, num_ctas=num_ctas)
    checked(run, name, schedule=gluon_cpu.Schedule("random", seed=zlib.crc32(name.encode()) % 1000))


@pytest.mark.parametrize("num_ctas", slow_if(lambda num_ctas: num_ctas == 4, [1, 2, 4]))
def test_rows_that_see_no_key(num_ctas):
    """Causal with more queries than keys: the first rows have O = 0 and LSE = -inf, of whole query tiles too."""
    run = blackwell_run({"q_len": 600, "kv_len": 100}, causal=True, num_ctas=num_ctas)
    checked(run, "fully masked rows")
    assert (run.out[:, :, :500] == 0).all()
    assert (run.lse[:, :, :500] == -float("inf")).all()


@pytest.mark.parametrize("num_ctas", slow_if(lambda num_ctas: num_ctas == 2, [1, 2]))
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("row_blocks", [1, 2, 3])
def test_row_blocks_of_one_program(row_blocks, num_ctas, causal):
    """Every channel lives on from one row block to the next."""
    row = {"q_len": ROWS_PER_CTA * num_ctas - 3, "heads": row_blocks, "kv_heads": 1, "kv_len": 300}
    run = blackwell_run(row, causal=causal, num_ctas=num_ctas, programs=1)
    assert run.launch.programs == 1
    checked(run, f"{row_blocks} row blocks")


def test_two_slots_for_keys_and_values_are_enough():
    checked(blackwell_run({"q_len": 40, "kv_len": 400}, causal=False, config=blackwell_config(2, 192)), "two slots")


@pytest.mark.parametrize("num_ctas", [1, 2])
def test_more_programs_than_row_blocks(num_ctas):
    """A program without work opens and closes its channels, and that is all."""
    run = blackwell_run({"q_len": 100}, causal=True, num_ctas=num_ctas)
    run.launch = dataclasses.replace(run.launch, programs=3)
    checked(run, "more programs than row blocks")


@pytest.mark.parametrize("causal", slow_if(lambda causal: not causal, [False, True]), ids=["full", "causal"])
def test_programs_of_a_small_card(causal):
    """Four row blocks of each of three heads over 5 programs; a causal one takes a heavy one with a light one."""
    run = blackwell_run({"q_len": 1000, "heads": 3, "kv_heads": 1}, causal=causal, programs=5)
    checked(run, "programs")


SLOW = pytest.mark.slow


@pytest.mark.parametrize("policy", slow_if(lambda policy: policy != "random", gluon_cpu.POLICIES))
@pytest.mark.parametrize(
    ("head_dim", "num_ctas", "dtype"),
    [
        (64, 1, torch.bfloat16),
        (64, 2, torch.bfloat16),
        pytest.param(64, 4, torch.bfloat16, marks=SLOW),
        pytest.param(128, 1, torch.bfloat16, marks=SLOW),
        pytest.param(128, 1, E4M3, marks=SLOW),
    ],
)
def test_silent_and_right_under_every_policy(policy, head_dim, num_ctas, dtype):
    """D = 64 takes turns, 128 does not; with four CTAs one load serves two pairs."""
    row = {"q_len": ROWS_PER_CTA * num_ctas + 30, "kv_len": 330, "head_dim": head_dim, "dtype": dtype}
    run = blackwell_run(row, causal=True, num_ctas=num_ctas, programs=1)
    for seed, mode in enumerate((None, "lowered") if num_ctas < 4 else (None,)):
        checked(run, f"{policy}, seed {seed}", schedule=gluon_cpu.Schedule(policy, seed=seed), mode=mode)


@pytest.mark.parametrize("num_ctas", slow_if(lambda num_ctas: num_ctas == 2, [1, 2]))
def test_schedules_do_not_change_the_numbers(num_ctas):
    """Bit by bit: nothing in the kernel depends on who comes first."""
    run = blackwell_run({"q_len": 560, "kv_len": 400}, causal=True, num_ctas=num_ctas, programs=1)
    first = checked(run, "first")
    for policy in gluon_cpu.POLICIES:
        run(schedule=gluon_cpu.Schedule(policy, seed=3))
        assert torch.equal(run.out, first[0])
        assert torch.equal(run.lse, first[1])


# ---------------------------------------------------------------------------------------------------------------------
# fp8
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("i", [0, 1, 2], ids=["q_scale", "k_scale", "v_scale"])
def test_each_scale_is_of_its_own_tensor_and_head(i):
    """One scale far from 1 for one head of one batch: only what belongs to it changes."""
    q, k, v, *_ = inputs({"q_len": 50, "heads": 4, "kv_heads": 2, "batch": 2, "dtype": E4M3})
    scales = [torch.ones(2, 2) for _ in range(3)]
    without = Run(q, k, v, *scales, causal=True, device=B200)
    checked(without, "scales of 1")
    scales[i][1, 0] = 0.25
    run = Run(q, k, v, *scales, causal=True, device=B200)
    checked(run, "one scale")
    same = (run.out == without.out).flatten(2).all(-1)
    assert same.tolist() == [[True] * 4, [False, False, True, True]]


@pytest.mark.parametrize("dtype", slow_if(lambda dtype: dtype == E5M2, [E4M3, E5M2]), ids=str)
def test_scales_make_up_for_small_and_large_inputs(dtype):
    """K in the least numbers of the type and Q in large ones, with scales that undo it."""
    q, k, v = normal_qkv(q_len=100, kv_len=200, dtype=torch.float32)
    low, high = 2.0**-4, 2.0**5
    q, k, v = (q * high).to(dtype), (k * low).to(dtype), (v * high).to(dtype)
    scales = [torch.full((1, 1), factor) for factor in (1 / high, 1 / low, 1 / high)]
    checked(Run(q, k, v, *scales, causal=True, device=B200), "scaled")


# ---------------------------------------------------------------------------------------------------------------------
# Levers: none changes a result beyond rounding
# ---------------------------------------------------------------------------------------------------------------------

PLAIN = blackwell_config(3, 192, packed_arithmetic=False)
# One CTA, two key blocks to a lap of the ring; with and without masked blocks.
PROBLEM = {"q_len": 520, "kv_len": 660, "heads": 2, "kv_heads": 1}
# Where nothing is added up in another order, not a bit may change.
EXACT: dict[str, tuple[dict[str, Any], Device]] = {
    "load_pieces": ({"load_pieces": 4, "exp_pieces": 4}, B200),
    "load_pieces 2 of 4": ({"load_pieces": 2, "exp_pieces": 4}, B200),
    "exp_turns": ({"exp_turns": True}, B200),
    "max_in_load": ({"max_in_load": True}, B300),
    "max_in_load, in pieces": ({"max_in_load": True, "load_pieces": 2, "exp_pieces": 4}, B300),
    "longest_first": ({"longest_first": True}, B200),
    "dynamic": ({"dynamic": True}, B200),
    "result_slots": ({"result_slots": 1}, B200),
}
ROUNDING: dict[str, tuple[dict[str, Any], Device]] = {
    "early_p": ({"early_p": True, "exp_pieces": 4}, B200),
    "exp_pieces": ({"exp_pieces": 4}, B200),
    "packed_arithmetic": ({"packed_arithmetic": True}, B200),
    "polynomial_columns": ({"polynomial_columns": 4, "packed_arithmetic": True}, B200),
    "polynomial_columns, not packed": ({"polynomial_columns": 6}, B200),
    "polynomial for all": ({"polynomial_columns": 16}, B200),
    "rescale_threshold": ({"rescale_threshold": 8.0}, B200),
}
FIELDS = {f.name for f in dataclasses.fields(BlackwellConfig) if f.default is not dataclasses.MISSING}


def test_every_lever_is_tested():
    tried = {name for change, _ in (EXACT | ROUNDING).values() for name in change}
    assert tried == FIELDS - {"cga_layout"}


@functools.cache
def result(device: Device, causal: bool, **change: Any) -> tuple[Tensor, Tensor]:
    config = dataclasses.replace(PLAIN, **change)
    run = blackwell_run(PROBLEM, causal=causal, device=device, config=config, programs=1)
    if config.dynamic:
        assert run.launch.programs == 6
    return checked(run, f"{change}", schedule=gluon_cpu.Schedule("pct", seed=1))


def without(change: dict[str, Any]) -> dict[str, Any]:
    """What a lever is compared with: nothing else, but for the pieces that it asks for."""
    return {"exp_pieces": change["exp_pieces"]} if len(change) > 1 and "exp_pieces" in change else {}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_a_lever_that_changes_no_bit(name):
    change, device = EXACT[name]
    for got, want in zip(result(device, True, **change), result(B200, True, **without(change)), strict=True):
        assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ROUNDING)
def test_a_lever_within_rounding(name, causal):
    """In the budget against float64; and the lever does something, or this would test nothing."""
    change, device = ROUNDING[name]
    got, want = result(device, causal, **change), result(B200, causal, **without(change))
    assert not all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


ALL_LEVERS: dict[str, Any] = {
    "load_pieces": 2,
    "exp_pieces": 4,
    "early_p": True,
    "exp_turns": True,
    "max_in_load": True,
    "polynomial_columns": 4,
    "rescale_threshold": 8.0,
    "longest_first": True,
}


@pytest.mark.parametrize("policy", slow_if(lambda policy: policy != "random", gluon_cpu.POLICIES))
@pytest.mark.parametrize(
    ("num_ctas", "dtype", "dynamic"),
    [
        (1, torch.bfloat16, True),
        pytest.param(1, torch.float16, False, marks=SLOW),
        pytest.param(2, torch.bfloat16, True, marks=SLOW),
    ],
)
def test_all_levers_together(policy, num_ctas, dtype, dynamic):
    config = blackwell_config(3 * num_ctas, 192, num_ctas=num_ctas, **ALL_LEVERS, dynamic=dynamic)
    row = {"q_len": 2 * ROWS_PER_CTA * num_ctas + 40, "kv_len": 400, "dtype": dtype, "heads": 2, "kv_heads": 1}
    run = blackwell_run(row, causal=True, device=B300, config=config, programs=2)
    checked(run, policy, schedule=gluon_cpu.Schedule(policy, seed=5))


# ---------------------------------------------------------------------------------------------------------------------
# The conditional rescale
# ---------------------------------------------------------------------------------------------------------------------

RESCALED_KEYS = 640  # five key blocks, walked from the last


def rising(row_growth: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with scores near 0 in the last key block, and in row m larger by row_growth[m] in each block walked after
    it, in log2 units of the scaled score, with scale 1/8 and D = 64."""
    q, k, v = normal_qkv(q_len=len(row_growth), kv_len=RESCALED_KEYS, dtype=torch.float32)
    q, k = 0.1 * q, 0.1 * k
    step = 8 * torch.tensor(2.0).log()  # so that scale * score, times log2(e), grows by row_growth
    q[..., 0] = row_growth
    blocks_after = (RESCALED_KEYS - 1 - torch.arange(RESCALED_KEYS)) // 128  # 0 for the last block
    k[..., 0] = step * blocks_after
    return q.to(dtype), k.to(dtype), v.to(dtype)


GROWTH = {
    "a little": torch.full((300,), 1.5),
    "just below the threshold": torch.full((300,), 7.75),
    "a lot": torch.full((300,), 20.0),
    "shrinking": torch.full((300,), -6.0),
    # Within one warpgroup, and between the two query tiles and the CTAs of a pair.
    "some rows": torch.where(torch.arange(300) % 37 == 0, 15.0, 0.5),
    "the last rows": torch.where(torch.arange(600) >= 400, 15.0, 0.5),
    "the first rows": torch.where(torch.arange(600) < 128, 15.0, 0.5),
}
THRESHOLD = blackwell_config(3, 192, rescale_threshold=8.0)


@pytest.mark.parametrize("growth", GROWTH.values(), ids=GROWTH.keys())
def test_rescaling_by_need(growth):
    checked(Run(*rising(growth, torch.float16), causal=False, device=B200, config=THRESHOLD, programs=1), "threshold 8")


@pytest.mark.slow
@pytest.mark.parametrize("growth", GROWTH.values(), ids=GROWTH.keys())
def test_rescaling_by_need_in_each_cta_of_a_pair(growth):
    inputs = rising(growth, torch.bfloat16)
    config = pick_config(Problem.of(*inputs), B200, 2)
    assert isinstance(config, BlackwellConfig)
    assert config.rescale_threshold == 8
    checked(Run(*inputs, causal=False, device=B200, config=config, programs=1), "threshold 8")


def test_a_rescale_is_skipped_below_the_threshold():
    """With a threshold that lets maxima grow beyond it, and so P beyond the largest fp16, O shows that they did."""
    beyond = dataclasses.replace(THRESHOLD)
    object.__setattr__(beyond, "rescale_threshold", 100.0)  # which the config itself refuses
    inputs = rising(GROWTH["a lot"], torch.float16)
    run = Run(*inputs, causal=False, device=B200, config=beyond, programs=1)
    run()
    assert not run.out.isfinite().any()
    checked(Run(*inputs, causal=False, device=B200, config=THRESHOLD, programs=1), "threshold 8")


def test_nearly_every_row_of_the_table_is_executed():
    """The campaign over schedules runs them all. Here, each head dim, mask and number of CTAs is met in a test above,
    but for four CTAs without a mask, which take the compiler half a minute each."""
    executed = {(64 if row.get("head_dim", 64) <= 64 else 128, causal, n) for row, causal, n in CASES.values()}
    wanted = {(r.padded_head_dim, r.causal, r.config.num_ctas) for r in BLACKWELL}
    assert executed <= wanted
    assert wanted - executed == {(64, False, 4), (128, False, 4)}
