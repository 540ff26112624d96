"""How a table does beside others: cuDNN in the same run, and FlashAttention-3 as it was timed beside cuDNN before."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PEERS = Path(__file__).parents[1] / "results" / "h200_peers.json"
PAIRS = {
    "in_use_over_peer": ("peer", "in_use"),
    "new_over_peer": ("peer", "new"),
    "new_over_in_use": ("in_use", "new"),
}


LIMITS = ("left", "right", "chunk", "scores", "softcap")  # of a problem's mask and scores, where it has them


def fa3_over_cudnn(shape: Mapping[str, Any], path: Path = PEERS) -> float | None:
    """The ratio of its speed to cuDNN's where both were timed beside each other, on an H200; None where they were not.
    In fp8 its fp8 to cuDNN's bf16."""
    dtype = {"bfloat16": "bf16", "float8_e4m3fn": "e4m3"}.get(shape["dtype"])
    asked = dtype, shape["head_dim"], shape["causal"], shape["q_len"]
    sizes = 16384, 2048  # of its points: tokens, columns
    alike = (shape["kv_heads"], shape["kv_len"], shape["head_dim_v"]) == (
        shape["heads"], shape["q_len"], shape["head_dim"]
    )  # fmt: skip
    alike = alike and not shape.keys() & {*LIMITS}
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


def means_of_sets(shapes: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By dtype; larger head dims and gradients apart. shapes: as a table file has them."""
    times: dict[str, list[Mapping[str, float]]] = {}
    for found in shapes:
        if "beside" in found:
            times.setdefault(set_of(found), []).append(found["beside"])
    return {name: {"shapes": len(of_set)} | geometric_means(of_set) for name, of_set in times.items()}


def set_of(found: Mapping[str, Any]) -> str:
    shape = found["shape"]
    name = str(shape["dtype"])
    if not shape["head_dim"] == shape["head_dim_v"] <= 128:  # apart from the points that are compared everywhere
        name += f" D={head_dims(shape)}"
    return f"gradients, {name}" if found.get("of_gradients") else name


def head_dims(shape: Mapping[str, Any]) -> str:
    return f"{shape['head_dim']}" + f"/{shape['head_dim_v']}" * (shape["head_dim_v"] != shape["head_dim"])


def table(provenance: Mapping[str, Any]) -> Iterator[str]:
    """Of a table file: what was timed, and how it does, in Markdown. Speeds are over cuDNN's in the same run, and with
    FA3 as in PEERS."""
    yield "| shape | config | gain | in use / cuDNN | new / cuDNN | FA3 / cuDNN |"
    yield "|---|---|---|---|---|---|"
    for found in provenance["shapes"]:
        shape = found["shape"]
        kind = "gradients, " * bool(found.get("of_gradients")) + shape["dtype"]
        name = f"{kind} D={head_dims(shape)} {'causal' if shape['causal'] else 'full'} {shape['q_len']}"
        name += "".join(f", {limit} {shape[limit]}" for limit in LIMITS if limit in shape)
        stays = found["chosen"] == found["in_use"]
        gain = "–" if stays else f"{found['gain']:+.1%} ±{found['spread']:.1%}"
        beside, cells = found.get("beside"), ["–"] * 3
        if beside:
            of = ratios(beside)
            cells[:2] = f"{of['in_use_over_peer']:.3f}", f"{of['new_over_peer']:.3f}"
            if "fa3_over_cudnn" in beside:
                cells[2] = f"{beside['fa3_over_cudnn']:.2f}"
        yield f"| {name} | {'as before' if stays else found['chosen']} | {gain} | {' | '.join(cells)} |"
    for name, means in means_of_sets(provenance["shapes"]).items():
        fa3 = f"{means['fa3_over_cudnn']:.3f}" if "fa3_over_cudnn" in means else "–"
        cells = [f"{means['in_use_over_peer']:.3f}", f"{means['new_over_peer']:.3f}", fa3]
        gain = f"{means['new_over_in_use'] - 1:+.1%}"
        yield f"| geometric mean of {means['shapes']}, {name} | | {gain} | {' | '.join(cells)} |"
