"""A bias on the card: numbers, hidden keys, strides, repeats, graphs, both passes; in processes of their own."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gluon_attn import attention
from gluon_attn.apart import Apart
from gluon_attn.gradients import attention_backward
from gluon_attn.testing import poison_free_memory
from tests.gluon_attn.backward.test_features import CASES, SINKS, bias_of, check, normal, normal_qkv
from tests.gluon_attn.kernels.test_bias import CASES as FORWARD_CASES
from tests.gluon_attn.kernels.test_bias import B, H, normal_bias
from tests.gluon_attn.kernels.test_bias import check as check_forward
from tests.gluon_attn.kernels.test_bias import normal_qkv as normal_qkv_forward
from tests.gpu.checks import Registry, outcomes_of, settle

pytestmark = pytest.mark.timeout(1800)

TESTS = Registry()

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
# Head dims of one kernel.
HEAD_DIMS = {64: (64,), 128: (72, 128), 256: (256,)}
# (batches, heads, whether each query has its own row) of a bias, by how its gradient comes about.
KINDS: dict[str, tuple[tuple[int, int, bool], ...]] = {
    "stored": ((2, 4, True),),
    "summed": ((1, 4, True), (2, 1, True), (1, 1, True)),
    "a row": ((2, 4, False), (1, 4, False), (2, 1, False), (1, 1, False)),
}
# Of q, k, v and of the bias.
DTYPES = {"bf16": (BF16, BF16), "fp16": (FP16, FP16), "bf16 and fp32": (BF16, FP32)}
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (70, 20)},
    "documents": {"causal": True, "documents": 90},
    "sinks": {"causal": True, "sinks": SINKS},
}
# (Sq, Sk): of one block and of many, and odd ones. Documents begin anew in the middle of a block.
LENGTHS = ((1, 1), (1, 300), (300, 70), (113, 203), (700, 1023), (2048, 2048))


def numbers(padded: int, kind: str, dtypes: str, options: str) -> Callable[[], None]:
    """Gradients, with O and LSE behind them; GQA, MHA and MQA in turn. Where all of dBias is
    stored, in a fixed order of dQ's sums too."""

    def run() -> None:
        dtype, bias_dtype = DTYPES[dtypes]
        # Beside sinks dS of a single key is off by the rounding of O, of which delta is: torch's is not.
        all_lengths = LENGTHS[1:] if options == "sinks" else LENGTHS
        for i, (head_dim, shape, lengths) in enumerate(itertools.product(HEAD_DIMS[padded], KINDS[kind], all_lengths)):
            given = {**OPTIONS[options], "bias": shape, "bias_dtype": bias_dtype}
            what: Any = {"where": "cuda", "dtype": dtype, "kv_heads": (2, 4, 1)[i % 3]}
            poison_free_memory(((2, 4, *lengths), bias_dtype), ((2, 4, lengths[0], head_dim), dtype))
            check(given, lengths, head_dim, **what)
            if kind == "stored":
                check(given, lengths, head_dim, deterministic=True, **what)

    return run


# Every pair of a head dim, a kind, dtypes and options is in one of these.
for i, j in itertools.product(range(len(OPTIONS)), range(3)):
    of = (
        list(HEAD_DIMS)[j],
        list(KINDS)[(i + j) % 3],
        list(DTYPES)[(2 * i + j) % 3],
        list(OPTIONS)[i],
    )
    TESTS["numbers, D={}, {}, {}, {}".format(*of)] = numbers(*of)


@TESTS
def head_dims_192_and_128() -> None:
    for shape, causal in itertools.product(((2, 4, True), (2, 1, False)), (False, True)):
        for lengths in LENGTHS:
            check({"causal": causal, "bias": shape}, lengths, 192, where="cuda", head_dim_v=128)


def forward_alone(head_dim: int) -> Callable[[], None]:
    """The cases of the test without a card, and longer ones: O and LSE."""

    def run() -> None:
        for name, case in FORWARD_CASES.items():
            for more in (0, 1000) if case.head_dim == head_dim else ():
                print(name, more)
                q_len, kv_len = case.lengths[0] + (more if case.lengths[0] > 1 else 0), case.lengths[1] + more
                given = normal_qkv_forward((q_len, kv_len), head_dim, case.head_dim_v, case.dtype)
                q, k, v = (t.cuda() for t in given)
                rows = q_len if case.shape[2] == case.lengths[0] else 1
                bias = normal_bias(*case.shape[:2], rows, kv_len, dtype=case.bias_dtype or case.dtype)
                check_forward(q, k, v, on_card(bias), device=None, **case.options)

    return run


for d in sorted({case.head_dim for case in FORWARD_CASES.values()}):
    TESTS[f"forward alone, D={d}"] = forward_alone(d)


def on_card(bias: Tensor) -> Tensor:
    """The same there, with rows as long as TMA asks for."""
    return F.pad(bias, (0, -bias.shape[3] % 8), value=math.nan).cuda()[..., : bias.shape[3]]


@TESTS
def strides() -> None:
    """Expanded; heads after tokens; a bias that is a part of a larger one."""
    q, k, v = (t.cuda() for t in normal_qkv_forward((1100, 1208), 64))
    for bias in (
        normal_bias(1, H, 1, 1208).cuda().expand(B, H, 1100, 1208),
        normal_bias(B, 1100, H, 1208).cuda().transpose(1, 2),
        normal_bias(B, H, 1400, 1600).cuda()[:, :, 200:1300, 104:1312],
    ):
        check_forward(q, k, v, bias, device=None, causal=True)


def hidden_keys(head_dim: int) -> Callable[[], None]:
    """A bias of -inf, in some rows of all keys."""

    def run() -> None:
        for lengths, causal in itertools.product(((200, 230), (1100, 1301)), (False, True)):
            for shape in ((2, 4, True), (1, 1, True)):
                check({"causal": causal, "bias": shape, "hidden": 5}, lengths, head_dim, where="cuda")

    return run


@TESTS
def cases_of_the_test_without_a_card() -> None:
    for name, (options, lengths, head_dim) in CASES.items():
        if "bias" in options:
            print(name)
            check(options, lengths, head_dim, where="cuda")


def tensors(head_dim: int, lengths: tuple[int, int], kind: tuple[int, int, bool], seed: int) -> list[Tensor]:
    """q, k, v, bias, dO and dLSE; other ones for each seed."""
    given = normal_qkv(batch=2, heads=4, kv_heads=2, q_len=lengths[0], kv_len=lengths[1], head_dim=head_dim)
    dout, dlse = normal(*given[0].shape, seed=7 + seed), normal(*given[0].shape[:3], dtype=FP32, seed=8 + seed)
    bias = bias_of(kind, lengths, BF16, "cuda")
    return [*(t.roll(seed, 2).cuda() for t in given), bias.mul_(1 + seed), dout.cuda(), dlse.cuda()]


def repeats(head_dim: int, kind: tuple[int, int, bool], stored: bool) -> Callable[[], None]:
    """Hundreds of launches, one behind the other: the same bits of all that is not a sum in any order."""

    def run() -> None:
        q, k, v, bias, dout, dlse = tensors(head_dim, (1111, 1333), kind, 0)
        options: dict[str, Any] = {"causal": True, "bias": bias.requires_grad_()}

        def results() -> list[Tensor]:
            with torch.no_grad():
                out, lse = attention(q, k, v, return_lse=True, **options)
                grads = attention_backward(dout, dlse, q, k, v, out, lse, deterministic=stored, **options)
            return [out, lse, *(grads if stored else grads[1:3])]

        first, different = results(), torch.zeros((), dtype=torch.int32, device="cuda")
        for _ in range(200):
            for one, other in zip(first, results(), strict=True):
                different += (one != other).any()
        assert int(different) == 0, f"{int(different)} tensors differ"

    return run


def graphs(head_dim: int, kind: tuple[int, int, bool], stored: bool) -> Callable[[], None]:
    """Captured with some numbers and replayed with others: as a call with those. Sums begin at zero each time."""

    def run() -> None:
        def results(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dout: Tensor, dlse: Tensor) -> list[Tensor]:
            out, lse = attention(q, k, v, bias=bias, causal=True, deterministic=stored, return_lse=True)
            return [out, lse, *torch.autograd.grad([out, lse], [q, k, v, bias], [dout, dlse])]

        def given(seed: int) -> list[Tensor]:
            return [t.requires_grad_(i < 4) for i, t in enumerate(tensors(head_dim, (700, 901), kind, seed))]

        inputs = given(0)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = results(*inputs)
        for seed in (1, 2, 3):
            others = given(seed)
            with torch.no_grad():
                for old, new in zip(inputs, others, strict=True):
                    old.copy_(new)
            graph.replay()
            for i, (one, other) in enumerate(zip(got, results(*others), strict=True)):
                same_bits = stored or i < 2
                close = torch.equal(one, other) if same_bits else torch.allclose(one, other, atol=0.05, rtol=0.05)
                assert close, f"replay {seed}, tensor {i} of O, LSE and the gradients"

    return run


for d in HEAD_DIMS:
    TESTS[f"hidden keys, D={d}"] = hidden_keys(d)
    for make in (repeats, graphs):
        TESTS[f"{make.__name__}, D={d}, stored"] = make(d, (2, 4, True), True)
        TESTS[f"{make.__name__}, D={d}, a row of sums"] = make(d, (1, 1, False), False)


@TESTS
def large_numbers() -> None:
    """Scores far above 0 and far below: as without what all of them have in common."""
    for head_dim, shift in itertools.product(HEAD_DIMS, (1000.0, -1000.0)):
        q, k, v, bias, *_ = tensors(head_dim, (300, 504), (2, 4, True), 0)
        out, lse = attention(q, k, v, bias=bias.float() + shift, return_lse=True)
        want, want_lse = attention(q, k, v, bias=bias.float(), return_lse=True)
        torch.testing.assert_close(out, want, atol=2e-2, rtol=0)
        torch.testing.assert_close(lse, want_lse + shift, atol=1e-2, rtol=1e-5)


@TESTS
def more_than_2_to_32_elements() -> None:
    """A bias of each head: the last head's numbers are those of a call of that head alone."""
    heads, length = 17, 2**14
    q, k, v, dout = (torch.randn(1, heads, length, 64, dtype=BF16, device="cuda") for _ in range(4))
    bias = torch.randn(1, heads, length, length, dtype=BF16, device="cuda")
    assert bias.numel() > 2**32
    dlse = torch.randn(1, heads, length, device="cuda")

    def results(heads: slice) -> list[Tensor]:
        qs, ks, vs, douts, dlses, biases = (t[:, heads] for t in (q, k, v, dout, dlse, bias))
        options: dict[str, Any] = {"bias": biases.requires_grad_(), "causal": True}
        with torch.no_grad():
            out, lse = attention(qs, ks, vs, return_lse=True, **options)
        return [out, lse, *attention_backward(douts, dlses, qs, ks, vs, out, lse, **options)]

    last = slice(heads - 1, heads)
    for found, want in zip(results(slice(None)), results(last), strict=True):
        # Programs may have other row blocks, and sums of dQ another order.
        assert (found[:, last].float() - want.float()).abs().max() <= 0.01 * want.float().abs().max()


def run_test(name: str) -> None:
    TESTS[name]()


# Not more: float64 scores of several items must have room on one card.
APART = Apart(function="tests.gpu.test_bias:run_test", processes=16)


@pytest.fixture(scope="module")
def outcome(request):
    yield from outcomes_of(APART, request)


@pytest.mark.parametrize("name", TESTS)
def test_bias(name, outcome):
    settle(outcome(name))
