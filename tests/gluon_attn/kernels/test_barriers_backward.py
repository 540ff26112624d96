"""The gradient role's two warpgroups wait for their products apart: has the machine's code a barrier of both wherever
memory goes from one to the other? gluon_cpu runs a role as one agent and cannot tell. No card is needed."""

import functools
import itertools
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from gluon_attn.backward.configs import HopperBackward
from gluon_attn.backward.launch import Choices, compiled_backward, main_of
from gluon_attn.backward.table import HOPPER, IN_ONE_LAUNCH, UNLIKE, pick_config, rows_by_default
from gluon_attn.bias import Bias
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.tuning import gradient_kernels_of_cards
from tests.gluon_attn.problems import problem
from tests.slow import slow_if

EVENTS = {
    "write": r"stmatrix\.|st\.shared\.(v4|b32)",  # of dS, P, dQ, dK, dV; of dBias in fp32 one by one
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


@dataclass(frozen=True)
class Step:
    """A step of the role. products: in the order in which they are issued, those of pieces one by one. exchanged: those
    that read what both warpgroups have written. tells: what the role tells others, in order, and which products the
    memory of a slot needs to be done with. with_statistics: slots from which threads read, too."""

    products: tuple[str, ...]
    exchanged: frozenset[str]
    tells: tuple[tuple[str, frozenset[str]], ...]
    with_statistics: frozenset[str] = frozenset(("Q", "dO"))

    def named(self, names: frozenset[str]) -> set[int]:
        """The products that are called so."""
        return {i for i, name in enumerate(self.products) if name in names}


NONE = frozenset[str]()
TOLD_OF_DQ, TOLD_OF_DO, TOLD_OF_Q = ("dQ", NONE), ("dO", frozenset(("dP", "dV"))), ("Q", frozenset(("S", "dK")))
ONE_TILE = Step(("S", "dP", "dV", "dQ", "dK"), frozenset(("dQ",)), (TOLD_OF_DQ, TOLD_OF_DO, TOLD_OF_Q))
HALVES = Step(
    ("S", "dP", "dV", "dQ", "dK", "dQ"),
    frozenset(("dV", "dQ", "dK")),
    (TOLD_OF_DO, TOLD_OF_DQ, TOLD_OF_Q, TOLD_OF_DQ),
)
THIRDS = Step(
    3 * ("S",) + ("dP", "dV", "dQ") + 3 * ("dK",) + 2 * ("dQ",),
    HALVES.exchanged,
    (TOLD_OF_DO, TOLD_OF_DQ, TOLD_OF_Q) + 2 * (TOLD_OF_DQ,),
)
PARTS = {
    "dv": Step(3 * ("S",) + ("dV",), NONE, (TOLD_OF_DO, TOLD_OF_Q), frozenset(("Q",))),
    "dk, dq": Step(
        3 * ("S",) + ("dP",) + 3 * ("dQ",) + 3 * ("dK",),
        frozenset(("dQ",)),
        (TOLD_OF_DO,) + 3 * (TOLD_OF_DQ,) + (TOLD_OF_Q,),
    ),
}


# What follows after the last step.
AFTER_STEPS = {"dv": Step(("dV",), NONE, (TOLD_OF_DO, ("K", frozenset(("dV",)))))}


def step_of(config: HopperBackward) -> Step:
    if config.exchanges_p:
        return THIRDS if config.q_pieces == 3 else HALVES
    return PARTS.get(config.grads, ONE_TILE)


def events_of(ptx: str) -> list[tuple[str, int]]:
    """Of the gradient role, which comes first and is the only one that has products: (kind, number waited for). The
    roles of one warp have no barrier of 256 threads, and so the last one but the kernel's is this role's."""
    found = []
    for line in ptx.splitlines():
        for kind, pattern in EVENTS.items():
            if match := re.match(rf"\s*(?:@!?%p\d+\s+)?(?:{pattern})", line):
                found.append((kind, int(match[1]) if kind == "wait" else 0))
    start, *_, last, _ = (i for i, (kind, _) in enumerate(found) if kind == "barrier")  # first after the barriers' init
    last = max(last, *(i for i, (kind, _) in enumerate(found) if kind == "commit"))
    end = next(i for i in range(last, len(found)) if found[i][0] == "branch")
    return found[start + 1 : end]


def steps_of(events: list[tuple[str, int]], step: Step) -> list[list[tuple[str, int]]]:
    """From the first product of a row block to the end of its loop: one without and one with a mask."""
    commits = [i for i, (kind, _) in enumerate(events) if kind == "commit"]
    products = len(step.products)
    assert len(commits) == 2 * products
    steps = []
    for first, last in ((commits[0], commits[products - 1]), (commits[products], commits[-1])):
        end = next((i for i in range(last, len(events)) if events[i][0] == "branch"), len(events))
        steps.append(events[first:end])
    return steps


def wrong_in_step(events: list[tuple[str, int]], step: Step) -> list[str]:
    exchanged, tells = step.named(step.exchanged), list(step.tells)
    found = []
    products = 0
    fenced = met = False  # since the last write: fenced, and then met at a barrier
    read_fenced = read_met = True  # since the last read: likewise
    done: set[int] = set()  # waited for by each warpgroup
    done_by_both: set[int] = set()  # and met since
    for kind, number in events:
        if kind == "write":
            fenced = met = False
        elif kind == "read":
            read_fenced = read_met = False
        elif kind == "fence":
            fenced = read_fenced = True
        elif kind == "barrier":
            met, read_met, done_by_both = fenced, read_fenced, set(done)
        elif kind == "commit":
            if products in exchanged and not met:
                found.append(f"{step.products[products]} reads what the other warpgroup may not have written")
            products += 1
        elif kind == "wait":
            done = set(range(products - number))
        elif kind == "arrive":
            what, names = tells.pop(0)
            if what in ("dQ", "dBias") and not met:
                found.append(f"{what} is handed over before both warpgroups have written it")
            if not step.named(names) <= done_by_both:
                found.append(f"the slot of {what} is released before both warpgroups have multiplied")
            if what in step.with_statistics and not read_met:
                found.append(f"the slot of {what} is released before both warpgroups have read its statistics")
    if tells:
        found.append(f"nobody is told of {tells[0][0]}")
    if not exchanged <= done_by_both:
        found.append("the next step overwrites what the other warpgroup may not have multiplied")
    return found


def wrong_in_staging(events: list[tuple[str, int]]) -> list[str]:
    """dK and dV: written, fenced, met, stored; and no write after before the store has read."""
    found = []
    for store in (i for i, (kind, _) in enumerate(events) if kind == "store"):
        before = [kind for kind, _ in events[:store]]
        since = before[max(i for i, kind in enumerate(before) if kind == "write") :]
        if since != ["write", "fence", "barrier"]:
            found.append(f"dK or dV is stored after {since}")
    for read in (i for i, (kind, _) in enumerate(events) if kind == "store read"):
        if ("barrier", 0) not in events[read + 1 : read + 2]:
            found.append("one warp alone has waited until dK and dV are read")
    first = next(i for i, (kind, _) in enumerate(events) if kind == "store")
    writes = max(i for i in range(first) if events[i][0] == "write")
    arrivals = [i for i in range(writes) if events[i][0] == "arrive"]
    if not arrivals or events[arrivals[-1] - 1][0] != "barrier":
        found.append("K and V are released before both warpgroups have multiplied")
    return found


def wrong(ptx: str, config: HopperBackward, dbias_tiles: int = 0) -> list[str]:
    """dbias_tiles: of the gradient of a bias of each row, which comes before dQ through its slots."""
    events, step = events_of(ptx), step_of(config)
    step = replace(step, tells=(("dBias", NONE),) * dbias_tiles + step.tells)
    found = wrong_in_staging(events)
    if after := AFTER_STEPS.get(config.grads):
        branches = [-1, *(i for i, (kind, _) in enumerate(events) if kind == "branch"), len(events)]
        first, end = next(
            (a + 1, b) for a, b in itertools.pairwise(branches) if events[a + 1 : b].count(("commit", 0)) == 1
        )
        found += wrong_in_step([e for e in events[first:end] if e[0] != "write"], after)
        events = events[:first] + events[end:]
    return found + [w for of_step in steps_of(events, step) for w in wrong_in_step(of_step, step)]


def main_ptx(config: HopperBackward, head_dims: tuple[int, int], *, causal: bool, **options: Any) -> str:
    choices = Choices(
        dtype=torch.bfloat16,
        padded_head_dims=head_dims,
        mask=Mask(causal=causal),
        config=config,
        finishes=config.can_finish(head_dims[0]),
        **options,
    )
    *_, main = main_of(choices, compiled_backward(choices)).values()
    return str(main.asm["ptx"])


def config_of(head_dim: int, causal: bool) -> HopperBackward:
    return rows_by_default((head_dim, head_dim), causal)[0].config


@functools.cache
def ptx_of(head_dim: int, causal: bool, deterministic: bool, packed: bool = False) -> str:
    """Where there is one, with the role that makes dQ."""
    config = config_of(head_dim, causal)
    return main_ptx(config, (head_dim, head_dim), causal=causal, deterministic=deterministic, packed=packed)


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in order"])
@pytest.mark.parametrize("causal", slow_if(bool, [False, True]))
@pytest.mark.parametrize("head_dim", slow_if(lambda head_dim: head_dim != 64, HOPPER))
@pytest.mark.slow_but("64-False-any order")
def test_the_warpgroups_meet_where_memory_goes_from_one_to_the_other(head_dim, causal, deterministic):
    assert wrong(ptx_of(head_dim, causal, deterministic), config_of(head_dim, causal)) == []


OF_CARDS = gradient_kernels_of_cards()


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", OF_CARDS)
def test_of_rows_in_files_likewise(name, causal):
    row = OF_CARDS[name]
    for deterministic in (False, True):
        ptx = main_ptx(row.config, row.head_dims, causal=causal, deterministic=deterministic)
        assert wrong(ptx, row.config) == []


@functools.cache
def ptx_of_launches(config: HopperBackward, causal: bool) -> dict[HopperBackward, str]:
    """At head dims of 192 and 128, of each launch by its part of the config."""
    mask = Mask(causal=causal)
    choices = Choices(dtype=torch.bfloat16, padded_head_dims=(192, 128), mask=mask, config=config, finishes=False)
    kernels = compiled_backward(choices)[1:-1]
    return {part: str(kernel.asm["ptx"]) for part, kernel in zip(config.launches, kernels, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("table", [UNLIKE, IN_ONE_LAUNCH], ids=["apart", "in one launch"])
def test_of_unlike_head_dims_likewise(table, causal):
    for part, ptx in ptx_of_launches(table[192, 128], causal).items():
        assert wrong(ptx, part) == []


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HOPPER)
def test_of_packed_sequences_likewise(head_dim):
    for causal, deterministic in ((False, True), (True, False)):
        assert wrong(ptx_of(head_dim, causal, deterministic, packed=True), config_of(head_dim, causal)) == []


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HOPPER)
def test_with_a_bias_and_its_gradient_likewise(head_dim):
    for each_row in (True, False):
        bias = Bias(dtype=torch.bfloat16, each_row=each_row, shared=True)
        config = pick_config(problem(head_dim=head_dim, bias=bias), of_bias=True)
        ptx = main_ptx(config, (head_dim, head_dim), causal=True, bias=bias, of_bias=True)
        tiles = config.block_m // config.dbias_rows(bias, head_dim) if each_row else 0
        assert wrong(ptx, config, tiles) == []


def barriers_of(ptx: str, config: HopperBackward) -> tuple[int, int]:
    """How many of 256 threads there are from the first product to the last store; and how many of them the tests above
    would not miss. Those before and after are the kernel's, and those of claims."""
    lines = ptx.splitlines()
    first = next(i for i, line in enumerate(lines) if re.match(r"\s*wgmma\.mma_async", line))
    *places, _, _ = (i for i, line in enumerate(lines) if i > first and re.match(r"\s*bar\.sync\s+0, 256;", line))
    silent = [place for place in places if not wrong("\n".join(lines[:place] + lines[place + 1 :]), config)]
    return len(places), len(silent)


@pytest.mark.parametrize("head_dim", slow_if(lambda head_dim: head_dim != 64, HOPPER))
def test_each_of_these_barriers_is_needed(head_dim):
    """Without any one of them the test above would fail, but for those that the compiler adds near another:
    after the wait for the last product, and between two releases. One more is there where dV has no memory but dQ's."""
    config = HOPPER[head_dim]
    found = barriers_of(ptx_of(head_dim, False, False), config)
    assert found == ((5 + 2 * 6, 2 * 2) if config.exchanges_p else (4 + (not config.ds_stages) + 2 * 4, 2 * 2))


@pytest.mark.slow
def test_of_unlike_head_dims_each_is_needed():
    """But for those beside another: of the launch for dV before its wait; of that for dK and dQ before dO's release,
    which dP alone has read; in one launch as at D=256."""
    found = {
        part.grads: barriers_of(ptx, part)
        for table in (UNLIKE, IN_ONE_LAUNCH)
        for part, ptx in ptx_of_launches(table[192, 128], False).items()
    }
    assert found == {"dv": (4 + 2 * 3, 2 * 1), "dk, dq": (7 + 2 * 6, 2 * 1), "all": (9 + 2 * 7, 2 * 2)}
