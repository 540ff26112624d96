"""Configurations check themselves, and say what follows from them."""

import dataclasses
from typing import Any

import pytest

from gluon_attn import BlackwellConfig, ForwardConfig, HopperConfig
from gluon_attn.forward.table import blackwell_config

# ---------------------------------------------------------------------------------------------------------------------
# Hopper
# ---------------------------------------------------------------------------------------------------------------------

HOPPER_VALID: dict[str, Any] = {
    "softmax_roles": 2,
    "block_n": 128,
    "query_slots": 1,
    "kv_slots": 2,
    "turns": True,
    "stage_in_queries": False,
    "softmax_registers": 240,
    "load_registers": 24,
    "cga_layout": (),
}

# What is wrong, and how the message starts and goes on.
HOPPER_REFUSED = {
    "no softmax role": ({"softmax_roles": 0}, "self.softmax_roles=0 must be .*1.*4"),
    "five softmax roles": ({"softmax_roles": 5, "softmax_registers": 24}, "self.softmax_roles=5 must be .*1.*4"),
    "three quarters early": ({"early_exp": 3}, "self.early_exp=3 must be 0, 1 or 2"),
    "maxima as integers on two CTAs": (
        {"integer_max": True, "cga_layout": ((1, 0),)},
        "self.integer_max=True must be False with 2 CTAs",
    ),
    "block_n 32": ({"block_n": 32}, "self.block_n=32 must be 64 or 128"),
    "block_n 96": ({"block_n": 96}, "self.block_n=96 must be 64 or 128"),
    "block_n 256": ({"block_n": 256}, "self.block_n=256 must be 64 or 128"),
    "no query slot": ({"query_slots": 0}, "self.query_slots=0 must be at least 1"),
    "no K/V slot": ({"kv_slots": 0}, "self.kv_slots=0 must be at least 1"),
    "negative K/V slots": ({"kv_slots": -2}, "self.kv_slots=-2 must be at least 1"),
    "softmax registers 12": ({"softmax_registers": 12}, "self.softmax_registers=12 must be a multiple of 8"),
    "softmax registers 100": ({"softmax_registers": 100}, "self.softmax_registers=100 must be a multiple of 8"),
    "softmax registers 264": ({"softmax_registers": 264}, "self.softmax_registers=264 must be a multiple of 8"),
    "load registers 16": ({"load_registers": 16}, "self.load_registers=16 must be a multiple of 8"),
    "load registers 25": ({"load_registers": 25}, "self.load_registers=25 must be a multiple of 8"),
    "load registers 264": ({"load_registers": 264}, "self.load_registers=264 must be a multiple of 8"),
    "more registers than there are": (
        {"softmax_roles": 4, "softmax_registers": 128},
        "self.registers=68608 must be at most 65536",
    ),
    "registers to transpose 12": (
        {"transpose_registers": 12, "softmax_registers": 160},
        "self.transpose_registers=12 must be a multiple of 8 from 24 to 256, or 0",
    ),
    "more registers than there are, with a role to transpose": (
        {"transpose_registers": 56},
        "self.registers=71680 must be at most 65536",
    ),
    "sharded along D": ({"cga_layout": ((0, 1),)}, r"self.cga_layout=\(\(0, 1\),\) must be \(\).*\(\(1, 0\),\)"),
    "not sharded": ({"cga_layout": ((0, 0),)}, r"self.cga_layout=\(\(0, 0\),\) must be \(\).*\(\(1, 0\),\)"),
    "four CTAs": ({"cga_layout": ((1, 0), (2, 0))}, r"self.cga_layout=\(\(1, 0\), \(2, 0\)\) must be"),
}


@pytest.mark.parametrize(("change", "message"), HOPPER_REFUSED.values(), ids=HOPPER_REFUSED.keys())
def test_a_hopper_config_checks_itself(change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        HopperConfig(**(HOPPER_VALID | change))


def test_a_hopper_config_is_keyword_only_and_frozen():
    with pytest.raises(TypeError, match="positional"):
        HopperConfig(*HOPPER_VALID.values())  # type: ignore[call-arg]
    config = HopperConfig(**HOPPER_VALID)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.kv_slots = 3  # type: ignore[misc]
    assert hash(config) == hash(HopperConfig(**HOPPER_VALID))


def test_a_changed_copy_is_checked_too():
    with pytest.raises(ValueError, match=r"self.kv_slots=0 must be at least 1"):
        dataclasses.replace(HopperConfig(**HOPPER_VALID), kv_slots=0)


@pytest.mark.parametrize("softmax_roles", [1, 2, 3, 4])
@pytest.mark.parametrize(("cga_layout", "num_ctas"), [((), 1), (((1, 0),), 2)])
def test_rows_of_a_hopper_config(softmax_roles, cga_layout, num_ctas):
    fields = HOPPER_VALID | {"softmax_roles": softmax_roles, "softmax_registers": 96, "cga_layout": cga_layout}
    config = HopperConfig(**fields)
    assert config.num_ctas == num_ctas
    assert config.block_m == 64 * softmax_roles * num_ctas


# ---------------------------------------------------------------------------------------------------------------------
# Blackwell
# ---------------------------------------------------------------------------------------------------------------------

BLACKWELL_VALID: dict[str, Any] = {"block_n": 128, "kv_slots": 3, "softmax_registers": 192, "load_registers": 24}

# What is wrong, and how the message starts and goes on.
BLACKWELL_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "block_n 32": ({"block_n": 32}, "self.block_n=32 must be 64 or 128"),
    "block_n 256": ({"block_n": 256}, "self.block_n=256 must be 64 or 128"),
    "no K/V slot": ({"kv_slots": 0}, "self.kv_slots=0 must be at least 1"),
    "one K/V slot": ({"kv_slots": 1}, "self.kv_slots=1 must be at least 2"),
    "softmax registers 100": ({"softmax_registers": 100}, "self.softmax_registers=100 must be a multiple of 8"),
    "softmax registers 264": ({"softmax_registers": 264}, "self.softmax_registers=264 must be a multiple of 8"),
    "load registers 16": ({"load_registers": 16}, "self.load_registers=16 must be a multiple of 8"),
    "sharded along D": ({"cga_layout": ((0, 1),)}, r"self.cga_layout=\(\(0, 1\),\) must be \(\) for one CTA"),
    "not sharded": ({"cga_layout": ((0, 0),)}, r"self.cga_layout=\(\(0, 0\),\) must be .*along the rows"),
    "pairs in another order": (
        {"cga_layout": ((2, 0), (1, 0))},
        r"self.cga_layout=\(\(2, 0\), \(1, 0\)\) must be .*\(\(1, 0\), \(2, 0\)\) for four",
    ),
    "eight CTAs": ({"cga_layout": ((1, 0), (2, 0), (4, 0))}, r"self.cga_layout=.* must be .* for four"),
    "three load pieces": ({"load_pieces": 3}, "self.load_pieces=3 must be 1, 2 or 4"),
    "no load piece": ({"load_pieces": 0}, "self.load_pieces=0 must be 1, 2 or 4"),
    "eight exp pieces": ({"exp_pieces": 8}, "self.exp_pieces=8 must be 1, 2 or 4"),
    "fewer exp pieces than loads": (
        {"load_pieces": 4, "exp_pieces": 2},
        "self.exp_pieces=2 must be a multiple of self.load_pieces=4",
    ),
    "early P in one piece": ({"early_p": True}, "self.exp_pieces=1 must be 4 with early_p"),
    "early P in two pieces": ({"early_p": True, "exp_pieces": 2}, "self.exp_pieces=2 must be 4 with early_p"),
    "odd polynomial columns": ({"polynomial_columns": 3}, "self.polynomial_columns=3 must be even, 0 to 16"),
    "18 polynomial columns": ({"polynomial_columns": 18}, "self.polynomial_columns=18 must be even, 0 to 16"),
    "negative polynomial columns": ({"polynomial_columns": -2}, "self.polynomial_columns=-2 must be even, 0 to 16"),
    "negative threshold": ({"rescale_threshold": -1.0}, "self.rescale_threshold=-1.0 must be from 0 to 8"),
    "threshold 9": ({"rescale_threshold": 9.0}, "self.rescale_threshold=9.0 must be from 0 to 8"),
    "threshold NaN": ({"rescale_threshold": float("nan")}, "self.rescale_threshold=nan must be from 0 to 8"),
    "no registers left": (
        {"softmax_registers": 240},
        "self.softmax_registers=240 and self.load_registers=24 must leave the correction role 24 to 256 .*leave 8$",
    ),
    "too many registers left": (
        {"softmax_registers": 104},
        "self.softmax_registers=104 and self.load_registers=24 must leave .*they leave 280$",
    ),
}


@pytest.mark.parametrize(("change", "message"), BLACKWELL_REFUSED.values(), ids=BLACKWELL_REFUSED.keys())
def test_a_blackwell_config_checks_itself(change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        BlackwellConfig(**(BLACKWELL_VALID | change))


def test_a_blackwell_config_and_its_changed_copy():
    config = BlackwellConfig(**BLACKWELL_VALID)
    assert hash(config) == hash(BlackwellConfig(**BLACKWELL_VALID))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.kv_slots = 4  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"self.kv_slots=0 must be at least 1"):
        dataclasses.replace(config, kv_slots=0)
    with pytest.raises(TypeError, match="positional"):
        BlackwellConfig(*BLACKWELL_VALID.values())  # type: ignore[call-arg]


CGA_LAYOUTS = {1: (), 2: ((1, 0),), 4: ((1, 0), (2, 0))}


@pytest.mark.parametrize("num_ctas", [1, 2, 4])
def test_rows_and_shards_of_a_blackwell_config(num_ctas):
    config = blackwell_config(3, 192, num_ctas=num_ctas)
    assert (config.num_ctas, config.block_m, config.rows_per_query_tile) == (num_ctas, 256 * num_ctas, 128 * num_ctas)
    assert config.operand("q") == config.operand("out") == (128 * num_ctas, CGA_LAYOUTS[num_ctas])
    # Of K a pair's CTA has half of the rows, of V half of the columns; both pairs of four have the same.
    shards: dict[int, tuple[Any, Any]] = {
        1: ((), ()),
        2: (((1, 0),), ((0, 1),)),
        4: (((1, 0), (0, 0)), ((0, 1), (0, 0))),
    }
    assert (config.operand("k"), config.operand("v")) == tuple((128, layout) for layout in shards[num_ctas])


def test_max_in_load_is_for_sm_103_alone():
    assert blackwell_config(3, 192).archs == (100, 103)
    assert blackwell_config(3, 192, max_in_load=True).archs == (103,)
    assert HopperConfig(**HOPPER_VALID).archs == (90,)


def test_the_base_of_configs_is_no_config():
    fields: dict[str, Any] = {"block_n": 128, "kv_slots": 2, "softmax_registers": 192, "load_registers": 24}
    with pytest.raises(TypeError, match=r"^ForwardConfig: expected a HopperConfig or a BlackwellConfig"):
        ForwardConfig(**fields)  # type: ignore[abstract]  # which a type checker says too
