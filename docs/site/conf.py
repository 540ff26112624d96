"""The pages as one HTML site: `make docs`. Sphinx reads the Markdown of the repository's top, docs/ and tests/."""

from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
project = "gluon-attn"
copyright = author = "the gluon-attn authors"
extensions = ["myst_parser"]
root_doc = "docs/README"
include_patterns = ["*.md", "docs/*.md", "docs/learn/*.md", "tests/*.md"]
html_theme = "furo"
html_title = "gluon-attn"
myst_heading_anchors = 6
# Links to folders have no page here: tests/docs/test_pages.py checks that every link leads somewhere.
suppress_warnings = ["myst.xref_missing", "myst.header"]

# In the order in which they are to be read; what is not named follows.
FIRST = ["README", "docs/install", "docs/integrations", "docs/figures", "docs/glossary", "docs/architecture"]


def with_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """The index and the course get what a site needs and a page on its own does not: the tree of pages."""
    if name == "docs/learn/README":
        pages = sorted(path.stem for path in (ROOT / "docs" / "learn").glob("*.md") if path.stem != "README")
        source[0] += tree(pages, "The lessons")
    elif name == root_doc:
        found = {p.relative_to(ROOT).with_suffix("").as_posix() for pattern in ("*.md", "docs/*.md", "tests/*.md")
                 for p in ROOT.glob(pattern)}  # fmt: skip
        others = sorted(found - {root_doc, *FIRST})
        source[0] += tree(["/docs/learn/README", *(f"/{page}" for page in (*FIRST, *others))], "All pages")


def tree(pages: list[str], caption: str) -> str:
    return "\n\n```{toctree}\n:hidden:\n:caption: " + caption + "\n\n" + "\n".join(pages) + "\n```\n"


def setup(app: Sphinx) -> None:
    app.connect("source-read", with_contents)
