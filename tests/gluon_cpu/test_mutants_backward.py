"""Who has added to dQ is told by atomics: each of them weakened is among the mutants of the campaign, and is found."""

import re

import pytest

from tests.gluon_cpu.attention import BackwardRun, normal_qkv
from tests.gluon_cpu.campaign_mutants import text_of, verdict
from tests.gluon_cpu.explained_mutants import TOLD_BEFORE_WAITING, reason_of
from tests.gluon_cpu.mutants import mutants
from tests.gluon_cpu.mutated_kernels import KERNELS

RELAXED = {("acquire -> relaxed", "atomic_load"), ("release -> relaxed", "atomic_rmw")}
WITHIN_A_CTA = {("gpu -> cta", "atomic_load"), ("gpu -> cta", "atomic_rmw")}
DELETED = {("never waits", "atomic_load"), ("delete", "atomic_rmw")}
FIRST = {(change, "atomic_cas") for change in ("always the first", "acquire -> relaxed", "gpu -> cta")}
CLAIM = {("always the first", "atomic_rmw")}  # which key block a program has


@pytest.mark.slow
@pytest.mark.parametrize(("order", "first_asked"), [("", FIRST), (", in order", set())], ids=["any order", "in order"])
def test_every_weakened_atomic_is_found(order, first_asked):
    kernel = f"gradients, D=64, full{order}"
    runs = KERNELS[kernel].runs()
    weakened = [mutant for mutant in mutants(text_of(runs[0])) if mutant.op.startswith("atomic")]
    assert {(m.change, m.op) for m in weakened} == RELAXED | WITHIN_A_CTA | DELETED | CLAIM | first_asked
    needed = [mutant for mutant in weakened if not reason_of(kernel, mutant.name)]
    assert len(needed) >= len(weakened) - 1
    said = {mutant.name: verdict(runs, mutant, range(2)) for mutant in needed}
    assert all(said.values()), said
    assert not [name for name, words in said.items() if words.startswith("WRONG")]


@pytest.mark.slow
def test_with_a_window_who_waits_may_tell_of_a_store():
    """Its keys may be the first that a row block sees, and not the first of the next one. So all that tells there is
    needed; under a causal mask alone its release is not, as who waits has added to what others have stored."""
    kernel = "gradients, D=128, wide window, in order"
    runs = KERNELS[kernel].runs()
    telling = [m for m in mutants(text_of(runs[0])) if re.search(rf"< {TOLD_BEFORE_WAITING}", m.name)]
    assert [(m.change, m.op) for m in telling] == [
        ("delete", "async_tma_store_wait"),
        ("pendings 0 -> 1", "async_tma_store_wait"),
        ("done -> read", "async_tma_store_wait"),
        ("delete", "atomic_rmw"),
        ("release -> relaxed", "atomic_rmw"),
        ("gpu -> cta", "atomic_rmw"),
    ]
    found = [verdict(runs, mutant, range(1)).partition(" (")[0] for mutant in telling]
    assert found == ["OutputRace", "OutputRace", "OutputRace", "Deadlock", "OutputRace", "DataRace"]
    assert not any(reason_of(kernel, mutant.name) for mutant in telling)


@pytest.mark.parametrize(
    ("kernel", "races"),
    [
        # Before dQ is there and once it is, neither of them in a loop; in one; and until a head's dQ can be made.
        ("gradients, D=64, full, in order", ["OutputRace", "OutputRace", "OutputRace", "DataRace"]),
        # For what others hand in of dK and dV, for who is first to add to dQ, and until a head's dQ can be made.
        ("gradients, D=128, full, shared", ["DataRace", "OutputRace", "DataRace"]),
    ],
)
def test_who_never_waits_is_found(kernel, races):
    runs = KERNELS[kernel].runs()
    text = text_of(runs[0])
    assert text.count("tt.atomic_load") == len(races)
    never = [mutant for mutant in mutants(text) if mutant.change == "never waits"]
    assert [verdict(runs, mutant, range(2)).partition(" ")[0] for mutant in never] == races


def test_every_wait_by_inline_assembly_is_among_them():
    """Of a step without a mask and one with: for S, dP, dV and dQ."""
    run = BackwardRun(*normal_qkv(q_len=64), causal=False, deterministic=False, programs=1)
    waits = [mutant for mutant in mutants(text_of(run)) if mutant.op == "elementwise_inline_asm"]
    assert [mutant.change for mutant in waits] == 2 * [f"pendings {n} -> {n + 1}" for n in (1, 0, 1, 1)]
