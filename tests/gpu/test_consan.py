"""Triton's concurrency sanitizer (ConSan) on the kernels, and on one that it must reject.

ConSan watches the one schedule that runs, buffer by buffer. A finding is a device assert, which ends the context: each
check has a process of its own.
"""

import contextlib
import dataclasses
import unittest.mock
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bench.mask_mods import near, near_keys, near_rows
from gluon_attn import MaskMod, attention
from gluon_attn.apart import Apart
from gluon_attn.backward.launch import Choices, compiled_backward
from gluon_attn.backward.plan import BackwardPlan, finishes
from gluon_attn.backward.table import PACKAGED as BACKWARD
from gluon_attn.backward.table import rows_by_default
from gluon_attn.device import Device
from gluon_attn.forward.launch import compiled, compiled_transpose
from gluon_attn.forward.table import HOPPER, OTHER_HEAD_DIMS, Row
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.problem import Problem
from gluon_attn.runtime import kernel as runtime_kernel
from gluon_attn.sanitizer import FINDING, HAND_OVERS, SANITIZER, run_hand_over
from gluon_attn.testing import backward_call, check, check_gradients, normal, normal_qkv
from gluon_attn.tuning import gradient_kernels_of_cards, kernels_of_cards
from tests.gluon_attn.backward import test_features, test_varlen
from tests.gpu.checks import outcomes_of, settle

pytestmark = pytest.mark.timeout(900)

# Of the backward's table, in code and in files, by name and mask: padded head dims of Q and V, and the config.
CONFIGS = {
    (f"D={d}{f' and {d_v}' * (d != d_v)}{f', row {i}' * (i > 0)}", causal): ((d, d_v), row.config)
    for d, d_v in dict.fromkeys(row.head_dims for row in BACKWARD)
    for causal in (False, True)
    for i, row in enumerate(rows_by_default((d, d_v), causal))
}
CONFIGS |= {
    (name, causal): (row.head_dims, row.config)
    for name, row in gradient_kernels_of_cards().items()
    for causal in (False, True)
}
GRADIENT_CASES = [(name, causal, fixed) for name, causal in CONFIGS for fixed in (False, True)]
CASES: dict[str, Row] = {f"table row {i}": row for i, row in enumerate(HOPPER)} | kernels_of_cards()
CASES |= {f"192 and 128, row {i}": row for i, row in enumerate(OTHER_HEAD_DIMS) if row.result_file is not None}
# (Sq, Sk): tails, and enough key blocks for more than one lap around each ring.
LENGTHS = ((129, 129), (300, 333), (333, 300), (512, 512))

# (Sq, Sk, processors) with more parts of key blocks than programs, by keys of a key block and head dim, padded.
MORE_PARTS = {
    (128, 64): (1024, 1024, 9),
    (128, 128): (640, 640, 9),
    (128, 192): (640, 640, 9),
    (64, 256): (512, 512, 15),
}


def run_attention(row: Row) -> None:
    dtype = torch.bfloat16 if row.element_bytes == 2 else torch.float8_e4m3fn
    # Instrumented kernels keep what they watch in global memory; without it nothing would be watched.
    kernel = compiled(
        dtype, row.padded_head_dim, row.mask, row.config, padded_head_dim_v=row.padded_head_dim_v, device_index=0
    )
    assert kernel.metadata.profile_scratch_size > 0
    if row.config.transposes_before(row.element_bytes):
        assert compiled_transpose(dtype, row.padded_head_dim, device_index=0).metadata.profile_scratch_size > 0
    for q_len, kv_len in LENGTHS:
        q, k, v = normal_qkv(
            heads=2, kv_heads=1, q_len=q_len, kv_len=kv_len, head_dim=row.padded_head_dim,
            head_dim_v=row.padded_head_dim_v, dtype=dtype,
        )  # fmt: skip
        out, lse = attention(q, k, v, causal=row.causal, config=row.config, return_lse=True)
        torch.cuda.synchronize()
        check(q, k, v, out, lse, causal=row.causal, what=f"Sq={q_len}, Sk={kv_len}")


def run_gradients(name: str, causal: bool, deterministic: bool) -> None:
    """All kernels, with a processor for each key block, and with two for all of them; and with a causal mask in more
    parts of key blocks than there are programs, if sums have no order."""
    ((head_dim, head_dim_v), config), mask = CONFIGS[name, causal], Mask(causal=causal)
    choices = Choices(
        dtype=torch.bfloat16,
        padded_head_dims=(head_dim, head_dim_v),
        mask=mask,
        config=config,
        deterministic=deterministic,
        finishes=finishes(config, (head_dim, head_dim_v), Device.hopper()),
    )
    kernels = compiled_backward(choices, device_index=0)
    assert all(kernel.metadata.profile_scratch_size > 0 for kernel in kernels)
    card = Device.of(torch.device("cuda", 0))
    calls = [(2, 1, *lengths, sm_count) for lengths in LENGTHS for sm_count in (card.sm_count, 2)]
    if causal and not deterministic:
        calls.append((2, 1, *MORE_PARTS[config.keys, head_dim]))
    for heads, kv_heads, q_len, kv_len, sm_count in calls:
        q, k, v = normal_qkv(
            heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=head_dim, head_dim_v=head_dim_v
        )
        dout = normal(*q.shape[:3], head_dim_v, seed=7)
        out, lse = attention(q, k, v, causal=causal, return_lse=True)
        device = dataclasses.replace(card, sm_count=sm_count)
        if sm_count not in (card.sm_count, 2):
            plan = BackwardPlan.of(Problem.of(q, k, v, causal=causal), config, device)
            assert plan.shared_parts > plan.programs, f"{plan.shared_parts=} {plan.programs=}"
        got = backward_call(
            config, dout, q, k, v, out, lse, causal=causal, deterministic=deterministic, device=device
        )()
        torch.cuda.synchronize()
        check_gradients(q, k, v, dout, got, causal=causal, what=f"Sq={q_len}, Sk={kv_len}, {sm_count} processors")


def run_persistent(num_ctas: int) -> None:
    """More row blocks than programs, so that each channel lives on from one to the next."""
    programs = torch.cuda.get_device_properties().multi_processor_count // num_ctas
    q, k, v = normal_qkv(heads=2 * programs + 1, kv_heads=1, q_len=100, kv_len=200)
    out, lse = attention(q, k, v, causal=True, num_ctas=num_ctas, return_lse=True)
    torch.cuda.synchronize()
    check(q, k, v, out, lse, causal=True)


# Rows of the tests of gradients without a card: each with a kernel of its own.
FEATURES = (
    "window", "window to both sides", "window, D=256", "chunks", "soft cap", "ALiBi, D=128", "documents",
    "documents, D=256", "sinks, window and soft cap", "bias", "bias, D=128", "bias, one for the heads, D=256",
    "bias, a row", "bias, a row, D=128", "bias, a row, D=256", "bias in fp32",
)  # fmt: skip
PACKED = ("edges", "edges, causal", "D=256", "window, sinks and soft cap", "keys that do not count")
UNLIKE = ((64, 192), (192, 64), (256, 128))  # head dims of Q and of V
FEATURE_LENGTHS = ((300, 333), (333, 300))


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Asserts that what was compiled within is instrumented, and that a kernel of each pass is among it."""
    compiled_here: dict[str, bool] = {}
    compile_gluon = runtime_kernel.compile_gluon

    def recorded(*arguments: Any, **options: Any) -> Any:
        kernel = compile_gluon(*arguments, **options)
        compiled_here[kernel.metadata.name] = kernel.metadata.profile_scratch_size > 0
        return kernel

    with unittest.mock.patch.object(runtime_kernel, "compile_gluon", recorded):
        yield
    assert compiled_here.get("attention_forward"), compiled_here
    assert compiled_here.get("attention_backward"), compiled_here


def run_feature(name: str) -> None:
    options, _, head_dim = test_features.CASES[name]
    with watched():
        for lengths in FEATURE_LENGTHS:
            test_features.check(options, lengths, head_dim, where="cuda")


def run_unlike(head_dim: int, head_dim_v: int) -> None:
    with watched():
        for lengths in FEATURE_LENGTHS:
            test_features.check({"causal": True}, lengths, head_dim, where="cuda", head_dim_v=head_dim_v)


def run_packed(name: str, deterministic: bool) -> None:
    lengths, head_dim, options, used = test_varlen.CASES[name]
    with watched():
        given = test_varlen.packed(lengths, head_dim, options, used, where="cuda")
        test_varlen.check(*given, device=None, deterministic=deterministic)


def run_mask_mod() -> None:
    """A window as a function that leaves blocks out."""
    mod = MaskMod(near, keys=near_keys, rows=near_rows, constants=(70,))
    with watched():
        q, k, v = (t.requires_grad_() for t in normal_qkv(heads=2, kv_heads=1, q_len=300, kv_len=300, head_dim=64))
        dout = normal(*q.shape, seed=7)
        out = attention(q, k, v, causal=True, mask_mod=mod)
        assert isinstance(out, torch.Tensor)
        grads = torch.autograd.grad(out, [q, k, v], dout)
        torch.cuda.synchronize()
        check(q.detach(), k.detach(), v.detach(), out.detach(), None, causal=True, window=(70, None))
        check_gradients(q, k, v, dout, grads, causal=True, window=(70, None))


RUNS = {
    **{f"feature: {name}": (run_feature, (name,)) for name in FEATURES},
    **{f"head dims {d} and {d_v}": (run_unlike, (d, d_v)) for d, d_v in UNLIKE},
    **{
        f"packed: {name}{', in a fixed order' * fixed}": (run_packed, (name, fixed))
        for name in PACKED
        for fixed in (False, True)
    },
    "a mask by a function": (run_mask_mod, ()),
    **{name: (run_attention, (row,)) for name, row in CASES.items()},
    **{
        f"gradients, {name}, {'causal' if causal else 'full'}{', in a fixed order' * fixed}": (
            run_gradients,
            (name, causal, fixed),
        )
        for name, causal, fixed in GRADIENT_CASES
    },
    "more row blocks than programs, 2 CTAs": (run_persistent, (2,)),
    "more row blocks than programs, 1 CTA": (run_persistent, (1,)),
    **{name: (run_hand_over, (name,)) for name in HAND_OVERS},
}


def run(name: str) -> None:
    function, arguments = RUNS[name]
    function(*arguments)  # type: ignore[operator]


APART = Apart(
    function="tests.gpu.test_consan:run",
    item_seconds=240,
    env=SANITIZER,
)


@pytest.fixture(scope="module")
def outcome(request):
    yield from outcomes_of(APART, request)


@pytest.mark.parametrize("name", [name for name in RUNS if name != "a role that does not wait"])
def test_no_findings(name, outcome):
    settle(outcome(name))


@pytest.mark.parametrize("name", ["a role that does not wait"])
def test_a_race_is_found(name, outcome):
    """Otherwise the sanitizer was not on, and the passes above mean nothing."""
    found = outcome(name)
    assert found.verdict == "failed", f"the race was not found: {found}"
    assert FINDING in found.text, found.text
