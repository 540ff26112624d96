"""docs/checked.md: the tables of mutants agree with each other, and README with them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "checked.md").read_text(encoding="utf-8")
KINDS = {"Hopper": "Hopper, mutants", "gradients": "gradients, mutants", "Blackwell": "Blackwell, mutants"}


def summary(name: str) -> list[int]:
    """Of a row of the first tables: mutants, found, redundant, neither."""
    [numbers] = re.findall(rf"^\| \[{name}\]\S* \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    return [int(number) for number in numbers]


def sums(table: str) -> list[int]:
    """Of each column of numbers alone."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    columns = [column for column in zip(*rows, strict=True) if all(cell.isdigit() for cell in column)]
    return [sum(map(int, column)) for column in columns]


@pytest.mark.parametrize("kind", KINDS)
def test_tables_of_mutants_add_up(kind):
    mutants, found, redundant, neither = summary(KINDS[kind])
    assert (mutants, neither) == (found + redundant, 0)
    section = PAGE.split(f"## Mutants: {kind}\n")[1].split("\n## ")[0]
    tables = {t.splitlines()[0]: sums(t) for t in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)}
    by_head = {head: numbers for head, numbers in tables.items() if "| mutants |" in head and "found" in head}
    assert list(by_head.values()).count([mutants, found, redundant]) == 1
    assert tables["| mutants | why it is redundant |"] == [redundant]
    assert tables["| found as | mutants |"] == [found]


def test_table_of_mutants_of_features_adds_up():
    section = PAGE.split("## Mutants: features\n")[1].split("\n## ")[0]
    tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    [table] = [sums(t) for t in tables if "neither" in t.splitlines()[0]]
    assert table == summary("features, mutants")
    assert table[0] == sum(table[1:])


def test_table_of_mutants_since_the_finish_role_adds_up():
    section = PAGE.split("### Mutants: the finish role\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| .* \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| \w{7} \|$", section, re.MULTILINE)
    each = [sum(map(int, column)) for column in zip(*rows, strict=True)]
    assert each == summary("the same, since the finish role")
    assert each[0] == each[1] + each[2]


def test_readme_has_the_sums():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| mutants: (?:found|redundant) \|.*\| (\d+) \|$", readme, re.MULTILINE)
    each = [summary(name) for name in KINDS.values()]
    assert [int(number) for number in shown] == [sum(numbers[i] for numbers in each) for i in (1, 2)]
