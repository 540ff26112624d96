"""The candidates that the tuning table is chosen from."""

import dataclasses

import pytest
import torch

from bench import sweep
from bench.candidates import CANDIDATES, label, orders_heads
from bench.points import DTYPES, Point
from gluon_attn import HopperConfig
from gluon_attn.device import Device
from gluon_attn.forward.fits import require_fits
from gluon_attn.forward.table import HOPPER, OTHER_HEAD_DIMS
from gluon_attn.problem import Problem


def problem_of(point: Point) -> Problem:
    q, v = (
        torch.empty((point.batch, point.heads, point.length, d), dtype=DTYPES[point.dtype], device="meta")
        for d in (point.head_dim, point.head_dim_v)
    )
    return Problem.of(q, q, v, causal=point.causal)


@pytest.mark.parametrize("kind", CANDIDATES, ids=lambda k: f"D={k[0]}/{k[1]}, {8 * k[2]} bits")
def test_every_candidate_fits_and_has_a_name_of_its_own(kind):
    head_dim, head_dim_v, element_bytes = kind
    dtype = "bf16" if element_bytes == 2 else "e4m3"
    for config in CANDIDATES[kind]:
        require_fits(
            config,
            problem_of(Point(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, causal=False, length=512)),
            Device.hopper(),
        )
    assert len({label(config) for config in CANDIDATES[kind]}) == len(CANDIDATES[kind])


def test_the_table_is_among_the_candidates():
    """But for rows of windows, which a search has chosen (test_table_hopper.py)."""
    for row in [row for row in HOPPER + OTHER_HEAD_DIMS if not row.in_limits]:
        kind = (*row.head_dims, row.element_bytes)
        if row in HOPPER or kind in CANDIDATES:  # of other head dims not all are measured
            assert row.config in CANDIDATES[kind]


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_candidates_of_a_point(head_dim, dtype):
    """The longest first is an order under a mask only, where each has its counterpart without."""
    full, causal = (
        sweep.candidates(Point(dtype=dtype, head_dim=head_dim, causal=causal, length=512), [1, 2])
        for causal in (False, True)
    )
    for num_ctas in (1, 2):
        only = sweep.candidates(Point(dtype=dtype, head_dim=head_dim, causal=False, length=512), [num_ctas])
        assert {config.num_ctas for config in only} == {num_ctas}
    ordered = [config for config in causal if orders_heads(config)]
    assert ordered
    assert full == [config for config in causal if not orders_heads(config)]
    otherwise = {
        dataclasses.replace(config, last_heads_longest_first=False)
        for config in ordered
        if isinstance(config, HopperConfig)
    }
    assert len(otherwise) == len(ordered)
    assert otherwise <= set(full)
