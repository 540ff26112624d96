"""Set-up's first step, tools/install_torch.py, against stand-in indexes with wheels of one file: no network needed."""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tools.install_torch import CPU_BUILD, CPU_INDEX, SYSTEMS, tries, unsupported

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "install_torch.py"
CPU, PLAIN = "2.13.0+cpu", "2.15.0"


def add_wheel(index: Path, name: str, version: str) -> None:
    """A wheel of a package with nothing but its version, in an index of folders (PEP 503)."""
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"]))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with (folder / "index.html").open("a") as page:
        page.write(f'<a href="{wheel.name}#sha256={digest}">{wheel.name}</a>\n')


class Machine:
    """A virtual environment without torch, two indexes, and a PATH without nvidia-smi."""

    def __init__(self, folder: Path) -> None:
        pip = pytest.importorskip("pip")
        self.python = folder / "venv" / "bin" / "python"
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        pip_only = folder / "pip_only"  # the pip of this Python, and nothing else that it has
        pip_only.mkdir()
        (pip_only / "pip").symlink_to(Path(pip.__file__).parent)
        self.tools = folder / "tools"
        self.tools.mkdir()
        self.configured, self.pytorch = folder / "configured", folder / "pytorch"
        self.configured.mkdir()
        self.pytorch.mkdir()
        self.environment = {
            "HOME": str(folder),
            "PATH": str(self.tools),
            "PYTHONPATH": str(pip_only),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": self.configured.as_uri(),
            "PIP_NO_CACHE_DIR": "1",
        }

    def install(self, *options: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.python), str(SCRIPT), "--cpu-index", self.pytorch.as_uri(), *options]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120)

    def torch(self) -> str:
        command = [str(self.python), "-c", "import torch; print(torch.__version__)"]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_the_configured_index_has_the_cpu_build(machine):
    add_wheel(machine.configured, "torch", CPU)
    add_wheel(machine.pytorch, "torch", CPU)
    done = machine.install()
    assert done.returncode == 0, done.stderr
    assert machine.torch() == CPU
    assert done.stdout.count("set-up:") == 1
    assert machine.pytorch.as_uri() not in done.stdout


def test_pytorchs_index_has_it(machine):
    """The usual case: PyPI has only the plain torch."""
    add_wheel(machine.configured, "torch", PLAIN)
    add_wheel(machine.configured, "triton", "3.9.0")
    add_wheel(machine.pytorch, "torch", CPU)
    done = machine.install()
    assert done.returncode == 0, done.stderr
    assert machine.torch() == CPU
    assert f"that failed; installing {CPU_BUILD} from PyTorch's own index" in done.stdout
    assert f"No matching distribution found for {CPU_BUILD}" in done.stderr  # why it failed


def test_the_plain_torch_is_better_than_none(machine):
    add_wheel(machine.configured, "torch", PLAIN)
    add_wheel(machine.configured, "triton", "3.9.0")
    done = machine.install()
    assert done.returncode == 0, done.stderr
    assert machine.torch() == PLAIN
    assert "several gigabytes" in done.stdout


def test_nothing_at_all(machine):
    """The error gives pip's reason for each try, and what to do."""
    done = machine.install()
    assert done.returncode == 1
    summary = done.stderr.partition("set-up: pip could not install torch")[2]
    assert summary.count("No matching distribution found for torch") == 3
    for remedy in ("HTTPS_PROXY", "PIP_INDEX_URL", "TORCH=", "PYTHON="):
        assert remedy in summary


def test_an_index_that_does_not_answer_is_the_reason_given(machine):
    machine.environment["PIP_INDEX_URL"] = "http://127.0.0.1:9/simple"  # the port of `discard`: nobody listens
    done = machine.install("--torch", "torch")
    assert done.returncode == 1
    assert "refused" in done.stderr.partition("set-up: pip could not install torch")[2]


def test_what_was_asked_for_is_all_that_is_tried(machine):
    add_wheel(machine.configured, "torch", PLAIN)
    done = machine.install("--torch", f"torch=={PLAIN}")
    assert done.returncode == 0, done.stderr
    assert machine.torch() == PLAIN
    assert machine.install("--torch", "torch==1.0").returncode == 0, "it is there already"


def test_with_a_gpu_the_plain_torch_is_what_is_wanted(machine):
    smi = machine.tools / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200'\n")
    smi.chmod(0o755)
    for version in (CPU, PLAIN):
        add_wheel(machine.configured, "torch", version)
    add_wheel(machine.configured, "triton", "3.9.0")
    done = machine.install()
    assert done.returncode == 0, done.stderr
    assert machine.torch() == PLAIN


def test_pytorchs_index_is_the_default():
    planned = tries("", False, CPU_INDEX)
    assert CPU_INDEX.startswith("https://download.pytorch.org/")
    assert CPU_INDEX in planned[1].arguments
    assert planned[2].arguments == ("torch>=2.11", "triton>=3.9,<3.10")


@pytest.mark.parametrize(
    ("system", "machine_name", "python", "says"),
    [
        ("Darwin", "arm64", (3, 11), "this is Darwin on arm64"),
        ("Windows", "AMD64", (3, 12), "WSL 2"),
        ("Linux", "ppc64le", (3, 12), "no wheels"),
        ("Linux", "x86_64", (3, 10), "expected Python 3.11 or newer, got 3.10"),
    ],
)
def test_unsupported_systems_are_told_so(system, machine_name, python, says):
    problem = unsupported(system, machine_name, python)
    assert problem is not None
    assert says in problem
    assert SYSTEMS in problem or "PYTHON=" in problem


@pytest.mark.parametrize("machine_name", ["x86_64", "aarch64"])
def test_supported_systems(machine_name):
    assert unsupported("Linux", machine_name, (3, 11)) is None


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_ends_with_the_reason_and_the_remedy(machine, tmp_path):
    """And with nothing set up, so that the next `make` tries again."""
    made = tmp_path / "made"
    made.mkdir()
    (made / "bin").symlink_to(machine.python.parent)
    real = os.pathsep.join([str(machine.tools), os.environ["PATH"]])
    command = ["make", f"VENV={made}", f"TORCH_CPU_INDEX={machine.pytorch.as_uri()}", f"{made}/.ready-test"]
    run = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, timeout=120)
    environment = machine.environment | {"PATH": real, "PYTHON": sys.executable}
    done = run(command, env=environment)
    if "several gigabytes, as there is an NVIDIA GPU" in done.stdout:
        pytest.skip("this machine has an NVIDIA GPU: there is one try only, which fails too")
    assert done.returncode == 2
    assert done.stdout.count("set-up: ") == 3, done.stdout + done.stderr
    assert "No matching distribution found" in done.stderr
    assert "What helps:" in done.stderr
    assert not (made / ".ready-test").exists()
