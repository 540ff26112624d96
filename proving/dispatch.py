"""How the worker warps of a kernel get their roles, in words that the verifier decides.

Triton's code for `warp_specialize`: the first group of warps stores a table with the role of each worker warp, and the
values that the roles take, in shared memory. The workers come back for a new table until one tells them to end.
"""

import re
from dataclasses import dataclass

from .ptx import declare, strip_comment
from .registers import Definitions, definitions, is_uniform, the_definition

DISPATCH = re.compile(
    r"add\.s32\s+(?P<address>%r\d+), (?P<a>%r\d+), (?P<b>%r\d+);\n(?:\s*\.loc[^\n]*\n|\s*//[^\n]*\n)*"
    r"\s*ld\.shared\.b8\s+(?P<role>%r\d+), \[(?P=address)\+(?P<offset>\d+)\];"
)
TABLE_STORE = re.compile(
    r"st\.shared\.(?:v[24]\.)?b(?P<bits>\d+)\s+\[global_smem\+(?P<offset>\d+)\],\s*\{?(?P<values>[\s\d,-]+)\}?;"
)
TO_LABEL = re.compile(r"(?:@!?%p\d+ )?bra(?:\.uni)?\s+(\$L\w+);")
# The workers' warps follow those of the first group, which are this many or more.
FIRST_WORKER = 4


@dataclass(frozen=True)
class Dispatch:
    """How Triton hands roles to the worker warps: one byte per warp in shared memory, read at each of their visits.

    at, role, warp: the line that reads it, the register it goes to, the register with the number of the warp.
    tables: of each visit, the role by warp. stores: the lines that write them, of all tables.
    """

    at: int
    role: str
    warp: str
    tables: list[dict[int, int]]
    stores: list[int]


def find_dispatch(ptx: str) -> Dispatch | None:
    found = DISPATCH.search(ptx)
    base = re.search(r"mov\.b32\s+(%r\d+), global_smem;", ptx)
    threads = re.search(r"\.reqntid (\d+)", ptx)
    if not found or not base or not threads or base[1] not in (found["a"], found["b"]):
        return None
    table = range(int(found["offset"]) + FIRST_WORKER, int(found["offset"]) + int(threads[1]) // 32)
    tables: list[dict[int, int]] = []
    stores: list[int] = []
    new_table = True
    for i, line in enumerate(ptx.split("\n")):
        text = strip_comment(line)
        if store := TABLE_STORE.search(text):
            if int(store["offset"]) not in table:
                continue
            if new_table:
                tables.append({})
            new_table = False
            stores.append(i)
            size = int(store["bits"]) // 8
            values = [int(value) % 2 ** (8 * size) for value in store["values"].split(",")]
            data = b"".join(value.to_bytes(size, "little") for value in values)
            first_warp = int(store["offset"]) - int(found["offset"])
            tables[-1] |= {first_warp + j: byte for j, byte in enumerate(data)}
        elif re.fullmatch(r"barrier\.sync\s+1;", text):
            new_table = True
    warp = found["b"] if found["a"] == base[1] else found["a"]
    return Dispatch(ptx.count("\n", 0, found.end()), found["role"], warp, tables, stores)


CAPTURE_STORE = re.compile(
    r"st\.shared\.(?:v[24]\.)?b\d+\s+\[global_smem\+(?P<offset>\d+)\],\s*\{?(?P<values>[%\w\s,]+)\}?;"
)


def store_roles_once(ptx: str) -> tuple[str, int]:
    """What the worker warps are told, their roles and the values these take, is stored by one thread of the first
    group, not by every one.

    Why: stores of equal values are races to the verifier, and it stops at the first. Exact: the values are constants or
    the same in every thread, thread 0 is of the first group, and a CTA barrier comes before the workers read them.
    """
    dispatch = find_dispatch(ptx)
    lines = ptx.split("\n")
    stores = [*dispatch.stores, *capture_stores(lines, dispatch)] if dispatch else []
    for i in stores:
        lines[i] = (
            "\t{ .reg .b32 %thread; .reg .pred %first; mov.u32 %thread, %tid.x; setp.eq.u32 %first, %thread, 0; "
            f"@%first {strip_comment(lines[i])} }}"
        )
    return "\n".join(lines), len(stores)


def capture_stores(lines: list[str], dispatch: Dispatch) -> list[int]:
    """The stores of values that are the same in every thread, between those of the roles and the barrier after them."""
    found = []
    sources = definitions(lines)
    for start in dispatch.stores:
        for i in range(start + 1, len(lines)):
            text = strip_comment(lines[i])
            store = CAPTURE_STORE.search(text)
            if i in dispatch.stores or re.fullmatch(r"barrier\.sync\s+1;", text):
                break
            if store and all(is_uniform(value.strip(), sources) for value in store["values"].split(",")):
                found.append(i)
    return found


CAPTURE_LOAD = re.compile(
    r"ld\.shared\.(?:v[24]\.)?b32\s+\{?(?P<targets>[%\w\s,]+?)\}?, \[global_smem\+(?P<offset>\d+)\];"
)


def recompute_captures(ptx: str) -> tuple[str, int]:
    """A worker computes the numbers that it is told, as the first group does, and does not read them from memory.

    Why: as `name_roles`. Exact: the numbers are made of parameters and block numbers alone, by the same operations.
    """
    dispatch = find_dispatch(ptx)
    lines, sources = ptx.split("\n"), definitions(ptx.split("\n"))
    stored: dict[int, str] = {}
    for i in capture_stores(lines, dispatch) if dispatch else []:
        store = CAPTURE_STORE.search(lines[i])
        assert store is not None
        for word, value in enumerate(store["values"].split(",")):
            stored[int(store["offset"]) + 4 * word] = value.strip()
    registers = count = 0
    for i, line in enumerate(lines):
        load = CAPTURE_LOAD.fullmatch(strip_comment(line))
        if load is None:
            continue
        targets = [target.strip() for target in load["targets"].split(",")]
        values = [stored.get(int(load["offset"]) + 4 * word, "?") for word in range(len(targets))]
        made = Recomputation(sources, registers)
        results = [made.of(value) for value in values]
        if made.possible:
            moves = [f"mov.b32 {target}, {result};" for target, result in zip(targets, results, strict=True)]
            lines[i] = "\t" + " ".join([*made.statements, *moves])
            registers, count = made.registers, count + 1
    ptx = "\n".join(lines)
    return (declare(ptx, f".reg .b32 %captured<{registers}>;") if registers else ptx), count


class Recomputation:
    """The statements that compute uniform 32-bit registers anew, into registers of their own."""

    def __init__(self, sources: Definitions, registers: int) -> None:
        self.sources = sources
        self.registers = registers  # how many of them there are
        self.statements: list[str] = []
        self.possible = True

    def of(self, value: str) -> str:
        """The register that holds `value` anew, or the constant that it is."""
        if not value.startswith("%r"):
            # A constant, a parameter, a block number; or what no register of 32 bits can hold.
            self.possible &= not re.match(r"%(p|f)\d|\?", value)
            return value
        if value.startswith("%rd") or not is_uniform(value, self.sources):
            self.possible = False
            return value
        operation, reads = the_definition(value, self.sources)
        operands = [self.of(read) for read in reads]
        register = f"%captured{self.registers}"
        self.registers += 1
        self.statements.append(f"{operation} {register}, {', '.join(operands)};")
        return register


def name_roles(ptx: str) -> tuple[str, int]:
    """A worker warp finds its role by counting its visits, not by reading it from shared memory.

    Why: who waits for a value in memory that a deadlock keeps from being written is `unsupported` to the verifier; with
    the constants in place the deadlock itself is found. Exact: the first group stores the tables in the order of the
    text, once each, between two CTA barriers that every warp passes once per visit.
    """
    dispatch = find_dispatch(ptx)
    if dispatch is None or not dispatch.stores or not in_order(ptx.split("\n"), dispatch):
        return ptx, 0
    choices = " ".join(
        f"setp.eq.u32 %role_is, %role_key, {64 * visit + warp}; "
        f"selp.b32 {dispatch.role}, {role}, {dispatch.role}, %role_is;"
        for visit, table in enumerate(dispatch.tables)
        for warp, role in table.items()
    )
    lines = ptx.split("\n")
    # 255: no role. A visit beyond the tables does not end, which the verifier reports.
    lines[dispatch.at] = (
        "\t{ .reg .b32 %role_key; .reg .pred %role_is; shl.b32 %role_key, %visits, 6; "
        f"add.s32 %role_key, %role_key, {dispatch.warp}; mov.b32 {dispatch.role}, 255; {choices} "
        "add.s32 %visits, %visits, 1; }"
    )
    ptx, started = re.subn(r"(mov\.u32 \t%r\d+, %tid\.x;)", r"\1 mov.b32 %visits, 0;", "\n".join(lines), count=1)
    if not started:
        raise ValueError("ptx: expected the kernel to read %tid.x at its start, found no such line")
    return declare(ptx, ".reg .b32 %visits;"), 1


def in_order(lines: list[str], dispatch: Dispatch) -> bool:
    """Whether the first group runs through all stores of the tables in the order of the text, once each.

    No branch may leap over a store, forwards or backwards, but for the one that parts the workers from the first group:
    it comes before all stores, and leads forwards.
    """
    labels = {strip_comment(line)[:-1]: i for i, line in enumerate(lines) if re.match(r"\$L\w+:", line)}
    first, partings = dispatch.stores[0], 0
    for i, line in enumerate(lines):
        branch = TO_LABEL.fullmatch(strip_comment(line))
        if not branch:
            continue
        low, high = sorted((i, labels[branch[1]]))
        if not any(low < store < high for store in dispatch.stores):
            continue
        if i > first or labels[branch[1]] < i:
            return False
        partings += 1
    return partings == 1
