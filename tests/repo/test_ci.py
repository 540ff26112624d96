"""`.ci/run` runs every command in a bare environment, but for what says where packages come from."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from channels.compat import MINORS

ROOT = Path(__file__).parents[2]
CI = ROOT / ".ci" / "run"

# Prints what it was called with and its environment.
FAKE_MAKE = """#!/usr/bin/env bash
echo "make $*"
env
"""


def test_commands_run_in_a_bare_environment(tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    (tmp_path / "make").write_text(FAKE_MAKE)
    (tmp_path / "make").chmod(0o755)
    environment = {
        "HOME": "/home/somebody",
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHONUNBUFFERED": "1",
        "PYTEST_ADDOPTS": "-x",
        "TRITON_CACHE_DIR": "/somewhere",
        "PIP_INDEX_URL": "https://a.mirror/simple with spaces",
        "https_proxy": "http://a.proxy:3128",
    }
    printed = subprocess.run(["bash", CI], env=environment, capture_output=True, text=True, check=True).stdout
    of_each = re.split(r"^make (.*)\n", printed, flags=re.MULTILINE)[1:]
    head = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    part = f" ARGS=--part {int(head, 16) % 16 + 1}/16" if head else ""
    assert of_each[::2] == ["test", f"test-slow{part}", "check", "check-proofs"]
    kept = environment.keys() - {"PYTHONUNBUFFERED", "PYTEST_ADDOPTS", "TRITON_CACHE_DIR"}
    for lines in of_each[1::2]:
        seen = dict(line.split("=", 1) for line in lines.splitlines())
        assert {name: seen[name] for name in kept} == {name: environment[name] for name in kept}
        assert seen.keys() - kept <= {"PWD", "SHLVL", "_"}, "bash itself sets these three"


# A function with many slow cases, one with a single one, and one that is quick.
TESTS = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("case", range(20))
def test_many(case): ...

@pytest.mark.slow
def test_one(): ...

def test_quick(): ...
"""


def test_parts_of_the_slow_cases_are_all_of_them_once_each(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)

    def collected(*options: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "--collect-only"]
        printed = subprocess.run(
            [*command, "-q", "--rootdir", str(tmp_path), str(tmp_path), *options],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        return [line.partition("::")[2] for line in printed.splitlines() if "::" in line]

    parts = [collected("--part", f"{i}/3") for i in (1, 2, 3)]
    assert all("test_quick" in part for part in parts), "what is not slow is no part's"
    assert sorted(case for part in parts for case in part if case != "test_quick") == sorted(collected("-m", "slow"))
    assert [len(part) for part in parts] == [1 + 7] * 3


def test_all_slow_tests_run_each_night():
    workflow = (ROOT / ".github" / "workflows" / "nightly.yml").read_text(encoding="utf-8")
    assert re.findall(r"^      - run: (.*)$", workflow, re.MULTILINE) == ["make test-slow"]
    assert "schedule:" in workflow


def test_the_workflow_runs_what_ci_runs_and_the_hooks_beside_each_torch():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    first, second = workflow.split("\n  beside-each-torch:\n")
    assert re.findall(r"^      - run: (.*)$", first, re.MULTILINE) == [".ci/run"]
    (torches,) = re.findall(r"torch: \[(.*)\]", second)
    assert torches == ", ".join(f'"2.{minor}"' for minor in range(11, 16))
    (tests,) = re.findall(r"python -m pytest (.*)$", second, re.MULTILINE)
    assert all((ROOT / test).is_file() for test in tests.split())


def test_a_release_is_installed_beside_every_torch_and_triton_that_are_supported():
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    pairs = re.findall(r'torch: "([\d.]+)", triton: "([\d.]+)"', workflow)
    assert {torch for torch, _ in pairs} == {f"2.{minor}" for minor in range(11, 16)}
    assert {triton for _, triton in pairs} == set(MINORS)
    assert "secrets." not in workflow


def test_a_release_says_where_the_project_lives(tmp_path):
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    (command,) = re.findall(r"run: (printf .*project.urls.*)$", workflow, re.MULTILINE)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    environment = os.environ | {"HOME_PAGE": "https://example.org/a/b"}
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, check=True)
    before, after = (tomllib.loads((at / "pyproject.toml").read_text(encoding="utf-8")) for at in (ROOT, tmp_path))
    urls = {"Source": "https://example.org/a/b", "Issues": "https://example.org/a/b/issues"}
    assert after == {**before, "project": before["project"] | {"urls": urls}}
