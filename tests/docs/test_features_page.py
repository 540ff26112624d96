"""docs/features.md has the tables of gluon_attn/features.py; `python -m tests.docs.test_features_page` writes them."""

import re
from pathlib import Path

from gluon_attn import features

PAGE = Path(__file__).parents[2] / "docs" / "features.md"
REGION = re.compile(r"(<!-- written by tests/docs/test_features_page.py: ([\w ]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
TABLES = {"supported": features.supported, "apart": features.apart, "not there": features.not_there}


def written(text: str) -> str:
    return REGION.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n\n{m[4]}", text)


def test_the_page_has_the_tables():
    text = PAGE.read_text(encoding="utf-8")
    assert sorted(m[2] for m in REGION.finditer(text)) == sorted(TABLES)
    assert text == written(text)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
