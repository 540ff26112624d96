"""What the compiler makes of Blackwell's rows: memory, threads, registers, barriers. No card is needed.

A compile costs five to twenty seconds, so one row stands for those that differ from it in the mask and the
architecture alone; which of them it is changes from one to the next, so that each mask and architecture comes up.
"""

import collections
import functools
import itertools
import re
from typing import Any

import pytest
import torch

from bench.precompile import precompile
from channels.arrivals import commit_arrivals, filled_arrivals, freed_arrivals, hardware_arrivals, signal_arrivals
from gluon_attn.forward.configs import REGISTERS_PER_SM, BlackwellConfig, ForwardConfig
from gluon_attn.forward.launch import compiled
from gluon_attn.forward.table import BLACKWELL, Row, blackwell_config
from gluon_attn.kernels.blackwell.forward.wires import ITEM_SLOTS, ROLES
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.resources import first_role_registers
from gluon_attn.runtime.compat import CompiledKernel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # all are compiled for the first test

QUERY_TILES = 2  # query tiles of a CTA


def alike(row: Row) -> tuple[int, int, int]:
    return row.padded_head_dim, row.config.num_ctas, row.element_bytes


GROUPS = {key: list(rows) for key, rows in itertools.groupby(sorted(BLACKWELL, key=alike), key=alike)}
CHOSEN = [rows[i % len(rows)] for i, rows in enumerate(GROUPS.values())]
# The wiring that no row has: items from the hardware, and neither turns nor an early P.
DYNAMIC = [Row(64, False, blackwell_config(6, 192, num_ctas=n, dynamic=True)) for n in (1, 2, 4)]

Job = tuple[torch.dtype, int, int, Mask, ForwardConfig]


def job(row: Row) -> Job:
    dtype = torch.bfloat16 if row.element_bytes == 2 else torch.float8_e4m3fn
    return dtype, *row.head_dims, row.mask, row.config


def name_of(row: Row) -> str:
    kind = f"{8 * row.element_bytes} bits, {'causal' if row.causal else 'full'}"
    dynamic = ", dynamic" if row.config.one_program_per_item else ""
    return f"D={row.padded_head_dim}, {row.config.num_ctas} CTAs, {kind}, sm_{row.config.archs[0]}{dynamic}"


every_kernel = pytest.mark.parametrize("row", CHOSEN + DYNAMIC, ids=map(name_of, CHOSEN + DYNAMIC))


def compiled_as(job: Job) -> CompiledKernel:
    dtype, head_dim, head_dim_v, mask, config = job
    return compiled(dtype, head_dim, mask, config, padded_head_dim_v=head_dim_v)


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead():
    """All kernels, on all cores, into the cache on disk."""
    for _ in precompile(map(job, CHOSEN + DYNAMIC)):
        pass


@functools.cache
def kernel(row: Row) -> Any:
    return compiled_as(job(row))


def test_the_chosen_rows_stand_for_all():
    """What the tests below look at does not depend on what the others of a group differ in."""
    assert len(GROUPS) == 12
    for rows in GROUPS.values():
        assert len({(r.config.archs[0], r.causal) for r in rows}) == len(rows) == 4
        facts = {(wiring(r), r.config.smem_bytes(r.padded_head_dim, r.element_bytes)) for r in rows}
        assert len(facts) == 1
    assert {(r.config.archs[0], r.causal) for r in CHOSEN} == set(itertools.product((100, 103), (False, True)))


def wiring(row: Row) -> tuple[Any, ...]:
    config = row.config
    assert isinstance(config, BlackwellConfig)
    return config.kv_slots, config.block_n, config.early_p, config.exp_turns, config.dynamic, config.softmax_registers


@every_kernel
def test_shared_memory_is_what_the_config_says(row):
    taken, estimate = kernel(row).metadata.shared, row.config.smem_bytes(row.padded_head_dim, row.element_bytes)
    assert taken <= estimate <= taken + 2048


@every_kernel
def test_tensor_memory_is_what_the_config_says(row):
    columns = row.config.tensor_memory_columns(row.padded_head_dim)
    # It is handed out in powers of two.
    assert columns <= kernel(row).metadata.tmem_size == 1 << (columns - 1).bit_length() <= 512


@every_kernel
def test_threads_and_registers_are_what_the_config_says(row):
    config, ptx = row.config, kernel(row).asm["ptx"]
    assert kernel(row).metadata.num_warps * 32 == 128 * config.WARPGROUPS <= 1024
    assert f".reqntid {128 * config.WARPGROUPS}" in ptx
    assert first_role_registers(ptx) == config.correction_registers
    asked = {int(n) for n in re.findall(r"setmaxnreg\.\w+\S*\s+(\d+)", ptx)}
    assert {config.softmax_registers, config.load_registers} <= asked
    assert (
        128 * (2 * config.softmax_registers + config.correction_registers + config.load_registers) <= REGISTERS_PER_SM
    )


@every_kernel
def test_the_cluster_is_what_the_config_says(row):
    found = re.findall(r"\.reqnctapercluster (\d+)", kernel(row).asm["ptx"])
    assert found == ([] if row.config.num_ctas == 1 else [str(row.config.num_ctas)])


@every_kernel
def test_barriers_are_initialised_with_the_derived_counts(row):
    """What channels/arrivals.py says of each channel is what the compiled kernel counts, barrier by barrier."""
    config, num_ctas = row.config, row.config.num_ctas
    pair = num_ctas > 1  # its lead issues the products of both, and waits for both
    expected: collections.Counter[int] = collections.Counter()

    def barriers(number: int, count: int, *, of_pair: bool = False) -> None:
        expected[hardware_arrivals(count, two_ctas=of_pair)] += number

    # queries and keys_values: filled for the products of the pair, freed by their commits.
    barriers(QUERY_TILES + config.kv_slots, filled_arrivals(filling_roles=1), of_pair=pair)
    barriers(QUERY_TILES, commit_arrivals(num_ctas, pair, multicast=False))
    barriers(config.kv_slots, commit_arrivals(num_ctas, pair, multicast=num_ctas > 2))
    # scores and outputs: filled by products, freed in both CTAs of the pair.
    barriers(2 * QUERY_TILES, commit_arrivals(num_ctas, pair, multicast=False))
    barriers(2 * QUERY_TILES, freed_arrivals(consuming_roles=1), of_pair=pair)
    # alphas and statistics within a CTA; statistics_read, and tails if there are any, to the lead.
    barriers(2 * QUERY_TILES, signal_arrivals(sending_roles=1))
    barriers((2 if config.early_p else 1) * QUERY_TILES, signal_arrivals(sending_roles=1), of_pair=pair)
    # results.
    barriers(QUERY_TILES, filled_arrivals(filling_roles=1))
    barriers(QUERY_TILES, freed_arrivals(consuming_roles=1))
    if config.exp_turns:
        barriers(QUERY_TILES, signal_arrivals(sending_roles=1))
    if config.dynamic:  # freed by every role of the cluster, on one barrier of it
        barriers(ITEM_SLOTS.value, filled_arrivals(filling_roles=1))
        barriers(ITEM_SLOTS.value, num_ctas * freed_arrivals(consuming_roles=ROLES.value))
    counts = collections.Counter(
        int(n) for n in re.findall(r"mbarrier\.init\S*\s+\[[^\]]*\],\s*(\d+)", kernel(row).asm["ptx"])
    )
    assert counts == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2], ids=str)
def test_the_other_dtypes_compile_to_the_same_products(dtype):
    """Of fp16 and e5m2 one kernel each; their products are as many as those of bf16 and e4m3."""
    row = next(r for r in CHOSEN if alike(r) == (64, 1, dtype.itemsize))
    other = compiled_as((dtype, *job(row)[1:]))
    products = [k.asm["ptx"].count("tcgen05.mma.") for k in (kernel(row), other)]
    assert products[0] == products[1] > 0
    assert other.metadata.shared == kernel(row).metadata.shared
