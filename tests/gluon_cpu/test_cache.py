"""What is compiled is kept on disk, and taken from there by the next process."""

import pytest
import torch

from gluon_cpu import front
from tests.compat import gl, jit


@jit
def count(out):
    at = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(out + at, at)


@pytest.fixture
def compile_anew(monkeypatch, tmp_path):
    """Launches `count` as a new process would: nothing is in memory yet."""
    monkeypatch.setenv("GLUON_CPU_CACHE", str(tmp_path))

    def run(launch):
        monkeypatch.setattr(front, "_LOADED", {})
        out = torch.full((128,), -1, dtype=torch.int32)
        launch(count, (1,), out)
        assert torch.equal(out, torch.arange(128, dtype=torch.int32))

    return run


def test_what_is_compiled_is_kept_on_disk(compile_anew, launch, monkeypatch, tmp_path):
    compile_anew(launch)
    assert len(list(tmp_path.glob("*.pickle"))) == 1
    monkeypatch.setattr(front, "build_text", None)  # nothing is compiled from here on
    compile_anew(launch)


def test_a_file_that_cannot_be_read_is_made_anew(compile_anew, launch, tmp_path):
    compile_anew(launch)
    (path,) = tmp_path.glob("*.pickle")
    path.write_bytes(path.read_bytes()[:100])
    compile_anew(launch)
    assert path.stat().st_size > 100
