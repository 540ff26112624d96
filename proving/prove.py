"""One proof, from the launch to the record of it."""

import dataclasses
import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton

from . import store
from .equivalence import Equivalence
from .kernel_input import kernel_input
from .launch import Launch
from .rewrites import DIAGNOSIS, SAFETY, Rewrite, rewritten
from .verifier import PACKAGE, Limits, Verdict, verify, version


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Something to prove. launch: compiles, so it is called when the proof is due.

    equivalence: what the kernel computes, to be proved as well; None: only that no schedule deadlocks or races.
    decisions: from the PTX, which branches on data every thread takes, or does not, each time: the proof is of such
    runs only. quick: part of the set for every commit.
    """

    name: str
    launch: Callable[[], Launch]
    limits: Limits
    equivalence: Equivalence | None = None
    decisions: Callable[[str], dict[int, bool]] | None = None
    quick: bool = False


@dataclass(frozen=True, kw_only=True)
class Task:
    """A proof made ready for the verifier."""

    proof: Proof
    launch: Launch
    ptx: str
    rewrites: dict[str, int]
    input: dict[str, Any]
    reference: str | None
    binding: dict[str, Any] | None

    @staticmethod
    def of(proof: Proof, *more: Rewrite) -> "Task":
        """more: rewrites beyond those that a proof needs."""
        launch, equivalence = proof.launch(), proof.equivalence
        ptx, applied = rewritten(launch.ptx, (*SAFETY, *more, *(equivalence.rewrites if equivalence else ())))
        return Task(
            proof=proof,
            launch=launch,
            ptx=ptx,
            rewrites=applied,
            input=kernel_input(launch, proof.decisions(launch.ptx) if proof.decisions else None),
            reference=equivalence.reference if equivalence else None,
            binding=equivalence.binding(launch) if equivalence else None,
        )

    @property
    def key(self) -> str:
        return store.key_of(self.ptx, (self.input, self.reference, self.binding), version())

    def run(self) -> Verdict:
        return verify(self.ptx, self.input, self.proof.limits, reference=self.reference, binding=self.binding)

    def proved(self, verdict: Verdict) -> bool:
        return verdict.verified if self.proof.equivalence else verdict.race_free

    def record(self, verdict: Verdict) -> store.Record:
        return store.Record(
            name=self.proof.name,
            key=self.key,
            result=verdict.result,
            seconds=round(verdict.seconds, 1),
            memory_mib=round(verdict.memory_mib),
            verifier=f"{PACKAGE} {version()}",
            triton=triton.__version__,
            date=datetime.date.today().isoformat(),
            launch=self.input["launch"],
            rewrites=self.rewrites,
        )

    def same_as(self, record: store.Record) -> store.Record:
        """A record of this proof by another one with the same key."""
        return dataclasses.replace(record, name=self.proof.name, same_as=record.name)


def explained(proof: Proof, verdict: Verdict) -> tuple[Task, Verdict]:
    """A failure again, with the rewrites that make the verifier say more about a deadlock; the verdict stays a failure.

    A failure that they turn into a proof would be one of the verifier, or of the rewrites: the first verdict is kept.
    """
    plain = Task.of(proof)
    if verdict.result != "unsupported" or verdict.checks.get("synchronization") == "passed":
        return plain, verdict
    task = Task.of(proof, *DIAGNOSIS)
    again = task.run()
    return (plain, verdict) if task.proved(again) else (task, again)
