"""Head dims that are no power of two, and V's unlike Q's, on the card: O, LSE and gradients against float64."""

import pytest
import torch

from gluon_attn import attention
from gluon_attn.apart import Apart
from gluon_attn.tensors import empty_output
from gluon_attn.testing import FP8, check, check_gradients, normal, normal_qkv, poison_free_memory
from tests.gpu.checks import outcomes_of, settle

pytestmark = pytest.mark.timeout(1800)

HEAD_DIMS = (64, 128, 192, 256)
PAIRS = [(d, d_v) for d in HEAD_DIMS for d_v in HEAD_DIMS if d != d_v or d == 192]
PAIRS += [(160, 96), (40, 136), (256, 8), (192, 112)]
CASES = {
    f"{d}/{d_v}, {'causal' if causal else 'full'}": (d, d_v, causal) for d, d_v in PAIRS for causal in (False, True)
}

# Of flash-attention's tests: queries and keys.
LENGTHS = ((1, 1), (64, 1), (3, 513), (113, 203), (256, 256), (799, 3), (1, 239), (1023, 1024), (2048, 2048))


def run(name: str) -> None:
    d, d_v, causal = CASES[name]
    for i, (q_len, kv_len) in enumerate(LENGTHS):
        dtype = (torch.bfloat16, torch.float16, *FP8)[i % 4]
        layout = ("bhsd", "bshd")[i % 2]
        if dtype in FP8 and (d % 16 or d_v % 16):
            dtype = torch.bfloat16
        q, k, v = normal_qkv(
            batch=2, heads=6, kv_heads=(6, 2, 1)[i % 3], q_len=q_len, kv_len=kv_len, head_dim=d, head_dim_v=d_v,
            dtype=dtype, layout=layout,
        )  # fmt: skip
        shape = tuple(empty_output(q, v, device="meta").shape)
        what = f"{name} {q_len} {kv_len} {dtype} {layout}"
        for num_ctas in (None, 2):
            poison_free_memory((shape, torch.bfloat16))
            out, lse = attention(q, k, v, causal=causal, layout=layout, return_lse=True, num_ctas=num_ctas)
            check(q, k, v, out, lse, causal=causal, layout=layout, what=what)
        if dtype in FP8:
            continue
        dout = normal(*shape, dtype=dtype, seed=7)
        for deterministic in (False, True):
            inputs = [t.detach().requires_grad_() for t in (q, k, v)]
            again = attention(*inputs, causal=causal, layout=layout, deterministic=deterministic)
            assert isinstance(again, torch.Tensor)
            got = list(torch.autograd.grad(again, inputs, dout))
            check_gradients(q, k, v, dout, got, causal=causal, layout=layout, what=f"{what} {deterministic=}")


APART = Apart(function="tests.gpu.test_head_dims:run")


@pytest.fixture(scope="module")
def outcome(request):
    yield from outcomes_of(APART, request)


@pytest.mark.parametrize("name", CASES)
def test_head_dims(name, outcome):
    settle(outcome(name))
