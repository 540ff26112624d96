"""Loads from tensor memory that find a maximum as well, which the verifier does not know."""

import re

from .ptx import strip_comment

LOAD_MAX = re.compile(
    r"tcgen05\.ld\.red\.sync\.aligned\.(?P<shape>\w+\.x\d+)\.max(?P<nan>(?:\.NaN)?)\.f32\s+"
    r"\{(?P<values>[%\w\s,]+)\}, \{(?P<maximum>%r\d+)\}, (?P<place>\[[^\]]+\]);"
)


def spell_out_maxima(ptx: str) -> tuple[str, int]:
    """A load from tensor memory that also gives the maximum of what each lane gets becomes a load, and the maxima.

    Why: the verifier knows sm_100, and sm_103 alone has such loads. Exact: a maximum is the same in any order. It comes
    after a wait for the load, which the verifier does not look at, here or elsewhere.
    """
    lines, count = ptx.split("\n"), 0
    for i, line in enumerate(lines):
        found = LOAD_MAX.fullmatch(strip_comment(line))
        if found is None:
            continue
        values = [value.strip() for value in found["values"].split(",")]
        maximum = found["maximum"]
        steps = [f"mov.b32 {maximum}, {values[0]};"]
        steps += [f"max{found['nan']}.f32 {maximum}, {maximum}, {value};" for value in values[1:]]
        lines[i] = (
            f"\ttcgen05.ld.sync.aligned.{found['shape']}.b32 {{{', '.join(values)}}}, {found['place']}; "
            f"tcgen05.wait::ld.sync.aligned; {' '.join(steps)}"
        )
        count += 1
    return "\n".join(lines), count
