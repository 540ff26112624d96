"""The gradient role's two warpgroups wait for their products apart: has the machine's code a barrier of both wherever
memory goes from one to the other? gluon_cpu runs a role as one agent and cannot tell. No card is needed."""

import functools
import re

import pytest
import torch

from gluon_attn.backward.launch import compiled_backward
from gluon_attn.backward.table import HOPPER
from gluon_attn.kernels.common.mask import Mask

EVENTS = {
    "write": r"stmatrix\.|st\.shared\.v4",  # of dS, P, dQ, dK, dV
    "read": r"ld\.shared\.v2",  # of the statistics
    "commit": r"wgmma\.commit_group",
    "wait": r"wgmma\.wait_group\.sync\.aligned\s+(\d+)",
    "fence": r"fence\.proxy\.async",
    "barrier": r"bar\.sync\s+0, 256;",
    "arrive": r"mbarrier\.arrive\.shared",
    "store": r"cp\.async\.bulk\.tensor\S*\.global\.shared",
    "store read": r"cp\.async\.bulk\.wait_group\.read",
    "branch": r"bra(\.uni)?\s",
}
PRODUCTS = 5  # of a step: S, dP, dV, then dQ and dK, or dK and dQ where P goes through shared memory too
S, DP, DV = range(3)


def events_of(ptx: str) -> list[tuple[str, int]]:
    """Of the gradient role, which comes first and is the only one that has products: (kind, number waited for). The
    roles of one warp have no barrier of 256 threads."""
    found = []
    for line in ptx.splitlines():
        for kind, pattern in EVENTS.items():
            if match := re.match(rf"\s*(?:@!?%p\d+\s+)?(?:{pattern})", line):
                found.append((kind, int(match[1]) if kind == "wait" else 0))
    start = next(i for i, (kind, _) in enumerate(found) if kind == "barrier")  # after the barriers' init
    last = max(i for i, (kind, _) in enumerate(found) if kind == "commit")
    end = next(i for i in range(last, len(found)) if found[i][0] == "branch")
    return found[start + 1 : end]


def steps_of(events: list[tuple[str, int]]) -> list[list[tuple[str, int]]]:
    """From the first product of a row block to the end of its loop: one without and one with a mask."""
    commits = [i for i, (kind, _) in enumerate(events) if kind == "commit"]
    assert len(commits) == 2 * PRODUCTS
    steps = []
    for first, last in ((commits[0], commits[PRODUCTS - 1]), (commits[PRODUCTS], commits[-1])):
        end = next((i for i in range(last, len(events)) if events[i][0] == "branch"), len(events))
        steps.append(events[first:end])
    return steps


def wrong_in_step(step: list[tuple[str, int]], exchanges_p: bool) -> list[str]:
    dk, dq = (3, 4) if exchanges_p else (4, 3)  # their places among the products
    exchanged = {DV, dk, dq} if exchanges_p else {dq}  # read what both warpgroups have written
    of_rows = {S, DP, DV, dk}  # read the slot of Q and dO
    arrivals = ["release", "publish"] if exchanges_p else ["publish", "release"]
    found = []
    products = 0
    fenced = met = False  # since the last write: fenced, and then met at a barrier
    done: set[int] = set()  # waited for by each warpgroup
    done_by_both: set[int] = set()  # and met since
    for kind, number in step:
        if kind == "write":
            fenced = met = False
        elif kind == "fence":
            fenced = True
        elif kind == "barrier":
            met, done_by_both = fenced, set(done)
        elif kind == "commit":
            if products in exchanged and not met:
                found.append(f"product {products} reads what the other warpgroup may not have written")
            products += 1
        elif kind == "wait":
            done = set(range(products - number))
        elif kind == "arrive" and arrivals.pop(0) == "publish":
            if not met:
                found.append("dQ is handed over before both warpgroups have written it")
        elif kind == "arrive" and not of_rows <= done_by_both:
            found.append("the slot of Q and dO is released before both warpgroups have multiplied")
    if arrivals:
        found.append(f"no {arrivals[0]}")
    if not exchanged <= done_by_both:
        found.append("the next step overwrites what the other warpgroup may not have multiplied")
    return found


def wrong_in_staging(events: list[tuple[str, int]]) -> list[str]:
    """dK and dV: written, fenced, met, stored; and no write after before the store has read."""
    found = []
    first = next(i for i, (kind, _) in enumerate(events) if kind == "store")
    writes = max(i for i in range(first) if events[i][0] == "write")
    before = [kind for kind, _ in events[writes:first]]
    if before != ["write", "fence", "barrier"]:
        found.append(f"dK is stored after {before}")
    read = next(i for i, (kind, _) in enumerate(events) if kind == "store read")
    if events[read + 1][0] != "barrier":
        found.append("one warp alone has waited until dK and dV are read")
    arrivals = [i for i in range(writes) if events[i][0] == "arrive"]
    if not arrivals or events[arrivals[-1] - 1][0] != "barrier":
        found.append("K and V are released before both warpgroups have multiplied")
    return found


def wrong(ptx: str, exchanges_p: bool) -> list[str]:
    events = events_of(ptx)
    return [w for step in steps_of(events) for w in wrong_in_step(step, exchanges_p)] + wrong_in_staging(events)


@functools.cache
def ptx_of(head_dim: int, causal: bool, deterministic: bool) -> str:
    config = HOPPER[head_dim]
    kernels = compiled_backward(torch.bfloat16, head_dim, Mask(causal=causal), config, deterministic=deterministic)
    return str(kernels[1].asm["ptx"])


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in order"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", HOPPER)
def test_the_warpgroups_meet_where_memory_goes_from_one_to_the_other(head_dim, causal, deterministic):
    assert wrong(ptx_of(head_dim, causal, deterministic), HOPPER[head_dim].exchanges_p) == []


@pytest.mark.parametrize("head_dim", HOPPER)
def test_each_of_these_barriers_is_needed(head_dim):
    """Without any one of them the test above would fail. Only the compiler's own, after its wait for the last product
    where P is exchanged, is followed by another before it matters."""
    ptx, exchanges_p = ptx_of(head_dim, False, False), HOPPER[head_dim].exchanges_p
    lines = ptx.splitlines()
    barriers = [i for i, line in enumerate(lines) if re.match(r"\s*bar\.sync\s+0, 256;", line)]
    silent = []
    for place in barriers[1:-1]:  # the first one and the last are the kernel's
        broken = "\n".join(lines[:place] + lines[place + 1 :])
        silent += [] if wrong(broken, exchanges_p) else [place]
    assert len(barriers) == 2 + 3 + 2 * (4 if exchanges_p else 3)
    assert len(silent) == (2 if exchanges_p else 0)
