"""Mutants of a kernel's synchronisation, made in the text of its intermediate form: one operation a line."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

# Deleted one by one, each wherever it stands. None has a result that is used.
SYNCHRONISATION = (
    "ttng.init_barrier",
    "ttng.inval_barrier",
    "ttng.wait_barrier",
    "ttng.arrive_barrier",
    "ttng.barrier_expect",
    "ttng.fence_async_shared",
    "ttng.cluster_barrier",
    "ttng.async_tma_store_wait",
    "ttng.tc_gen5_commit",
    "ttg.barrier",
    "gpu.barrier",
    "tt.grid_dependency_wait",
    "tt.atomic_rmw",
)


@dataclass(frozen=True)
class Mutant:
    change: str  # "delete", "count 1 -> 2", ...
    op: str  # without its dialect
    number: int  # of its kind, in the order of the text
    role: str  # default, partition0, ...; empty outside
    where: tuple[str, ...]  # file:line, innermost first
    copy: str  # "1 of 3" where the compiler has made several of one operation, as of an unrolled loop; else empty
    text: str

    @property
    def name(self) -> str:
        path = " < ".join(self.where)
        copy = f", {self.copy}" if self.copy else ""
        return f"{self.change}: {self.op} #{self.number} {self.role or 'kernel'} at {path}{copy}"


class Locations:
    """`loc(#loc12)` to the kernel's lines, innermost first."""

    def __init__(self, text: str) -> None:
        self.definitions = dict(re.findall(r"^#(loc\d*) = loc\((.*)\)$", text, re.MULTILINE))

    def lines(self, expression: str, depth: int = 0) -> tuple[str, ...]:
        if depth > 50:
            return ()
        found: list[str] = []
        for file, line, reference in re.findall(r'"([^"]*)":(\d+):\d+|#(loc\d*)', expression):
            if reference:
                found += self.lines(self.definitions.get(reference, ""), depth + 1)
            elif file.endswith(".py"):
                found.append(f"{file.rpartition('/')[2]}:{line}")
        return tuple(dict.fromkeys(found))

    def of(self, line: str) -> tuple[str, ...]:
        found = re.search(r"loc\((.*)\)\s*$", line)
        return self.lines(found[1]) if found else ()


def awaited(lines: list[str], i: int) -> str:
    """What the atomic load at line i waits for, in a loop or before one: what the next comparison is with."""
    after = (re.search(r"arith\.cmpi ne, %[\w.#]+, (%[\w.#]+) : i32", line) for line in lines[i + 1 :])
    return next((found[1] for found in after if found), "")


def changes(line: str, awaited: str = "") -> Iterator[tuple[str, list[str]]]:
    """(what is changed, the lines in place of this one). awaited: by an atomic load."""
    op = op_of(line)
    indent = line[: len(line) - len(line.lstrip())]
    where = (re.search(r" loc\(.*\)\s*$", line) or [""])[0]
    counts = op == "tt.atomic_rmw" and re.search(r"\batomic_rmw add,", line)  # in int32, unlike sums of a gradient
    unused = op == "tt.atomic_rmw" and not counts  # what it returns
    if op in SYNCHRONISATION and (unused or not re.match(r"\s*%", line)):
        yield "delete", []
    if (op == "tt.atomic_cas" or counts) and (found := re.match(r"\s*(%[\w.#]+) = ", line)):
        yield "always the first", [f"{indent}{found[1]} = arith.constant 0 : i32{where}"]
    if op == "tt.atomic_load" and awaited and (found := re.match(r"\s*(%[\w.#]+) = ", line)):
        yield (
            "never waits",
            [
                line.replace(found[1], "%loaded_by_mutant", 1),
                f"{indent}%zero_of_mutant = arith.constant 0 : i32{where}",
                f"{indent}{found[1]} = arith.addi {awaited}, %zero_of_mutant : i32{where}",
            ],
        )
    atomic = unused or op in ("tt.atomic_cas", "tt.atomic_load")
    if atomic and (found := re.search(r"\b(acquire|release|acq_rel), (gpu|sys)\b", line)):
        for group, word in ((1, "relaxed"), (2, "cta")):
            at = found.span(group)
            yield f"{found[group]} -> {word}", [line[: at[0]] + word + line[at[1] :]]
    if op in ("ttng.init_barrier", "ttng.arrive_barrier") and (found := re.search(rf"{op} [^,]+, (\d+)", line)):
        count = int(found[1])
        for other in (count + 1, count - 1) if op == "ttng.init_barrier" and count > 1 else (count + 1,):
            at = found.span(1)
            yield f"count {count} -> {other}", [line[: at[0]] + str(other) + line[at[1] :]]
    if op == "ttng.barrier_expect" and (found := re.search(r"barrier_expect [^,]+, (\d+)", line)):
        size, at = int(found[1]), found.span(1)
        for other in (size // 2, size * 2):
            yield f"bytes {size} -> {other}", [line[: at[0]] + str(other) + line[at[1] :]]
    if op == "ttng.wait_barrier" and (found := re.search(r"wait_barrier [^,]+, (%[\w.#]+)", line)):
        at = found.span(1)
        flipped = line[: at[0]] + "%flipped_by_mutant" + line[at[1] :]
        yield (
            "phase flipped",
            [
                f"{indent}%one_of_mutant = arith.constant 1 : i32{where}",
                f"{indent}%flipped_by_mutant = arith.xori {found[1]}, %one_of_mutant : i32{where}",
                flipped,
            ],
        )
    if op == "ttng.tc_gen5_mma":
        # The barriers come before the colon, each with its predicate: `%barrier[%true]`; an accumulator has `[]`.
        for barrier in re.finditer(r"(%[\w.#]+)\[(%[\w.#]+)\]", line.partition(" : ")[0]):
            at = barrier.span(2)
            yield (
                f"drop barrier {barrier[1]}",
                [
                    f"{indent}%false_of_mutant = arith.constant false{where}",
                    line[: at[0]] + "%false_of_mutant" + line[at[1] :],
                ],
            )
    if op in ("ttng.warp_group_dot_wait", "ttng.async_tma_store_wait", "tt.elementwise_inline_asm"):
        # A wait may be inline assembly, as `wgmma.wait_group.sync.aligned 1;`.
        found = re.search(r"(?:pendings = |wait_group\.sync\.aligned )(\d+)", line)
        if found:
            at = found.span(1)
            yield (
                f"pendings {found[1]} -> {int(found[1]) + 1}",
                [line[: at[0]] + str(int(found[1]) + 1) + line[at[1] :]],
            )
    if op == "ttng.async_tma_store_wait" and "read_only" not in line:
        yield "done -> read", [line.replace("}", ", read_only}", 1)]


def op_of(line: str) -> str:
    found = re.match(r"\s*(?:%[\w:#, %]+ = )?\"?([a-z_]+\.[\w.]+)", line)
    return found[1] if found else ""


def places(text: str) -> Iterator[tuple[int, str, str, tuple[str, ...]]]:
    """(line number, operation, role, where) of every operation that can be changed."""
    locations = Locations(text)
    role, role_indent = "", 0
    for i, line in enumerate(text.splitlines()):
        indent = len(line) - len(line.lstrip())
        if found := re.match(r"\s*(default|partition\d+)(\(.*\))?.*\{\s*$", line):
            role, role_indent = found[1], indent
        elif role and indent <= role_indent and line.strip().startswith("}"):
            role = ""
        if any(changes(line)):
            yield i, op_of(line), role, locations.of(line)


def mutants(text: str) -> Iterator[Mutant]:
    lines = text.splitlines()
    found = list(places(text))
    copies = Counter(place[1:] for place in found)
    numbers: Counter[str] = Counter()
    seen: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
    for i, op, role, where in found:
        numbers[op] += 1
        seen[op, role, where] += 1
        several = copies[op, role, where]
        copy = f"{seen[op, role, where]} of {several}" if several > 1 else ""
        for change, instead in changes(lines[i], awaited(lines, i) if op == "tt.atomic_load" else ""):
            mutated = "\n".join([*lines[:i], *instead, *lines[i + 1 :]])
            yield Mutant(change, op.partition(".")[2], numbers[op], role, where, copy, mutated + "\n")
