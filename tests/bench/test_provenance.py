"""Where a figure comes from."""

import pytest

from bench import provenance


@pytest.mark.parametrize("changed", ["", "gluon_attn/api.py\nbench/sweep.py"])
def test_code_that_is_in_no_commit_is_named(monkeypatch, changed):
    """The commit itself is what a search is resumed by: what is written meanwhile must not change it."""
    said = {("git", "rev-parse"): "abc", ("git", "diff"): changed}
    monkeypatch.setattr(provenance, "output_of", lambda *command: said.get(command[:2], ""))
    found = provenance.provenance(None)
    assert found["commit"] == "abc"
    assert found.get("changed", []) == changed.split()
    assert "changed" not in provenance.provenance("def")
