"""Blackwell's rows of the tuning table fit the card; tiles check themselves; the picker has an answer where one exists.

What the compiler makes of the rows is looked at in ../kernels/test_compiled_blackwell.py.
"""

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from gluon_attn import BlackwellTile, HopperTile
from gluon_attn.device import Device
from gluon_attn.forward.configs import TileConfig
from gluon_attn.forward.table import (
    BLACKWELL,
    HOPPER,
    TABLE,
    blackwell_tile,
    pick_tile,
    require_fits,
)
from gluon_attn.problem import Problem

# Of a B200 or B300, from CUDA's programming guide and the PTX manual.
SMEM_BYTES = 232448
REGISTERS = 65536
MAX_THREADS = 1024
MAX_REGISTERS_PER_THREAD = 255
TENSOR_MEMORY_COLUMNS = 512
TENSOR_MEMORY_LANES = 128

WARPGROUP = 128
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DEVICES = {"B200": Device.blackwell(), "B300": Device.blackwell_ultra()}
every_device = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES.keys())
every_row = pytest.mark.parametrize(
    "row",
    BLACKWELL,
    ids=[
        f"row {i}: D={r.padded_head_dim}, {r.tile.num_ctas} CTAs, {8 * r.element_bytes} bits"
        for i, r in enumerate(BLACKWELL)
    ],
)


def problem(**fields: Any) -> Problem:
    standard: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "batch": 2,
        "heads": 16,
        "kv_heads": 16,
        "q_len": 1024,
        "kv_len": 1024,
        "head_dim": 128,
        "causal": False,
        "scale": 0.1,
        "layout": "bhsd",
    }
    return Problem(**(standard | fields))


# ---------------------------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------------------------


@every_device
def test_there_is_a_row_for_every_kind_of_problem(device):
    kinds = {
        (r.padded_head_dim, r.causal, r.tile.num_ctas, r.element_bytes)
        for r in BLACKWELL
        if device.arch in r.tile.archs and r.min_kv_len == 1
    }
    assert kinds == set(itertools.product((64, 128), (False, True), (1, 2, 4), (1, 2)))


@every_row
def test_no_row_is_behind_another_that_always_comes_first(row):
    """The picker takes the first that fits: each row is that on some card."""
    asked = problem(
        head_dim=row.padded_head_dim,
        causal=row.causal,
        dtype=torch.bfloat16 if row.element_bytes == 2 else E4M3,
        kv_len=row.min_kv_len,
    )
    picked = [pick_tile(asked, device, row.tile.num_ctas) for device in DEVICES.values()]
    assert row.tile in picked


@every_row
def test_row_is_marked_as_not_measured(row):
    """There was no card to measure on: who has one names the result file, the card and the date."""
    assert (row.result_file, row.card, row.date) == (None, None, None)


def tile_bytes(tile: BlackwellTile, head_dim: int, element_bytes: int) -> int:
    """The tiles of one CTA: Q and O (16 bits) of two query tiles; K and V in one ring, in a pair half of each."""
    queries_and_results = 2 * 128 * head_dim * (element_bytes + 2)
    shares = 1 if tile.num_ctas == 1 else 2
    return queries_and_results + tile.kv_slots * tile.block_n // shares * head_dim * element_bytes


@every_row
def test_row_fits_shared_memory(row):
    tiles = tile_bytes(row.tile, row.padded_head_dim, row.element_bytes)
    assert tiles < row.tile.smem_bytes(row.padded_head_dim, row.element_bytes) <= SMEM_BYTES
    assert row.tile.smem_bytes(row.padded_head_dim, row.element_bytes) <= tiles + 2048


@every_row
def test_row_has_room_for_a_whole_step(row):
    """K and V of one block, and the next K while V is in use; in a pair's ring a slot is half as large."""
    assert row.tile.kv_slots >= 3


@every_row
def test_row_fits_the_registers(row):
    tile = row.tile
    # Two softmax warpgroups, correction, and one warpgroup in which load, mma and store have a warp each.
    per_thread = [tile.softmax_registers] * 2 + [tile.correction_registers, tile.load_registers]
    assert sum(WARPGROUP * registers for registers in per_thread) <= REGISTERS
    assert all(24 <= registers <= MAX_REGISTERS_PER_THREAD and registers % 8 == 0 for registers in per_thread)


@every_row
def test_row_fits_the_threads(row):
    assert WARPGROUP * row.tile.WARPGROUPS <= MAX_THREADS


@every_row
def test_row_fits_tensor_memory(row):
    tile = row.tile
    # Scores and output of each of two query tiles: fp32, a row to a lane.
    assert tile.tensor_memory_columns(row.padded_head_dim) == 2 * (tile.block_n + row.padded_head_dim)
    assert tile.tensor_memory_columns(row.padded_head_dim) <= TENSOR_MEMORY_COLUMNS
    assert tile.ROWS_PER_CTA == TENSOR_MEMORY_LANES


# ---------------------------------------------------------------------------------------------------------------------
# The picker
# ---------------------------------------------------------------------------------------------------------------------

LENGTHS = (1, 127, 128, 129, 1000, 4097, 1 << 20)


@every_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, E4M3, E5M2], ids=str)
def test_a_tile_for_every_problem(dtype, device):
    for head_dim, causal, q_len, kv_len, num_ctas in itertools.product(
        range(8 * 2 // dtype.itemsize, 129, 8 * 2 // dtype.itemsize), (False, True), LENGTHS, LENGTHS, (None, 1, 2, 4)
    ):
        asked = problem(dtype=dtype, causal=causal, q_len=q_len, kv_len=kv_len, head_dim=head_dim)
        tile = pick_tile(asked, device, num_ctas)
        assert isinstance(tile, BlackwellTile)
        assert num_ctas in (None, tile.num_ctas), asked
        require_fits(tile, asked, device)
        assert tile_bytes(tile, asked.padded_head_dim, dtype.itemsize) <= SMEM_BYTES, asked


@every_device
@pytest.mark.parametrize("head_dim", [136, 192, 256])
def test_no_tile_beyond_what_tensor_memory_holds(head_dim, device):
    with pytest.raises(NotImplementedError, match=rf"^q: head_dim {head_dim} on a Blackwell card .*at most 128"):
        pick_tile(problem(head_dim=head_dim), device)


def test_each_architecture_has_its_own_tiles():
    for device, kind in ((Device.hopper(), HopperTile), *((d, BlackwellTile) for d in DEVICES.values())):
        assert type(pick_tile(problem(), device)) is kind
    assert {type(r.tile) for r in HOPPER} == {HopperTile}
    assert {type(r.tile) for r in BLACKWELL} == {BlackwellTile}
    assert TABLE == HOPPER + BLACKWELL


@every_device
def test_a_card_with_less_shared_memory_gets_what_fits_or_an_error(device):
    with pytest.raises(ValueError, match="1024 bytes of shared memory"):
        pick_tile(problem(), dataclasses.replace(device, smem_bytes=1024))


def test_picking_is_pure(monkeypatch):
    asked = problem(causal=True, dtype=E4M3)
    first = pick_tile(asked, Device.blackwell())
    monkeypatch.setattr(torch.cuda, "get_device_properties", None)
    monkeypatch.setattr(torch.cuda, "is_available", None)
    assert pick_tile(asked, Device.blackwell()) == first
    assert pick_tile(asked, dataclasses.replace(Device.blackwell(), name="NVIDIA GB200")) == first


# ---------------------------------------------------------------------------------------------------------------------
# What a tile refuses
# ---------------------------------------------------------------------------------------------------------------------

VALID: dict[str, Any] = {"block_n": 128, "kv_slots": 3, "softmax_registers": 192, "load_registers": 24}

# What is wrong, and how the message starts and goes on.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
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


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_tile_checks_itself(change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        BlackwellTile(**(VALID | change))


def test_a_valid_tile_and_its_changed_copy():
    tile = BlackwellTile(**VALID)
    assert hash(tile) == hash(BlackwellTile(**VALID))
    with pytest.raises(dataclasses.FrozenInstanceError):
        tile.kv_slots = 4  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"self.kv_slots=0 must be at least 1"):
        dataclasses.replace(tile, kv_slots=0)
    with pytest.raises(TypeError, match="positional"):
        BlackwellTile(*VALID.values())  # type: ignore[call-arg]


CGA_LAYOUTS = {1: (), 2: ((1, 0),), 4: ((1, 0), (2, 0))}


@pytest.mark.parametrize("num_ctas", [1, 2, 4])
def test_rows_and_shards_of_a_tile(num_ctas):
    tile = blackwell_tile(3, 192, num_ctas=num_ctas)
    assert (tile.num_ctas, tile.block_m, tile.rows_per_lane) == (num_ctas, 256 * num_ctas, 128 * num_ctas)
    assert tile.operand("q") == tile.operand("o") == (128 * num_ctas, CGA_LAYOUTS[num_ctas])
    # Of K a pair's CTA has half of the rows, of V half of the columns; both pairs of four have the same.
    shards: dict[int, tuple[Any, Any]] = {
        1: ((), ()),
        2: (((1, 0),), ((0, 1),)),
        4: (((1, 0), (0, 0)), ((0, 1), (0, 0))),
    }
    assert (tile.operand("k"), tile.operand("v")) == tuple((128, layout) for layout in shards[num_ctas])


def test_max_in_load_is_for_sm_103_alone():
    assert blackwell_tile(3, 192).archs == (100, 103)
    assert blackwell_tile(3, 192, max_in_load=True).archs == (103,)
    tile: TileConfig = pick_tile(problem(head_dim=64), Device.hopper())
    assert tile.archs == (90,)
