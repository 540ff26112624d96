"""Attention as Blackwell does it, in one CTA, a pair, and two pairs: numbers, and bugs of that kind of kernel."""

from typing import Any

import pytest
import torch

import gluon_cpu
from tests.gluon_cpu import findings_blackwell as kernels
from tests.gluon_cpu.findings_cases import markers
from tests.gluon_cpu.support import descriptor, poisoned, same, small_integers
from tests.slow import slow_if

N, STEPS = 64, 4


def problem(num_ctas: int, dtype: torch.dtype, head_dim: int = 64) -> tuple:
    """(descriptors, output, layout constants, right numbers): scores and weights are small integers, so exact."""
    bits = num_ctas.bit_length() - 1
    rows = 128 * num_ctas
    q = small_integers(rows, head_dim, dtype=dtype, seed=1, largest=1)
    q[:, 2:] = 0  # scores of at most 2, so that fp8 holds them
    k, v = (small_integers(N * STEPS, head_dim, dtype=dtype, seed=s, largest=1) for s in (2, 3))
    whole = [[0, 0]] * max(bits - 1, 0)
    descriptors = (
        descriptor(q, [rows, head_dim], cga=[[1 << i, 0] for i in range(bits)]),
        descriptor(k, [N, head_dim], cga=[[1, 0], *whole][:bits]),
        descriptor(v, [N, head_dim], cga=[[0, 1], *whole][:bits]),
    )
    scores = (q.float() @ k.float().T).view(rows, STEPS, N)
    weights = (scores - scores.amax(2, keepdim=True)).view(rows, STEPS * N)
    return descriptors, poisoned(rows, head_dim), tuple((1 << i, 0) for i in range(bits)), weights @ v.float()


def launch(num_ctas: int, *, dtype: Any = torch.bfloat16, bug: str = "", head_dim: int = 64, **more: Any) -> None:
    descriptors, out, cga, want = problem(num_ctas, dtype, head_dim)
    options: dict[str, Any] = {"target": "sm_100a", "WITH_MAX": False, "num_ctas": num_ctas} | more
    gluon_cpu.launch(kernels.small_attention, (1,), *descriptors, out, STEPS, CGA=cga, BUG=bug, **options)
    same(out, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("num_ctas", [1, 2, 4])
@pytest.mark.slow_but("2-torch.float8_e5m2", "4-torch.bfloat16", "1-torch.float8_e4m3fn")
def test_numbers_and_silence(num_ctas, dtype):
    for policy in gluon_cpu.POLICIES:
        launch(num_ctas, dtype=dtype, schedule=gluon_cpu.Schedule(policy, seed=3))


@pytest.mark.parametrize("num_ctas", [2, 4])
def test_scores_loaded_with_their_maxima(num_ctas):
    """Only sm_103a reduces as it loads."""
    launch(num_ctas, target="sm_103a", WITH_MAX=True)


def test_silent_as_the_compiler_lays_out_one_cta():
    launch(1, mode="lowered", head_dim=128)


BUGS = {
    # Without its wait a multicast comes into both pairs, so the slot that is hit may be that of either.
    "load without a free slot": ((2, 4), gluon_cpu.RaceError, ()),
    "weights not awaited": ((1, 2, 4), gluon_cpu.DataRace, ("weights used",)),
    "scores not awaited": ((1, 2, 4), gluon_cpu.RaceError, ()),
    "released before the weights are stored": ((1, 2, 4), gluon_cpu.DataRace, ("weights stored",)),
    "a commit to one pair only": ((4,), gluon_cpu.DataRace, ()),
    "the peer's weights not awaited": ((2, 4), gluon_cpu.DataRace, ("weights used",)),
    "each CTA waits for its own half of the keys": ((2, 4), gluon_cpu.DataRace, ()),
}


# Each bug with as few CTAs as show it; with more, slow.
WITH_MORE_CTAS = [(bug, n) for bug, (counts, *_) in BUGS.items() for n in counts[1:]]
BUGS_AND_CTAS = [(bug, n) for bug, (counts, *_) in BUGS.items() for n in counts]


@pytest.mark.parametrize(("bug", "num_ctas"), slow_if(lambda case: case in WITH_MORE_CTAS, BUGS_AND_CTAS))
def test_bugs(bug, num_ctas):
    _, kind, lines = BUGS[bug]
    for policy in gluon_cpu.POLICIES:
        with pytest.raises((kind, gluon_cpu.UninitialisedRead, gluon_cpu.BarrierMisuse)) as found:
            launch(num_ctas, bug=bug, schedule=gluon_cpu.Schedule(policy, seed=0))
        print(policy, found.value)
        for line in lines:
            assert markers()[line] in str(found.value), found.value
