"""How many arrivals complete a phase of each barrier: pure Python, from the roles, the CTAs and the multicast.

`mbarrier.init(barrier, count)` of Gluon takes the count of *one* CTA; for a barrier that a pair of CTAs shares, the
compiler doubles it. So these functions count per CTA, and `hardware_arrivals` says what the hardware counts.
"""

from .compat import constexpr_function


@constexpr_function
def filled_arrivals(loading_roles: int) -> int:
    """On "the slot is filled", one barrier per CTA: each loading role of the CTA arrives once, by announcing the bytes
    to expect. The copy engine completes bytes, never arrivals, also when another CTA issued the copy."""
    return loading_roles


@constexpr_function
def freed_arrivals(consuming_roles: int) -> int:
    """On "this CTA is done with the slot", one barrier per CTA: each role that reads the slot arrives once, whatever
    its number of warps."""
    return consuming_roles


@constexpr_function
def handover_arrivals(loading_roles: int, num_ctas: int, multicast: bool) -> int:
    """On "the slot is free in both CTAs", one barrier per pair, held by its lead: the loading role of each CTA arrives
    once its own CTA is done. 0 if there is no such barrier, as nobody writes into another CTA's slot."""
    if num_ctas not in (1, 2):
        raise ValueError(f"num_ctas: expected 1 or 2, got {num_ctas}")
    return loading_roles if multicast and num_ctas == 2 else 0


@constexpr_function
def signal_arrivals(sending_roles: int) -> int:
    """On a signal, one barrier per CTA: each sender arrives once."""
    return sending_roles


def hardware_arrivals(count: int, *, two_ctas: bool) -> int:
    """Arrivals the hardware waits for on a barrier initialised with `count`; two_ctas: one barrier for the pair."""
    return count * (2 if two_ctas else 1)
