"""The main kernel makes dQ of its sums: where it does, and that it writes all of dQ, also where nobody has added."""

import dataclasses

import pytest
import torch

from gluon_attn.backward.launch import Choices, builds_of, main_of
from gluon_attn.backward.plan import BackwardPlan, finishes
from gluon_attn.backward.table import CAUSAL, HOPPER, IN_ONE_LAUNCH, UNLIKE, WITH_BIAS, WITH_DBIAS
from gluon_attn.bias import Bias
from gluon_attn.device import Device
from gluon_attn.kernels.common.mask import Mask
from tests.gluon_attn.problems import problem
from tests.gluon_cpu.attention import BackwardRun, bias_of, normal_qkv
from tests.gluon_cpu.features import FeatureBackwardRun, FeatureCall
from tests.slow import slow_if

EACH_ROW, ONE_ROW = (Bias(dtype=torch.bfloat16, each_row=each_row, shared=False) for each_row in (True, False))
KINDS = {
    "D=64": (HOPPER[64], (64, 64), None, True),
    "D=64 causal": (CAUSAL[64], (64, 64), None, True),
    "D=128": (HOPPER[128], (128, 128), None, True),
    "D=256": (HOPPER[256], (256, 256), None, False),  # dQ comes in two parts
    "D=192, V of 128": (UNLIKE[192, 128], (192, 128), None, False),  # in pieces, and in another launch
    "D=192, V of 128, in one launch": (IN_ONE_LAUNCH[192, 128], (192, 128), None, False),
    "D=64, a bias of one row": (HOPPER[64], (64, 64), ONE_ROW, True),
    "D=64, a bias of each row": (WITH_BIAS[64], (64, 64), EACH_ROW, False),  # no memory
    "D=64, its gradient": (WITH_DBIAS[64], (64, 64), EACH_ROW, False),  # of 64 rows a warp has half of the columns
}


@pytest.mark.parametrize("kind", KINDS)
def test_where_the_main_kernel_finishes(kind):
    config, head_dims, bias, expected = KINDS[kind]
    assert finishes(config, head_dims, Device.hopper(), bias=bias) == expected


def test_where_programs_share_key_blocks_too():
    plan = BackwardPlan.of(problem(q_len=4096, kv_len=4096, head_dim=64), HOPPER[64], Device.hopper())
    assert plan.shared > 0
    assert plan.finishes
    assert Choices.of(plan).steps == ("before", "all")


def test_not_without_memory():
    device = dataclasses.replace(Device.hopper(), smem_bytes=HOPPER[128].smem_bytes(128))
    assert not finishes(HOPPER[128], (128, 128), device)
    device = dataclasses.replace(device, smem_bytes=HOPPER[128].smem_bytes(128, finishes=True))
    assert finishes(HOPPER[128], (128, 128), device)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_shared_memory_is_what_the_compiler_takes(head_dim):
    config = HOPPER[head_dim]
    choices = Choices(
        dtype=torch.bfloat16, padded_head_dims=(head_dim, head_dim), mask=Mask(), config=config, finishes=True
    )
    assert choices.steps == ("before", "all")
    (build,) = main_of(choices, builds_of(choices)).values()
    taken = build.compile(90).metadata.shared
    assert 0 <= config.smem_bytes(head_dim, finishes=True) - taken < 1024


# Sq, Sk, head dim, query heads, causal, the bias, programs.
CASES = {
    "one program, many row blocks": (300, 130, 64, 2, False, "", 1),
    "fewer programs than row blocks": (200, 130, 128, 2, True, "", 3),
    "more programs than row blocks": (60, 300, 128, 2, False, "", 6),
    "rows without keys": (300, 60, 64, 2, True, "", 2),
    "rows without keys, D=128": (230, 60, 128, 2, True, "", 2),
    "one row": (1, 200, 64, 2, False, "", 2),
    "programs share two key blocks": (512, 200, 64, 2, False, "", 3),
    "programs share two of three": (512, 300, 128, 2, True, "", 4),
    "D=40": (150, 150, 40, 2, True, "", 2),
    "D=96": (100, 200, 96, 2, True, "", 2),
    "a query head to a KV head": (150, 150, 64, 1, True, "", 2),
    "four query heads to a KV head": (150, 170, 128, 4, False, "", 3),
    "a bias of one row": (150, 150, 64, 2, True, "one row", 2),
}


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in order"])
@pytest.mark.parametrize("case", CASES)
def test_all_of_dq_is_written(case, deterministic):
    q_len, kv_len, head_dim, heads, causal, of_bias, programs = CASES[case]
    if of_bias and deterministic:
        pytest.skip("sums of a bias's gradient have no order")
    qkv = normal_qkv(heads=heads, kv_heads=1, q_len=q_len, kv_len=kv_len, head_dim=head_dim, dtype=torch.float16)
    bias = bias_of(of_bias, *qkv[:2])
    run = BackwardRun(*qkv, causal=causal, deterministic=deterministic, programs=programs, bias=bias)
    assert run.finishes
    run(mode="lowered")
    run.check(case)


# Sq, Sk; packed: of all sequences together, one of which is empty.
FEATURED = {
    "window": (300, 420),
    "window to both sides": (300, 200),  # rows before the first key that any sees
    "chunk": (300, 300),
    "documents": (300, 300),
    "mask_mod": (300, 300),
    "packed": (300, 260),
    "packed, causal": (300, 200),
}


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in order"])
@pytest.mark.parametrize("head_dim", slow_if(lambda head_dim: head_dim == 128, [64, 128]))
@pytest.mark.parametrize("feature", FEATURED)
def test_of_features_too(feature, head_dim, deterministic):
    call = FeatureCall(feature, FEATURED[feature], heads=2, kv_heads=1, head_dim=head_dim)
    run = FeatureBackwardRun(call, deterministic=deterministic, programs=3)
    assert run.finishes
    run(mode="lowered")
    run.check(feature)
