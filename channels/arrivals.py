"""How many arrivals complete a phase of each barrier: pure Python, from the roles, the CTAs and the multicast.

`mbarrier.init(barrier, count)` of Gluon takes the count of *one* CTA; for a barrier that a pair of CTAs shares, the
compiler doubles it. So these functions count per CTA, and `hardware_arrivals` says what the hardware counts.
"""

from .compat import constexpr_function


@constexpr_function
def filled_arrivals(filling_roles: int) -> int:
    """On "the slot is filled": each filling role of the CTA arrives once, a loading one by announcing the bytes to
    expect. The copy engine completes bytes, never arrivals, also when another CTA issued the copy."""
    return filling_roles


@constexpr_function
def freed_arrivals(consuming_roles: int) -> int:
    """On "this CTA is done with the slot", one barrier per CTA: each role that reads the slot arrives once, whatever
    its number of warps."""
    return consuming_roles


@constexpr_function
def commit_arrivals(num_ctas: int, two_ctas: bool, multicast: bool) -> int:
    """On a barrier on which Blackwell's tensor cores arrive, one barrier per CTA: once for each CTA that issues
    products and whose commit reaches this one. two_ctas: of each pair only the lead issues, for both. multicast: the
    operands are loaded for the whole cluster at once, so that the commits of all of it count."""
    return num_ctas // (2 if two_ctas else 1) if multicast else 1


@constexpr_function
def handover_arrivals(loading_roles: int, num_ctas: int, multicast: bool) -> int:
    """On "the slot is free in both CTAs", one barrier per pair, held by its lead: the loading role of each CTA arrives
    once its own CTA is done. 0 if there is no such barrier, as nobody writes into another CTA's slot."""
    if num_ctas not in (1, 2):
        raise ValueError(f"num_ctas: expected 1 or 2, got {num_ctas}")
    return loading_roles if multicast and num_ctas == 2 else 0


@constexpr_function
def signal_arrivals(sending_roles: int) -> int:
    """On a signal: each sender of the CTA arrives once."""
    return sending_roles


def hardware_arrivals(count: int, *, two_ctas: bool) -> int:
    """Arrivals the hardware waits for on a barrier initialised with `count`; two_ctas: one barrier for the pair."""
    return count * (2 if two_ctas else 1)
