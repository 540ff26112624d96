"""How many arrivals complete a phase of each barrier: each count follows from who arrives, and how often."""

import itertools
from types import SimpleNamespace
from typing import Literal

import pytest
import torch

from channels.arrivals import (
    commit_arrivals,
    filled_arrivals,
    freed_arrivals,
    handover_arrivals,
    hardware_arrivals,
    signal_arrivals,
)
from gluon_attn.forward.table import blackwell_config
from gluon_attn.runtime.descriptors import Block
from tests.compat import tcgen05_mma_barrier_count


@pytest.mark.parametrize("roles", [1, 2, 3, 4])
def test_each_role_arrives_once_per_cta(roles):
    assert filled_arrivals(roles) == roles
    assert freed_arrivals(roles) == roles
    assert signal_arrivals(roles) == roles


# loading roles, CTAs, multicast -> the count that one CTA initialises the barrier with
HANDOVER = {
    "one CTA": (1, 1, False, 0),
    "one CTA, multicast asked for": (1, 1, True, 0),
    "two CTAs, each fills its own slot": (1, 2, False, 0),
    "two CTAs, multicast": (1, 2, True, 1),
    "two CTAs, multicast, two loading roles": (2, 2, True, 2),
}


@pytest.mark.parametrize(("loading", "num_ctas", "multicast", "count"), HANDOVER.values(), ids=HANDOVER.keys())
def test_handover(loading, num_ctas, multicast, count):
    assert handover_arrivals(loading, num_ctas, multicast) == count


@pytest.mark.parametrize("num_ctas", [0, 3, 4])
def test_handover_knows_one_and_two_ctas(num_ctas):
    with pytest.raises(ValueError, match=f"num_ctas: expected 1 or 2, got {num_ctas}"):
        handover_arrivals(1, num_ctas, True)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_hardware_counts_both_ctas_of_a_pair(count):
    assert hardware_arrivals(count, two_ctas=False) == count
    assert hardware_arrivals(count, two_ctas=True) == 2 * count


@pytest.mark.parametrize("num_ctas", [1, 2])
@pytest.mark.parametrize("softmax_roles", [1, 2, 3, 4])
def test_a_lap_of_a_multicast_ring_balances(softmax_roles, num_ctas):
    """Who arrives where in one lap of a keys channel, counted one by one, completes each barrier exactly once."""
    multicast = num_ctas == 2
    filled, freed, handover = [0] * num_ctas, [0] * num_ctas, 0
    for cta in range(num_ctas):
        filled[cta] += 1  # its load role announces the bytes
        for _ in range(softmax_roles):
            freed[cta] += 1  # each softmax role has read the slot
        if multicast:
            handover += 1  # its load role reports to the lead
    assert filled == [hardware_arrivals(filled_arrivals(1), two_ctas=False)] * num_ctas
    assert freed == [hardware_arrivals(freed_arrivals(softmax_roles), two_ctas=False)] * num_ctas
    assert handover == hardware_arrivals(handover_arrivals(1, num_ctas, multicast), two_ctas=multicast)


# CTAs, products by pairs, multicast -> arrivals of the tensor cores' commits that complete a phase
COMMITS = {
    "one CTA": (1, False, False, 1),
    "a pair: its lead alone issues": (2, True, False, 1),
    "a pair, multicast: the same": (2, True, True, 1),
    "two pairs, each loads its own": (4, True, False, 1),
    "two pairs that one load serves: the leads of both": (4, True, True, 2),
    "two CTAs without pairs, multicast": (2, False, True, 2),
    "four CTAs without pairs, multicast": (4, False, True, 4),
}


@pytest.mark.parametrize(("num_ctas", "pairs", "multicast", "count"), COMMITS.values(), ids=COMMITS.keys())
def test_commits(num_ctas, pairs, multicast, count):
    assert commit_arrivals(num_ctas, pairs, multicast) == count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("num_ctas", [1, 2, 4])
def test_commits_are_those_that_the_operands_layouts_bring_about(num_ctas, dtype):
    """Triton counts them from the layouts: of the tile that the kernel commits with, K's; V comes in the same slots."""
    pairs, multicast = num_ctas > 1, num_ctas > 2
    tile = blackwell_config(3, 192, num_ctas=num_ctas)

    def operand(name: Literal["q", "k", "v"], head_dim: int) -> SimpleNamespace:
        rows, cga_layout = tile.operand(name)
        return SimpleNamespace(layout=Block.of(dtype, rows, head_dim, cga_layout).layout)

    for head_dim in (64, 128):
        q, k, v = (operand(name, head_dim) for name in ("q", "k", "v"))
        for committed in (k, v):
            counted = tcgen05_mma_barrier_count([committed], multicast, pairs)
            assert counted == commit_arrivals(num_ctas, pairs, multicast)
        # Q is never the same in two CTAs: its slots are freed by a commit to the CTA, or the pair, itself.
        assert tcgen05_mma_barrier_count([q], True, pairs) == commit_arrivals(num_ctas, pairs, multicast=False)


@pytest.mark.parametrize("num_ctas", [1, 2, 4])
def test_a_lap_of_blackwells_rings_balances(num_ctas):
    """Who arrives where in one lap of keys_values and of scores, one by one, completes each barrier exactly once."""
    pairs, multicast = num_ctas > 1, num_ctas > 2
    leads = range(0, num_ctas, 2 if pairs else 1)
    lead_of = {cta: cta - cta % 2 if pairs else cta for cta in range(num_ctas)}
    loaded, freed, scores_freed = ([0] * num_ctas for _ in range(3))
    for cta in range(num_ctas):
        loaded[lead_of[cta]] += 1  # its load role announces the bytes, for the products that the lead issues
        scores_freed[lead_of[cta]] += 1  # its softmax role has put P in place
    for lead, cta in itertools.product(leads, range(num_ctas)):
        if multicast or lead_of[cta] == lead:
            freed[cta] += 1  # a lead's commit reaches its own pair, or all that share the load
    for lead in leads:
        assert loaded[lead] == hardware_arrivals(filled_arrivals(1), two_ctas=pairs)
        assert scores_freed[lead] == hardware_arrivals(freed_arrivals(1), two_ctas=pairs)
    assert freed == [commit_arrivals(num_ctas, pairs, multicast)] * num_ctas
