"""Set-up's first step: install torch with pip into the Python that runs this, or say why that cannot be.

Without an NVIDIA GPU the CPU build is wanted, as the other brings gigabytes of CUDA. PyPI does not have it, so up to
three things are tried: the CPU build from the indexes that pip is configured with; the CPU build from PyTorch's own
index; the plain torch. `make` runs this before everything else; it uses nothing but the standard library.
"""

from __future__ import annotations  # an older Python gets as far as being told so

import argparse
import importlib.util
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CPU_BUILD = "torch==2.13.0+cpu"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OLDEST_PYTHON = (3, 11)  # as pyproject.toml says
SYSTEMS = "Linux on x86_64 (tested) and aarch64 (not tested; `make prove` cannot run there)"


@dataclass(frozen=True)
class Try:
    """One call of `pip install`. what: completes "installing ..."."""

    what: str
    arguments: tuple[str, ...]


def unsupported(system: str, machine: str, python: tuple[int, ...]) -> str | None:
    """Why this machine or its Python cannot run the project, and what to do; None if they can."""
    if (system, machine) not in (("Linux", "x86_64"), ("Linux", "aarch64")):
        return (
            f"this is {system} on {machine}. Supported: {SYSTEMS}. Triton, which compiles every kernel, has no wheels "
            "for other systems; elsewhere use a Linux container or virtual machine (on Windows: WSL 2)."
        )
    if python < OLDEST_PYTHON:
        wanted, got = ".".join(map(str, OLDEST_PYTHON)), ".".join(map(str, python))
        return (
            f"expected Python {wanted} or newer, got {got}. Name a newer one before the command, for the virtual "
            f"environment to be made with: PYTHON=python{wanted} make ..."
        )
    return None


def has_gpu() -> bool:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return "GPU" in listed.stdout


def requirements(*names: str) -> tuple[str, ...]:
    """What pyproject.toml asks for of these packages, for the tests where they ask for more."""
    import tomllib  # not at the top, as an older Python has none

    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    dependencies = project["optional-dependencies"]["test"] + project["dependencies"]
    return tuple(next(wanted for wanted in dependencies if wanted.startswith(name)) for name in names)


def tries(wanted: str, gpu: bool, cpu_index: str) -> list[Try]:
    """What to try, in this order. wanted: what the user asked for as torch; empty: choose."""
    if wanted:
        return [Try(f"{wanted}, as asked for", (wanted,))]
    # With Triton, as a build with CUDA pins that: of all builds one that allows the release that is wanted here.
    plain = requirements("torch", "triton")
    if gpu:
        return [Try("torch with CUDA, several gigabytes, as there is an NVIDIA GPU", plain)]
    return [
        Try(f"{CPU_BUILD} (no NVIDIA GPU here) from the indexes that pip is configured with", (CPU_BUILD,)),
        Try(f"{CPU_BUILD} from PyTorch's own index, {cpu_index}", ("--extra-index-url", cpu_index, CPU_BUILD)),
        Try("the plain torch: with CUDA, several gigabytes, which this machine has no use for", plain),
    ]


def pip_install(arguments: tuple[str, ...]) -> str | None:
    """None, or what pip gave as the reason. Everything that pip says is shown as it comes."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--retries", "2", *arguments]
    said = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            said.append(line.strip())
    if process.returncode == 0:
        return None
    # What ails the network pip gives as warnings, one for each attempt.
    warnings = [line for line in said if line.startswith("WARNING: ")]
    errors = [line for line in said if line.startswith("ERROR: ")]
    return "\n    ".join(warnings[-1:] + errors or said[-3:]) or f"pip ended with status {process.returncode}"


def install(planned: list[Try]) -> str | None:
    """Try one after the other. None, or every try's reason and what to do."""
    reasons: list[str] = []
    for attempt in planned:
        print(f"set-up: {'that failed; ' if reasons else ''}installing {attempt.what}", flush=True)
        reason = pip_install(attempt.arguments)
        if reason is None:
            return None
        reasons.append(f"  {attempt.what}:\n    {reason}")
    return "\n".join(
        [
            "set-up: pip could not install torch. It gave these reasons:",
            *reasons,
            "What helps:",
            "  no network here, or only through a proxy: set HTTPS_PROXY, or point pip at a mirror by PIP_INDEX_URL",
            "  a wheel of torch at hand: make TORCH=/path/to/torch.whl ...",
            "  a Python that has torch, Triton 3.9 and pytest: make PYTHON=/path/to/python ... installs nothing",
        ]
    )


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--torch", default="", help="what pip is asked for, instead of choosing")
    command.add_argument("--cpu-index", default="", help=f"in place of {CPU_INDEX}")
    command.add_argument("--check", action="store_true", help="only whether this machine is supported")
    chosen = command.parse_args()
    if problem := unsupported(platform.system(), platform.machine(), sys.version_info[:2]):
        sys.exit(f"set-up: {problem}")
    if chosen.check or importlib.util.find_spec("torch") is not None:
        return
    if problem := install(tries(chosen.torch, has_gpu(), chosen.cpu_index or CPU_INDEX)):
        sys.exit(problem)


if __name__ == "__main__":
    main()
