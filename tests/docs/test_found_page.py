"""docs/found.md: its reports are those that are printed. What the kernels do is in tests/gluon_cpu/test_found.py.

After a change of a message: `python -m tests.docs.test_found_page` writes the real ones.
"""

import pytest

from tests.docs.examples import Page

PAGE = Page("found.md", shared=Page("gluon_cpu.md"))


@pytest.mark.parametrize("block", PAGE.findings, ids=lambda b: b.name)
def test_message_is_as_printed(block, tmp_path, monkeypatch):
    monkeypatch.setenv("GLUON_CPU_CACHE", str(tmp_path / "cache"))
    assert PAGE.printed(block, tmp_path) == block.message


if __name__ == "__main__":
    PAGE.write_messages()
