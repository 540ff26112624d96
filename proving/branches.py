"""Branches on data, made straight."""

import re

from .ptx import DEBUG, declare, strip_comment

# Operations on registers without any effect but their result.
PURE = (
    *("abs", "add", "and", "cvt", "ex2", "fma", "lg2", "mad", "max", "min", "mov", "mul", "neg", "or", "rcp", "selp"),
    *("shl", "shr", "sub", "xor"),
)
BRANCH = re.compile(r"@(?P<negated>!?)(?P<predicate>%p\d+) bra\s+(?P<label>\$L\w+);")
PURE_STATEMENT = re.compile(rf"(?P<op>(?:{'|'.join(PURE)})(?:\.\w+)*)\s+(?P<target>%r\d+),\s*(?P<rest>[^;]*);")
LONGEST_SKIP = 40  # lines: more than any expansion of a library function has


def straighten_branches(ptx: str) -> tuple[str, int]:
    """Branches over a few register operations become those operations, each followed by a choice of its result.

    Why: the expansions of log2, division and the like branch on the data to mend denormal inputs, and the verifier
    decides no branch on data. Exact: every operation is pure, and a lane that would have jumped keeps its old value.
    """
    lines, branches, results = ptx.split("\n"), 0, 0
    for at, line in enumerate(lines):
        branch = BRANCH.fullmatch(strip_comment(line))
        skipped = branch and skipped_statements(lines, at + 1, branch["label"])
        if not branch or not skipped:
            continue
        for i in skipped:
            statement = PURE_STATEMENT.fullmatch(strip_comment(lines[i]))
            assert statement is not None
            new, old = f"%straight{results}", statement["target"]
            results += 1
            # The branch jumps over the statement if its condition holds.
            if_true, if_false = (new, old) if branch["negated"] else (old, new)
            lines[i] = (
                f"\t{statement['op']} {new}, {statement['rest']}; "
                f"selp.b32 {old}, {if_true}, {if_false}, {branch['predicate']};"
            )
        lines[at] = f"\t// straightened: {strip_comment(line)}"
        branches += 1
    ptx = "\n".join(lines)
    return (declare(ptx, f".reg .b32 %straight<{results}>;") if results else ptx), branches


def skipped_statements(lines: list[str], first: int, label: str) -> list[int]:
    """Where the statements are that a branch to `label` skips, or [] if any of them is not pure."""
    found: list[int] = []
    for i in range(first, min(first + LONGEST_SKIP, len(lines))):
        text = strip_comment(lines[i])
        if text == f"{label}:" or re.fullmatch(rf"bra\.uni\s+{re.escape(label)};", text):
            return found
        if DEBUG.match(text):
            continue
        if not PURE_STATEMENT.fullmatch(text):
            return []
        found.append(i)
    return []
