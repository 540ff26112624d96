"""Guarding the guard: the verifier, as this project drives it, rejects kernels that are broken and accepts their twins.

Some seconds each. Skipped without the verifier.
"""

import dataclasses

import pytest
import torch

from gluon_attn.forward.table import BLACKWELL
from gluon_attn.kernels.common.packed import RECORD
from proving.attention import ARCH, catalogue, one_row_block, packed
from proving.launch import Pointer
from proving.prove import Proof, Task, explained
from proving.verifier import PACKAGE, Limits, version
from tests.proving import kernels
from tests.proving.mutations import mutants, verdict_of_mutant
from tests.slow import slow_if

pytestmark = pytest.mark.skipif(version() is None, reason=f"{PACKAGE} is not installed: pip install -e '.[prove]'")

LIMITS = Limits(seconds=240)


def small(num_ctas: int, bug: str = "", *, computes: bool = False) -> Proof:
    equivalence = kernels.equivalence(num_ctas) if computes else None
    return Proof(
        name="small",
        launch=lambda: kernels.launch(num_ctas, bug=bug),
        source=lambda: "never on record",
        limits=LIMITS,
        equivalence=equivalence,
    )


@pytest.mark.parametrize("num_ctas", slow_if(lambda num_ctas: num_ctas == 2, [1, 2]))
def test_the_right_kernel_is_proved(num_ctas):
    verdict = Task.of(small(num_ctas)).run()
    assert verdict.race_free, verdict


BROKEN = {
    "loads into a slot in use": "not_wellsynced",
    "multiplies what is not loaded": "not_wellsynced",
    "expects half of the bytes": "not_wellsynced",
    "counts an arrival too many": "not_wellsynced",
    "frees a slot before the product is done": "potential_race",
    "never frees a slot": "not_wellsynced",
    "never says that it is done": "not_wellsynced",
    "takes out what is not done": "invalid_lifecycle",
    "invalidates while the tensor cores may arrive": "invalid_lifecycle",
}
BROKEN_PAIR = {
    "does not wait for the peer's half": "not_wellsynced",
    "frees a slot before the product is done": "not_wellsynced",
    "expects half of the bytes": "not_wellsynced",
}


def check_is_rejected(num_ctas: int, bug: str, result: str) -> None:
    proof = small(num_ctas, bug)
    task = Task.of(proof)
    verdict = task.run()
    assert not task.proved(verdict)
    assert explained(proof, verdict)[1].result == result


# Further ones of a kind: counts and bytes, and arrivals that never come.
SLOW = {
    "loads into a slot in use",
    "expects half of the bytes",
    "counts an arrival too many",
    "never says that it is done",
    "invalidates while the tensor cores may arrive",
}


@pytest.mark.parametrize(("bug", "result"), slow_if(lambda item: item[0] in SLOW, BROKEN.items()))
def test_a_broken_kernel_is_rejected(bug, result):
    check_is_rejected(1, bug, result)


ONE_OF_A_PAIR = "does not wait for the peer's half"


@pytest.mark.parametrize(("bug", "result"), slow_if(lambda item: item[0] != ONE_OF_A_PAIR, BROKEN_PAIR.items()))
def test_a_broken_pair_is_rejected(bug, result):
    check_is_rejected(2, bug, result)


@pytest.mark.slow
def test_what_the_kernel_computes_is_proved():
    verdict = Task.of(small(1, computes=True)).run()
    assert verdict.verified, verdict


@pytest.mark.slow
def test_a_kernel_that_computes_something_else_is_rejected():
    bug = "transposes the output"
    assert Task.of(small(1, bug)).run().race_free
    task = Task.of(small(1, bug, computes=True))
    verdict = task.run()
    assert not task.proved(verdict)
    assert verdict.result == "equivalence_not_proven"


ATTENTION, PACKED = "d64-bf16-full-1cta", "d64-bf16-full-1cta-packed"


def proof_called(name: str) -> Proof:
    return next(proof for proof in catalogue() if proof.name == name)


@pytest.mark.slow
def test_attention_is_proved():
    """By the verifier, whatever is on record."""
    verdict = Task.of(proof_called(ATTENTION)).run()
    assert verdict.race_free, verdict


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((ATTENTION, kind) for kind in ("no arrive", "no wait", "no commit", "wrong bytes")),
        *((PACKED, kind) for kind in ("no arrive", "no wait")),
    ],
)
def test_attention_without_an_operation_is_rejected(name, kind):
    """The first of that kind."""
    proof = proof_called(name)
    launch = proof.launch()
    mutant = next(mutant for mutant in mutants(launch.ptx) if mutant.kind == kind)
    verdict = verdict_of_mutant(proof, launch, mutant)
    assert verdict.result in ("not_wellsynced", "potential_race", "invalid_lifecycle")


@pytest.mark.slow
@pytest.mark.parametrize("first", [229, 200])
def test_sequences_with_rows_in_common_are_rejected(first):
    """Two programs store a sequence each: 229 rows, and 40 from row `first` on. What lists them is trusted for that."""
    row = next(row for row in BLACKWELL if ARCH in row.config.archs)
    case = dataclasses.replace(packed(one_row_block(torch.bfloat16, row)), clusters=2)
    launch = case.steps()[-1].described()
    (records,) = (arg for arg in launch.arguments if isinstance(arg, Pointer) and arg.words)
    at = 2 * RECORD.value  # of the second one, behind the number of them
    assert (launch.grid, records.words[at], records.words[at + 1]) == ((2, 1, 1), 229, 40)
    moved = dataclasses.replace(records, words={**records.words, at: first})
    launch = dataclasses.replace(launch, arguments=tuple(moved if arg is records else arg for arg in launch.arguments))
    verdict = Task.of(Proof(name="moved", launch=lambda: launch, source=lambda: "", limits=LIMITS)).run()
    assert verdict.result == ("race_free" if first == 229 else "potential_race"), verdict
