"""Pairs of registers of which one half is nothing."""

import re

from .ptx import strip_comment
from .registers import definitions

PAIR = re.compile(r"mov\.b64\s+(?P<pair>%rd\d+), \{(?P<first>%r\d+), (?P<second>%r\d+)\};")
FIRST = re.compile(r"mov\.b64\s+\{%r\d+, _\}, (?P<pair>%rd\d+);")


def fill_second_halves(ptx: str) -> tuple[str, int]:
    """A pair whose second half nobody has written has the first there too.

    Why: the verifier knows nothing of a pair if it does not know both halves. Exact: nobody reads the second half.
    """
    lines, count = ptx.split("\n"), 0
    written, texts = definitions(lines), [strip_comment(line) for line in lines]
    for i, text in enumerate(texts):
        found = PAIR.fullmatch(text)
        if not found or found["second"] in written:
            continue
        pair = found["pair"]
        readers = [other for j, other in enumerate(texts) if j != i and re.search(rf"{pair}\b", other)]
        if all((reads := FIRST.fullmatch(reader)) and reads["pair"] == pair for reader in readers):
            lines[i] = f"\tmov.b64 {pair}, {{{found['first']}, {found['first']}}};"
            count += 1
    return "\n".join(lines), count
