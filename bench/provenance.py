"""Where a figure comes from: card, clocks, versions, commit."""

import datetime
import subprocess
from typing import Any

import torch
import triton

SEED = 0  # of the inputs, and of the order of the calls


def output_of(*command: str) -> str:
    """Standard output of a command, or "" if there is no such command or it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def query_of_card(*fields: str) -> tuple[str, ...]:
    """The command that asks nvidia-smi for fields of torch's current card: by its UUID, as CUDA_VISIBLE_DEVICES numbers
    cards anew and nvidia-smi does not look at it. Without a card, one that fails."""
    card = f"GPU-{torch.cuda.get_device_properties().uuid}" if torch.cuda.is_available() else "none"
    return "nvidia-smi", "-i", card, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"


def clocks() -> str:
    """SM clock, memory clock, power and temperature as the driver gives them now."""
    return output_of(*query_of_card("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu"))


def provenance(commit: str | None) -> dict[str, Any]:
    """For a result file. commit: of the tree that is measured, if git cannot tell. Where it can, `changed` names the
    code that is in no commit."""
    changed = output_of("git", "diff", "HEAD", "--name-only", "--", "*.py").split()
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "seed": SEED,
        "commit": commit or output_of("git", "rev-parse", "--short=12", "HEAD") or "unknown",
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": output_of(*query_of_card("driver_version")),
        "clocks": clocks(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    } | ({"changed": changed} if changed and not commit else {})
