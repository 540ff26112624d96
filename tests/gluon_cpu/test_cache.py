"""What is compiled is kept on disk, and taken from there by the next process."""

import pytest
import torch

import gluon_cpu
from gluon_cpu import front
from tests.compat import gl, jit
from tests.gluon_cpu import findings_hopper as hopper


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
        monkeypatch.setattr(front, "_FAST", {})
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


@pytest.fixture
def count_compilations(monkeypatch):
    """The kernels that went through the frontend, as each does."""
    monkeypatch.setattr(front, "_FAST", {})
    compiled = []
    build = front.build_ttgir

    def counted(*arguments):
        compiled.append(arguments)
        return build(*arguments)

    monkeypatch.setattr(front, "build_ttgir", counted)
    return compiled


def source_in(mode, folder, monkeypatch):
    """The generated code of a kernel whose roles share memory, so that the compiler's passes have something to do."""
    monkeypatch.setenv("GLUON_CPU_CACHE", str(folder))
    monkeypatch.setattr(front, "_LOADED", {})
    gluon_cpu.launch(hopper.no_wait, (1,), torch.full((128,), -1, dtype=torch.int32), BUG=False, mode=mode)
    return next(iter(front._LOADED.values())).generated.source


def test_lowered_mode_goes_on_from_fast_mode(count_compilations, monkeypatch, tmp_path):
    fast = source_in("fast", tmp_path / "both", monkeypatch)
    lowered = source_in("lowered", tmp_path / "both", monkeypatch)
    assert len(count_compilations) == 1
    assert lowered != fast
    assert source_in("lowered", tmp_path / "alone", monkeypatch) == lowered
    assert len(count_compilations) == 2, "the module was used up"


def test_only_the_newest_modules_are_kept(count_compilations, monkeypatch, tmp_path):
    monkeypatch.setattr(front, "MOST_KEPT", 1)
    source_in("fast", tmp_path, monkeypatch)
    (first,) = front._FAST
    gluon_cpu.launch(count, (1,), torch.full((128,), -1, dtype=torch.int32), mode="fast")
    assert len(front._FAST) == 1
    assert first not in front._FAST
    source_in("lowered", tmp_path, monkeypatch)
    assert len(count_compilations) == 3
