"""One proof, from the launch to the record of it."""

import dataclasses
import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton

from . import store
from .contents import take_as_given
from .equivalence import Equivalence
from .kernel_input import is_alone, kernel_input, parameter_of
from .launch import Launch, Pointer
from .rewrites import DIAGNOSIS, SAFETY, Rewrite, rewritten
from .source import adapter, hash_of
from .verifier import PACKAGE, Limits, Verdict, verify, version


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Something to prove. launch: compiles, so it is called when the proof is due. source: all that the launch is made
    from, as a text, without compiling (see source.py).

    equivalence: what the kernel computes, to be proved as well; None: only that no schedule deadlocks or races.
    rewrites: those that this proof needs beyond what all do. decisions: from the PTX, which branches on data every
    thread takes, or does not, each time: the proof is of such runs only. quick: part of the set for every commit.
    """

    name: str
    launch: Callable[[], Launch]
    source: Callable[[], str]
    limits: Limits
    equivalence: Equivalence | None = None
    rewrites: tuple[Rewrite, ...] = ()
    decisions: Callable[[str], dict[int, bool]] | None = None
    quick: bool = False

    @property
    def all_rewrites(self) -> tuple[Rewrite, ...]:
        return (*SAFETY, *self.rewrites, *(self.equivalence.rewrites if self.equivalence else ()))

    def source_key(self) -> str:
        """The same as long as the PTX and the verifier's input are. Takes a second."""
        made = self.equivalence
        equivalence = made and [made.reference, made.inputs, made.outputs, made.scalars]
        rewrites = [rewrite.__qualname__ for rewrite in self.all_rewrites]
        parts = (triton.__version__, adapter(), self.source(), repr(equivalence), repr(rewrites), repr(self.decisions))
        return hash_of(*parts)


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
        ptx, applied = rewritten(launch.ptx, (*proof.all_rewrites, *more))
        for arg in launch.arguments:
            if isinstance(arg, Pointer) and arg.words:
                if not is_alone(arg, launch):
                    raise ValueError(
                        f"{arg.name}: expected memory of its own, as its words are given, got a shared one"
                    )
                ptx, applied[f"words of {arg.name}"] = take_as_given(ptx, parameter_of(launch, arg.name), arg.words)
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
        return self.key_with(version())

    def key_with(self, verifier: str | None) -> str:
        """The key of a record made with that version of the verifier."""
        return store.key_of(self.ptx, (self.input, self.reference, self.binding), verifier)

    def run(self) -> Verdict:
        return verify(self.ptx, self.input, self.proof.limits, reference=self.reference, binding=self.binding)

    def proved(self, verdict: Verdict) -> bool:
        return verdict.verified if self.proof.equivalence else verdict.race_free

    def record(self, verdict: Verdict) -> store.Record:
        return store.Record(
            name=self.proof.name,
            key=self.key,
            source=self.proof.source_key(),
            result=verdict.result,
            seconds=round(verdict.seconds, 1),
            memory_mib=round(verdict.memory_mib),
            verifier=f"{PACKAGE} {version()}",
            triton=triton.__version__,
            date=datetime.date.today().isoformat(),
            launch=self.input["launch"],
            rewrites=self.rewrites,
        )

    def renewed(self, record: store.Record) -> store.Record:
        """A record of this proof with the same key, whose sources may have changed since."""
        return dataclasses.replace(record, source=self.proof.source_key())

    def same_as(self, record: store.Record) -> store.Record:
        """A record of this proof by another one with the same key."""
        return dataclasses.replace(record, name=self.proof.name, source=self.proof.source_key(), same_as=record.name)


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
