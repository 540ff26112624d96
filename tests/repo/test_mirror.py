"""The tests of every module are found: in a file of its name, or where tests/README.md says."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
PACKAGES = ("channels", "gluon_attn", "gluon_cpu", "proving", "bench")
WITHOUT = {"__init__.py", "compat.py"}
SECTION = re.compile(r"^## (\w+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| (`.*?) \| (`.*?) \|$", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")


def rows() -> Iterator[tuple[str, list[str], list[str]]]:
    """(package, modules or folders of it, files of tests) as the page has them."""
    for package, text in SECTION.findall(PAGE):
        for modules, tests in ROW.findall(text):
            yield package, CODE.findall(modules), CODE.findall(tests)


def file_of(package: str, test: str) -> Path:
    return ROOT / test if test.startswith("tests/") else ROOT / "tests" / package / test


def has_its_name(package: str, module: Path) -> bool:
    """module: within its package."""
    name = module.stem.strip("_")
    folders = [ROOT / "tests" / package / folder for folder in module.parents]
    return any(
        path for folder in folders for path in (*folder.glob(f"test_{name}.py"), *folder.glob(f"test_{name}_*.py"))
    )


def is_named(module: str, entry: str) -> bool:
    """entry: a module, or a folder with a slash at its end."""
    return module.startswith(entry) if entry.endswith("/") else module == entry


def unfound(package: str) -> list[str]:
    named = [entry for of, modules, _ in rows() if of == package for entry in modules]
    modules = [path.relative_to(ROOT / package) for path in sorted((ROOT / package).rglob("*.py"))]
    return [
        str(module)
        for module in modules
        if module.name not in WITHOUT
        and not has_its_name(package, module)
        and not any(is_named(module.as_posix(), entry) for entry in named)
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_has_its_tests(package):
    assert unfound(package) == []


def test_what_the_page_names_is_there():
    assert {package for package, _, _ in rows()} == set(PACKAGES)
    modules = [ROOT / package / entry for package, entries, _ in rows() for entry in entries]
    tests = [file_of(package, test) for package, _, files in rows() for test in files]
    assert [str(path) for path in (*modules, *tests) if not path.exists()] == []


@pytest.mark.parametrize(
    ("package", "module", "found"),
    [
        ("gluon_cpu", "schedule.py", True),
        ("gluon_cpu", "ops/atomics.py", True),  # a folder above
        ("gluon_attn", "kernels/hopper/forward/work.py", True),  # test_work_hopper.py
        ("gluon_attn", "kernels/hopper/forward/kernel.py", False),  # that of runtime/ is of another
        ("gluon_cpu", "schedules.py", False),
    ],
)
def test_a_file_of_its_name(package, module, found):
    assert has_its_name(package, Path(module)) is found
