"""Configurations for Hopper to try against each other: what the tuning table is chosen from."""

from typing import Any

from gluon_attn.forward.configs import BlackwellConfig, ForwardConfig, HopperConfig
from gluon_attn.forward.table import hopper_config


def both(*args: int, **options: Any) -> list[ForwardConfig]:
    return [hopper_config(*args, num_ctas=num_ctas, **options) for num_ctas in (1, 2)]


# By (padded head dims of Q and of V, bytes of an element), with the arguments of `hopper_config`. Longest first only
# under a mask.
CANDIDATES: dict[tuple[int, int, int], list[ForwardConfig]] = {
    (64, 64, 2): [
        *both(1, 128, 2, 2, 232),
        *both(2, 128, 2, 2, 232, turns=True, early_exp=2),
        *both(4, 64, 2, 4, 112),
        *both(4, 64, 2, 4, 112, early_exp=1),
        hopper_config(4, 64, 2, 4, 112, integer_max=True),
        hopper_config(4, 64, 2, 4, 112, early_exp=1, integer_max=True),
        hopper_config(4, 64, 2, 4, 112, integer_max=True, last_heads_longest_first=True),
        *both(3, 128, 2, 2, 160, turns=True, early_exp=1),
        *both(3, 128, 2, 2, 160, turns=True, early_exp=1, last_heads_longest_first=True),
        hopper_config(3, 128, 2, 2, 160, turns=True, early_exp=1, integer_max=True),
        hopper_config(3, 128, 2, 2, 160, turns=True, early_exp=1, integer_max=True, last_heads_longest_first=True),
    ],
    (128, 128, 2): [
        *both(1, 128, 2, 2, 232),
        *both(2, 128, 2, 2, 232, turns=True, early_exp=2),
        *both(2, 128, 2, 2, 232, turns=True, early_exp=2, last_heads_longest_first=True),
        hopper_config(2, 128, 2, 2, 232, turns=True, early_exp=2, integer_max=True),
        hopper_config(2, 128, 2, 2, 232, turns=True, early_exp=2, integer_max=True, last_heads_longest_first=True),
        hopper_config(2, 64, 2, 4, 232, early_exp=1, integer_max=True),
    ],
    (256, 256, 2): [
        *both(2, 64, 1, 2, 232, stage_in_queries=True),
        *both(2, 64, 1, 2, 232, stage_in_queries=True, last_heads_longest_first=True),
        *both(2, 64, 1, 2, 232, turns=True, early_exp=1, stage_in_queries=True),
    ],
    (192, 128, 2): [
        hopper_config(2, 128, 1, 2, 232, turns=True, early_exp=1, stage_in_queries=True),
        *both(2, 128, 1, 2, 232, turns=True, early_exp=2, stage_in_queries=True),
        *both(2, 128, 1, 2, 232, turns=True, early_exp=2, stage_in_queries=True, last_heads_longest_first=True),
        hopper_config(2, 128, 1, 2, 232, turns=True, early_exp=2, integer_max=True, stage_in_queries=True),
        hopper_config(2, 64, 1, 3, 232, early_exp=1),
        hopper_config(2, 64, 1, 3, 232, turns=True, early_exp=1),
        hopper_config(2, 64, 1, 3, 232, early_exp=1, last_heads_longest_first=True),
    ],
    # In fp8 with registers for a role that transposes V, or without: then a kernel of its own does it before.
    (64, 64, 1): [
        *both(2, 128, 2, 4, 216, transpose_registers=56),
        *both(4, 64, 2, 4, 112),
        *both(4, 64, 2, 4, 112, early_exp=1),
        *both(4, 64, 2, 4, 112, early_exp=1, last_heads_longest_first=True),
        *both(3, 128, 2, 2, 160),
        *both(3, 128, 2, 2, 160, last_heads_longest_first=True),
        *both(3, 128, 2, 2, 160, turns=True),
    ],
    (128, 128, 1): [
        *both(2, 128, 2, 2, 216, early_exp=1, transpose_registers=56),
        *both(2, 128, 2, 3, 240, early_exp=1),
        *both(2, 128, 2, 4, 240, early_exp=1),
        *both(2, 128, 2, 4, 240, turns=True, early_exp=1),
        *both(2, 128, 2, 4, 240, turns=True, early_exp=1, last_heads_longest_first=True),
    ],
    (256, 256, 1): [
        *both(2, 64, 1, 4, 240, early_exp=1),
        *both(2, 64, 1, 4, 240, early_exp=1, last_heads_longest_first=True),
        *both(2, 64, 1, 4, 240, turns=True, early_exp=1),
    ],
}


def label(config: ForwardConfig) -> str:
    """Short name in tables. Hopper: roles x keys, slots of Q / K and V, T for turns, e and the quarters of early
    exponentials, i for maxima as integers, s for O staged in Q, v for a role that transposes V. Blackwell: keys, slots,
    and a letter for each lever that is on. Then l for longest first, and the CTAs."""
    if isinstance(config, HopperConfig):
        slots = f"q{config.query_slots}kv{config.kv_slots}"
        early = f"e{config.early_exp}" * (config.early_exp > 0) + "i" * config.integer_max
        staged = "s" * config.stage_in_queries
        transpose = " v" * (config.transpose_registers > 0)
        name = f"{config.softmax_roles}x{config.block_n} {slots}{'T' * config.turns}{early}{staged}{transpose}"
    else:
        assert isinstance(config, BlackwellConfig)
        pieces = f"{config.load_pieces}/{config.exp_pieces}"
        levers = (
            "e" * config.early_p + "t" * config.exp_turns + "m" * config.max_in_load + "2" * config.packed_arithmetic
        )
        levers += f"p{config.polynomial_columns}" * (config.polynomial_columns > 0)
        levers += f"r{config.rescale_threshold:g}" * (config.rescale_threshold > 0) + "d" * config.dynamic
        name = f"{config.block_n} kv{config.kv_slots} {pieces}{levers}"
    return f"{name}{'l' * orders_heads(config)} {config.num_ctas}cta"


def orders_heads(config: ForwardConfig) -> bool:
    """Whether it takes row blocks of several heads together, those with most keys first: under a mask only."""
    return (
        config.last_heads_longest_first
        if isinstance(config, HopperConfig)
        else isinstance(config, BlackwellConfig) and config.longest_first
    )
