"""docs/proving.md: its table of times is that of the records.

After new proofs: `python -m tests.docs.test_proving_page` writes it anew.
"""

import itertools
import re
from pathlib import Path

from proving import store
from proving.attention import catalogue

PAGE = Path(__file__).parents[2] / "docs" / "proving.md"
HEAD = "| proof | proofs | least, s | most, s | most memory, GiB |\n|---|---|---|---|---|\n"
# As they are shown. A proof is of the kind whose pattern its whole name matches.
KINDS = {
    "one CTA, one row block": r".*-1cta(?!-(laps|two-row-blocks|odd-lengths|equals-softmax|packed.*)$).*",
    "one CTA, two row blocks": r".*-1cta-two-row-blocks",
    "one CTA, odd lengths": r".*-1cta-odd-lengths",
    "one CTA, packed sequences": r".*-1cta-packed.*",
    "two CTAs, one row block": r".*-2cta(?!-(laps|packed)$).*",
    "two CTAs, packed sequences": r".*-2cta-packed",
    "four CTAs, one row block": r".*-4cta(?!-(laps|packed)$).*",
    "four CTAs, packed sequences": r".*-4cta-packed",
    "one CTA, every ring goes round twice or more": r".*-1cta-laps",
    "two CTAs, the same": r".*-2cta-laps",
    "four CTAs, the same": r".*-4cta-laps",
    "equality with softmax": r".*-equals-softmax",
    "the kernel that lists row blocks": r"lists-.*",
}


def kind_of(name: str) -> str:
    [kind] = [kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, name)]
    return kind


def rows(records: list[store.Record]) -> str:
    """Of the proofs that were run, not of those that are the same as another."""
    lines = []
    for kind in KINDS:
        of_kind = [r for r in records if kind_of(r.name) == kind and r.same_as is None]
        seconds, memory = [r.seconds for r in of_kind], max(r.memory_mib for r in of_kind) / 1024
        lines.append(f"| {kind} | {len(of_kind)} | {min(seconds):.0f} | {max(seconds):.0f} | {memory:.1f} |\n")
    return "".join(lines)


def on_record() -> list[store.Record]:
    records = [store.load(path.stem) for path in sorted(store.RESULTS.glob("*.json"))]
    return [record for record in records if record]


def shown(page: str) -> str:
    _, head, after = page.partition(HEAD)
    assert head, "the page has no table of times"
    return "".join(itertools.takewhile(lambda line: line.startswith("|"), after.splitlines(keepends=True)))


def test_the_times_are_those_on_record():
    assert shown(PAGE.read_text(encoding="utf-8")) == rows(on_record())


def test_the_numbers_of_proofs_are_those_on_record():
    page, records = PAGE.read_text(encoding="utf-8"), on_record()
    same = sum(record.same_as is not None for record in records)
    assert f"There are {len(catalogue())} proofs, all of them on record" in page
    assert f"These are {len(records) - same} of the {len(records)} on record. The other {same} were not run" in page
    assert {record.name for record in records} == {proof.name for proof in catalogue()}


def test_every_proof_is_of_one_kind():
    assert {kind_of(proof.name) for proof in catalogue()} == set(KINDS)


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.replace(HEAD + shown(text), HEAD + rows(on_record())), encoding="utf-8")
