"""What a newcomer meets first: the requirements, `make help` and the README's two commands."""

import importlib.metadata
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tools.install_torch import CPU_BUILD

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
REQUIREMENTS = {r.name: r for r in map(Requirement, PROJECT["dependencies"])}


def test_requirements():
    assert set(REQUIREMENTS) == {"torch", "triton", "numpy", "ml_dtypes"}
    assert REQUIREMENTS["triton"].specifier == SpecifierSet(">=3.9,<3.10")
    assert REQUIREMENTS["torch"].specifier == SpecifierSet(">=2.11")
    assert SpecifierSet(PROJECT["requires-python"]) == SpecifierSet(">=3.11")


def test_extras_parse():
    extras = {name: [Requirement(r).name for r in wanted] for name, wanted in PROJECT["optional-dependencies"].items()}
    assert {"test", "bench", "dev"} <= set(extras)
    assert "pytest" in extras["test"]


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
