"""The gradients of packed sequences on a card: numbers, bits against a call for each sequence, repeats, graphs; in
processes of their own."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gluon_attn.apart import Apart
from gluon_attn.varlen import attention_varlen, attention_varlen_backward
from tests.gluon_attn.backward.test_varlen import CASES, SLOPES, check, packed, same_as_each, starts
from tests.gpu.checks import Registry, outcomes_of, settle

pytestmark = pytest.mark.timeout(1800)

TESTS = Registry()

# Queries and keys of each sequence, rows after the last one.
MIXES: dict[str, tuple[list[int], list[int], tuple[int, int]]] = {
    "unlike": ([113, 0, 1, 799, 203, 64, 2048, 17], [203, 5, 1, 3, 0, 64, 2048, 300], (0, 0)),
    "one long among short ones": ([4000, *[50] * 40], [4000, *[70] * 40], (5, 9)),
    "equal": ([512] * 16, [512] * 16, (0, 0)),
    "hundreds": ([1, 64, 3, 130] * 80, [5, 1, 90, 130] * 80, (1000, 1000)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (128, 0)},
    "window to both sides": {"window": (33, 65)},
    "chunks": {"causal": True, "chunk": 200},
    "sinks and soft cap": {"causal": True, "sinks": torch.tensor([-1.0, 0.5, 2.0, 4.0]), "softcap": 5.0},
    "ALiBi": {"causal": True, "alibi_slopes": SLOPES[0]},
}


def numbers(head_dim: int, option: str) -> Callable[[], None]:
    def run() -> None:
        for lengths, deterministic in itertools.product(MIXES.values(), (False, True)):
            given = packed(lengths, head_dim, OPTIONS[option], where="cuda")
            check(*given, device=None, deterministic=deterministic)

    return run


for d, name in itertools.product((64, 72, 128, 256), OPTIONS):
    TESTS[f"numbers, D={d}, {name}"] = numbers(d, name)


@TESTS
def cases_of_the_test_without_a_card() -> None:
    for (lengths, head_dim, options, used), deterministic in itertools.product(CASES.values(), (False, True)):
        check(*packed(lengths, head_dim, options, used, where="cuda"), device=None, deterministic=deterministic)


@TESTS
def bit_for_bit_a_call_for_each_sequence() -> None:
    for lengths, head_dim, option in itertools.product(MIXES.values(), (64, 128, 256), ("full", "causal")):
        same_as_each(*packed(lengths, head_dim, OPTIONS[option], where="cuda"), device=None, shared=True)


@TESTS
def repeats_have_the_same_bits() -> None:
    for head_dim, lengths in itertools.product((64, 128, 256), ("unlike", "one long among short ones")):
        given, dout, dlse = packed(MIXES[lengths], head_dim, {"causal": True}, where="cuda")
        out, lse = attention_varlen(**given, return_lse=True)
        first = attention_varlen_backward(dout, dlse, out=out, lse=lse, **given, deterministic=True)
        different = torch.zeros((), dtype=torch.int32, device="cuda")
        for _ in range(2000):
            again = attention_varlen_backward(dout, dlse, out=out, lse=lse, **given, deterministic=True)
            for one, other in zip(first, again, strict=True):
                different += (one != other).any()
        assert int(different) == 0, f"D={head_dim}, {lengths}: {int(different)} tensors differ"


@TESTS
def graphs_follow_the_lengths() -> None:
    """A graph that was captured with other lengths, of as many rows together."""
    rows, count = 3000, 6
    for head_dim, deterministic in itertools.product((64, 128, 256), (False, True)):
        given, dout, dlse = packed(
            ([rows, *[0] * 5], [rows, *[0] * 5], (0, 0)), head_dim, {"causal": True}, where="cuda"
        )
        inputs = [given[name].requires_grad_() for name in "qkv"]

        def run(given=given, inputs=inputs, dout=dout, dlse=dlse, deterministic=deterministic) -> Any:
            out, lse = attention_varlen(**given, return_lse=True, deterministic=deterministic)
            return torch.autograd.grad([out, lse], inputs, [dout, dlse])

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run()
        generator = torch.Generator().manual_seed(3)
        for _ in range(4):
            for name in ("cu_seqlens_q", "cu_seqlens_k"):
                cuts = torch.randint(0, rows + 1, (count - 1,), generator=generator).sort()[0].tolist()
                ends = [0, *cuts, rows]
                given[name].copy_(starts([end - first for first, end in itertools.pairwise(ends)]))
            graph.replay()
            want = check(
                {n: x.detach() if n in "qkv" else x for n, x in given.items()}, dout, dlse, device=None,
                deterministic=True,
            )  # fmt: skip
            for one, other in zip(got, want, strict=True):
                assert torch.equal(one, other) if deterministic else torch.allclose(one, other, atol=0.05, rtol=0.05)


def run_test(name: str) -> None:
    TESTS[name]()


APART = Apart(function="tests.gpu.test_varlen_gradients:run_test", processes=12)


@pytest.fixture(scope="module")
def outcome(request):
    yield from outcomes_of(APART, request)


@pytest.mark.parametrize("name", TESTS)
def test_varlen_gradients(name, outcome):
    settle(outcome(name))
