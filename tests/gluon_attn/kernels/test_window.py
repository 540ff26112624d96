"""A mask that hides early keys: which key blocks are walked then, in which kind of step, and what rows see of them."""

import dataclasses
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import gluon_cpu
from gluon_attn.cpu import launches_on_cpu
from gluon_attn.device import Device
from gluon_attn.forward.configs import ForwardConfig, HopperConfig
from gluon_attn.forward.fits import require_fits
from gluon_attn.forward.launch import NOT_GIVEN, compiled
from gluon_attn.forward.plan import Plan
from gluon_attn.forward.table import blackwell_config, hopper_config
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.problem import Problem
from gluon_attn.resources import resources
from gluon_attn.tensors import FP8_DTYPES, output_dtype
from tests.gluon_cpu.attention import normal_qkv
from tests.slow import slow_if

H200, B200 = Device.hopper(), Device.blackwell()


def run(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, left: int, config: ForwardConfig, programs: int = 3
) -> tuple[Tensor, Tensor]:
    """O and LSE of our kernel."""
    problem = dataclasses.replace(Problem.of(q, k, v, causal=causal), left=left)
    device = H200 if isinstance(config, HopperConfig) else B200
    require_fits(config, problem, device)
    device = dataclasses.replace(device, sm_count=programs * config.num_ctas)
    out = torch.full(q.shape, float("nan"), dtype=output_dtype(q.dtype))
    lse = torch.full(q.shape[:3], float("nan"))
    tensors: dict[str, Any] = {**NOT_GIVEN, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    launches_on_cpu(Plan.of(problem, config, device), q, k, v, out)(tensors)
    return out.double(), lse.double()


def seen_keys(q_len: int, kv_len: int, *, causal: bool, left: int) -> Tensor:
    """[q_len, kv_len]: whether a query sees a key."""
    distance = torch.arange(q_len)[:, None] + kv_len - q_len - torch.arange(kv_len)  # of the key before the query
    return (distance <= left) & ((distance >= 0) | (not causal))


def want(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """By the definition, in float64; O is 0 in a row that sees no key. What no query sees may be NaN."""
    nobody_sees = ~seen.any(dim=0)[:, None]
    q, k, v = q.double(), k.double().masked_fill(nobody_sees, 0.0), v.double().masked_fill(nobody_sees, 0.0)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    return torch.where(lse.isneginf()[..., None], 0.0, scores.softmax(-1)) @ v, lse


def check(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, left: int, config: ForwardConfig, programs: int = 3
) -> tuple[Tensor, Tensor]:
    """O and LSE of our kernel, that have been found right."""
    out, lse = run(q, k, v, causal=causal, left=left, config=config, programs=programs)
    expected, expected_lse = want(q, k, v, seen_keys(q.shape[2], k.shape[2], causal=causal, left=left))
    atol = 0.15 if q.dtype in FP8_DTYPES else 4e-3  # P in fp8 has three bits
    torch.testing.assert_close(out, expected, atol=atol, rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-5)
    return out, lse


def poison_unwalked(k: Tensor, v: Tensor, q_len: int, left: int, block_n: int) -> int:
    """NaN in the key blocks before the first that a query sees. Returns how many."""
    blocks = max(0, k.shape[2] - q_len - left) // block_n
    for t in (k, v):
        t[:, :, : blocks * block_n] = float("nan")
    return blocks


class Case(NamedTuple):
    config: ForwardConfig
    left: int
    causal: bool
    lengths: tuple[tuple[int, int], ...]  # Sq, Sk
    dtype: torch.dtype = torch.float16


SMALL = hopper_config(2, 64, 2, 2, 232)  # 128 rows, 64 keys
TURNS = hopper_config(2, 128, 2, 2, 232, turns=True, early_exp=2, integer_max=True)
FOUR = hopper_config(4, 64, 2, 4, 112, integer_max=True, last_heads_longest_first=True)  # 256 rows, 64 keys
THREE = hopper_config(3, 64, 2, 2, 160, last_heads_longest_first=True)  # 192 rows, 64 keys
WIDE = blackwell_config(3, 192, exp_pieces=4, polynomial_columns=2, rescale_threshold=8.0)  # 256 rows, 128 keys
IN_FP8 = hopper_config(2, 128, 2, 2, 216, early_exp=1, transpose_registers=56)

# More keys than queries, in whole blocks; as many; fewer: causal, some rows see none.
LENGTHS = ((150, 448), (301, 301), (270, 77))
LONGER = ((300, 896), (520, 150))
SQUARE = (600, 600)
CASES = {
    "Hopper, its own key": Case(SMALL, 0, True, LENGTHS),
    "Hopper, two keys": Case(TURNS, 1, True, LENGTHS),
    "Hopper, its own key on": Case(SMALL, 0, False, LENGTHS),
    "Hopper, 63": Case(SMALL, 63, True, LENGTHS),
    "Hopper, 64": Case(TURNS, 64, True, LENGTHS),
    "Hopper, 130": Case(SMALL, 130, True, LENGTHS),
    "Hopper, 130 on": Case(TURNS, 130, False, LENGTHS),
    "Hopper, four roles": Case(FOUR, 130, True, LONGER),
    "Hopper, four roles, on": Case(FOUR, 64, False, LONGER),
    "Hopper, shares change roles": Case(THREE, 300, True, ((900, 900),)),
    "Hopper, more than all": Case(SMALL, 1000, True, LENGTHS),
    "Hopper, more than all, on": Case(SMALL, 2**31 - 1, False, LENGTHS),
    "Hopper, O in Q's tile": Case(hopper_config(2, 64, 1, 2, 232, stage_in_queries=True), 63, True, LENGTHS),
    "Hopper, 2 CTAs": Case(hopper_config(2, 64, 2, 2, 232, num_ctas=2), 130, True, LONGER),
    "Hopper, 2 CTAs, on": Case(hopper_config(2, 64, 2, 2, 232, num_ctas=2), 63, False, LONGER),
    "Hopper, e4m3": Case(IN_FP8, 130, True, LENGTHS, torch.float8_e4m3fn),
    "Blackwell, its own key": Case(WIDE, 0, True, LONGER),
    "Blackwell, two keys on": Case(WIDE, 1, False, LONGER),
    "Blackwell, 63": Case(WIDE, 63, False, LONGER),
    "Blackwell, 64": Case(WIDE, 64, True, (*LONGER, SQUARE)),
    "Blackwell, 400": Case(WIDE, 400, True, LONGER),
    "Blackwell, more than all": Case(WIDE, 1000, True, LONGER),
    "Blackwell, turns, early P": Case(
        blackwell_config(3, 192, exp_turns=True, exp_pieces=4, early_p=True), 130, True, LONGER
    ),
    "Blackwell, e4m3": Case(blackwell_config(3, 192), 130, True, LONGER, torch.float8_e4m3fn),
    "Blackwell, 2 CTAs": Case(blackwell_config(3, 192, num_ctas=2), 130, True, ((530, 1100), (600, 150))),
}
QUICK = ("Hopper, two keys", "Hopper, 130 on", "Hopper, shares change roles", "Blackwell, 63")


@pytest.mark.parametrize("name", slow_if(lambda name: name not in QUICK, CASES))
@pytest.mark.slow_but("Blackwell, 63", "Hopper, shares change roles")
def test_against_float64(name):
    """Two query heads of one KV head. NaN in every block that no query sees a key of."""
    config, left, causal, lengths, dtype = CASES[name]
    unwalked = rows_without_keys = 0
    for q_len, kv_len in lengths:
        q, k, v = normal_qkv(heads=2, kv_heads=1, q_len=q_len, kv_len=kv_len, dtype=dtype)
        unwalked += poison_unwalked(k, v, q_len, left, config.block_n)
        out, lse = check(q, k, v, causal=causal, left=left, config=config)
        rows_without_keys += int(lse.isneginf().sum())
        assert (out[lse.isneginf()] == 0).all()
    if len(lengths) > 1:
        assert (unwalked > 0) == (left < 500)
        assert (rows_without_keys > 0) == causal


def test_how_shares_change_roles_in_the_case():
    """In the second row block of a pair, and where those of the last head follow one by one."""
    config, left, causal, ((q_len, kv_len),), _ = CASES["Hopper, shares change roles"]
    q, k, v = normal_qkv(heads=2, q_len=q_len, kv_len=kv_len)
    problem = dataclasses.replace(Problem.of(q, k, v, causal=causal), left=left)
    plan = Plan.of(problem, config, dataclasses.replace(H200, sm_count=3))
    assert (plan.blocks_per_item, plan.heads_longest_first) == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "on"])
@pytest.mark.parametrize("policy", gluon_cpu.POLICIES)
def test_no_finding_under_any_policy(policy, causal):
    """Roles that skip blocks, rings of one slot and turns: who waits for whom. In each row block, of 256 rows, the last
    role skips blocks that the first one needs, and causal the other way round."""
    config = hopper_config(4, 64, 1, 1, 112, turns=True, early_exp=1)
    q, k, v = normal_qkv(q_len=400, kv_len=500, dtype=torch.float16)
    with gluon_cpu.machine(schedule=gluon_cpu.Schedule(policy, seed=1)):
        check(q, k, v, causal=causal, left=70, config=config, programs=1)


SHARES = {  # a config, and the rows of a role's share, or on Blackwell, of a row block
    "Hopper": (SMALL, 64),
    "Blackwell": (blackwell_config(3, 192), 256),
}


@pytest.mark.parametrize("name", SHARES)
def test_only_who_sees_keys_of_a_block_multiplies_with_it(name):
    """With NaN in one block at a time, rows that share a walk with none that sees a key of it come out right."""
    config, rows = SHARES[name]
    q_len, kv_len, left = 2 * rows, 3 * rows, 30
    seen = seen_keys(q_len, kv_len, causal=True, left=left)
    for block in (kv_len // config.block_n - 1, (kv_len - q_len) // config.block_n - 1):
        q, k, v = normal_qkv(q_len=q_len, kv_len=kv_len, dtype=torch.float16)
        expected, _ = want(q, k, v, seen)
        for t in (k, v):
            t[:, :, block * config.block_n : (block + 1) * config.block_n] = float("nan")
        out, _ = run(q, k, v, causal=True, left=left, config=config)
        sees_it = seen[:, block * config.block_n : (block + 1) * config.block_n].any(dim=1)
        clean = ~sees_it.view(-1, rows).any(dim=1, keepdim=True).expand(-1, rows).flatten()
        assert 0 < clean.sum() < q_len
        torch.testing.assert_close(out[:, :, clean], expected[:, :, clean], atol=4e-3, rtol=0)
        assert out[:, :, sees_it].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("causal", slow_if(lambda causal: not causal, [True, False]))
def test_compiled_for_hopper(causal):
    """One role: a loop for each kind of step, the third for a window alone. The unmasked one stays as it is."""
    config = hopper_config(1, 128, 2, 2, 232)
    plain, window = (resources(compiled(torch.bfloat16, 64, Mask(causal=causal, left=n), config)) for n in (None, 1000))
    assert [len(plain.loops), len(window.loops)] == ([2, 3] if causal else [1, 2])
    assert plain.spills == window.spills == 0
    assert all(loop.waits == 2 for loop in window.loops), "products in flight beside the softmax"
    unmasked = [found.loops[causal].instructions for found in (plain, window)]
    assert abs(unmasked[1] - unmasked[0]) <= 4


@pytest.mark.slow
def test_compiled_for_blackwell():
    """Two softmax roles, each with a loop more, of masked steps, which spills a little. The unmasked ones hardly do."""
    config = blackwell_config(3, 192)
    plain, window = (resources(compiled(torch.bfloat16, 64, Mask(left=n), config)) for n in (None, 1000))
    softmax = [[loop for loop in found.loops if loop.exp2 > 0] for found in (plain, window)]
    assert [len(loops) for loops in softmax] == [2, 4]
    unmasked = [loop for loop in softmax[1] if loop.instructions < 1.1 * softmax[0][0].instructions]
    assert len(unmasked) == 2
    assert all(loop.spills <= 4 for loop in unmasked), unmasked
    assert all(loop.spills <= 17 for loop in softmax[1]), softmax[1]
