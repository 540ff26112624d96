"""Tile configurations to try against each other, by padded head dim: what the tuning table is chosen from."""

from gluon_attn.tile import HopperTile
from gluon_attn.tuning import hopper_tile


def both(*args: int, **options: bool) -> list[HopperTile]:
    return [hopper_tile(*args, num_ctas=num_ctas, **options) for num_ctas in (1, 2)]


CANDIDATES: dict[int, list[HopperTile]] = {
    64: [
        *both(3, 128, 2, 2, 160, take_turns=True),
        *both(3, 128, 2, 2, 160, take_turns=False),
        *both(3, 64, 2, 4, 160, take_turns=True),
        *both(4, 64, 2, 4, 112, take_turns=True),
        *both(4, 64, 2, 4, 112, take_turns=False),
        *both(2, 128, 2, 2, 240, take_turns=True),
    ],
    128: [
        *both(2, 128, 2, 2, 240, take_turns=True),
        *both(2, 128, 2, 2, 240, take_turns=False),
        *both(2, 128, 1, 2, 240, take_turns=False),
        *both(2, 128, 1, 3, 240, take_turns=True, stage_in_queries=True),
    ],
    256: [
        *both(2, 64, 1, 2, 240, take_turns=True, stage_in_queries=True),
        *both(2, 64, 1, 2, 240, take_turns=False, stage_in_queries=True),
    ],
}


def label(config: HopperTile) -> str:
    """Short name in tables: roles x keys, slots of Q / K and V, t for turns, s for O staged in Q, CTAs."""
    turns = "t" if config.take_turns else ""
    slots = f"q{config.query_slots}kv{config.kv_slots}"
    staged = "s" if config.stage_in_queries else ""
    return f"{config.softmax_roles}x{config.block_n} {slots}{turns}{staged} {config.num_ctas}cta"
