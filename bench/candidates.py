"""Configurations for Hopper to try against each other: what the tuning table is chosen from."""

from dataclasses import replace
from typing import Any

from gluon_attn.forward.configs import ForwardConfig
from gluon_attn.forward.configs import label as label
from gluon_attn.forward.configs import orders_heads as orders_heads
from gluon_attn.forward.table import hopper_config


def both(*args: int, **options: Any) -> list[ForwardConfig]:
    return [hopper_config(*args, num_ctas=num_ctas, **options) for num_ctas in (1, 2)]


OF_192 = hopper_config(2, 128, 1, 2, 232, turns=True, early_exp=2, integer_max=True, stage_in_queries=True)

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
        OF_192,
        replace(OF_192, last_heads_longest_first=True),
        hopper_config(2, 64, 2, 2, 232, early_exp=2, integer_max=True),
        hopper_config(2, 64, 2, 2, 232, turns=True, early_exp=1, integer_max=True),
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
