"""Exact rewrites of PTX: the same kernel, in words that the verifier decides.

Each returns (PTX, how often it applied), keeps the number of every line, and leaves alone what it does not recognise:
the verifier then says `unsupported`, which is a failure and never a proof.
"""

from collections.abc import Callable

from .branches import straighten_branches
from .dispatch import name_roles, recompute_captures, store_roles_once
from .loads import spell_out_maxima
from .reductions import store_reductions_once

Rewrite = Callable[[str], tuple[str, int]]

# Under these a proof is made. The others only make a failure easier to read: they do away with reads that a proof
# should cover.
SAFETY: tuple[Rewrite, ...] = (straighten_branches, store_roles_once, store_reductions_once, spell_out_maxima)
DIAGNOSIS: tuple[Rewrite, ...] = (recompute_captures, name_roles)


def rewritten(ptx: str, rewrites: tuple[Rewrite, ...] = SAFETY) -> tuple[str, dict[str, int]]:
    """(PTX, how often each rewrite applied). Raises RuntimeError if one moved a line: findings name lines."""
    applied = {}
    for rewrite in rewrites:
        lines = ptx.count("\n")
        ptx, applied[rewrite.__name__] = rewrite(ptx)
        if ptx.count("\n") != lines:
            raise RuntimeError(f"{rewrite.__name__}: expected {lines} lines as before, got {ptx.count(chr(10))}")
    return ptx, applied
