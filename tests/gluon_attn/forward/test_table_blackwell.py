"""Blackwell's rows of the tuning table fit the card; the picker has an answer where one exists.

What the compiler makes of the rows is looked at in ../kernels/test_compiled_blackwell.py.
"""

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from gluon_attn import BlackwellConfig, HopperConfig
from gluon_attn.device import Device
from gluon_attn.forward.fits import require_fits
from gluon_attn.forward.table import BLACKWELL, HOPPER, TABLE, Row, pick_config
from tests.gluon_attn.problems import problem
from tests.slow import slow_if

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


def name_of(i: int, row: Row) -> str:
    return f"row {i}: D={row.padded_head_dim}, {row.config.num_ctas} CTAs, {8 * row.element_bytes} bits"


ROWS: dict[str, Any] = {name_of(i, row): row for i, row in enumerate(BLACKWELL)}


# ---------------------------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------------------------


@every_device
def test_there_is_a_row_for_every_kind_of_problem(device):
    kinds = {
        (r.padded_head_dim, r.causal, r.config.num_ctas, r.element_bytes)
        for r in BLACKWELL
        if device.arch in r.config.archs and r.min_kv_len == 1
    }
    assert kinds == set(itertools.product((64, 128), (False, True), (1, 2, 4), (1, 2)))


def test_no_row_is_behind_another_that_always_comes_first():
    """The picker takes the first that fits: each row is that on some card."""
    for name, row in ROWS.items():
        asked = problem(
            head_dim=row.padded_head_dim,
            causal=row.causal,
            dtype=torch.bfloat16 if row.element_bytes == 2 else E4M3,
            kv_len=row.min_kv_len,
        )
        assert row.config in [pick_config(asked, device, row.config.num_ctas) for device in DEVICES.values()], name


def test_rows_are_marked_as_not_measured():
    """There was no card to measure on: who has one names the result file, the card and the date."""
    for name, row in ROWS.items():
        assert (row.result_file, row.card, row.date) == (None, None, None), name


def tile_bytes(config: BlackwellConfig, head_dim: int, element_bytes: int) -> int:
    """The tiles of one CTA: Q and O (16 bits) of two query tiles; K and V in one ring, in a pair half of each."""
    queries_and_results = 2 * 128 * head_dim * (element_bytes + 2)
    shares = 1 if config.num_ctas == 1 else 2
    return queries_and_results + config.kv_slots * config.block_n // shares * head_dim * element_bytes


def test_rows_fit_shared_memory():
    for name, row in ROWS.items():
        tiles = tile_bytes(row.config, row.padded_head_dim, row.element_bytes)
        assert tiles < row.config.smem_bytes(row.padded_head_dim, row.element_bytes) <= SMEM_BYTES, name
        assert row.config.smem_bytes(row.padded_head_dim, row.element_bytes) <= tiles + 2048, name


def test_rows_have_room_for_a_whole_step():
    """K and V of one block, and the next K while V is in use; in a pair's ring a slot is half as large."""
    assert [name for name, row in ROWS.items() if row.config.kv_slots < 3] == []


def test_rows_fit_the_registers():
    for name, row in ROWS.items():
        config = row.config
        # Two softmax warpgroups, correction, and one warpgroup in which load, mma and store have a warp each.
        per_thread = [config.softmax_registers] * 2 + [config.correction_registers, config.load_registers]
        assert sum(WARPGROUP * registers for registers in per_thread) <= REGISTERS, name
        assert all(24 <= each <= MAX_REGISTERS_PER_THREAD and each % 8 == 0 for each in per_thread), name


def test_rows_fit_the_threads():
    assert [name for name, row in ROWS.items() if WARPGROUP * row.config.WARPGROUPS > MAX_THREADS] == []


def test_rows_fit_tensor_memory():
    for name, row in ROWS.items():
        config = row.config
        assert config.tensor_memory_columns(row.padded_head_dim) <= TENSOR_MEMORY_COLUMNS, name
        assert config.ROWS_PER_CTA == TENSOR_MEMORY_LANES, name


# ---------------------------------------------------------------------------------------------------------------------
# The picker
# ---------------------------------------------------------------------------------------------------------------------

LENGTHS = (1, 127, 128, 129, 1000, 4097, 1 << 20)


@every_device
@pytest.mark.parametrize(
    "dtype", slow_if(lambda dtype: dtype in (torch.float16, E5M2), [torch.float16, torch.bfloat16, E4M3, E5M2]), ids=str
)
@pytest.mark.slow_but("torch.bfloat16-B200", "torch.float8_e4m3fn-B300")
def test_a_config_for_every_problem(dtype, device):
    for head_dim, causal, q_len, kv_len, num_ctas in itertools.product(
        range(8 * 2 // dtype.itemsize, 129, 8 * 2 // dtype.itemsize), (False, True), LENGTHS, LENGTHS, (None, 1, 2, 4)
    ):
        asked = problem(dtype=dtype, causal=causal, q_len=q_len, kv_len=kv_len, head_dim=head_dim)
        config = pick_config(asked, device, num_ctas)
        assert isinstance(config, BlackwellConfig)
        assert num_ctas in (None, config.num_ctas), asked
        require_fits(config, asked, device)
        assert tile_bytes(config, asked.padded_head_dim, dtype.itemsize) <= SMEM_BYTES, asked


@every_device
@pytest.mark.parametrize("head_dim", [136, 192, 256])
def test_no_config_beyond_what_tensor_memory_holds(head_dim, device):
    with pytest.raises(NotImplementedError, match=rf"^v: head_dim {head_dim} on a Blackwell card .*at most 128"):
        pick_config(problem(head_dim=head_dim), device)


def test_each_architecture_has_its_own_configs():
    for device, kind in ((Device.hopper(), HopperConfig), *((d, BlackwellConfig) for d in DEVICES.values())):
        assert type(pick_config(problem(), device)) is kind
    assert {type(r.config) for r in HOPPER} == {HopperConfig}
    assert {type(r.config) for r in BLACKWELL} == {BlackwellConfig}
    assert TABLE == HOPPER + BLACKWELL


@every_device
def test_a_card_with_less_shared_memory_gets_what_fits_or_an_error(device):
    with pytest.raises(ValueError, match="1024 bytes of shared memory"):
        pick_config(problem(), dataclasses.replace(device, smem_bytes=1024))


def test_picking_is_pure(monkeypatch):
    asked = problem(causal=True, dtype=E4M3)
    first = pick_config(asked, Device.blackwell())
    monkeypatch.setattr(torch.cuda, "get_device_properties", None)
    monkeypatch.setattr(torch.cuda, "is_available", None)
    assert pick_config(asked, Device.blackwell()) == first
    assert pick_config(asked, dataclasses.replace(Device.blackwell(), name="NVIDIA GB200")) == first
