"""How a compiled kernel synchronises, as a list of lines that two kernels may have in common."""

import re

from tests.gluon_cpu.mutants import Locations, changes, op_of

REGION = re.compile(r"\b(scf\.\w+|ttg\.warp_specialize|default|partition\d+|else)\b")


def synchronisation(text: str) -> list[str]:
    """Each operation that the campaign on mutants breaks, in the order of the text, indented by the loops, branches and
    roles that it is in: with its counts, phases and lines of the kernel, without the names of values. Roles, loops and
    branches are listed if there is such an operation in them."""
    locations, found = Locations(text), list[str]()
    around: list[tuple[int, str, bool]] = []  # indent, what it is, whether it is listed
    for line in text.splitlines():
        stripped, indent = line.strip(), len(line) - len(line.lstrip())
        while around and indent <= around[-1][0]:
            _, what, listed = around.pop()
            if listed:
                found.append(f"{'  ' * len(around)}end of {what}")
        if re.search(r"\{\s*$", stripped):
            region = REGION.search(stripped)
            around.append((indent, region[1] if region else op_of(line), False))
        elif any(changes(line)):
            for i, (at, what, listed) in enumerate(around):
                if not listed:
                    found.append(f"{'  ' * i}{what}")
                    around[i] = (at, what, True)
            operation = re.sub(r"%[\w.#:]+", "%", stripped.partition(" loc(")[0].partition(" : ")[0])
            found.append(f"{'  ' * len(around)}{operation} at {' < '.join(locations.of(line))}")
    return found
