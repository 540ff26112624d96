"""Every Markdown page: links and anchors lead somewhere, commands exist and parse, lines are short."""

import argparse
import atexit
import importlib.util
import re
import runpy
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.md")])
LINE_LENGTH = 120
README_WORDS = 900
SENTENCE_WORDS = 40
OURS = {"bench", "channels", "gluon_attn", "gluon_cpu", "proving", "tests"}

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
NAMED = re.compile(r'<a id="([^"]+)">')


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose_of(page: Path) -> str:
    """The page without its code blocks, their lines left empty."""
    return FENCE.sub(lambda m: "\n" * m[0].count("\n"), text_of(page))


def anchor(heading: str) -> str:
    """What GitHub makes of a heading's text."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@cache
def anchors(page: Path) -> set[str]:
    found = set(NAMED.findall(prose_of(page)))
    for heading in HEADING.findall(prose_of(page)):
        plain = anchor(heading)
        numbered = (f"{plain}-{n}" for n in range(1, 100))
        found.add(plain if plain not in found else next(name for name in numbered if name not in found))
    return found


def wrong_links(page: Path, text: str) -> Iterator[str]:
    for target in LINK.findall(text):
        if re.match(r"\w+:", target):
            continue
        path, _, part = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists():
            yield f"{target}: no such file"
        elif part and there.suffix == ".md" and part not in anchors(there):
            yield f"{target}: no such heading"


@every_page
def test_links_lead_somewhere(page):
    assert list(wrong_links(page, CODE.sub("", prose_of(page)))) == []


@pytest.mark.parametrize("link", ["[x](nothing.md)", "[x](README.md#nothing)", "[x](#nothing)", "![x](nothing.png)"])
def test_a_link_that_leads_nowhere_is_found(link):
    assert len(list(wrong_links(ROOT / "README.md", link))) == 1


@pytest.mark.parametrize(
    ("heading", "wanted"),
    [("GQA, MQA", "gqa-mqa"), ("`gluon_cpu`: a check", "gluon_cpu-a-check"), ("[CTA](x.md) pair", "cta-pair")],
)
def test_anchors_are_those_of_github(heading, wanted):
    assert anchor(heading) == wanted


@every_page
def test_lines_are_short(page):
    """Of prose and tables; what a program prints is shown as it is."""
    lines = enumerate(prose_of(page).splitlines(), start=1)
    assert [number for number, line in lines if len(line) > LINE_LENGTH] == []


def sentences_of(text: str) -> Iterator[str]:
    """Of paragraphs and list items, in plain words; a heading, a table or a picture has none."""
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*>|#]|\d+\.) ?)", FENCE.sub("\n\n", text)):
        if block.strip().startswith(("|", "#", "![", "<")):
            continue
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", CODE.sub("Code", block.replace("\n", " ")))
        yield from re.split(r"(?<=[.!?:])[\s*]+(?=[A-Z0-9*(“])", plain.strip())


def long_sentences(text: str) -> list[str]:
    return [s for s in sentences_of(text) if len(re.findall(r"\w[\w'.,/×-]*", s)) > SENTENCE_WORDS]


@every_page
def test_sentences_are_short(page):
    assert long_sentences(text_of(page)) == []


def test_a_long_sentence_is_found():
    assert long_sentences("Short. " + "word " * SENTENCE_WORDS + "[word](x.md). Short again.") != []
    assert long_sentences("- " + "word " * SENTENCE_WORDS + "\n- word\n\n| " + "word " * 50) == []


def test_the_readme_is_short():
    assert len(text_of(ROOT / "README.md").split()) <= README_WORDS


def test_every_page_is_in_the_index():
    """But for those of a folder, which has an index of its own: the page of its name."""
    index = {target.partition("#")[0] for target in LINK.findall(text_of(ROOT / "docs" / "README.md"))}
    assert [p.name for p in (ROOT / "docs").glob("*.md") if p.name != "README.md" and p.name not in index] == []


@dataclass(frozen=True)
class Command:
    page: str
    words: tuple[str, ...]
    whole: bool  # shown in a block, to be run as it is; else mentioned, perhaps without what it has to be given

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def shell_lines(page: Path) -> Iterator[tuple[str, bool]]:
    """What the page shows as commands: whole ones in blocks of `sh`, others between backquotes."""
    for language, block in FENCE.findall(text_of(page)):
        if language == "sh":
            yield from ((line, True) for line in block.replace("\\\n", " ").splitlines())
    yield from ((code, False) for code in CODE.findall(prose_of(page).replace("\n", " ")))


def commands(first: str) -> list[Command]:
    """Those that begin with `first`, each once."""
    found: dict[tuple[tuple[str, ...], bool], Command] = {}
    for page in PAGES:
        for line, whole in shell_lines(page):
            if line.strip().startswith(first):
                words = tuple(shlex.split(line, comments=True))
                found.setdefault((words, whole), Command(name_of(page), words, whole))
    return list(found.values())


@cache
def recipes() -> dict[str, str]:
    """What the Makefile runs for each target that `make help` lists."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z][a-z-]*):.*## .*\n((?:\t.*\n)*)", makefile, re.MULTILINE))


@pytest.mark.parametrize("command", commands("make "), ids=str)
def test_make_targets_exist(command):
    targets = [word for word in command.words[1:] if "=" not in word]
    assert [target for target in targets if target not in recipes()] == []


class Parsed(Exception):
    """The arguments were taken."""


def module_and_arguments(command: Command) -> tuple[str, list[str]] | None:
    """What Python would run, if it is a module of ours: directly, or by a recipe of the Makefile that takes ARGS."""
    if command.words[0] == "make":
        variables = dict(word.split("=", 1) for word in command.words[1:] if "=" in word)
        [target] = [word for word in command.words[1:] if "=" not in word] or [""]
        module = re.search(r"-m ([\w.]+) .*ARGS", recipes().get(target, ""))
        found = (module[1], shlex.split(variables["ARGS"])) if module and "ARGS" in variables else None
    else:
        found = command.words[2], list(command.words[3:])
    return found if found and found[0].split(".")[0] in OURS else None


WITH_ARGUMENTS = [c for c in (*commands("make "), *commands("python -m ")) if module_and_arguments(c)]


def parse(module: str, arguments: list[str], monkeypatch) -> None:
    """Run the module's command up to where it has parsed its arguments. Raises Parsed if it takes them, SystemExit if
    not. What a command does about signals and its own end is not done to this process."""

    def stop_after(parse_args: Callable[..., Any]) -> Callable[..., NoReturn]:
        def parse_and_stop(*args, **kwargs):
            parse_args(*args, **kwargs)
            raise Parsed

        return parse_and_stop

    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, stop_after(getattr(argparse.ArgumentParser, name)))
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(atexit, "register", lambda function, *_, **__: function)
    runpy.run_module(module, run_name="__main__")


@pytest.mark.parametrize("command", WITH_ARGUMENTS, ids=str)
def test_commands_take_their_arguments(command, monkeypatch, capsys):
    module, arguments = module_and_arguments(command) or ("", [])
    assert importlib.util.find_spec(module) is not None
    if not arguments:
        return
    try:
        with pytest.raises(Parsed):
            parse(module, arguments, monkeypatch)
    except SystemExit:
        if command.whole or "the following arguments are required" not in capsys.readouterr().err:
            raise


def test_a_command_that_is_parsed_leaves_the_signals_as_they_are(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Parsed):
        parse("proving", ["list"], monkeypatch)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_command_with_a_wrong_argument_is_found(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parse("bench", ["--no-such-option"], monkeypatch)
    assert "--no-such-option" in capsys.readouterr().err
