"""Numbers in memory that say which work there is: a proof takes them as given, as it does the launch.

The verifier knows no contents of memory, and decides no branch on what is read there. Packed sequences and documents
have such numbers: how many row blocks there are, where each sequence begins, which keys a row block may see. A kernel
before attention writes them.
"""

import re
from collections.abc import Mapping

from .ptx import declare, entry, strip_comment
from .registers import Definitions, definitions

LOAD = re.compile(
    r"(?:@(?P<negated>!?)(?P<guard>%p\d+) )?(?P<load>ld\.global\.b32 \{ (?P<target>%r\d+) \}, "
    r"\[ (?P<address>%rd\d+) \+ (?P<offset>\d+) \];)"
)
ADDRESS = re.compile(r"(?P<operation>add\.s64|mad\.wide\.s32)\s+(?P<target>%rd\d+), (?P<reads>[^;]+);")
READ = re.compile(r"(@!?%p\d+ )?ld\.[\w.:]+\s+(?P<targets>[^\[;]*), \[\s*%rd\d+[^\];]*\];")
WORD_BYTES = 4


def take_as_given(ptx: str, parameter: int, words: Mapping[int, int]) -> tuple[str, int]:
    """(PTX in which a load of one of these words is a choice of its value by its address, how many loads were changed).

    parameter: the number of the pointer's. words: int32 in the memory behind it, by index; they are all that is known.
    A load of another word, or of several at once, stays. Exact for memory that holds these words, as the kernel does
    not write to it: if anything but a load reads an address made from the pointer, nothing is changed. Memory that
    another argument names too is for the caller to refuse.
    """
    name, _ = entry(ptx)
    lines = ptx.split("\n")
    given = re.compile(rf"ld\.param\.b64\s+(?P<target>%rd\d+), \[{re.escape(name)}_param_{parameter}\];")
    starts = {i: found["target"] for i, line in enumerate(lines) if (found := given.fullmatch(strip_comment(line)))}
    named = re.compile(rf"(?!\.param\b).*\b{re.escape(name)}_param_{parameter}\b.*")
    if {i for i, line in enumerate(lines) if named.fullmatch(strip_comment(line))} != starts.keys():
        return ptx, 0  # the pointer is read otherwise too
    offsets = addresses_from(starts, lines)
    # Beside each address its distance from the pointer, in a register of its own.
    twins = {address: f"%given{parameter}_{i}" for i, address in enumerate(sorted(offsets))}
    count = 0
    for i, line in enumerate(lines):
        text = strip_comment(line)
        if i in starts and starts[i] in twins:
            lines[i] = f"\t{text} mov.b64 {twins[starts[i]]}, 0;"
        elif (found := ADDRESS.fullmatch(text)) and found["target"] in twins:
            reads = ", ".join(twins.get(read, read) for read in found["reads"].split(", "))
            lines[i] = f"\t{text} {found['operation']} {twins[found['target']]}, {reads};"
        elif (found := LOAD.fullmatch(text)) and found["address"] in twins:
            lines[i] = choice(found, twins[found["address"]], words)
            count += 1
    if not count:
        return ptx, 0
    return declare("\n".join(lines), f".reg .b64 %given{parameter}_<{len(twins)}>;"), count


def addresses_from(starts: Mapping[int, str], lines: list[str]) -> set[str]:
    """The registers that hold the pointer and something added, or none if anything but a load reads one. starts: by
    line, those that it is loaded to."""
    sources, found = definitions(lines), set(starts.values())
    while more := {target for target in sources if target not in found and is_derived(target, found, sources)}:
        found |= more
    for i, line in enumerate(lines):
        text = strip_comment(line)
        address, load = ADDRESS.fullmatch(text), READ.fullmatch(text)
        if i in starts or (address and address["target"] in found):
            continue
        if found & {*re.findall(r"%rd\d+", load["targets"] if load else text)}:
            return set()
    return found


def is_derived(target: str, found: set[str], sources: Definitions) -> bool:
    """Whether each statement that writes it adds something to one of `found`."""
    return all(
        (operation == "add.s64" and sum(read in found for read in reads) == 1)
        or (operation == "mad.wide.s32" and reads[2] in found)
        for operation, reads in sources[target]
    )


def choice(load: re.Match[str], offset: str, words: Mapping[int, int]) -> str:
    """The statements in place of a LOAD. offset: of its address from the pointer, in a register. What is not among the
    words is loaded as before, and under a guard that does not hold the target keeps its value."""
    asked = {None: "setp.eq.s64 %asked, %at, %at;", "": "mov.pred %asked, {};", "!": "not.pred %asked, {};"}
    chosen = " ".join(
        f"setp.eq.s64 %is, %at, {WORD_BYTES * index}; selp.b32 %word, {word}, %word, %is; or.pred %found, %found, %is;"
        for index, word in sorted(words.items())
    )
    target = load["target"]
    return (
        "\t{ .reg .b64 %at; .reg .b32 %word; .reg .pred %is, %found, %asked, %left; "
        f"add.s64 %at, {offset}, {load['offset']}; {asked[load['negated']].format(load['guard'])} "
        f"setp.ne.s64 %found, %at, %at; mov.b32 %word, 0; {chosen} "
        f"and.pred %is, %found, %asked; selp.b32 {target}, %word, {target}, %is; "
        f"not.pred %left, %found; and.pred %left, %left, %asked; @%left {load['load']} }}"
    )
