"""docs/learn: each lesson's page has all of its file, and what it prints; the exercises are broken, and can be mended.

A page is the source: `python -m tests.docs.test_learn_pages` makes each lesson's file of its page, runs it, and writes
what it prints, and what was measured, into the pages. Then `python -m tests.docs.learn_pictures` draws.
"""

import contextlib
import difflib
import importlib
import importlib.util
import io
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest

import gluon_cpu
from bench.learn import OUT, tables
from channels import check_ends
from channels.compat import JITFunction
from gluon_attn import lessons
from gluon_attn.runtime import compat
from tests.docs import learn_pictures
from tests.docs.examples import Page, mended, options_of
from tests.docs.test_pages import anchors

ROOT = Path(__file__).parents[2]
LEARN = ROOT / "docs" / "learn"
INDEX = LEARN / "README.md"
MOST_LINES = 150
MOST_BYTES = 30_000  # of a picture
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"(^## What the file prints\n.*?^```text\n)(.*?)(^```$)", re.MULTILINE | re.DOTALL)
CHANGE = re.compile(r"^```diff\n# (\w+)\.py\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MEASURED = re.compile(r"(<!-- written by tests/docs/test_learn_pages.py: measured -->\n)(.*?)(<!-- end -->)", re.DOTALL)
LESSONS = sorted(path.stem for path in LEARN.glob("[0-9][0-9]_*.md"))
EXERCISES = sorted(path.stem for path in LEARN.glob("exercise_*.py"))
GALLERY = Page("learn/bugs.md", shared=Page("gluon_cpu.md"))
every_lesson = pytest.mark.parametrize("name", LESSONS)


def page(name: str) -> str:
    return (LEARN / f"{name}.md").read_text(encoding="utf-8")


def source(name: str) -> str:
    return (LEARN / f"{name}.py").read_text(encoding="utf-8")


def lines(code: str) -> list[str]:
    """Without empty ones, which separate the pieces."""
    return [line for line in code.splitlines() if line.strip()]


def printed(name: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        lessons.load(name).main()
    return out.getvalue()


def measured() -> str:
    """The tables of the result file; without one, that there is none."""
    if not (ROOT / OUT).exists():
        return "\nNot measured yet.\n\n"
    return "\n" + "\n".join(tables(json.loads((ROOT / OUT).read_text(encoding="utf-8")))) + "\n\n"


# The lessons


def test_the_lessons_are_numbered_and_in_the_index():
    assert [name[:2] for name in LESSONS] == [f"{i:02}" for i in range(1, len(LESSONS) + 1)]
    assert list(lessons.lessons().values()) == LESSONS
    named = re.findall(r"\]\((\w+\.md)\)", INDEX.read_text(encoding="utf-8"))
    assert {path.name for path in LEARN.glob("*.md")} - {"README.md"} <= set(named)


@every_lesson
def test_the_page_has_all_of_the_file(name):
    """And so no code that the page does not explain."""
    assert lines("\n".join(CODE.findall(page(name)))) == lines(source(name))
    assert len(source(name).splitlines()) <= MOST_LINES


@every_lesson
def test_it_runs_and_prints_what_the_page_shows(name):
    shown = PRINTED.search(page(name))
    assert shown is not None
    assert printed(name) == shown[2]


@every_lesson
def test_ends_are_used_rightly(name):
    functions = [f for f in vars(lessons.load(name)).values() if isinstance(f, JITFunction)]
    assert [misuse for f in functions for misuse in check_ends(f)] == []


@pytest.mark.parametrize("name", learn_pictures.runs())
def test_the_pictures_are_small_and_on_their_page(name):
    assert (LEARN / f"{name}.svg").stat().st_size <= MOST_BYTES
    assert f"]({name}.svg)" in page(name)


def test_a_picture_has_a_row_for_each_role_and_its_engines():
    drawn = learn_pictures.picture(learn_pictures.runs()["03_ring"])
    rows = re.findall(r'text-anchor="end">([^<]*)<', drawn)
    assert rows == ["double", "load", "TMA load"]
    assert drawn.count('class="w"') > 2
    assert drawn.count("<path d=") > 2
    assert drawn == (LEARN / "03_ring.svg").read_text(encoding="utf-8")


def test_the_measured_times_are_those_of_the_result_file():
    shown = MEASURED.search(INDEX.read_text(encoding="utf-8"))
    assert shown is not None
    assert shown[2] == measured()


@pytest.mark.parametrize("order", ["by head", "longest first", "snake"])
def test_the_work_of_lesson_7_is_divided_as_its_page_says(order):
    """In blocks of keys, with 32 heads of 32 blocks; `place` is run as Python."""
    heads, items, programs = 32, 1024, 132
    language = SimpleNamespace(num_programs=lambda _: programs, where=lambda wanted, x, y: x if wanted else y)
    place = FunctionType(lessons.load("07_persistent").place.fn.__code__, {"gl": language})
    given = [[place(item, items, heads, order) for item in range(i, items, programs)] for i in range(programs)]
    assert sorted(itertools.chain(*given)) == list(itertools.product(range(heads), range(items // heads)))
    work = [sum(block + 1 for _, block in one) for one in given]
    text = " ".join(page("07_persistent").split())
    said = re.search(
        r"132 programs have (\d+) each on average.* (\d+) by head, (\d+) longest first, and (\d+) in", text
    )
    assert said is not None
    assert sum(work) == int(said[1]) * programs
    assert max(work) == int(said[2 + ["by head", "longest first", "snake"].index(order)])


def compiled(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object], target: str) -> list[tuple[Any, ...]]:
    """What a run would compile: kernel, types, constants, attributes, options, architecture."""
    found: dict[str, tuple[Any, ...]] = {}
    launch = importlib.import_module("gluon_cpu.launch")
    real = launch.compile_source

    def noted(kernel: Any, types: Any, constants: Any, attrs: Any, options: Any, arch: int, mode: str) -> Any:
        found.setdefault(f"{kernel} {types} {constants} {options.num_ctas}", (kernel, types, constants, attrs, options))
        return real(kernel, types, constants, attrs, options, arch, mode)

    monkeypatch.setattr(launch, "compile_source", noted)
    with gluon_cpu.machine(target=target):
        run()
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", learn_pictures.runs())
def test_the_kernel_compiles_for_the_card(name, monkeypatch):
    target = learn_pictures.TARGETS.get(name, "sm_90a")
    for kernel, types, constants, attrs, options in compiled(monkeypatch, learn_pictures.runs()[name], target):
        code = compat.triton.compile(
            compat.GluonASTSource(kernel, types, constants, attrs),
            target=compat.GPUTarget("cuda", {"sm_90a": 90, "sm_100a": 100}[target], 32),
            options={"num_warps": options.num_warps, "num_ctas": options.num_ctas},
        )
        assert 0 < code.metadata.shared <= 232448
        assert ".local" not in code.asm["ptx"]


# The exercises


def changes(exercise: str) -> list[tuple[str, str]]:
    """What the answers say to change: (old text, new text)."""
    found = []
    for name, hunk in CHANGE.findall((LEARN / "answers.md").read_text(encoding="utf-8")):
        if name == exercise:
            old = "".join(f"{line[1:]}\n" for line in hunk.splitlines() if line[:1] in ("-", " "))
            new = "".join(f"{line[1:]}\n" for line in hunk.splitlines() if line[:1] in ("+", " "))
            found.append((old, new))
    return found


def module_of(name: str, text: str, folder: Path) -> ModuleType:
    """A file of the course with another text."""
    lessons.load("course")  # puts its folder on the path
    file = folder / f"{name}.py"
    file.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"{name}_{folder.name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def target_of(module: ModuleType) -> str:
    return getattr(module, "TARGET", "sm_90a")


@pytest.mark.parametrize("name", EXERCISES)
def test_an_exercise_is_mended_by_its_answers_and_by_no_fewer(name, tmp_path):
    text, hunks = source(name), changes(name)
    assert hunks, f"no answer for {name}"
    for number in range(len(hunks) + 1):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        module = module_of(name, text, folder)
        if number == len(hunks):
            assert gluon_cpu.check(module.run, schedules=6, target=target_of(module), quiet=True).ok
            break
        with pytest.raises((gluon_cpu.Finding, AssertionError)):
            gluon_cpu.check(module.run, schedules=6, target=target_of(module), quiet=True)
        old, new = hunks[number]
        assert text.count(old) == 1, old
        text = text.replace(old, new)


def test_every_exercise_is_on_a_page():
    assert [name for name in EXERCISES if not any(f"({name}.py)" in page(lesson) for lesson in LESSONS)] == []
    assert [name for name in LESSONS if f"lesson-{int(name[:2])}" not in anchors(LEARN / "answers.md")] == []


def test_an_exercise_says_what_is_found(capsys):
    module = lessons.load("exercise_02")
    with pytest.raises(SystemExit, match="TooFewArrivals"):
        lessons.load("course").exercise(module.run)


def test_a_lesson_that_was_changed_says_what_is_found():
    module = lessons.load("02_copy")
    with pytest.raises(SystemExit, match="parity 0: BarrierMisuse"):
        lessons.load("course").check(lambda: module.checked("phase"), "parity 0")


def test_a_lesson_with_wrong_numbers_says_so():
    def wrong() -> None:
        module = lessons.load("03_ring")
        module.checked(module.by_channel)
        raise AssertionError

    with pytest.raises(SystemExit, match="a ring: AssertionError\nThe output is not"):
        lessons.load("course").check(wrong, "a ring")


HINTS = {  # exercise: (answers made before, what the next report says)
    "exercise_03": (
        1,
        "somebody must wait for the phase that this TMA load completes: perhaps a role has too few rounds",
    ),
    "exercise_05": (0, "double 1 has not arrived, and waits for something else"),
}


@pytest.mark.parametrize("name", HINTS)
def test_the_report_of_an_exercise_points_at_its_fault(name, tmp_path):
    made, hint = HINTS[name]
    text = source(name)
    for old, new in changes(name)[:made]:
        text = text.replace(old, new)
    module = module_of(name, text, tmp_path)
    with pytest.raises(gluon_cpu.Finding) as found:
        gluon_cpu.check(module.run, schedules=6, quiet=True)
    assert hint in str(found.value), found.value


def test_the_report_of_a_channel_among_several_names_it(tmp_path):
    """Lesson 5, exercise 2: V is freed before the wait for its product."""
    wait, free = "        acc, _ = warpgroup_mma_wait(0, deps=[acc, p])\n", "        v.release()\n"
    text = source("05_turns")
    assert text.count(wait + free) == 1
    module = module_of("05_turns", text.replace(wait + free, free + wait), tmp_path)
    with pytest.raises(gluon_cpu.DataRace, match=r"data race on wires\.values\.tiles\[\d\], shared memory"):
        gluon_cpu.check(module.checked, schedules=6, quiet=True)


def test_an_exercise_with_wrong_numbers_says_so():
    def wrong() -> None:
        module = lessons.load("03_ring")
        module.checked(module.by_channel)
        raise AssertionError

    with pytest.raises(SystemExit, match="AssertionError\nThe output is not"):
        lessons.load("course").exercise(wrong)


# The gallery

every_bug = pytest.mark.parametrize("block", GALLERY.findings, ids=lambda block: block.name)


@every_bug
def test_a_report_of_the_gallery_is_as_printed(block, tmp_path, monkeypatch):
    monkeypatch.setenv("GLUON_CPU_CACHE", str(tmp_path / "cache"))
    assert GALLERY.printed(block, tmp_path) == block.message


@every_bug
def test_a_bug_of_the_gallery_is_mended(block, tmp_path, monkeypatch):
    monkeypatch.setenv("GLUON_CPU_CACHE", str(tmp_path / "cache"))
    with GALLERY.examples(tmp_path, **{block.name: mended(block.code)}):
        module = importlib.import_module(block.name)
        assert gluon_cpu.check(module.run, schedules=6, quiet=True, **options_of(module)).ok


def test_every_finding_named_in_the_gallery_exists():
    kinds = set(re.findall(r"`([A-Z]\w+)`", GALLERY.path.read_text(encoding="utf-8")))
    assert [kind for kind in kinds if not issubclass(getattr(gluon_cpu, kind), gluon_cpu.Finding)] == []
    assert len(kinds) > 8


def test_the_solution_is_right():
    module = lessons.load("solution_mlp")
    assert gluon_cpu.check(module.checked, schedules=6, quiet=True).ok


# From pages to files


def write(name: str) -> None:
    file = LEARN / f"{name}.py"
    file.write_text("\n".join(CODE.findall(page(name))), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "ruff", "format", "-q", str(file)], check=True)
    shown, formatted = lines("\n".join(CODE.findall(page(name)))), lines(source(name))
    if shown != formatted:
        sys.exit(f"{name}.md: not as ruff formats it\n" + "\n".join(difflib.unified_diff(shown, formatted, n=0)))
    text = PRINTED.sub(lambda m: m[1] + printed(name) + m[3], page(name))
    (LEARN / f"{name}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for lesson in sys.argv[1:] or LESSONS:
        write(lesson)
    GALLERY.write_messages()
    index = INDEX.read_text(encoding="utf-8")
    INDEX.write_text(MEASURED.sub(lambda m: m[1] + measured() + m[3], index), encoding="utf-8")
