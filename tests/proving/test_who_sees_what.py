"""The table of judges and faults in docs/checked.md is what its command prints."""

from pathlib import Path

import pytest

from proving.verifier import PACKAGE, version
from tests.proving.who_sees_what import Fault, faults, row_of

PAGE = (Path(__file__).parents[2] / "docs" / "checked.md").read_text(encoding="utf-8")
FAULTS = list(faults())


def test_the_page_has_every_fault_once():
    rows = [line.split(" | ")[0].removeprefix("| ") for line in PAGE.split("\n") if line.startswith("| ")]
    assert {fault.name: rows.count(fault.name) for fault in FAULTS} == dict.fromkeys([f.name for f in FAULTS], 1)


@pytest.mark.skipif(version() is None, reason=f"{PACKAGE} is not installed: pip install -e '.[prove]'")
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_row_of_the_page(fault: Fault):
    assert f"| {' | '.join(row_of(fault))} |" in PAGE
