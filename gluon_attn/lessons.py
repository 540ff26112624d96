"""What `python -m gluon_attn learn` does: runs a lesson of the course, docs/learn. Its files are installed as `learn`
beside this one, which is a link to that folder in a checkout."""

import argparse
import ast
import importlib
import shutil
import sys
from pathlib import Path
from types import ModuleType

from .demo import quiet_exit

FOLDER = Path(__file__).parent / "learn"


def lessons() -> dict[int, str]:
    """The name of each lesson's file, without its ending, by its number."""
    return {int(path.stem[:2]): path.stem for path in sorted(FOLDER.glob("[0-9][0-9]_*.py"))}


def load(name: str) -> ModuleType:
    """A file of the course as a module. Its name begins with a digit, and the files import each other by bare names."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


def title(name: str) -> str:
    return (ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))) or "").splitlines()[0]


def main(arguments: list[str]) -> None:
    found = lessons()
    command = argparse.ArgumentParser(
        prog="python -m gluon_attn learn",
        description="Run a lesson of the course, on the CPU, and print what it shows. The pages are docs/learn.",
    )
    command.add_argument("lesson", type=int, nargs="?", choices=list(found), help="its number; without: list them")
    command.add_argument("--copy", type=Path, metavar="FOLDER", help="copy lessons and exercises there, to work on")
    options = command.parse_args(arguments)
    chosen = options.lesson
    if options.copy is not None:
        if options.copy.exists():
            command.error(f"--copy: expected a folder that is not there yet, got {options.copy}")
        shutil.copytree(FOLDER, options.copy, ignore=shutil.ignore_patterns("__pycache__"))
        print(f"copied to {options.copy}: run a file there with python, as python {options.copy / 'exercise_02.py'}")
        return
    if chosen is None:
        for number, name in found.items():
            print(f"{number:>2}  {title(name)}")
        print("\nRun one: python -m gluon_attn learn 1")
        return
    quiet_exit()
    print(f"{chosen}. {title(found[chosen])}\nThe file: {(FOLDER / found[chosen]).resolve()}.py\n", flush=True)
    load(found[chosen]).main()
