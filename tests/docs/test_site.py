"""`make docs`: the site has every page, and no link in it leads nowhere. Nothing is fetched."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("furo", reason="furo is not installed: pip install '.[docs]'")

pytestmark = pytest.mark.slow
HREF = re.compile(r'href="([^"#]*)(?:#([^"]*))?"')


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-c", "docs/site", ".", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


def test_every_page_is_there(site):
    for pages in (ROOT.glob("*.md"), (ROOT / "docs").glob("*.md"), (ROOT / "docs" / "learn").glob("*.md")):
        names = [page.relative_to(ROOT).with_suffix(".html") for page in pages]
        assert [name for name in names if not (site / name).exists()] == []


def test_no_link_leads_nowhere(site):
    """But for those to folders, which have no page here: tests/docs/test_pages.py looks at these."""
    texts = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    names = {page: set(re.findall(r'id="([^"]+)"', text)) for page, text in texts.items()}
    lost = []
    for page, text in texts.items():
        article = text[text.find("<article") : text.find("</article>")]
        for path, part in HREF.findall(article):
            there = (page.parent / path).resolve() if path else page
            if re.match(r"\w+:", path) or part.startswith("../"):
                continue
            if not there.exists() or (part and part not in names.get(there, {part})):
                lost.append(f"{page.relative_to(site)}: {path}#{part}")
    assert lost == []
