"""The main kernel makes dQ of its sums: where it does, and that it writes all of dQ, also where nobody has added."""

import dataclasses
from typing import Any

import pytest
import torch

from channels.compat import jit
from gluon_attn import MaskMod
from gluon_attn.backward.launch import Choices, builds_of, main_of
from gluon_attn.backward.plan import BackwardPlan, finishes
from gluon_attn.backward.table import CAUSAL, HOPPER, IN_ONE_LAUNCH, UNLIKE, WITH_BIAS, WITH_DBIAS
from gluon_attn.bias import Bias
from gluon_attn.device import Device
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.mask_mod import compiled_part as compiled_mask
from tests.gluon_attn.problems import problem
from tests.gluon_cpu.attention import BackwardRun, bias_of, normal_qkv
from tests.gluon_cpu.attention import run as launched
from tests.gluon_cpu.features import Asked, Feature, FeatureBackwardRun, FeatureCall, poison

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


# Sq, Sk, head dim, (batch, query heads, KV heads), causal, the bias, programs.
CASES = {
    "one program, many row blocks": (300, 130, 64, (1, 2, 1), False, "", 1),
    "fewer programs than row blocks": (200, 130, 128, (1, 2, 1), True, "", 3),
    "more programs than row blocks": (60, 300, 128, (1, 2, 1), False, "", 6),
    "rows without keys": (300, 60, 64, (1, 2, 1), True, "", 2),
    "rows without keys, D=128": (230, 60, 128, (1, 2, 1), True, "", 2),
    "one row": (1, 200, 64, (1, 2, 1), False, "", 2),
    "programs share two key blocks": (1024, 200, 64, (1, 1, 1), False, "", 4),
    "programs share two, one has a part of both": (512, 200, 128, (1, 2, 1), False, "", 3),
    "programs share three": (512, 300, 128, (1, 1, 1), True, "", 6),
    "programs share one of three": (512, 300, 128, (1, 1, 1), False, "", 2),
    "D=8": (150, 150, 8, (1, 2, 1), False, "", 2),
    "D=40": (150, 150, 40, (1, 2, 1), True, "", 2),
    "D=72": (100, 200, 72, (1, 2, 1), False, "", 2),
    "D=96": (100, 200, 96, (1, 2, 1), True, "", 2),
    "a query head to a KV head": (150, 150, 64, (1, 1, 1), True, "", 2),
    "four query heads to a KV head": (150, 170, 128, (1, 4, 1), False, "", 3),
    "two batches, three query heads to each of two KV heads": (70, 130, 128, (2, 6, 2), True, "", 3),
    "a bias of one row": (150, 150, 64, (1, 2, 1), True, "one row", 2),
}
# Into how many parts key blocks that programs share are divided, in any order and in order; of other cases none is.
PARTS = {
    "programs share two key blocks": (4, 4),
    "programs share two, one has a part of both": (3, 0),
    "programs share three": (6, 6),
    "programs share one of three": (2, 0),
}


def run_of(case: str, *, deterministic: bool) -> BackwardRun:
    q_len, kv_len, head_dim, (batch, heads, kv_heads), causal, of_bias, programs = CASES[case]
    qkv = normal_qkv(
        batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=head_dim, dtype=torch.float16
    )
    bias = bias_of(of_bias, *qkv[:2])
    return BackwardRun(*qkv, causal=causal, deterministic=deterministic, programs=programs, bias=bias)


def check(run: BackwardRun | FeatureBackwardRun, case: str) -> None:
    """Of the last call all gradients; that dQ of a row that sees nothing is 0; and that of each KV head as many are
    counted as the finish role waits for, of nothing else any."""
    run.check(case)
    k, dq, nothing = run.tensors["k"], run.tensors["dq"], run.tensors["lse"].isneginf()
    done = run.between["done"].flatten().tolist()
    if "records" in run.between:  # packed: (T, H, D)
        kv_heads, number = k.shape[1], int(run.between["records"][0])
        nothing = nothing.T
    else:
        keys = run.launch.build.constants["CONFIG"].keys
        kv_heads, number = k.shape[0] * k.shape[1], -(-k.shape[2] // keys) * max(1, run.shared_parts)
    assert not dq[nothing].any()
    assert done == [number] * kv_heads + [0] * (len(done) - kv_heads)


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in order"])
@pytest.mark.parametrize("case", CASES)
def test_all_of_dq_is_written(case, deterministic):
    if "bias" in case and deterministic:
        pytest.skip("sums of a bias's gradient have no order")
    run = run_of(case, deterministic=deterministic)
    assert run.finishes
    assert run.shared_parts == PARTS.get(case, (0, 0))[deterministic]
    run(mode="lowered")
    check(run, case)


@jit
def middle(q_index, k_index, head, batch):
    return q_index // 128 == 1


@jit
def rows_of_middle(first_key, last_key, q_len, k_len, kv_head, batch):
    return 128, 256


def in_the_middle(lengths: tuple[int, int], heads: int) -> Asked:
    """A function that leaves out whole row blocks, those before and after."""
    function, _ = compiled_mask(MaskMod(middle, rows=rows_of_middle))
    return Asked(options={"mask_mod": function}, reference={"mask": torch.arange(lengths[0])[:, None] // 128 == 1})


MIDDLE = Feature(argument="mask_mod", asked=in_the_middle)

# Feature, (Sq, Sk); packed: of all sequences together, one of which is empty; or where they begin and the last ends.
FEATURED: dict[str, tuple[Any, ...]] = {
    "window": ("window", (300, 420)),
    "window to both sides": ("window to both sides", (300, 200)),  # rows before the first key that any sees
    "chunk": ("chunk", (300, 300)),
    "documents": ("documents", (300, 300)),
    "mask_mod": ("mask_mod", (300, 300)),
    "mask_mod, row blocks that nobody adds to": (MIDDLE, (300, 200)),
    "packed": ("packed", (300, 260)),
    "packed, causal": ("packed, causal", (300, 200)),
    "packed, rows after the last": ("packed", (300, 200), (0, 60, 140), (0, 70, 140)),
    "packed, an empty one between others": ("packed, causal", (150, 130), (0, 60, 60, 150), (0, 70, 70, 130)),
    "packed, one without keys": ("packed", (170, 130), (0, 60, 100, 170), (0, 70, 70, 130)),
    "packed, none with keys": ("packed", (160, 40), (0, 100, 160), (0, 0, 0)),
    "packed, all rows after the last": ("packed", (160, 40), (0, 0, 0), (0, 0, 0)),
}


def featured_run_of(case: str, *, head_dim: int, deterministic: bool) -> FeatureBackwardRun:
    feature, lengths, *starts = FEATURED[case]
    call = FeatureCall(feature, lengths, heads=2, kv_heads=1, head_dim=head_dim)
    if starts:
        cu_q, cu_k = (torch.tensor(of, dtype=torch.int32) for of in starts)
        call.extras = call.extras._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    return FeatureBackwardRun(call, deterministic=deterministic, programs=3)


@pytest.mark.slow_but(
    "window-64-in order",
    "documents-64-any order",
    "mask_mod, row blocks that nobody adds to-64-in order",
    "packed-64-any order",
    "packed, one without keys-64-any order",
    "packed, rows after the last-64-in order",
)
@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in order"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("case", FEATURED)
def test_of_features_too(case, head_dim, deterministic):
    run = featured_run_of(case, head_dim=head_dim, deterministic=deterministic)
    assert run.finishes
    run(mode="lowered")
    check(run, case)


REPLAYED = ["rows without keys, D=128", "programs share two key blocks", "packed, rows after the last"]


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in order"])
@pytest.mark.parametrize("case", REPLAYED)
def test_a_replay_begins_anew(case, deterministic):
    """As one of a CUDA graph: its workspaces are as the call before has left them. That had dO of the other sign, so
    that no sum of it is a right one; with the same schedule in any order too the bits are the same."""
    if case in CASES:
        run: BackwardRun | FeatureBackwardRun = run_of(case, deterministic=deterministic)
    else:
        run = featured_run_of(case, head_dim=64, deterministic=deterministic)
    run.tensors["dout"].neg_()
    run(mode="lowered")
    grads = [run.tensors[name] for name in ("dq", "dk", "dv")]
    first = [grad.clone() for grad in grads]
    run.tensors["dout"].neg_()
    poison(*grads)
    for launch in run.launches:
        launched(launch, run.tensors, run.target, mode="lowered")
    check(run, case)
    assert all(torch.equal(grad, -before) for grad, before in zip(grads, first, strict=True))
