"""The levers of the tiles, each turned on its own: what the grid checks, and what is timed against the table."""

import dataclasses
from typing import Any

from gluon_attn import TileConfig
from gluon_attn.forward.configs import HopperTile

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


def plain(tile: TileConfig) -> TileConfig:
    """With every lever off."""
    return dataclasses.replace(tile, **(HOPPER_PLAIN if isinstance(tile, HopperTile) else BLACKWELL_PLAIN))


def variants(tile: TileConfig, arch: int) -> dict[str, TileConfig]:
    """Tiles that differ from `tile` in one lever, for an architecture, by what differs."""
    found: dict[str, TileConfig] = {}
    for change in HOPPER_CHANGES if isinstance(tile, HopperTile) else BLACKWELL_CHANGES:
        if change.get("integer_max") and tile.num_ctas > 1:
            continue  # which such a tile refuses
        other = dataclasses.replace(tile, **change)
        if other != tile and arch in other.archs:
            found.setdefault(label(tile, other), other)
    return found


def differences(tile: TileConfig, other: TileConfig) -> Change:
    return {
        field.name: getattr(other, field.name)
        for field in dataclasses.fields(tile)
        if getattr(other, field.name) != getattr(tile, field.name)
    }


def label(tile: TileConfig, other: TileConfig) -> str:
    return " ".join(f"{name}={value}" for name, value in differences(tile, other).items())
