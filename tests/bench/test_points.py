"""What points the benchmarks measure, and how they count."""

import pytest
import torch

from bench.points import LENGTHS, MODEL_DIM, SETS, TOKENS, Point
from gluon_attn.forward.table import HOPPER

EVERY_POINT = [p for points in SETS.values() for p in points]


@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3", "e5m2"])
def test_a_sweep_has_every_length_mask_and_head_dim(name):
    points = [p for p in SETS["sweep"] if p.dtype == name]
    found = {(p.head_dim, p.causal, p.length) for p in points}
    assert found == {(d, causal, n) for d in (64, 128) for causal in (False, True) for n in LENGTHS}
    assert all(p.batch * p.length == TOKENS and p.heads * p.head_dim == MODEL_DIM for p in points)
    assert len(points) == len(found)


def test_names_tell_all_points_apart():
    assert len({p.name for p in EVERY_POINT}) == len(set(EVERY_POINT))


def test_flops_count_both_products_and_half_of_them_under_a_mask():
    full, causal = (Point(head_dim=64, causal=c, length=512, batch=2, heads=3) for c in (False, True))
    assert full.flops == 2 * (2 * 2 * 3 * 512 * 512 * 64)
    assert causal.flops == full.flops / 2


@pytest.mark.parametrize("point", SETS["variants"], ids=lambda p: p.name)
def test_a_variant_differs_from_its_plainer_problem_in_one_thing(point):
    plainer = point.plainer()
    assert (plainer.heads_per_kv_head, plainer.layout) == (1, "bhsd")
    changed = [
        point.heads_per_kv_head != plainer.heads_per_kv_head,
        point.layout != plainer.layout,
        point.length != plainer.length,
    ]
    assert changed.count(True) == 1
    assert (plainer.batch, plainer.heads, plainer.dtype) == (point.batch, point.heads, point.dtype)
    if point.length != plainer.length:
        assert all(plainer.length % row.config.block_m == 0 for row in HOPPER if row.padded_head_dim == point.head_dim)
        assert 0 < plainer.length - point.length < 384


def test_arguments_are_the_same_numbers_in_the_points_layout_and_dtype():
    point = Point(
        dtype="e4m3", head_dim=64, causal=False, length=128, batch=1, heads=4, heads_per_kv_head=4, layout="bshd"
    )
    q, k, v = point.tensors("cpu")
    assert (q.shape, k.shape, v.shape, q.dtype) == ((1, 4, 128, 64), (1, 1, 128, 64), (1, 1, 128, 64), torch.bfloat16)
    typed = point.arguments([q, k, v])
    for plain, own in zip((q, k, v), typed, strict=True):
        assert own.dtype == torch.float8_e4m3fn
        assert own.is_contiguous()
        assert torch.equal(own.transpose(1, 2).float(), plain.to(torch.float8_e4m3fn).float())
