"""docs/learn: each lesson's page has all of its file, and what it prints; the files run; the exercises can be mended.

A page is the source: `python -m tests.docs.test_learn_pages` makes each lesson's file of its page, runs it, and writes
what it prints into the page.
"""

import contextlib
import difflib
import importlib
import io
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEARN = ROOT / "docs" / "learn"
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"(^## What the file prints\n.*?^```text\n)(.*?)(^```$)", re.MULTILINE | re.DOTALL)
LESSONS = sorted(path.stem for path in LEARN.glob("[0-9][0-9]_*.md"))


def page(name: str) -> str:
    return (LEARN / f"{name}.md").read_text(encoding="utf-8")


def source(name: str) -> str:
    return (LEARN / f"{name}.py").read_text(encoding="utf-8")


def lines(code: str) -> list[str]:
    """Without empty ones, which separate the pieces."""
    return [line for line in code.splitlines() if line.strip()]


def printed(name: str) -> str:
    if str(LEARN) not in sys.path:
        sys.path.insert(0, str(LEARN))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        importlib.import_module(name).main()
    return out.getvalue()


def write(name: str) -> None:
    file = LEARN / f"{name}.py"
    file.write_text("\n".join(CODE.findall(page(name))), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "ruff", "format", str(file)], check=True)
    shown, formatted = lines("\n".join(CODE.findall(page(name)))), lines(source(name))
    if shown != formatted:
        sys.exit(f"{name}.md: not as ruff formats it\n" + "\n".join(difflib.unified_diff(shown, formatted, "page", "file", n=0)))
    text = PRINTED.sub(lambda m: m[1] + printed(name) + m[3], page(name))
    (LEARN / f"{name}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for lesson in sys.argv[1:] or LESSONS:
        write(lesson)
