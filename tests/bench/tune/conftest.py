"""Tests of the tuner ask the packaged table alone."""

import pytest


@pytest.fixture(autouse=True)
def asks_packaged_alone(packaged_alone):
    """In every file of this folder."""
