"""Triton's concurrency sanitizer (ConSan) on the kernels, and on one that it must reject.

ConSan watches the one schedule that runs, buffer by buffer. A finding is a device assert, which ends the context: each
check has a process of its own.
"""

import dataclasses
import itertools

import pytest
import torch

from gluon_attn import attention
from gluon_attn.apart import Apart
from gluon_attn.backward.launch import compiled_backward
from gluon_attn.backward.table import HOPPER as BACKWARD
from gluon_attn.device import Device
from gluon_attn.forward.launch import compiled, compiled_transpose
from gluon_attn.forward.table import HOPPER, Row
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.sanitizer import FINDING, HAND_OVERS, SANITIZER, run_hand_over
from gluon_attn.testing import backward_call, check, check_gradients, normal, normal_qkv
from tests.gpu.checks import outcomes_of, settle

pytestmark = pytest.mark.timeout(900)

# Of the backward's table: padded head dim, causal, dQ in a fixed order.
GRADIENT_CASES = list(itertools.product(BACKWARD, (False, True), (False, True)))
CASES: dict[str, Row] = {f"table row {i}": row for i, row in enumerate(HOPPER)}
# (Sq, Sk): tails, and enough key blocks for more than one lap around each ring.
LENGTHS = ((129, 129), (300, 333), (333, 300), (512, 512))


def run_attention(row: Row) -> None:
    dtype = torch.bfloat16 if row.element_bytes == 2 else torch.float8_e4m3fn
    # Instrumented kernels keep what they watch in global memory; without it nothing would be watched.
    kernel = compiled(dtype, row.padded_head_dim, row.mask, row.config, device_index=0)
    assert kernel.metadata.profile_scratch_size > 0
    if row.config.transposes_before(row.element_bytes):
        assert compiled_transpose(dtype, row.padded_head_dim, device_index=0).metadata.profile_scratch_size > 0
    for q_len, kv_len in LENGTHS:
        q, k, v = normal_qkv(heads=2, kv_heads=1, q_len=q_len, kv_len=kv_len, head_dim=row.padded_head_dim, dtype=dtype)
        out, lse = attention(q, k, v, causal=row.causal, config=row.config, return_lse=True)
        torch.cuda.synchronize()
        check(q, k, v, out, lse, causal=row.causal, what=f"Sq={q_len}, Sk={kv_len}")


def run_gradients(head_dim: int, causal: bool, deterministic: bool) -> None:
    """All three kernels, with a processor for each key block, and with two for all of them."""
    config, mask = BACKWARD[head_dim], Mask(causal=causal)
    kernels = compiled_backward(torch.bfloat16, head_dim, mask, config, deterministic=deterministic, device_index=0)
    assert all(kernel.metadata.profile_scratch_size > 0 for kernel in kernels)
    card = Device.of(torch.device("cuda", 0))
    for (q_len, kv_len), sm_count in itertools.product(LENGTHS, (card.sm_count, 2)):
        q, k, v = normal_qkv(heads=2, kv_heads=1, q_len=q_len, kv_len=kv_len, head_dim=head_dim)
        dout = normal(*q.shape, seed=7)
        out, lse = attention(q, k, v, causal=causal, return_lse=True)
        device = dataclasses.replace(card, sm_count=sm_count)
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


RUNS = {
    **{name: (run_attention, (row,)) for name, row in CASES.items()},
    **{
        f"gradients, D={d}, {'causal' if causal else 'full'}{', in a fixed order' * fixed}": (
            run_gradients,
            (d, causal, fixed),
        )
        for d, causal, fixed in GRADIENT_CASES
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
    processes=4,
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
