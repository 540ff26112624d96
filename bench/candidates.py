"""Tile configurations for Hopper to try against each other: what the tuning table is chosen from."""

from typing import Any

from gluon_attn.forward.configs import BlackwellTile, HopperTile, TileConfig
from gluon_attn.forward.table import hopper_tile


def both(*args: int, **options: Any) -> list[TileConfig]:
    return [hopper_tile(*args, num_ctas=num_ctas, **options) for num_ctas in (1, 2)]


# By (padded head dim, bytes of an element). The arguments are those of `hopper_tile`. Heads in turn only under a mask.
CANDIDATES: dict[tuple[int, int], list[TileConfig]] = {
    (64, 2): [
        *both(1, 128, 2, 2, 232),
        *both(2, 128, 2, 2, 232, turns=True, early_exp=2),
        *both(4, 64, 2, 4, 112),
        *both(4, 64, 2, 4, 112, early_exp=1),
        hopper_tile(4, 64, 2, 4, 112, integer_max=True),
        hopper_tile(4, 64, 2, 4, 112, early_exp=1, integer_max=True),
        hopper_tile(4, 64, 2, 4, 112, integer_max=True, last_heads_in_turn=True),
        *both(3, 128, 2, 2, 160, turns=True, early_exp=1),
        *both(3, 128, 2, 2, 160, turns=True, early_exp=1, last_heads_in_turn=True),
        hopper_tile(3, 128, 2, 2, 160, turns=True, early_exp=1, integer_max=True),
        hopper_tile(3, 128, 2, 2, 160, turns=True, early_exp=1, integer_max=True, last_heads_in_turn=True),
    ],
    (128, 2): [
        *both(1, 128, 2, 2, 232),
        *both(2, 128, 2, 2, 232, turns=True, early_exp=2),
        *both(2, 128, 2, 2, 232, turns=True, early_exp=2, last_heads_in_turn=True),
        hopper_tile(2, 128, 2, 2, 232, turns=True, early_exp=2, integer_max=True),
        hopper_tile(2, 128, 2, 2, 232, turns=True, early_exp=2, integer_max=True, last_heads_in_turn=True),
        hopper_tile(2, 64, 2, 4, 232, early_exp=1, integer_max=True),
    ],
    (256, 2): [
        *both(2, 64, 1, 2, 232, stage_in_queries=True),
        *both(2, 64, 1, 2, 232, stage_in_queries=True, last_heads_in_turn=True),
        *both(2, 64, 1, 2, 232, turns=True, early_exp=1, stage_in_queries=True),
    ],
    # In fp8 with registers for a role that transposes V, or without: then a kernel of its own does it before.
    (64, 1): [
        *both(2, 128, 2, 4, 216, transpose_registers=56),
        *both(4, 64, 2, 4, 112),
        *both(4, 64, 2, 4, 112, early_exp=1),
        *both(4, 64, 2, 4, 112, early_exp=1, last_heads_in_turn=True),
        *both(3, 128, 2, 2, 160),
        *both(3, 128, 2, 2, 160, last_heads_in_turn=True),
        *both(3, 128, 2, 2, 160, turns=True),
    ],
    (128, 1): [
        *both(2, 128, 2, 2, 216, early_exp=1, transpose_registers=56),
        *both(2, 128, 2, 3, 240, early_exp=1),
        *both(2, 128, 2, 4, 240, early_exp=1),
        *both(2, 128, 2, 4, 240, turns=True, early_exp=1),
        *both(2, 128, 2, 4, 240, turns=True, early_exp=1, last_heads_in_turn=True),
    ],
    (256, 1): [
        *both(2, 64, 1, 4, 240, early_exp=1),
        *both(2, 64, 1, 4, 240, early_exp=1, last_heads_in_turn=True),
        *both(2, 64, 1, 4, 240, turns=True, early_exp=1),
    ],
}


def label(tile: TileConfig) -> str:
    """Short name in tables. Hopper: roles x keys, slots of Q / K and V, T for turns, e and the quarters of early
    exponentials, i for maxima as integers, s for O staged in Q, v for a role that transposes V. Blackwell: keys, slots,
    and a letter for each lever that is on. Then l for heads in turn, and the CTAs."""
    if isinstance(tile, HopperTile):
        slots = f"q{tile.query_slots}kv{tile.kv_slots}"
        early = f"e{tile.early_exp}" * (tile.early_exp > 0) + "i" * tile.integer_max
        staged = "s" * tile.stage_in_queries
        transpose = " v" * (tile.transpose_registers > 0)
        name = f"{tile.softmax_roles}x{tile.block_n} {slots}{'T' * tile.turns}{early}{staged}{transpose}"
    else:
        assert isinstance(tile, BlackwellTile)
        pieces = f"{tile.load_pieces}/{tile.exp_pieces}"
        levers = "e" * tile.early_p + "t" * tile.exp_turns + "m" * tile.max_in_load + "2" * tile.packed_arithmetic
        levers += f"p{tile.polynomial_columns}" * (tile.polynomial_columns > 0)
        levers += f"r{tile.rescale_threshold:g}" * (tile.rescale_threshold > 0) + "d" * tile.dynamic
        name = f"{tile.block_n} kv{tile.kv_slots} {pieces}{levers}"
    return f"{name}{'l' * orders_heads(tile)} {tile.num_ctas}cta"


def orders_heads(tile: TileConfig) -> bool:
    """Whether it takes row blocks of several heads in turn, those with most keys first: under a mask only."""
    return (
        tile.last_heads_in_turn
        if isinstance(tile, HopperTile)
        else isinstance(tile, BlackwellTile) and tile.longest_first
    )
