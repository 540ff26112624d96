"""Documents: what the kernel before prepares, which blocks are walked, and what rows see."""

from typing import Any

import pytest
import torch
from torch import Tensor

import gluon_cpu
from gluon_attn import attention, reference_attention
from gluon_attn.device import Device
from gluon_attn.documents import documents_build, documents_shape, padded_lengths
from gluon_attn.forward.configs import ForwardConfig, HopperConfig
from gluon_attn.forward.launch import compiled
from gluon_attn.forward.table import blackwell_config, hopper_config, pick_config
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.mask_mod import DOCUMENTS
from gluon_attn.resources import resources
from gluon_attn.tensors import FP8_DTYPES
from tests.gluon_attn.problems import problem
from tests.gluon_cpu.attention import normal_qkv
from tests.slow import slow_if

H200, B200 = Device.hopper(), Device.blackwell()


def ids(length: int, *starts: int) -> Tensor:
    """Sorted ids (1, length) of documents of which the first begins at 0 and others at `starts`."""
    return (torch.arange(length)[:, None] >= torch.tensor([[0, *starts]])).sum(1, dtype=torch.int32)[None] - 1


def shuffled(of: Tensor) -> Tensor:
    return of[:, torch.randperm(of.shape[1], generator=torch.Generator().manual_seed(1))].contiguous()


def prepared(q_ids: Tensor, k_ids: Tensor, of_keys: bool) -> Tensor:
    """(B, tiles, 4): the ranges that the kernel finds."""
    asked = problem(batch=q_ids.shape[0], q_len=q_ids.shape[1], kv_len=k_ids.shape[1])
    padded_q, padded_k = padded_lengths(asked)
    documents = torch.full(documents_shape(asked), -7, dtype=torch.int32)
    build = documents_build(of_keys=of_keys)
    grid = (q_ids.shape[0] * max(padded_q, padded_k) // 512,)
    with gluon_cpu.machine():
        build.kernel.fn[grid](
            documents, q_ids, k_ids, q_ids.shape[1], k_ids.shape[1], of_keys, target="sm_90a", num_warps=8
        )
    for found, given, start in ((documents, q_ids, 0), (documents, k_ids, padded_q)):
        assert torch.equal(found[:, start : start + given.shape[1]], given)
    ranges = documents[:, padded_q + padded_k :].unflatten(1, (-1, 4))
    own = k_ids if of_keys else q_ids
    return ranges[:, (padded_q // 64 if of_keys else 0) :][:, : -(-own.shape[1] // 64)]


BOTH = {
    "sorted": (ids(300, 40, 150, 151, 290), ids(500, 64, 128, 400)),
    "batches": (torch.cat([ids(200, 70), ids(200, 5, 128)]), torch.cat([ids(130), ids(130, 100)])),
    "unsorted": (shuffled(ids(300, 40, 290)), shuffled(ids(200, 100))),
    "without keys": (ids(300, 100, 200), ids(100) + 1),
    "largest and least": (torch.full((1, 70), 2**31 - 1, dtype=torch.int32), -ids(130, 65) * 2**31),
}


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("name", BOTH)
def test_ranges(name, of_keys):
    """No position that some of a tile sees is outside of the first two; all of the last two are seen by all of it. For
    sorted ids no tile at their ends is without one that is seen."""
    q_ids, k_ids = BOTH[name]
    found = prepared(q_ids, k_ids, of_keys)
    for batch in range(q_ids.shape[0]):
        seen = q_ids[batch][:, None] == k_ids[batch]
        seen = seen.mT if of_keys else seen
        for tile, (first, end, full_first, full_end) in enumerate(found[batch].tolist()):
            of_tile = seen[64 * tile : 64 * (tile + 1)]
            some = of_tile.any(0).nonzero()
            if some.numel():
                assert first <= int(some.min()), (batch, tile)
                assert end > int(some.max()), (batch, tile)
            if some.numel() and name == "sorted":
                assert (first // 64, (end - 1) // 64) == (int(some.min()) // 64, int(some.max()) // 64)
            assert of_tile[:, full_first:full_end].all(), (batch, tile)
            whole = [bool(t.all()) for t in of_tile.split(64, dim=1)]
            assert any(whole) == (full_end > full_first), (batch, tile)


def check(
    q: Tensor, k: Tensor, v: Tensor, *, device: Device, config: ForwardConfig | None = None, **options: Any
) -> None:
    out, lse = attention(q, k, v, return_lse=True, device=device, config=config, **options)
    # What nobody sees may be NaN.
    plain = [t.double().nan_to_num(0.0) for t in (q, k, v)]
    want, want_lse = reference_attention(*plain, **options)
    atol = 0.15 if q.dtype in FP8_DTYPES else 4e-3
    torch.testing.assert_close(out.double(), want, atol=atol, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-5)
    assert not out[want_lse.isneginf()].any()


SMALL = hopper_config(2, 64, 2, 2, 232)  # 128 rows, 64 keys
FOUR = hopper_config(4, 64, 2, 4, 112, integer_max=True, last_heads_longest_first=True)  # 256 rows, 64 keys
TURNS = hopper_config(2, 128, 2, 2, 232, turns=True, early_exp=2, integer_max=True)
IN_FP8 = hopper_config(2, 128, 2, 2, 216, early_exp=1, transpose_registers=56)
CASES: dict[str, tuple[Device, ForwardConfig, torch.dtype, dict[str, Any]]] = {
    "Hopper": (H200, SMALL, torch.float16, {}),
    "Hopper, causal": (H200, TURNS, torch.float16, {"causal": True}),
    "Hopper, four roles, causal": (H200, FOUR, torch.float16, {"causal": True}),
    "Hopper, window": (H200, SMALL, torch.float16, {"window": (70, 5)}),
    "Hopper, 2 CTAs": (H200, hopper_config(2, 64, 2, 2, 232, num_ctas=2), torch.float16, {"causal": True}),
    "Hopper, e4m3": (H200, IN_FP8, torch.float8_e4m3fn, {"causal": True}),
    "Hopper, e4m3, V before": (H200, hopper_config(2, 128, 2, 4, 240, early_exp=1), torch.float8_e4m3fn, {}),
    "Blackwell": (B200, blackwell_config(3, 192), torch.float16, {}),
    "Blackwell, causal": (B200, blackwell_config(3, 192), torch.float16, {"causal": True}),
    "Blackwell, 2 CTAs": (B200, blackwell_config(3, 192, num_ctas=2), torch.float16, {"causal": True}),
}
QUICK = ("Hopper, four roles, causal", "Blackwell, causal")


@pytest.mark.parametrize("name", slow_if(lambda name: name not in QUICK, CASES))
def test_against_float64(name):
    """Two query heads of one KV head; documents that begin and end within blocks, one of a single position, one of
    many whole blocks, one without keys. Keys of a document that no query has, of several blocks, are NaN."""
    device, config, dtype, options = CASES[name]
    q, k, v = normal_qkv(batch=2, heads=2, kv_heads=1, q_len=600, kv_len=700, dtype=dtype)
    q_ids, k_ids = ids(600, 10, 11, 130, 520), ids(700, 20, 21, 110, 400)
    k_ids[k_ids == 4] = 9  # no query's; and document 4 has no key
    for t in (k, v):
        t[0, :, 512:] = float("nan")
    both = q_ids.expand(2, 600).clone(), k_ids.expand(2, 700).clone()
    both[0][1], both[1][1] = ids(600), ids(700)  # one document
    check(q, k, v, device=device, config=config, segment_ids=both, **options)


@pytest.mark.parametrize("name", QUICK)
def test_unsorted(name):
    device, config, _, _ = CASES[name]
    q, k, v = normal_qkv(batch=1, heads=2, kv_heads=1, q_len=300, kv_len=300, dtype=torch.float16)
    check(q, k, v, device=device, config=config, causal=True, segment_ids=shuffled(ids(300, 90, 200)))


def test_with_slopes_and_layout():
    """The mask's tensors come after those of scores; positions are the third dimension, whatever the layout."""
    q, k, v = (t.transpose(1, 2).contiguous() for t in normal_qkv(heads=2, q_len=150, kv_len=150, dtype=torch.float16))
    of = ids(150, 70)
    slopes = torch.tensor([0.5, 0.125])
    options: dict[str, Any] = {"layout": "bshd", "alibi_slopes": slopes, "segment_ids": of, "causal": True}
    out, _ = attention(q, k, v, device=H200, return_lse=True, **options)
    want, _ = reference_attention(q.double(), k.double(), v.double(), **options)
    torch.testing.assert_close(out.double(), want, atol=4e-3, rtol=0)


SCHEDULES: dict[str, tuple[Device, ForwardConfig, int]] = {
    "Hopper": (H200, SMALL, 6),
    "four roles": (H200, FOUR, 6),
    "Blackwell": (B200, blackwell_config(2, 192), 4),
}


@pytest.mark.parametrize("name", slow_if(lambda name: name != "four roles", SCHEDULES))
def test_no_race(name):
    """Which blocks each role walks, skips and frees; the kernel before, whose end attention waits for."""
    device, config, schedules = SCHEDULES[name]
    q, k, v = normal_qkv(heads=1, kv_heads=1, q_len=400, kv_len=400, dtype=torch.float16)
    of = ids(400, 100, 130, 330)

    def call() -> None:
        attention(q, k, v, causal=True, segment_ids=of, device=device, config=config)

    gluon_cpu.check(call, schedules=schedules, quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_steps_without_a_mask_cost_nothing(head_dim):
    """The loop of steps without a mask has no more than a few instructions more than that of a plain kernel."""
    config = pick_config(problem(head_dim=head_dim, causal=True, q_len=4096, kv_len=4096), H200)
    assert isinstance(config, HopperConfig)
    least = []
    for function in (None, DOCUMENTS):
        found = resources(compiled(torch.bfloat16, head_dim, Mask(causal=True, function=function), config))
        walks = [loop for loop in found.loops if loop.products]
        fastest = min(walks, key=lambda loop: loop.instructions)
        assert fastest.spills == 0
        least.append(fastest.instructions)
    assert least[1] <= 1.05 * least[0]
