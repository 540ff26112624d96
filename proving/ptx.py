"""Reading PTX as Triton writes it: the parameters of its kernel, and what of it is code."""

import hashlib
import re
from dataclasses import dataclass

ENTRY = re.compile(r"\.visible\s+\.entry\s+(?P<name>[\w$]+)\s*\((?P<parameters>.*?)\)", re.DOTALL)
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(?P<type>\w+)\s.*?\w+(?:\[(?P<bytes>\d+)\])?$")
# What the compiler adds for debuggers: it holds paths and line numbers of the source.
DEBUG = re.compile(r"\s*(\.loc\s|\.file\s|\$L__tmp\d+:|\$L__func_\w+:|$)")


@dataclass(frozen=True)
class Parameter:
    """type: u32, u64, f32, ..., or b8 with `bytes`, the size of an opaque block such as a tensor map."""

    type: str
    bytes: int | None


def entry(ptx: str) -> tuple[str, list[Parameter]]:
    """(name, parameters) of the one kernel."""
    found = list(ENTRY.finditer(ptx))
    if len(found) != 1:
        raise ValueError(f"ptx: expected one .entry, got {len(found)}")
    parameters = []
    for text in filter(None, (part.strip() for part in found[0]["parameters"].split(","))):
        match = PARAMETER.match(text)
        if match is None:
            raise ValueError(f"ptx: expected a .param declaration, got {text!r}")
        parameters.append(Parameter(match["type"], int(match["bytes"]) if match["bytes"] else None))
    return found[0]["name"], parameters


def strip_comment(line: str) -> str:
    return line.split("//")[0].strip()


def declare(ptx: str, declaration: str) -> str:
    """Add registers to the kernel's own."""
    found, count = re.subn(r"(\.reg \.b32 \t%r<\d+>;)", rf"\1 {declaration}", ptx, count=1)
    if not count:
        raise ValueError("ptx: expected the declaration of the kernel's 32-bit registers, found none")
    return found


def code(ptx: str) -> list[str]:
    """The lines that decide what the kernel does: without comments, debug information, and what follows the kernel."""
    body = ptx[: ptx.index("\n}\n") + 2] if "\n}\n" in ptx else ptx
    lines = (strip_comment(line) for line in body.split("\n"))
    return [re.sub(r"\s+", " ", line) for line in lines if not DEBUG.match(line)]


def fingerprint(ptx: str) -> str:
    """A hash of the code alone: the same on every machine, and when only comments or lines of the source move."""
    return hashlib.sha256("\n".join(code(ptx)).encode()).hexdigest()


def branches_of(ptx: str, place: str) -> list[int]:
    """The lines (from 1) of the conditional branches that line `place` of the source, `file.py:12`, is compiled to."""
    lines = ptx.split("\n")
    found = [i + 1 for i, line in enumerate(lines) if re.match(r"@!?%p\d+ bra\s", strip_comment(line))]
    return [line for line in found if source_line(ptx, line) == place]


def source_line(ptx: str, line: int) -> str | None:
    """Where in the source line `line` (from 1) of the PTX comes from, as `file.py:12`, innermost function."""
    files = dict(re.findall(r"^\s*\.file\s+(\d+)\s+\"(?:[^\"]*/)?([^\"/]+)\"", ptx, re.MULTILINE))
    for text in reversed(ptx.split("\n")[:line]):
        if match := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", text):
            return f"{files.get(match[1], '?')}:{match[2]}"
    return None
