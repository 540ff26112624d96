"""gluon_cpu says which Triton it knows, before it fails in another way."""

import re

import pytest
import triton

from gluon_cpu.triton_version import require_known_triton


@pytest.mark.parametrize("version", ["3.8.0", "3.10.0", "3.90.0", "4.9.0"])
def test_another_triton_is_refused(monkeypatch, version):
    monkeypatch.setattr(triton, "__version__", version)
    with pytest.raises(ImportError, match=rf"^gluon_cpu: expected Triton 3\.9.*, got {re.escape(version)}; install"):
        require_known_triton()


@pytest.mark.parametrize("version", ["3.9.0", "3.9.1", "3.9.0+git1234567"])
def test_the_triton_that_it_knows(monkeypatch, version):
    monkeypatch.setattr(triton, "__version__", version)
    require_known_triton()
