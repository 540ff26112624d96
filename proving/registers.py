"""Where a register's value comes from, as far as it must be known to say who has the same value."""

import re

from .branches import PURE
from .ptx import strip_comment

Definitions = dict[str, list[tuple[str, list[str]]]]

STATEMENT = re.compile(
    r"(?P<guard>@!?%\w+ )?(?P<op>[a-z]\w*(?:\.[\w:]+)*)\s+"
    r"(?P<targets>%\w+(?:\|%\w+)?|\{[^}]*\}),\s*(?P<sources>.*)"
)
UNIFORM = (*PURE, "div", "rem", "setp")
LANE_BITS = 5  # of the number of a thread
UNIFORM_SOURCE = re.compile(r"%n?ctaid\.[xyz]|%cluster_ctarank|-?\d+|0[fFdD]\w+|global_smem|\w+_param_\d+")


def definitions(lines: list[str]) -> Definitions:
    """Of each register, the statements that write it, as (operation, what it reads). `?` is read where that is not all:
    under a guard, or with other registers written too."""
    found: Definitions = {}
    for line in lines:
        for piece in strip_comment(line).split(";"):
            statement = STATEMENT.fullmatch(piece.strip(" \t").removeprefix("{").strip())
            if statement is None:
                continue
            targets = re.findall(r"%\w+", statement["targets"])
            reads = [operand.strip(" {}") for operand in statement["sources"].split(",")]
            known = not statement["guard"] and len(targets) == 1
            for target in targets:
                found.setdefault(target, []).append((statement["op"], reads if known else [*reads, "?"]))
    return found


def is_uniform(value: str, sources: Definitions) -> bool:
    """Whether a register is the same in every thread of a CTA: written once, of parameters and block numbers only."""
    if UNIFORM_SOURCE.fullmatch(value):
        return True
    operation, reads = the_definition(value, sources)
    if operation.startswith("ld.param"):
        return True
    return operation.split(".")[0] in UNIFORM and all(is_uniform(read, sources) for read in reads)


def the_definition(value: str, sources: Definitions) -> tuple[str, list[str]]:
    """(operation, what it reads) of a register that is written once; of another an operation that is not known."""
    written = sources.get(value, [])
    return written[0] if len(written) == 1 else ("?", ["?"])


def is_constant(value: str, constant: int, sources: Definitions) -> bool:
    operation, reads = the_definition(value, sources)
    return value == str(constant) or (operation.startswith("mov") and reads == [str(constant)])


def is_same_in_warp(value: str, sources: Definitions) -> bool:
    """Whether all lanes of a warp have the same: made of what is uniform and of the number of the warp."""
    if is_uniform(value, sources):
        return True
    operation, reads = the_definition(value, sources)
    kind = operation.split(".")[0]
    if kind == "shr" and is_thread(reads[0], sources):
        return reads[1].isdigit() and int(reads[1]) >= LANE_BITS
    if kind == "and" and reads[1].isdigit():
        # Some bits of (thread >> n): none of them a bit of the lane.
        inner, of = the_definition(reads[0], sources)
        if inner.split(".")[0] == "shr" and is_thread(of[0], sources) and of[1].isdigit():
            return int(reads[1]) << int(of[1]) & (2**LANE_BITS - 1) == 0
    return kind in UNIFORM and all(is_same_in_warp(read, sources) for read in reads)


def is_thread(value: str, sources: Definitions) -> bool:
    """Whether it is the number of the thread in its CTA."""
    return the_definition(value, sources) == ("mov.u32", ["%tid.x"])
