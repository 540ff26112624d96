"""The proofs for every commit: each is on record for the kernel as it is now, or is made here."""

import pytest

from proving import store
from proving.attention import catalogue
from proving.prove import Proof, Task, explained
from proving.verifier import PACKAGE, version

QUICK = [proof for proof in catalogue() if proof.quick]


@pytest.mark.skipif(version() is None, reason=f"{PACKAGE} is not installed: pip install -e '.[prove]'")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("proof", QUICK, ids=lambda proof: proof.name)
def test_quick(proof: Proof):
    task = Task.of(proof)
    if store.find(task.key):
        return
    verdict = task.run()
    assert task.proved(verdict), explained(proof, verdict)
