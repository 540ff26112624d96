"""Packed sequences on the card: against float64, bit for bit against a loop, and in graphs whose lengths change."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.mask_mods import near, near_keys, near_rows
from gluon_attn import MaskMod, attention, attention_varlen, reference_attention
from gluon_attn.apart import Apart
from gluon_attn.device import Device
from gluon_attn.forward.launch import compiled
from gluon_attn.forward.table import pick_config
from gluon_attn.problem import Problem
from tests.gluon_attn.packs import Pack, pack, same_bits, starts
from tests.gpu.checks import outcomes_of, settle

pytestmark = pytest.mark.timeout(1800)

# Those of flash-attention's tests of packed sequences.
PAIRS = (
    (1, 1), (64, 1), (239, 1), (799, 3), (1, 3), (2, 1), (511, 1), (3, 513), (64, 128), (128, 128), (256, 256),
    (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (307, 256), (640, 128), (512, 256), (1024, 1024),
    (1023, 1024), (1024, 1023), (2048, 2048), (0, 100), (100, 0), (4224, 4224),
)  # fmt: skip
HEADS = {"MHA": (4, 4), "GQA": (6, 2), "MQA": (4, 1)}
HEAD_DIMS = (64, 96, 128, 192, 256)
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (64, 30)},
    "window, causal": {"window": (200, 0)},
    "window on": {"window": (None, 100)},
    "chunk": {"chunk": 300, "causal": True},
    "soft cap": {"softcap": 15.0, "causal": True},
}


def on_card(case: Pack) -> Pack:
    return case._replace(q=case.q.cuda(), k=case.k.cuda(), v=case.v.cuda())


def arguments(case: Pack) -> dict[str, Any]:
    return {name: x.cuda() if isinstance(x, Tensor) else x for name, x in case.arguments.items()}


def call(case: Pack, **options: Any) -> tuple[Tensor, Tensor]:
    """(O, LSE) with NaN before; rows after the last sequence must stay as they are."""
    bf16 = torch.bfloat16 if case.q.dtype.itemsize == 1 else case.q.dtype
    out = torch.full(case.q.shape, float("nan"), dtype=bf16, device="cuda")
    out[sum(case.lengths_q) :] = 7.0
    got: Any = attention_varlen(**arguments(case), out=out, return_lse=True, **options)
    assert bool((out[sum(case.lengths_q) :] == 7.0).all())
    return got


def of_pairs(head_dim: int, heads: str, **more: Any) -> Pack:
    query_heads, kv_heads = HEADS[heads]
    lengths_q, lengths_k = zip(*PAIRS, strict=True)
    return on_card(pack(lengths_q, lengths_k, heads=query_heads, kv_heads=kv_heads, head_dim=head_dim, **more))


def against_float64(head_dim: int, heads: str, kind: str, sinks: bool, num_ctas: int | None) -> None:
    """No further off than twice what plain PyTorch in the same dtype is, and a rounding."""
    case = of_pairs(head_dim, heads, dtype=torch.bfloat16)
    options = dict(KINDS[kind])
    if sinks:
        options["sinks"] = torch.randn(HEADS[heads][0], device="cuda")
    out, lse = call(case, num_ctas=num_ctas, **options)
    given = {name: x for name, x in arguments(case).items() if not name.startswith("max")}
    wide = given | {name: given[name].double() for name in "qkv"}
    want, want_lse = reference_attention(**wide, **options)
    plain, _ = reference_attention(**given, **options)
    rows = slice(0, sum(case.lengths_q))
    floor = 2 * (want + 0.3 - 0.3 - want).abs().max() + 2**-8 * want[rows].abs().max()
    allowed = (3 if sinks or "softcap" in options else 2) * (plain.double() - want)[rows].abs().max() + floor
    assert (out.double() - want)[rows].abs().max() <= allowed
    torch.testing.assert_close(lse[:, rows].double(), want_lse[:, rows], atol=2e-3, rtol=1e-3)


def bit_for_bit(dtype: str, causal: bool, num_ctas: int) -> None:
    """A loop of calls with the same config, on sequences of one length, for which the table has one."""
    for head_dim in (64, 128, 256):
        case = on_card(pack((700,) * 5, (900,) * 5, head_dim=head_dim, dtype=getattr(torch, dtype)))
        out, lse = call(case, causal=causal, num_ctas=num_ctas)
        config = config_of(case, causal, num_ctas)
        for rows, q, k, v in case.sequences():
            one: Any = attention(
                *(t[None] for t in (q, k, v)), causal=causal, layout="bshd", return_lse=True, config=config
            )
            assert same_bits(out[rows], one[0][0])
            assert same_bits(lse[:, rows], one[1][0])


def config_of(case: Pack, causal: bool, num_ctas: int) -> Any:
    """What the table has for the packed call."""
    given = arguments(case)
    lengths = tuple(
        given[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k")
    )
    problem = Problem.of(case.q, case.k, case.v, causal=causal, layout="thd", lengths=lengths)
    return pick_config(problem, Device.of(case.q.device), num_ctas)


def neighbours_of_nan() -> None:
    """And keys that do not count."""
    for head_dim, dtype in itertools.product((64, 128, 256), (torch.float16, torch.float8_e4m3fn)):
        lengths = (300, 70, 129, 500, 1)
        clean = on_card(pack(lengths, lengths, head_dim=head_dim, dtype=dtype))
        want, _ = call(clean)
        harmed = on_card(pack(lengths, lengths, head_dim=head_dim, dtype=dtype, poisoned=2))
        got, _ = call(harmed)
        for i, (rows, *_) in enumerate(clean.sequences()):
            assert i == 2 or same_bits(got[rows], want[rows]), (head_dim, dtype, i)
        used = (300, 3, 0, 129, 1)
        some = on_card(pack(lengths, lengths, head_dim=head_dim, dtype=dtype, used=used))
        got, lse = call(some)
        assert bool(got[: sum(lengths)].isfinite().all())
        assert bool(lse[:, 370:499].isneginf().all())


def mask_of_a_function() -> None:
    """As a window of the same keys; and a sequence with queries and no key has none of its neighbours'."""
    mod = MaskMod(near, keys=near_keys, rows=near_rows, constants=(100,))
    for head_dim, (lengths_k, used) in itertools.product(
        (64, 128, 256), (((300, 0, 700), None), ((300, 40, 700), (300, 0, 700)), ((0, 300, 700), None))
    ):
        counts = used or lengths_k
        case = on_card(
            pack(tuple(max(n, 30) for n in counts), lengths_k, head_dim=head_dim, dtype=torch.bfloat16, used=used)
        )
        (got, lse), (want, want_lse) = call(case, mask_mod=mod), call(case, window=(100, None))
        rows = slice(0, sum(case.lengths_q))
        torch.testing.assert_close(got[rows], want[rows], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse[:, rows], want_lse[:, rows], atol=2e-3, rtol=1e-3)
        start = sum(case.lengths_q[: counts.index(0)])
        assert bool((got[start : start + 30] == 0).all())
        assert bool(lse[:, start : start + 30].isneginf().all())


def graph_of_other_lengths() -> None:
    """A captured call follows what the tensors hold at each replay."""
    total, count = 4000, 6
    q, k, v = (torch.randn(total, 4, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    cu = torch.zeros(count + 1, dtype=torch.int32, device="cuda")

    def replayed() -> Any:
        return attention_varlen(q, k, v, cu, cu, total, total, causal=True, return_lse=True)

    cu.copy_(starts((total, 0, 0, 0, 0, 0)))
    replayed()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = replayed()
    for lengths in ((1000, 0, 500, 1, 2499, 0), (total, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, total), (666,) * 6):
        cu.copy_(starts(lengths))
        graph.replay()
        want, want_lse = replayed()
        rows = slice(0, sum(lengths))
        assert torch.equal(out[rows], want[rows])
        assert torch.equal(lse[:, rows], want_lse[:, rows])


def lengths_compile_nothing() -> None:
    before = None
    for lengths in ((4000, 4096), (5000, 3000, 96), (8096,), (2000,) * 4):
        case = on_card(pack(lengths, lengths, dtype=torch.bfloat16))
        call(case)
        size = compiled.cache_info().currsize
        assert before in (None, size)
        before = size


ITEMS: dict[str, Callable[[], None]] = {
    "neighbours of NaN": neighbours_of_nan,
    "mask of a function": mask_of_a_function,
    "a graph of other lengths": graph_of_other_lengths,
    "lengths compile nothing": lengths_compile_nothing,
}
for (d, kind), which, sinks, ctas in zip(
    itertools.product(HEAD_DIMS, KINDS),
    itertools.cycle(HEADS),
    itertools.cycle((False, True, False, False)),
    itertools.cycle((None, 1, None, 2, None)),
):
    ITEMS[f"D={d}, {which}, {kind}, {'sinks, ' if sinks else ''}{ctas or 'any'} CTAs"] = partial(
        against_float64, d, which, kind, sinks, ctas
    )
for dtype, masked, ctas in itertools.product(("bfloat16", "float8_e4m3fn"), (False, True), (1, 2)):
    ITEMS[f"bits, {dtype}, {'causal' if masked else 'full'}, {ctas} CTAs"] = partial(bit_for_bit, dtype, masked, ctas)


def run(name: str) -> None:
    ITEMS[name]()


APART = Apart(function="tests.gpu.test_varlen:run")


@pytest.fixture(scope="module")
def outcome(request):
    yield from outcomes_of(APART, request)


@pytest.mark.parametrize("name", ITEMS)
def test_varlen(name, outcome):
    settle(outcome(name))
