"""How a table does beside others: cuDNN in the same run, and FlashAttention-3 as it was timed beside cuDNN before."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PEERS = Path(__file__).parents[1] / "results" / "h200_peers.json"
PAIRS = {
    "in_use_over_peer": ("peer", "in_use"),
    "new_over_peer": ("peer", "new"),
    "new_over_in_use": ("in_use", "new"),
}


def fa3_over_cudnn(shape: Mapping[str, Any], path: Path = PEERS) -> float | None:
    """The ratio of its speed to cuDNN's where both were timed beside each other, on an H200; None where they were not.
    In fp8 its fp8 to cuDNN's bf16."""
    dtype = {"bfloat16": "bf16", "float8_e4m3fn": "e4m3"}.get(shape["dtype"])
    asked = dtype, shape["head_dim"], shape["causal"], shape["q_len"]
    sizes = 16384, 2048  # of its points: tokens, columns
    alike = (shape["kv_heads"], shape["kv_len"], shape["head_dim_v"]) == (
        shape["heads"], shape["q_len"], shape["head_dim"]
    )  # fmt: skip
    if not alike or (shape["batch"] * shape["q_len"], shape["heads"] * shape["head_dim"]) != sizes:
        return None
    for point in json.loads(path.read_text(encoding="utf-8"))["fa3"]["points"]:
        if (point["dtype"], point["head_dim"], point["causal"], point["length"]) == asked:
            return float(point["fa3_over_cudnn_bf16"])
    return None


def ratios(times: Mapping[str, float]) -> dict[str, float]:
    """Of speeds, from milliseconds of the peer, of the config in use and of the new one."""
    return {name: times[above] / times[below] for name, (above, below) in PAIRS.items()}


def geometric_means(times: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of these ratios, and of FA3's line, over all problems, if all have it."""
    found = {name: statistics.geometric_mean(ratios(t)[name] for t in times) for name in PAIRS}
    lines = [t["fa3_over_cudnn"] for t in times if "fa3_over_cudnn" in t]
    if len(lines) == len(times):
        found["fa3_over_cudnn"] = statistics.geometric_mean(lines)
    return found
