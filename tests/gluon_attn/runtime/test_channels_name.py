"""Another distribution's `channels`, such as Django's, is told of by name where it hides ours."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def importing(*path: Path, statement: str = "import gluon_attn") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    # -P: not the current folder, which holds ours.
    command = [sys.executable, "-P", "-c", statement]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def another_channels(folder: Path) -> Path:
    package = folder / "channels"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '4.3'\n")
    info = folder / "django_thing-4.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: django-thing\nVersion: 4.3\n")
    (info / "RECORD").write_text("channels/__init__.py,,\n")
    return package / "__init__.py"


def test_another_channels_is_told_of(tmp_path):
    file = another_channels(tmp_path)
    done = importing(tmp_path, ROOT)
    assert done.returncode == 1
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("ImportError: ")]
    assert f"got {file}, of the distribution django-thing" in error
    for remedy in ("pip uninstall django-thing", "first on PYTHONPATH"):
        assert remedy in error


def test_also_if_it_was_imported_before(tmp_path):
    another_channels(tmp_path)
    done = importing(tmp_path, ROOT, statement="import channels, sys; sys.path.remove(sys.path[0]); import gluon_attn")
    assert done.returncode == 1
    assert "ImportError: channels: expected the package that comes with gluon-attn" in done.stderr


def test_ours_first_is_fine(tmp_path):
    another_channels(tmp_path)
    done = importing(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
