"""The gradients of packed sequences on CPU tensors, executed by gluon_cpu: against float64, and bit for bit against a
call for each sequence; what lies around a sequence reaches nothing."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from channels.compat import gl, jit
from gluon_attn import MaskMod, reference_attention
from gluon_attn.device import Device
from gluon_attn.gradients import attention_backward
from gluon_attn.varlen import attention_varlen, attention_varlen_backward
from tests.slow import slow_if

HEADS, KV_HEADS = 4, 2
SINKS = torch.tensor([-1.0, 0.5, 2.0, 4.0])
SLOPES = torch.rand(5, HEADS, generator=torch.Generator().manual_seed(1))

# (queries of each sequence, keys, rows after the last one), head dim or that of Q and that of V, options, how many keys
# count.
EDGES = ([70, 0, 5, 130, 1], [40, 30, 140, 0, 1], (3, 5))
Lengths = tuple[list[int], list[int], tuple[int, int]]
HeadDims = int | tuple[int, int]
CASES: dict[str, tuple[Lengths, HeadDims, dict[str, Any], list[int] | None]] = {
    "edges": (EDGES, 64, {}, None),
    "edges, causal": (EDGES, 128, {"causal": True}, None),
    "window, sinks and soft cap": (EDGES, 64, {"window": (30, 0), "sinks": SINKS, "softcap": 2.0}, None),
    "D=256": (EDGES, 256, {"causal": True}, None),
    "D=96": (EDGES, 96, {"window": (50, 10)}, None),
    "D=192, V of 128": (EDGES, (192, 128), {"causal": True}, [40, 0, 130, 0, 0]),
    "D=192": (EDGES, 192, {}, None),
    "V wider than Q": (EDGES, (40, 128), {"causal": True}, None),
    "V narrower than Q": (EDGES, (64, 24), {}, None),
    "a head dim between, to the right": (EDGES, 72, {"window": (None, 20)}, None),
    "chunks": (([130, 200], [130, 270], (0, 0)), 64, {"chunk": 90, "causal": True}, None),
    "ALiBi": (EDGES, 64, {"alibi_slopes": SLOPES, "causal": True}, None),
    "keys that do not count": (EDGES, 64, {"causal": True}, [40, 0, 130, 0, 0]),
    "one sequence": (([200], [150], (0, 0)), 64, {"causal": True}, None),
    "many more rows than sequences have": (([5, 3], [7, 2], (150, 300)), 64, {}, None),
    "no queries": (([0, 0], [5, 140], (0, 3)), 64, {}, None),
}
QUICK = ("edges, causal", "window, sinks and soft cap")


def card(sm_count: int) -> Device:
    """One whose programs have several key blocks each."""
    return dataclasses.replace(Device.hopper(), sm_count=sm_count)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors are NaN, as torch fills them where it is asked for determinism."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def forward(given: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = attention_varlen(**given, return_lse=True, **options)
    return out, lse


def starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed(
    lengths: Lengths,
    head_dims: HeadDims,
    options: dict[str, Any],
    used: list[int] | None = None,
    *,
    seed: int = 0,
    where: str = "cpu",
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """What `attention_varlen` is given; dO and dLSE. All is NaN past the last sequence and where keys do not count."""
    q_lens, k_lens, (more_q, more_k) = lengths
    of_q, of_v = (head_dims, head_dims) if isinstance(head_dims, int) else head_dims
    generator = torch.Generator().manual_seed(seed)
    cu_q, cu_k = starts(q_lens), starts(k_lens)

    def normal(rows: int, more: int, heads: int, head_dim: int) -> Tensor:
        t = torch.randn(rows + more, heads, head_dim, generator=generator).bfloat16()
        t[rows:] = float("nan")
        return t

    q, dout = (normal(sum(q_lens), more_q, HEADS, head_dim) for head_dim in (of_q, of_v))
    k, v = (normal(sum(k_lens), more_k, KV_HEADS, head_dim) for head_dim in (of_q, of_v))
    dlse = torch.randn(HEADS, len(q), generator=generator)
    dlse[:, sum(q_lens) :] = float("nan")
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    given |= {"max_seqlen_q": max(q_lens), "max_seqlen_k": max(k_lens)} | options
    if used is not None:
        given["seqused_k"] = torch.tensor(used, dtype=torch.int32)
        for first, count, end in zip(cu_k, used, cu_k[1:], strict=False):
            k[first + count : end], v[first + count : end] = float("inf"), float("nan")
    given = {name: x.to(where) if isinstance(x, Tensor) else x for name, x in given.items()}
    return given, dout.to(where), dlse.to(where)


def each(given: dict[str, Any]) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
    """Of each sequence: its queries, its keys that count, and its options."""
    options = {n: x for n, x in given.items() if n in ("causal", "window", "chunk", "softcap", "sinks", "alibi_slopes")}
    cu_q, cu_k = given["cu_seqlens_q"].tolist(), given["cu_seqlens_k"].tolist()
    for i, (queries, keys) in enumerate(zip(pairwise(cu_q), pairwise(cu_k), strict=True)):
        end = keys[0] + int(given["seqused_k"][i]) if "seqused_k" in given else keys[1]
        if "alibi_slopes" in options:
            options["alibi_slopes"] = (
                given["alibi_slopes"][i] if given["alibi_slopes"].dim() == 2 else given["alibi_slopes"]
            )
        yield slice(*queries), slice(keys[0], end), dict(options)


def expected(given: dict[str, Any], dout: Tensor, dlse: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """dQ, dK, dV and dsinks by autograd of plain torch, a sequence at a time."""
    grads = [torch.zeros_like(given[name], dtype=dtype) for name in "qkv"]
    dsinks = torch.zeros(HEADS, dtype=dtype, device=dout.device)
    for queries, keys, options in each(given):
        if queries.start == queries.stop:
            continue
        rows = (queries, keys, keys)
        inputs = [given[n][r].to(dtype).transpose(0, 1)[None] for n, r in zip("qkv", rows, strict=True)]
        if "sinks" in options:
            inputs.append(options["sinks"].to(dtype))
        inputs = [t.detach().requires_grad_() for t in inputs]
        if "sinks" in options:
            options["sinks"] = inputs[3]
        out, lse = reference_attention(*inputs[:3], **options)
        loss = (out * dout[queries].transpose(0, 1)[None].to(dtype)).sum()
        loss = loss + torch.where(lse.isfinite(), lse * dlse[None, :, queries].to(dtype), 0.0).sum()
        found = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        for grad, one, r in zip(grads, found, rows, strict=False):
            grad[r] += one[0].transpose(0, 1)
        dsinks += found[3] if len(found) > 3 else 0
    return [*grads, dsinks] if "sinks" in given else grads


def check(
    given: dict[str, Any], dout: Tensor, dlse: Tensor, *, device: Device | None, deterministic: bool
) -> list[Tensor]:
    """By autograd, against float64: off by no more than plain torch in the same dtype, with a margin. Returns them."""
    given = dict(given)
    names = ["q", "k", "v", *(["sinks"] if "sinks" in given else [])]
    inputs = [given[name].detach().requires_grad_() for name in names]
    given |= zip(names, inputs, strict=True)
    out, lse = forward(given, deterministic=deterministic, device=device)
    with poisoned_memory():
        got = list(torch.autograd.grad([out, lse], inputs, [dout, dlse]))
    exact = expected(given, dout, dlse, torch.float64)
    plain = expected(given, dout, dlse, torch.float32 if dout.dtype == torch.float32 else dout.dtype)
    for name, one, want, other in zip(names, got, exact, plain, strict=True):
        assert one.isfinite().all(), name
        error, budget = (one.double() - want).norm(), (other.double() - want).norm()
        floor = 1e-3 if name == "sinks" else 2e-4
        assert error <= 3 * budget + floor * want.norm(), f"d{name}: off by {error:.3e}, plain torch by {budget:.3e}"
        assert not one[(want == 0).all(-1)].any(), name
    return got


@pytest.mark.parametrize("case", slow_if(lambda case: case not in QUICK, CASES))
@pytest.mark.slow_but("window, sinks and soft cap")
def test_against_float64(case):
    given, dout, dlse = packed(*CASES[case])
    check(given, dout, dlse, device=card(3), deterministic=False)


def same_as_each(
    given: dict[str, Any], dout: Tensor, dlse: Tensor, *, device: Device | None, shared: bool = False
) -> None:
    """In a fixed order, gradients have the bits of those of a call for each sequence. shared: that may share key blocks
    among programs, which adds up dK and dV in another order."""
    options: dict[str, Any] = {"deterministic": True, "device": device}
    out, lse = forward(given, device=device)
    with poisoned_memory():
        got = attention_varlen_backward(dout, dlse, out=out, lse=lse, **given, **options)
    for queries, keys, of_one in each(given):
        of_one.pop("sinks", None)
        left, _ = of_one.get("window", (keys.stop, None))
        if "window" in of_one and (left is None or left >= keys.stop - keys.start - 1):
            continue  # one that hides nothing at these lengths is left out there, and rows are walked otherwise
        rows = queries, keys, keys
        q, k, v = (given[n][r][None] for n, r in zip("qkv", rows, strict=True))
        sums, of_sums = (t[None, :, queries].contiguous() for t in (lse, dlse))
        grads = attention_backward(
            dout[queries][None], of_sums, q, k, v, out[queries][None], sums, layout="bshd", **of_one, **options
        )
        for name, one, other, r in zip(("dq", "dk", "dv"), got, grads, rows, strict=False):
            if shared and name != "dq":
                torch.testing.assert_close(one[r], other[0], atol=0.02, rtol=0.02)
            else:
                assert torch.equal(one[r], other[0]), f"{name} of queries {queries}, keys {keys}"


@pytest.mark.parametrize("case", slow_if(lambda case: case != "edges, causal", [c for c in CASES if c != "ALiBi"]))
def test_bit_for_bit_a_call_for_each_sequence(case):
    same_as_each(*packed(*CASES[case]), device=card(1))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", slow_if(lambda head_dim: head_dim != 64, [64, 128, 256]))
def test_nothing_of_a_sequence_reaches_its_neighbours(head_dim):
    """Not even NaN and infinity, which a probability of 0 does not make 0; and no row of theirs is written."""
    lengths = ([70, 30, 5, 130], [40, 30, 140, 70], (0, 0))
    given, dout, dlse = packed(lengths, head_dim, {"causal": True})
    options: dict[str, Any] = {"deterministic": True, "device": card(2)}
    out, lse = forward(given, device=card(2))
    want = attention_varlen_backward(dout, dlse, out=out, lse=lse, **given, **options)
    queries, keys = (given[f"cu_seqlens_{name}"].tolist() for name in "qk")
    for bad in (1, 3):
        for t, ends, what in (
            (given["q"], queries, "inf"), (given["k"], keys, "inf"), (given["v"], keys, "nan"), (out, queries, "nan"),
            (dout, queries, "-inf"), (lse.T, queries, "nan"), (dlse.T, queries, "nan"),
        ):  # fmt: skip
            t[ends[bad] : ends[bad + 1]] = float(what)
    got = attention_varlen_backward(dout, dlse, out=out, lse=lse, **given, **options)
    for one, other, ends in zip(got, want, (queries, keys, keys), strict=True):
        for clean in (0, 2):
            rows = slice(ends[clean], ends[clean + 1])
            assert torch.equal(one[rows], other[rows])


@pytest.mark.parametrize("deterministic", slow_if(bool, [False, True]))
def test_no_schedule_finds_a_race(deterministic):
    given, dout, _ = packed(([130, 0, 70], [70, 5, 260], (1, 2)), 64, {"causal": True})
    options: dict[str, Any] = {"device": card(2), "deterministic": deterministic}
    with torch.no_grad():
        out, lse = forward(given, device=card(2))
    runs = []

    def run() -> None:
        runs.append(attention_varlen_backward(dout, None, out=out, lse=lse, **given, **options))

    import gluon_cpu  # here, as the card's tests have the others under Triton 3.8, where it does not run

    gluon_cpu.check(run, schedules=8, quiet=True)
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0][1:], other[1:], strict=True))
    assert all(torch.equal(runs[0][0], other[0]) for other in runs[1:]) or not deterministic


def test_lengths_that_change_compile_and_plan_nothing(monkeypatch):
    given, dout, dlse = packed(*CASES["edges, causal"])
    check(given, dout, dlse, device=card(3), deterministic=False)
    from gluon_attn import gradients

    monkeypatch.setattr(gradients, "prepare", None)
    monkeypatch.setattr(gradients, "_launches", dict(gradients._launches))
    given["cu_seqlens_q"], given["cu_seqlens_k"] = starts([1, 70, 0, 100, 35]), starts([100, 11, 3, 97, 0])
    for name, t in (("q", dout), ("q", given["q"]), ("k", given["k"]), ("k", given["v"])):
        t[: given[f"cu_seqlens_{name}"][-1]].nan_to_num_()
    dlse.nan_to_num_()
    check(given | {"max_seqlen_q": 100, "max_seqlen_k": 100}, dout, dlse, device=card(3), deterministic=False)


def test_tensors_of_another_call_are_refused():
    given, dout, _ = packed(*CASES["one sequence"])
    with torch.no_grad():
        out, lse = forward(given, device=card(1))
    with pytest.raises(ValueError, match=r"^lse: expected shape \(4, 200\)"):
        attention_varlen_backward(dout, None, out=out, lse=lse[None], **given, device=card(1))
    wrong = given | {"cu_seqlens_k": starts([1, 2])}
    with pytest.raises(ValueError, match=r"^cu_seqlens_k: expected shape \(2,\)"):
        attention_varlen_backward(dout, None, out=out, lse=lse, **wrong, device=card(1))
    negated = given | {"cu_seqlens_k": torch._neg_view(-given["cu_seqlens_k"])}
    with pytest.raises(ValueError, match=r"^cu_seqlens_k: expected a tensor that is stored as it reads"):
        attention_varlen_backward(dout, None, out=out, lse=lse, **negated, device=card(1))


@jit
def of_parity(q_index, k_index, head, batch, offsets):
    return (q_index + k_index + gl.load(offsets + batch)) % 2 == 0


def test_a_mask_of_ones_own_against_float64():
    """By autograd and by the explicit call; its `batch` is the number of the sequence."""
    q_lens, k_lens = [40, 0, 70], [60, 20, 100]
    given, dout, dlse = packed((q_lens, k_lens, (2, 3)), 64, {"causal": True})
    offsets = torch.tensor([1, 0, 0], dtype=torch.int32)
    options: dict[str, Any] = {"mask_mod": MaskMod(of_parity, tensors=(offsets,)), "device": card(2)}
    inputs = [given[name].detach().requires_grad_() for name in "qkv"]
    out, lse = forward(given | dict(zip("qkv", inputs, strict=True)), **options)
    by_autograd = torch.autograd.grad([out, lse], inputs, [dout, dlse])
    direct = attention_varlen_backward(dout, dlse, out=out.detach(), lse=lse.detach(), **given, **options)
    exact: list[Tensor] = [torch.zeros_like(given[name], dtype=torch.float64) for name in "qkv"]
    for i, (queries, keys, _) in enumerate(each(given)):
        if queries.start == queries.stop:
            continue
        rows = (queries, keys, keys)
        q, k, v = (given[n][r].double().transpose(0, 1).requires_grad_() for n, r in zip("qkv", rows, strict=True))
        at, of = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
        seen = (of <= at + k.shape[1] - q.shape[1]) & ((at + of + offsets[i]) % 2 == 0)
        k_of_heads, v_of_heads = (t.repeat_interleave(HEADS // KV_HEADS, 0) for t in (k, v))
        scores = (q @ k_of_heads.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
        loss = (scores.softmax(-1) @ v_of_heads * dout[queries].transpose(0, 1)).sum()
        loss = loss + (scores.logsumexp(-1) * dlse[:, queries]).sum()
        for grad, one, r in zip(exact, torch.autograd.grad(loss, (q, k, v)), rows, strict=True):
            grad[r] = one.transpose(0, 1)
    for grads in (by_autograd, direct):
        for one, want in zip(grads, exact, strict=True):
            assert (one.double() - want).norm() <= 0.01 * want.norm()
