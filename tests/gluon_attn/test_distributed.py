"""Attention over several ranks, by gloo and gluon_cpu: against float64 on one, what is computed, what is refused."""

import contextlib
import dataclasses
import itertools
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.exc import Unsupported

from gluon_attn import reference_attention
from gluon_attn.api import attend, plan_of
from gluon_attn.call import Extras, Options
from gluon_attn.device import Device
from gluon_attn.distributed import ring_attention, shard, ulysses_attention
from gluon_attn.distributed.ranks import HEAD_START_BYTES, HEAD_START_CYCLES, give_head_start
from gluon_attn.distributed.ring import block_of, merge
from gluon_attn.testing import check, check_gradients
from tests.gluon_attn.ranks import (
    BACKENDS,
    BY_TORCH,
    CASES,
    options_of,
    packed_lengths,
    packed_tensors,
    run_ranks,
    whole_tensors,
)
from tests.slow import slow_if


@pytest.fixture(scope="module", params=slow_if(lambda ranks: ranks > 2, [2, 4]))
def found(request, tmp_path_factory) -> list[dict[str, Any]]:
    return run_ranks(request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, found):
    case, got = CASES[name], found[0][name]
    q, k, v, dout, dlse = whole_tensors(case, len(found))
    options = options_of(case)
    check(q, k, v, got["out"], got["lse"], what=name, **options)
    if not case.get("dout", True):
        dout = torch.zeros_like(dout)
    check_gradients(q, k, v, dout, got["grads"], dlse=dlse if case.get("dlse") else None, what=name, **options)


@pytest.mark.parametrize(
    ("transfers", "on_card", "size", "waits"),
    [(2, True, HEAD_START_BYTES, True), (2, True, HEAD_START_BYTES - 2, False), (0, True, 2**30, False),
     (2, False, 2**30, False)],
)  # fmt: skip
def test_large_transfers_begin_first(transfers, on_card, size, waits, monkeypatch):
    """On the card of the tensors, whichever is the current one."""
    slept: list[tuple[int, str]] = []
    cards = ["cuda:0"]

    @contextlib.contextmanager
    def on(card):
        cards.append(card)
        yield
        cards.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: slept.append((cycles, cards[-1])))
    k, v = (SimpleNamespace(is_cuda=on_card, nbytes=size // 2, device="cuda:1") for _ in range(2))
    give_head_start([object()] * transfers, [k, v])  # type: ignore[list-item]
    assert slept == [(HEAD_START_CYCLES, "cuda:1")] * waits


@pytest.mark.parametrize("name", CASES)
def test_what_the_mask_hides_is_not_computed(name, found):
    """Each rank computes as much as any other: under a causal mask half of each step but its own keys'."""
    case, size = CASES[name], len(found)
    chunk = case.get("chunk", 5)
    q_len, kv_len = (int(2 * c) for c in (chunk, case.get("kv_chunk", chunk)))
    causal = case.get("causal", False)
    for rank, of_rank in enumerate(found):
        forward = [call[1:] for call in of_rank[name]["calls"] if call[0] == "attention"]
        backward = [call[1:] for call in of_rank[name]["calls"] if call[0] == "attention_backward"]
        if name.startswith("ulysses"):
            assert (forward, backward) == ([(q_len * size, kv_len * size, causal)], [])  # it has its own gradients
            continue
        before = [(q_len, kv_len // 2, False)] * rank  # with the keys of those before this rank, then of those after
        after = [(q_len // 2, kv_len, False)] * (size - 1 - rank)
        others = [*before, *after] if causal else [(q_len, kv_len, False)] * (size - 1)
        assert forward == backward == [(q_len, kv_len, causal), *others]


@pytest.mark.parametrize("size", range(1, 10))
def test_every_pair_is_computed_once_by_any_number_of_ranks(size):
    chunk = 3
    length = 2 * size * chunk
    positions = [torch.cat([torch.arange(length).split(chunk)[c] for c in (r, 2 * size - 1 - r)]) for r in range(size)]
    times = torch.zeros(length, length, dtype=torch.int64)
    for rank, source in itertools.product(range(size), repeat=2):
        rows, keys, causal = block_of(rank, source, 2 * chunk, causal=True)
        at, to = positions[rank][rows], positions[source][keys]
        times[at[:, None], to] += torch.ones(len(at), len(to), dtype=torch.int64).tril(0 if causal else length)
    assert torch.equal(times, torch.ones_like(times).tril())


def test_shares(found):
    size = len(found)
    chunks = torch.arange(4 * size * 3).view(3, 4 * size).split(2, dim=1)
    for rank, of_rank in enumerate(found):
        assert torch.equal(of_rank["shard"], torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=1))


def test_keys_that_no_row_sees(found):
    """Those of one share, and of a whole head: O = 0 and LSE = -inf there, as of one call."""
    hidden = found[0]["hidden_keys"]
    q, k, v = hidden["inputs"]
    check(q, k, v, hidden["out"], hidden["lse"])
    assert (hidden["lse"][:, 1] == float("-inf")).all()
    assert hidden["lse"][:, 0].isfinite().all()
    for out, lse in found[0]["no_keys"]:
        assert (out == 0).all()
        assert (lse == float("-inf")).all()


@pytest.mark.parametrize("function", ["ring_attention", "ulysses_attention"])
def test_groups(function, found):
    """Of half the ranks each; of two ranks, each alone."""
    for of_rank in found:
        q, k, v, dout = of_rank["half_of_the_ranks"]["inputs"]
        out, *grads = of_rank["half_of_the_ranks"][function]
        check(q, k, v, out, None, causal=True)
        check_gradients(q, k, v, dout, grads, causal=True)


def check_by_torch(found: list[dict[str, Any]], case: dict[str, Any], device: str, backend: str) -> None:
    """torch's own ring, a forward and a backward call of ours for each step of it."""
    size = len(found)
    q, k, v, dout, _ = (t.to(device) for t in whole_tensors(case, size))
    for of_rank in found:
        of_torch = of_rank["by_torch"][backend]
        assert of_torch["shares"]
        assert [call[0] for call in of_torch["calls"]] == ["attention"] * size + ["attention_backward"] * size
        check(q, k, v, of_torch["out"].to(device), None, causal=True)
        check_gradients(q, k, v, dout, [t.to(device) for t in of_torch["grads"]], causal=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_context_parallel_of_torch(backend, found):
    check_by_torch(found, BY_TORCH, "cpu", backend)


def check_packed(found: list[dict[str, Any]], rows: int, device: str) -> None:
    """Each sequence against float64; rows after the last have gradients of 0."""
    q, k, v, dout, dlse = (t.to(device) for t in packed_tensors(rows))
    for of_rank in found:
        got = of_rank["packed_rows"]
        out, lse, grads = got["out"].to(device), got["lse"].to(device), [t.to(device) for t in got["grads"]]
        first = 0
        for length in filter(None, packed_lengths(rows)):
            part = slice(first, first + length)
            of_q, of_k, of_v, of_dout, of_out = (t[None, part] for t in (q, k, v, dout, out))
            check(of_q, of_k, of_v, of_out, lse[None, :, part], causal=True, layout="bshd")
            of_grads = [t[None, part] for t in grads]
            check_gradients(of_q, of_k, of_v, of_dout, of_grads, dlse=dlse[None, :, part], causal=True, layout="bshd")
            first += length
        assert first < rows
        assert all((t[first:] == 0).all() for t in grads)


def test_packed_sequences(found):
    check_packed(found, 20 * len(found), "cpu")


def check_wrapped(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        plain = of_rank["wrapped"]["plain"]
        for name in ("DDP", "FSDP2"):
            for grad, want in zip(of_rank["wrapped"][name], plain, strict=True):
                assert want.norm() > 0
                assert (grad - want).norm() < 0.02 * want.norm(), name


def test_a_model_that_torch_spreads(found):
    """DDP and FSDP2 have the gradients of one process: attention is as any other function to them."""
    check_wrapped(found)


def check_switched(found: list[dict[str, Any]]) -> None:
    """As near to one process in fp32 as torch's own kernels in bf16 are, twice over; and ours computed it."""
    size = len(found)
    both = ("attention", "attention_backward")
    for of_rank in found:
        cases = dict(of_rank["switched"])
        want, plain = cases.pop("fp32"), cases.pop("bf16")
        assert want["calls"] == plain["calls"] == []
        for name, got in cases.items():
            parts = size if name.startswith("context_parallel") else 1
            assert [call[0] for call in got["calls"]] == [of for of in both for _ in range(parts)], name
            assert abs(got["loss"] - want["loss"]) < 0.002 * want["loss"], name
            for w, p, g in zip(want["grads"], plain["grads"], got["grads"], strict=True):
                error, budget = (g - w).norm(), 2 * (p - w).norm()
                assert 0 < error <= budget, f"{name}: off by {error:.3e}, budget {budget:.3e}"


def test_a_model_with_torchs_attention_that_torch_spreads(found):
    """DDP, FSDP2 and context_parallel with SDPA switched over."""
    check_switched(found)


REFUSED = {
    "lengths": r"ValueError: k: expected 6 keys \(as queries\) under causal, got 4; pad",
    "odd": r"ValueError: q: expected a share of even length, .* got 5; make shares with",
    "odd keys": r"ValueError: k: expected a share of even length, .* got 5; make shares with",
    "heads": r"ValueError: q: expected a number of heads that is a multiple of the \d ranks, got 3; use ring_attention",
    "KV heads": r"ValueError: k: expected a number of KV heads that is a multiple of the \d ranks, got 1; use",
    "packed heads": r"ValueError: q: expected a number of heads that is a multiple of the \d ranks, got 3; use a small",
    "packed, bshd": r"ValueError: q: expected 3 dimensions, packed tokens, heads and head_dim, got 4",
    "packed window": r"NotImplementedError: window: masks other than causal, and changes of scores, are not supported",
    "fp8": r"NotImplementedError: q: expected float16 or bfloat16, .* got torch.float8_e4m3fn; convert",
    "shapes": r"ValueError: v: expected 6 keys \(as k\), got 4",
    "dtype": r"TypeError: q: expected dtype float16, .* got torch.float32; convert",
    "window": r"NotImplementedError: window: masks other than causal, and changes of scores, are not supported",
    "bias": r"NotImplementedError: bias: masks other than causal, and changes of scores, are not supported over",
    "documents": r"NotImplementedError: segment_ids: masks other than causal, and changes of scores, are not supported",
    "unknown": r"TypeError: ring_attention\(\) got an unexpected keyword argument 'num_ctas'",
    "card": r"NotImplementedError: device: expected a Hopper card, as gradients are asked for",
    "mesh": r"TypeError: group: expected a torch.distributed ProcessGroup or None, got .*DeviceMesh; give mesh.get_gr",
    "group": r"TypeError: group: expected a torch.distributed ProcessGroup or None, got str; leave it out",
    "other group": r"ValueError: group: expected one that this process is in, got one without rank \d; call only in",
    "shard": r"ValueError: t: expected a length in dimension 2 that is a multiple of \d, .* got 6; pad the sequence",
    "unshard": r"NotImplementedError: t: expected a tensor that does not require grad, .* got requires_grad=True",
    "twice": r"NotImplementedError: attention: gradients of its gradients are not supported",
}


def test_bad_calls_are_refused_before_anything_is_sent(found):
    for rank, of_rank in enumerate(found):
        raised = of_rank["bad_calls"]
        wanted = dict(REFUSED)
        if rank == len(found) - 1:
            del wanted["other group"]  # which has this rank
        assert raised.keys() == wanted.keys()
        for name, message in wanted.items():
            assert re.match(message, raised[name], re.DOTALL), raised[name]


@pytest.mark.parametrize("function", [ring_attention, ulysses_attention])
def test_without_processes(function):
    q = torch.ones(1, 2, 4, 64, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"^group: expected torch.distributed to be initialised, got none; call"):
        function(q, q, q, device=Device.hopper())
    with pytest.raises(RuntimeError, match=r"^group: expected torch.distributed to be initialised"):
        shard(q, dim=2)


@pytest.mark.parametrize("function", [ring_attention, ulysses_attention])
def test_no_part_of_a_graph(function):
    q = torch.ones(1, 2, 4, 64, dtype=torch.bfloat16)
    with pytest.raises(Unsupported, match=rf"{function.__name__}: transfers in a graph are not supported; keep"):
        torch.compile(function, fullgraph=True, backend="eager")(q, q, q, device=Device.hopper())


def test_a_graph_is_broken_there(found):
    """Without fullgraph; and nothing of what a call does is traced."""
    for of_rank in found:
        for (out, grad), (want, of_want) in of_rank["broken_graphs"].values():
            assert torch.equal(out, want)
            torch.testing.assert_close(grad, of_want, atol=0.05, rtol=0.05)


def test_merged_in_any_order():
    """Of parts that some rows, and one row in all parts, see nothing of."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 12, 16, generator=generator) for _ in range(3))
    hidden = torch.zeros(12, 12).bool()
    hidden[2, :4] = hidden[5, 4:8] = hidden[7] = True
    scores = (q @ k.mT).masked_fill(hidden, float("-inf"))
    want_lse = scores.logsumexp(-1)
    want = scores.softmax(-1).nan_to_num(0.0) @ v
    parts = [
        (s.softmax(-1).nan_to_num(0.0) @ values, s.logsumexp(-1))
        for s, values in zip(scores.split(4, -1), v.split(4, 2), strict=True)
    ]
    for order in itertools.permutations(parts):
        out, lse = (t.clone() for t in order[0])
        for part in order[1:]:
            merge(out, lse, *part)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(lse, want_lse)
        assert (out[:, :, 7] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_a_call_beside_transfers(causal):
    """A program for each item, on a card that is small enough for them to be fewer elsewhere; with items of two."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 700, 64, generator=generator).bfloat16() for h in (2, 1, 1))
    options = Options(causal=causal, device=dataclasses.replace(Device.hopper(), sm_count=3), card_is_shared=True)
    plan = plan_of(q, k, v, Extras(), options)
    assert plan is not None
    assert plan.programs == plan.items > 3
    assert plan.blocks_per_item == 1 + causal
    out, lse = attend(q, k, v, Extras(), options, return_lse=True)
    check(q, k, v, out, lse, causal=causal)


@pytest.mark.parametrize("score", [float("inf"), float("nan")])
def test_what_is_not_a_number_stays_so(score):
    """As in one call: a score of +inf makes O NaN and LSE +inf, one of NaN both NaN."""
    q, k, v = torch.ones(1, 1, 2, 8), torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4, 8)
    k[:, :, 1, 0] = score
    want, want_lse = reference_attention(q, k, v)
    out, lse = reference_attention(q, k[:, :, :2], v[:, :, :2])
    for first, second in (((0, 2), (2, 4)), ((2, 4), (0, 2))):
        (out, lse), part = (reference_attention(q, k[:, :, a:b], v[:, :, a:b]) for a, b in (first, second))
        merge(out, lse, *part)
        torch.testing.assert_close(out, want, equal_nan=True)
        torch.testing.assert_close(lse, want_lse, equal_nan=True)


def test_parts_far_apart():
    """Neither overflows, and the smaller counts nothing."""
    out, lse = torch.ones(1, 1, 1, 8), torch.tensor([[[-3e4]]])
    merge(out, lse, 2 * torch.ones(1, 1, 1, 8), torch.tensor([[[3e4]]]))
    assert (out == 2).all()
    assert lse.item() == 3e4
