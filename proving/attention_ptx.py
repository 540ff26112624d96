"""What proofs about attention do to its PTX, or read from it, beyond what all proofs do (rewrites.py)."""

import inspect
import re
from dataclasses import dataclass
from types import ModuleType

from channels import shared_memory as shared_memory_module
from gluon_attn.kernels.blackwell.forward import correction as correction_module

from .equivalence import without
from .ptx import branches_of, strip_comment
from .registers import Definitions, definitions, the_definition


def leave_out_lse(ptx: str) -> tuple[str, int]:
    """Without the stores to global memory that are not TMA's: LSE's.

    Why: every output must be compared, and the verifier finds no proof for a logarithm. Exact for O, which goes by TMA.
    """
    return without(r"(@!?%p\d+ )?st\.global\.")(ptx)


LARGER = re.compile(r"max\.NaN\.f32\s+(?P<result>%r\d+), (?P<first>%r\d+), (?P<second>%r\d+);")
LONGEST_CHOICE = 4  # lines from a division to the choice between its result and 0
LEAST_LOG2_BITS = "0fF1800000"  # -2^100, `LEAST_LOG2` of row_stats.py


def leave_out_floor(ptx: str) -> tuple[str, int]:
    """Without the least maximum that a first block leaves: see `first_maximum`.

    Why: it makes the function another one for a row whose scores are all below -2^100 in units of log 2. Exact above,
    and below it fp32 holds no difference of two scores.
    """
    lines, sources, count = ptx.split("\n"), definitions(ptx.split("\n")), 0
    for i, line in enumerate(lines):
        found = LARGER.fullmatch(strip_comment(line))
        if found and is_floor(found["second"], sources):
            lines[i] = f"\tmov.b32 {found['result']}, {found['first']};"
            count += 1
    return "\n".join(lines), count


def is_floor(value: str, sources: Definitions) -> bool:
    operation, reads = the_definition(value, sources)
    return operation == "div.full.f32" and the_definition(reads[0], sources) == ("mov.b32", [LEAST_LOG2_BITS])


RECIPROCAL = re.compile(r"div\.full\.f32\s+(?P<result>%r\d+), (?P<one>%r\d+), (?P<divisor>%r\d+);")
ZERO, ONE = "0f00000000", "0f3F800000"


def choose_divisors(ptx: str) -> tuple[str, int]:
    """x == 0 ? 0 : 1 / x becomes 1 / (x == 0 ? 1 : x), in `inverse` of row_stats.py.

    Why: the verifier decides a choice between divisors, and none between a quotient and 0. Exact for a row that sees a
    key, as every row of this proof does: its largest score adds 1 to the sum x, which is never 0 then.
    """
    lines, sources, count = ptx.split("\n"), definitions(ptx.split("\n")), 0
    for i, line in enumerate(lines):
        division = RECIPROCAL.fullmatch(strip_comment(line))
        if not division or the_definition(division["one"], sources) != ("mov.b32", [ONE]):
            continue
        quotient, divisor = division["result"], division["divisor"]
        for j in range(i + 1, min(i + LONGEST_CHOICE, len(lines))):
            choice = re.fullmatch(rf"selp\.f32\s+(%r\d+), {ZERO}, {quotient}, (%p\d+);", strip_comment(lines[j]))
            if choice and the_definition(choice[2], sources) == ("setp.eq.f32", [divisor, ZERO]):
                lines[i] = (
                    f"\t{{ .reg .b32 %divisor; selp.f32 %divisor, {ONE}, {divisor}, {choice[2]}; "
                    f"div.full.f32 {quotient}, {division['one']}, %divisor; }}"
                )
                lines[j] = f"\tmov.b32 {choice[1]}, {quotient};"
                count += 1
                break
    return "\n".join(lines), count


FIRST_PAIR, BOTH_PAIRS = 0b0011, 0b1111  # of the CTAs of a cluster of four, as a commit's mask
MASK = re.compile(rf"mov\.b16\s+(?P<mask>%rs\d+), {BOTH_PAIRS};")
COMMIT = re.compile(r"@%p\d+ tcgen05\.commit\.cta_group::2\.\S*\.multicast::cluster\.b64 \[%r\d+\], (?P<mask>%rs\d+);")
INIT = re.compile(r"(?P<init>@%p\d+ mbarrier\.init\.shared::cta\.b64 \[%r\d+\]), 2;")
IN_FIRST_PAIR = "mov.u32 %rank, %cluster_ctarank; setp.lt.u32 %first, %rank, 2;"


def leave_out_early_arrivals(ptx: str) -> tuple[str, int]:
    """Of four CTAs the first pair does not tell the second that it is done with a slot of keys or values.

    Why: it may say so of a lap before the second pair has waited for the one before. That is harmless, as that lap
    needs the second pair too (docs/proving.md), but the verifier takes no arrival before the wait for the last phase.
    Not exact: what is proved has less order than the kernel.
    """
    lines, count = ptx.split("\n"), 0
    committed = {found["mask"] for line in lines if (found := COMMIT.fullmatch(strip_comment(line)))}
    freed = line_of(shared_memory_module, "init_barriers(self.freed, commit_arrivals(")
    files = {
        name: number
        for number, name in re.findall(r"^\s*\.file\s+(\d+)\s+\"(?:[^\"]*/)?([^\"/]+)\"", ptx, re.MULTILINE)
    }
    of_freed = f"inlined_at {files.get('shared_memory.py')} {freed} "
    within = False
    for i, line in enumerate(lines):
        text = strip_comment(line)
        if text.startswith(".loc"):
            within = of_freed in text
        elif (found := MASK.fullmatch(text)) and found["mask"] in committed:
            lines[i] = (
                f"\t{{ .reg .b32 %rank; .reg .pred %first; {IN_FIRST_PAIR} "
                f"selp.b16 {found['mask']}, {FIRST_PAIR}, {BOTH_PAIRS}, %first; }}"
            )
            count += 1
        elif within and (found := INIT.fullmatch(text)):
            lines[i] = (
                f"\t{{ .reg .b32 %rank, %count; .reg .pred %first; {IN_FIRST_PAIR} "
                f"selp.b32 %count, 2, 1, %first; {found['init']}, %count; }}"
            )
            count += 1
    return "\n".join(lines), count


def line_of(module: ModuleType, start: str) -> int:
    """The line, from 1, of a module's source that begins so."""
    lines = inspect.getsource(module).split("\n")
    return 1 + next(i for i, line in enumerate(lines) if line.strip().startswith(start))


@dataclass(frozen=True)
class RescaleDecision:
    """For a kernel that rescales only where a maximum has grown: that the branch over it is always taken, or never."""

    skipped: bool

    def __call__(self, ptx: str) -> dict[int, bool]:
        place = line_of(correction_module, "if needed")
        lines = branches_of(ptx, f"correction.py:{place}")
        if not lines:
            raise ValueError(f"ptx: expected branches of correction.py:{place}, which rescales, found none")
        return dict.fromkeys(lines, self.skipped)
