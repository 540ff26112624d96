"""Tests of the tuner ask the packaged table alone."""

import pytest

from gluon_attn import tuning


@pytest.fixture(autouse=True)
def packaged_alone(monkeypatch):
    monkeypatch.setattr(tuning, "OF_CARDS", ())
    tuning.reset()
    yield
    tuning.reset()
