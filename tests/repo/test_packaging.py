"""What a newcomer meets first: the requirements, `make help` and the README's two commands."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from channels.compat import MINORS
from tools.install_torch import CPU_BUILD

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
OPTIONAL = PROJECT["optional-dependencies"]
PACKAGES = ("channels", "gluon_attn", "gluon_cpu")
TABLE = "gluon_attn/tables/made_up.json"  # rows for a card, of which there may be none so far
REQUIREMENTS = {r.name: r for r in map(Requirement, PROJECT["dependencies"])}


def test_requirements():
    assert set(REQUIREMENTS) == {"torch", "triton", "numpy", "ml_dtypes"}
    assert REQUIREMENTS["triton"].specifier == SpecifierSet(">=3.8,<3.10")
    assert REQUIREMENTS["torch"].specifier == SpecifierSet(">=2.11")
    assert SpecifierSet(PROJECT["requires-python"]) == SpecifierSet(">=3.11")


def test_extras_parse():
    extras = {name: {r.name: r for r in map(Requirement, wanted)} for name, wanted in OPTIONAL.items()}
    assert {"test", "bench", "dev", "hf", "prove"} <= set(extras)
    assert "pytest" in extras["test"]
    # What needs gluon_cpu or Blackwell's kernels.
    for name in ("test", "prove"):
        assert extras[name]["triton"].specifier == SpecifierSet(">=3.9,<3.10")


def test_the_minor_releases_of_triton_that_are_allowed_are_those_of_the_table():
    allowed = [minor for minor in range(20) if REQUIREMENTS["triton"].specifier.contains(f"3.{minor}.0")]
    assert [f"3.{minor}" for minor in allowed] == list(MINORS)
    assert f"OTHER_TRITON := {next(iter(MINORS))}" in MAKEFILE


def test_classifiers_agree_with_what_is_required():
    found = PROJECT["classifiers"]
    assert len(set(found)) == len(found)
    pythons = [c.rpartition(" ")[2] for c in found if c.startswith("Programming Language :: Python :: 3.")]
    assert pythons
    assert all(SpecifierSet(PROJECT["requires-python"]).contains(version) for version in pythons)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The names of the files in the sdist, and in the wheel that is built from it; and the wheel's metadata."""
    folder = tmp_path_factory.mktemp("build")
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist"))
    (tree / TABLE).write_text("{}", encoding="utf-8")
    (sdist,) = call_backend("build_sdist", tree, folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "sdist", filter="data")
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    (unpacked,) = (folder / "sdist").iterdir()
    (wheel,) = call_backend("build_wheel", unpacked, folder)
    with zipfile.ZipFile(wheel) as packed:
        (metadata,) = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        return in_sdist, set(packed.namelist()), packed.read(metadata).decode()


def call_backend(hook: str, tree: Path, folder: Path) -> list[Path]:
    """As `python -m build` does, but with the setuptools that is here."""
    command = f"from setuptools import build_meta; print(build_meta.{hook}({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", command], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [folder / done.stdout.splitlines()[-1]]


def test_the_wheel_has_the_packages_and_nothing_else(built):
    _, files, _ = built
    own = f"gluon_attn-{PROJECT['version']}.dist-info"
    assert {name.partition("/")[0] for name in files} == {"channels", "gluon_attn", "gluon_cpu", own}
    sources = {path.relative_to(ROOT).as_posix() for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    sources |= {f"gluon_attn/learn/{path.name}" for path in (ROOT / "docs" / "learn").glob("*.py")}  # by a link
    tables = {path.relative_to(ROOT).as_posix() for path in (ROOT / TABLE).parent.glob("*.json")} | {TABLE}
    others = {f"{name}/py.typed" for name in PACKAGES} | tables
    assert {name for name in files if not name.startswith(own)} == sources | others
    assert f"{own}/licenses/LICENSE" in files


def test_the_sdist_has_what_the_wheel_is_made_of(built):
    in_sdist, files, _ = built
    assert {name for name in files if ".dist-info/" not in name} <= in_sdist
    assert {"pyproject.toml", "README.md", "LICENSE"} <= in_sdist


def test_the_wheel_says_what_it_needs(built):
    _, _, metadata = built
    required = [Requirement(r) for r in re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)]
    assert {r.name: r.specifier for r in required if r.marker is None} == {
        name: r.specifier for name, r in REQUIREMENTS.items()
    }
    assert set(re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE)) == set(OPTIONAL)
    assert re.findall(r"^Classifier: (.*)$", metadata, re.MULTILINE) == PROJECT["classifiers"]


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_requirements_resolve_to_what_is_installed(name):
    installed = importlib.metadata.version(name)
    assert REQUIREMENTS[name].specifier.contains(installed, prereleases=True), f"{REQUIREMENTS[name]}: got {installed}"


def test_set_up_installs_a_torch_that_the_requirements_allow():
    name, _, version = CPU_BUILD.partition("==")
    assert REQUIREMENTS[name].specifier.contains(version)


def targets(makefile: str) -> dict[str, str]:
    """Each command of a Makefile with its help, empty if it has none."""
    rules = re.findall(r"^([a-z][\w-]*):(?!=)(?:.*?## *(.*)|.*)$", makefile, re.MULTILINE)
    return dict(rules)


def test_every_target_has_help():
    assert {"help", "run", "test", "check", "format", "gpu-test", "bench", "races", "clean"} <= set(targets(MAKEFILE))
    assert [target for target, text in targets(MAKEFILE).items() if not text] == []


def test_every_target_is_phony():
    phony = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[0].split()
    assert sorted(phony) == sorted(targets(MAKEFILE))


def test_a_target_without_help_is_seen():
    assert targets("run: setup ## Run it\n\t@run\nnew-one: setup\n\t@echo '## x'\nNAME := y\nname := z\n") == {
        "run": "Run it",
        "new-one": "",
    }


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_help_lists_every_target():
    printed = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target, text in targets(MAKEFILE).items():
        assert re.search(rf"^make {target} +{re.escape(text)}$", printed, re.MULTILINE), f"make help omits {target}"


@pytest.mark.parametrize("command", ["make run", "make test"])
def test_readme_names_the_commands(command):
    assert command in (ROOT / "README.md").read_text(encoding="utf-8")
