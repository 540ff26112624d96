"""Guarding the guard: the verifier, as this project drives it, rejects kernels that are broken and accepts their twins.

Some seconds each. Skipped without the verifier.
"""

import pytest

from proving.attention import catalogue
from proving.kernel_input import kernel_input
from proving.prove import Proof, Task, explained
from proving.rewrites import DIAGNOSIS, SAFETY, rewritten
from proving.verifier import PACKAGE, Limits, Verdict, verify, version
from tests.proving import kernels
from tests.proving.mutations import mutants
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


ATTENTION = "d64-bf16-full-1cta"


@pytest.fixture(scope="module")
def attention() -> Proof:
    return next(proof for proof in catalogue() if proof.name == ATTENTION)


@pytest.mark.slow
def test_attention_is_proved(attention):
    """By the verifier, whatever is on record."""
    verdict = Task.of(attention).run()
    assert verdict.race_free, verdict


def check_mutant(proof: Proof, kind: str) -> Verdict:
    """The verdict on the first mutant of that kind."""
    launch = proof.launch()
    mutant = next(mutant for mutant in mutants(launch.ptx) if mutant.kind == kind)
    ptx, _ = rewritten(mutant.ptx, (*SAFETY, *DIAGNOSIS))
    return verify(ptx, kernel_input(launch), LIMITS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["no arrive", "no wait", "no commit", "wrong bytes"])
def test_attention_without_an_operation_is_rejected(attention, kind):
    verdict = check_mutant(attention, kind)
    assert verdict.result in ("not_wellsynced", "potential_race", "invalid_lifecycle")
