"""How many arrivals complete a phase of each barrier: each count follows from who arrives, and how often."""

import pytest

from channels.arrivals import (
    filled_arrivals,
    freed_arrivals,
    handover_arrivals,
    hardware_arrivals,
    signal_arrivals,
)


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
