"""Breaking PTX on purpose: one synchronisation operation taken away or changed at a time."""

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

from proving.launch import Launch
from proving.prove import Proof, Task
from proving.ptx import strip_comment
from proving.rewrites import DIAGNOSIS
from proving.verifier import Verdict

OPERATIONS = {
    "arrive": r"(@!?%p\d+ )?mbarrier\.arrive\.(?!expect_tx)[^;]*;",
    "expect": r"(@!?%p\d+ )?mbarrier\.arrive\.expect_tx\.[^;]*;",
    "wait": r"mbarrier\.try_wait\.[^;]*;",
    "commit": r"(@!?%p\d+ )?tcgen05\.commit\.[^;]*;",
    "cluster barrier": r"barrier\.cluster\.arrive[^;]*;",
}
COUNTS = {
    "init count": (r"((?:@!?%p\d+ )?mbarrier\.init\.[^,]*, )(\d+);", lambda count: count + 1),
    "bytes": (r"((?:@!?%p\d+ )?mbarrier\.arrive\.expect_tx\.[^,]*, [^,]*, )(\d+);", lambda count: count // 2),
}


@dataclass(frozen=True)
class Mutant:
    kind: str
    line: int  # of the PTX, from 1
    ptx: str

    def __str__(self) -> str:
        return f"{self.kind} at line {self.line}"


def verdict_of_mutant(proof: Proof, launch: Launch, mutant: Mutant) -> Verdict:
    """launch: the proof's, unbroken."""
    broken = dataclasses.replace(launch, ptx=mutant.ptx)
    return Task.of(dataclasses.replace(proof, launch=lambda: broken), *DIAGNOSIS).run()


def mutants(ptx: str) -> Iterator[Mutant]:
    """Every mutant, in the order of the lines."""
    lines = ptx.split("\n")
    for i, line in enumerate(lines):
        text = strip_comment(line)
        for kind, pattern in OPERATIONS.items():
            if re.fullmatch(pattern, text):
                yield Mutant(f"no {kind}", i + 1, "\n".join(dropped(lines, i)))
        for kind, (pattern, change) in COUNTS.items():
            if match := re.fullmatch(pattern, text):
                changed = f"\t{match[1]}{change(int(match[2]))};"
                yield Mutant(f"wrong {kind}", i + 1, "\n".join([*lines[:i], changed, *lines[i + 1 :]]))


def dropped(lines: list[str], at: int) -> list[str]:
    """The lines without the operation at `at`: of a wait its branch back too, of a cluster barrier both halves."""
    gone = {at}
    text = strip_comment(lines[at])
    if text.startswith("mbarrier.try_wait"):
        gone.add(next(i for i in range(at, at + 3) if "bra.uni waitLoop" in lines[i]))
    if text.startswith("barrier.cluster.arrive"):
        gone.add(next(i for i in range(at, len(lines)) if "barrier.cluster.wait" in lines[i]))
    return ["\t// dropped" if i in gone else line for i, line in enumerate(lines)]
