"""The levers of the configs, each turned on its own: what the grid checks, and what is timed against the table."""

import dataclasses
from typing import Any

from gluon_attn import ForwardConfig
from gluon_attn.forward.configs import HopperConfig

Change = dict[str, Any]  # values of fields; more than one where a lever asks for another

HOPPER_CHANGES: tuple[Change, ...] = (
    {"turns": False},
    {"turns": True},
    {"early_exp": 0},
    {"early_exp": 1},
    {"early_exp": 2},
    {"integer_max": False},
    {"integer_max": True},
)
BLACKWELL_CHANGES: tuple[Change, ...] = (
    {"early_p": False},
    {"early_p": True, "exp_pieces": 4},
    {"exp_pieces": 1, "load_pieces": 1, "early_p": False},
    {"exp_pieces": 2, "load_pieces": 1, "early_p": False},
    {"exp_pieces": 4},
    {"load_pieces": 1},
    {"load_pieces": 2, "exp_pieces": 4},
    {"load_pieces": 4, "exp_pieces": 4},
    {"exp_turns": False},
    {"exp_turns": True},
    {"max_in_load": False},
    {"max_in_load": True},
    {"packed_arithmetic": False},
    {"packed_arithmetic": True},
    {"polynomial_columns": 0},
    {"polynomial_columns": 2},
    {"polynomial_columns": 4},
    {"polynomial_columns": 8},
    {"rescale_threshold": 0.0},
    {"rescale_threshold": 8.0},
    {"longest_first": False},
    {"longest_first": True},
    {"dynamic": False},
    {"dynamic": True},
)

# Every lever off.
HOPPER_PLAIN: Change = {"turns": False, "early_exp": 0, "integer_max": False}
BLACKWELL_PLAIN: Change = {
    "load_pieces": 1,
    "exp_pieces": 1,
    "early_p": False,
    "exp_turns": False,
    "max_in_load": False,
    "packed_arithmetic": False,
    "polynomial_columns": 0,
    "rescale_threshold": 0.0,
    "longest_first": False,
    "dynamic": False,
}


def plain(config: ForwardConfig) -> ForwardConfig:
    """With every lever off."""
    return dataclasses.replace(config, **(HOPPER_PLAIN if isinstance(config, HopperConfig) else BLACKWELL_PLAIN))


def variants(config: ForwardConfig, arch: int) -> dict[str, ForwardConfig]:
    """Configs that differ from `config` in one lever, for an architecture, by what differs."""
    found: dict[str, ForwardConfig] = {}
    for change in HOPPER_CHANGES if isinstance(config, HopperConfig) else BLACKWELL_CHANGES:
        if change.get("integer_max") and config.num_ctas > 1:
            continue  # which such a config refuses
        other = dataclasses.replace(config, **change)
        if other != config and arch in other.archs:
            found.setdefault(label(config, other), other)
    return found


def differences(config: ForwardConfig, other: ForwardConfig) -> Change:
    return {
        field.name: getattr(other, field.name)
        for field in dataclasses.fields(config)
        if getattr(other, field.name) != getattr(config, field.name)
    }


def label(config: ForwardConfig, other: ForwardConfig) -> str:
    return " ".join(f"{name}={value}" for name, value in differences(config, other).items())
