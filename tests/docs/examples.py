"""Pages with Gluon examples: their files, run as a reader would, and the messages shown below them."""

import contextlib
import importlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import gluon_cpu

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    name: str  # the file that its first line names, "" for a piece of the running example
    code: str
    message: str | None  # what the page says is printed


def mended(code: str) -> str:
    """The code with what its `# fix:` comments say done."""
    lines = []
    for line in code.splitlines():
        head, mark, fix = line.partition("# fix: ")
        if not mark:
            lines.append(line)
        elif fix != "delete":
            lines.append(head[: len(head) - len(head.lstrip())] + fix)
    return "\n".join(lines) + "\n"


def options_of(module: ModuleType) -> dict[str, Any]:
    """What the example's file wants to be checked with."""
    return {"target": module.TARGET} if hasattr(module, "TARGET") else {}


class Page:
    """A page under docs/ and the files that its blocks name; `shared`: another page, whose files these import."""

    def __init__(self, name: str, shared: "Page | None" = None) -> None:
        self.path = DOCS / name
        self.blocks = list(self._blocks())
        self.own = {b.name: b for b in self.blocks if b.name}
        self.files: dict[str, Block] = {**(shared.files if shared else {}), **self.own}
        self.findings = [b for b in self.blocks if b.message is not None]

    def _blocks(self) -> Iterator[Block]:
        for match in BLOCK.finditer(self.path.read_text(encoding="utf-8")):
            first = re.match(r"# examples/(\w+)\.py\n", match[1])
            yield Block(first[1] if first else "", match[1], match[2])

    @contextlib.contextmanager
    def examples(self, folder: Path, **replaced: str) -> Iterator[Path]:
        """The files of the page in `folder`/examples, importable by their bare names."""
        place = folder / "examples"
        place.mkdir()
        for name, block in self.files.items():
            (place / f"{name}.py").write_text(replaced.get(name, block.code), encoding="utf-8")
        before = {name: sys.modules.pop(name, None) for name in self.files}
        sys.path.insert(0, str(place))
        importlib.invalidate_caches()
        try:
            yield place
        finally:
            sys.path.remove(str(place))
            for name, module in before.items():
                sys.modules.pop(name, None)
                if module is not None:
                    sys.modules[name] = module

    def printed(self, block: Block, folder: Path) -> str:
        """What `check` prints of the example."""
        with self.examples(folder), contextlib.redirect_stdout(io.StringIO()) as out:
            module = importlib.import_module(block.name)
            with contextlib.suppress(gluon_cpu.Finding):
                gluon_cpu.check(module.run, **options_of(module))
        return out.getvalue()

    def write_messages(self) -> None:
        """Write the messages as they are printed now into the page."""

        def renewed(match: re.Match[str]) -> str:
            if match[2] is None:
                return match[0]
            name = str(re.match(r"# examples/(\w+)\.py\n", match[1])[1])  # type: ignore[index]
            with tempfile.TemporaryDirectory() as folder:
                os.environ["GLUON_CPU_CACHE"] = folder
                return f"```python\n{match[1]}```\n\n```text\n{self.printed(self.files[name], Path(folder))}```\n"

        self.path.write_text(BLOCK.sub(renewed, self.path.read_text(encoding="utf-8")), encoding="utf-8")
