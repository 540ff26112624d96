"""Reductions over the warps of a role, in words that the verifier decides."""

import re

from .ptx import strip_comment
from .registers import LANE_BITS, definitions, is_constant, is_same_in_warp, the_definition

REDUCTION = re.compile(r"redux\.sync\.(?P<kind>\w+\.\w+)\s+(?P<result>%r\d+), (?P<of>%r\d+), (?P<lanes>%r\d+|-1);")
EXCHANGED = ("min.s32", "max.s32", "add.s32")
PARTING = re.compile(r"\$L__BB|(@!?%p\d+ )?(bra|brx|ret|exit)\b")  # here lanes may part, or come together
STORE = re.compile(r"st\.shared\.b32\s+\[(?P<address>%r\d+)\+\d+\], (?P<value>%r\d+);")


def store_reductions_once(ptx: str) -> tuple[str, int]:
    """What a warp has reduced to one value is stored by its first lane, not by every one.

    Why: stores of equal values are races to the verifier, and it stops at the first. Exact: the value is the result of
    a `redux.sync` over all lanes, all of which still run side by side, and the address is the same for all of them.
    """
    lines, sources, count = ptx.split("\n"), definitions(ptx.split("\n")), 0
    results = set()
    for i, line in enumerate(lines):
        text = strip_comment(line)
        if (found := REDUCTION.fullmatch(text)) and is_constant(found["lanes"], -1, sources):
            if the_definition(found["result"], sources)[0].startswith("redux"):
                results.add(found["result"])
        elif PARTING.match(text):
            results.clear()
        elif (store := STORE.fullmatch(text)) and store["value"] in results:
            if not is_same_in_warp(store["address"], sources):
                continue
            lines[i] = (
                "\t{ .reg .b32 %lane; .reg .pred %first; mov.u32 %lane, %laneid; setp.eq.u32 %first, %lane, 0; "
                f"@%first {text} }}"
            )
            count += 1
    return "\n".join(lines), count


def reduce_by_exchange(ptx: str) -> tuple[str, int]:
    """The least or the largest int32 of all lanes of a warp, or their sum, is found in five exchanges.

    Why: the verifier knows what lanes give each other, and not what `redux.sync` makes of it. Exact: in any order.
    """
    lines, sources, count = ptx.split("\n"), definitions(ptx.split("\n")), 0
    for i, line in enumerate(lines):
        found = REDUCTION.fullmatch(strip_comment(line))
        if not found or found["kind"] not in EXCHANGED or not is_constant(found["lanes"], -1, sources):
            continue
        result = found["result"]
        steps = " ".join(
            f"shfl.sync.bfly.b32 %other, {result}, {2**k}, 31, -1; {found['kind']} {result}, {result}, %other;"
            for k in range(LANE_BITS)
        )
        lines[i] = f"\t{{ .reg .b32 %other; mov.b32 {result}, {found['of']}; {steps} }}"
        count += 1
    return "\n".join(lines), count
