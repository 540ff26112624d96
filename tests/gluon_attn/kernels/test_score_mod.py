"""A function of scores that a kernel is compiled with: what it is given and where what it returns goes."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from channels.compat import jit
from gluon_attn import BlackwellConfig, HopperConfig
from gluon_attn.cpu import launches_on_cpu
from gluon_attn.device import Device
from gluon_attn.forward.configs import ForwardConfig
from gluon_attn.forward.fits import require_fits
from gluon_attn.forward.launch import NOT_GIVEN
from gluon_attn.forward.plan import Plan
from gluon_attn.forward.table import blackwell_config, hopper_config, pick_config
from gluon_attn.problem import Problem
from gluon_attn.score_mod import ScoreMod, softcap
from tests.gluon_attn.problems import problem
from tests.gluon_cpu.attention import normal_qkv
from tests.slow import slow_if

H200, B200, B300 = Device.hopper(), Device.blackwell(), Device.blackwell_ultra()


@jit
def alibi(scores, q_index, k_index, head, batch):
    """Scores with a slope for each head and batch, times the distance; another one for keys to the right."""
    slope = 0.25 * (head + 1) + 0.125 * batch
    return scores + slope * (k_index - q_index)


ALIBI = ScoreMod(alibi).function


def alibi_in_torch(scores: Tensor) -> Tensor:
    """Of scores (B, H, Sq, Sk)."""
    batches, heads, queries, keys = (torch.arange(n, dtype=torch.float64) for n in scores.shape)
    slopes = 0.25 * (heads + 1) + 0.125 * batches[:, None]  # (B, H)
    return scores + slopes[:, :, None, None] * (keys - queries[:, None])


def run(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, device: Device, config: ForwardConfig, programs: int
) -> tuple[Tensor, Tensor]:
    """O and LSE of our kernel."""
    problem = dataclasses.replace(Problem.of(q, k, v, causal=causal), score_mod=ALIBI)
    require_fits(config, problem, device)
    device = dataclasses.replace(device, sm_count=programs * config.num_ctas)
    out = torch.full(q.shape, float("nan"), dtype=q.dtype)
    lse = torch.full(q.shape[:3], float("nan"))
    tensors: dict[str, Any] = {**NOT_GIVEN, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    launches_on_cpu(Plan.of(problem, config, device), q, k, v, out)(tensors)
    return out, lse


def want(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, modified: bool = True) -> tuple[Tensor, Tensor]:
    """By the definition, in float64; O is 0 in a row that sees no key."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.mT
    scores = scores * q.shape[-1] ** -0.5
    scores = alibi_in_torch(scores) if modified else scores
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
        scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    return torch.where(lse.isneginf()[..., None], 0.0, scores.softmax(-1)) @ v, lse


SIZES = {"batch": 2, "heads": 2, "kv_heads": 1, "q_len": 301, "kv_len": 333}
HOPPER_SMALL = hopper_config(2, 64, 2, 2, 232)  # 128 rows, 64 keys
CONFIGS: dict[str, tuple[Device, ForwardConfig, bool, dict[str, int]]] = {
    "Hopper, full": (H200, HOPPER_SMALL, False, SIZES),
    "Hopper, causal": (H200, HOPPER_SMALL, True, SIZES),
    "Hopper, turns, causal": (H200, hopper_config(2, 128, 2, 2, 232, turns=True, early_exp=2), True, SIZES),
    "Hopper, turns, full": (H200, hopper_config(2, 128, 2, 2, 232, turns=True, early_exp=2), False, SIZES),
    "Hopper, 2 CTAs": (H200, hopper_config(2, 64, 2, 2, 232, num_ctas=2), True, SIZES | {"batch": 1, "q_len": 401}),
    "Blackwell, full": (B200, blackwell_config(3, 192), False, SIZES),
    "Blackwell, causal": (B200, blackwell_config(3, 192), True, SIZES),
    "Blackwell, in pieces": (B200, blackwell_config(3, 192, load_pieces=2, exp_pieces=4, early_p=True), True, SIZES),
    "Blackwell, 2 CTAs": (B200, blackwell_config(3, 192, num_ctas=2), True, SIZES | {"batch": 1, "q_len": 601}),
    "Blackwell, 4 CTAs": (B200, blackwell_config(3, 192, num_ctas=4), True, SIZES | {"batch": 1, "q_len": 1101}),
}
QUICK = ("Hopper, causal", "Blackwell, causal")


@pytest.mark.parametrize("name", slow_if(lambda name: name not in QUICK, CONFIGS))
@pytest.mark.slow_but("Hopper, causal")
def test_against_float64(name):
    """Odd lengths; several row blocks and key blocks; two query heads of one KV head."""
    device, config, causal, sizes = CONFIGS[name]
    q, k, v = normal_qkv(**sizes, dtype=torch.float16)
    assert sizes["q_len"] > config.block_m
    assert sizes["kv_len"] > 2 * config.block_n
    out, lse = run(q, k, v, causal=causal, device=device, config=config, programs=3)
    expected, expected_lse = want(q, k, v, causal=causal)
    torch.testing.assert_close(out.double(), expected, atol=4e-3, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-5)
    # Without the function nearly every row is another one.
    _, plain_lse = want(q, k, v, causal=causal, modified=False)
    seen = expected_lse.isfinite()
    assert ((plain_lse - expected_lse)[seen].abs() > 1e-2).double().mean() > 0.95


LONG = {"batch": 1, "heads": 32, "kv_heads": 8, "q_len": 4096, "kv_len": 4096}


def test_a_lever_that_looks_at_raw_scores_is_refused():
    config = blackwell_config(3, 192, max_in_load=True)
    with pytest.raises(ValueError, match=r"^config: expected max_in_load=False with a score_mod, .*got True$"):
        require_fits(config, problem(**LONG, score_mod=ALIBI), B300)
    require_fits(config, problem(**LONG), B300)
    require_fits(dataclasses.replace(config, max_in_load=False), problem(**LONG, score_mod=ALIBI), B300)


@pytest.mark.parametrize(("lever", "device"), [("max_in_load", B300), (None, H200)], ids=["B300", "H200"])
def test_the_table_leaves_such_a_lever_out(lever, device):
    """And nothing else. On Hopper there is none: integer_max looks at what the function has made."""
    had_it, changes = 0, dict[str, Any]({lever: False} if lever else {})
    for head_dim, causal in ((64, False), (64, True), (128, False), (128, True)):
        for num_ctas in (None, 1, 2):
            asked = problem(**LONG, head_dim=head_dim, causal=causal)
            plain = pick_config(asked, device, num_ctas)
            config = pick_config(dataclasses.replace(asked, score_mod=ALIBI), device, num_ctas)
            assert isinstance(config, (HopperConfig, BlackwellConfig))
            assert config == dataclasses.replace(plain, **changes)
            require_fits(config, dataclasses.replace(asked, score_mod=ALIBI), device)
            had_it += getattr(plain, lever or "integer_max")
    assert had_it > 0


HALF: dict[str, tuple[bool, dict[str, Any], float | None]] = {
    "soft cap": (True, {"dtype": torch.bfloat16}, 55.0),
    "soft cap, full, V of 40 columns": (True, {"dtype": torch.bfloat16, "causal": False, "head_dim_v": 40}, 30.0),
    "no soft cap": (False, {"dtype": torch.bfloat16}, None),
    "a large cap": (False, {"dtype": torch.bfloat16}, 56.0),
    "D=128": (False, {"dtype": torch.bfloat16, "head_dim": 128}, 30.0),
    "fp16": (False, {"dtype": torch.float16}, 30.0),
}


@pytest.mark.parametrize(("half", "sizes", "cap"), HALF.values(), ids=HALF.keys())
def test_where_half_of_the_exponentials_are_polynomials(half, sizes, cap):
    function = None if cap is None else softcap(cap)
    config = pick_config(problem(**({**LONG, "causal": True, "head_dim": 64} | sizes), score_mod=function), H200)
    assert isinstance(config, HopperConfig)
    assert config.half_by_polynomial == half


@pytest.mark.parametrize(("dtype", "cap"), [(torch.bfloat16, None), (torch.bfloat16, 56.0), (torch.float16, 30.0)])
def test_polynomials_for_scores_far_from_0_are_refused(dtype, cap):
    function = None if cap is None else softcap(cap)
    config = hopper_config(2, 128, 2, 2, 232, half_by_polynomial=True)
    with pytest.raises(
        ValueError, match=r"^config: expected half_by_polynomial=False but for softcap of at most 55 in"
    ):
        require_fits(config, problem(**LONG, dtype=dtype, score_mod=function), H200)
    require_fits(config, problem(**LONG, dtype=torch.bfloat16, score_mod=softcap(55.0)), H200)
