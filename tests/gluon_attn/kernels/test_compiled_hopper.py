"""Every kernel of the tuning table compiles, and its machine code has what its speed rests on. No card is needed."""

import collections
import functools
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from channels.arrivals import filled_arrivals, freed_arrivals, handover_arrivals, hardware_arrivals, signal_arrivals
from gluon_attn.forward.configs import REGISTERS_PER_SM, HopperTile
from gluon_attn.forward.launch import compiled, compiled_transpose
from gluon_attn.forward.table import HOPPER, Row
from gluon_attn.resources import Resources, count, first_role_registers, instructions, resources, steady_loops
from gluon_attn.runtime.assembler import disassemble
from tests.slow import slow_if


def name_of(row: Row) -> str:
    assert isinstance(row.tile, HopperTile)
    mask = "causal" if row.causal else "full"
    return f"D={row.padded_head_dim}, {mask}, {row.tile.softmax_roles} roles, {row.tile.num_ctas} CTAs"


def on_two_ctas(row: Row) -> bool:
    return row.tile.num_ctas == 2


SIXTEEN_BITS = [row for row in HOPPER if row.element_bytes == 2]
FP8 = [row for row in HOPPER if row.element_bytes == 1]  # some have a role more
every_row = pytest.mark.parametrize("row", slow_if(on_two_ctas, SIXTEEN_BITS), ids=map(name_of, SIXTEEN_BITS))
fp8_rows = pytest.mark.parametrize("row", slow_if(on_two_ctas, FP8), ids=map(name_of, FP8))
WGMMA_DEPTH = 16  # columns of the left operand that one product instruction takes, at 16 bits


@functools.cache
def found(row) -> Resources:
    return resources(compiled(torch.bfloat16, row.padded_head_dim, row.causal, row.tile))


@every_row
def test_each_role_has_a_steady_loop_for_each_kind_of_block(row):
    kinds = 2 if row.causal else 1  # masked and unmasked blocks
    kinds += row.tile.integer_max  # unmasked ones twice
    assert len(found(row).loops) == row.tile.softmax_roles * kinds


INTEGER_MAX = [row for row in SIXTEEN_BITS if isinstance(row.tile, HopperTile) and row.tile.integer_max]
assert len(INTEGER_MAX) == 6


@pytest.mark.parametrize("row", INTEGER_MAX, ids=map(name_of, INTEGER_MAX))
def test_maxima_as_integers_are_fewer_instructions(row):
    # Three to an instruction, or nothing is gained: of 64 scores of a thread, in 128 keys, 30 fewer than as floats.
    kinds = len(found(row).loops) // row.tile.softmax_roles
    loops = found(row).loops
    as_integers, as_floats = loops[kinds - 2 :: kinds], loops[kinds - 1 :: kinds]
    for integers, floats in zip(as_integers, as_floats, strict=True):
        assert abs(floats.instructions - integers.instructions - row.tile.block_n * 30 // 128) <= 2


@every_row
def test_products_are_not_serialised(row):
    # One wait for QKᵀ and one for PV. An assembler that serialises the products waits after each instruction of them.
    per_step = (row.padded_head_dim + row.tile.block_n) // WGMMA_DEPTH
    assert {(loop.products, loop.waits) for loop in found(row).loops} == {(per_step, 2)}


@every_row
def test_each_score_has_one_exponential(row):
    # A thread has two rows, which a quad shares, and rescales each by one exponential more.
    assert {loop.exp2 for loop in found(row).loops} == {row.tile.block_n // 2 + 2}


@every_row
def test_the_product_is_waited_for_between_the_exponentials(row):
    # After all of them it cost 3 to 15 %. The assembler moves a few across, in a masked loop of a single role four; at
    # D=256, many where nothing keeps it.
    if row.padded_head_dim < 256:
        early = row.tile.early_exp * row.tile.block_n // 8  # a thread has two of a quad's rows
        moved = 7 if row.tile.early_exp else 4
        assert all(early <= loop.early_exp2 <= early + moved for loop in found(row).loops)


CAUSAL = [row for row in SIXTEEN_BITS if row.causal and isinstance(row.tile, HopperTile)]


@pytest.mark.parametrize("row", slow_if(on_two_ctas, CAUSAL), ids=map(name_of, CAUSAL))
def test_two_rows_of_a_thread_share_the_comparisons_of_the_mask(row):
    # Of 64 scores of a thread, in 128 keys, 64 selections and 34 comparisons; not shared, there would be 30 more.
    kinds = len(found(row).loops) // row.tile.softmax_roles
    loops = found(row).loops
    for masked, unmasked in zip(loops[::kinds], loops[kinds - 1 :: kinds], strict=True):
        assert masked.instructions - unmasked.instructions <= row.tile.block_n * 9 // 10


@every_row
def test_steady_loops_do_not_spill(row):
    assert [loop.spills for loop in found(row).loops] == [0] * len(found(row).loops)


@every_row
def test_the_tile_says_what_the_kernel_takes(row):
    smem, registers = found(row).smem_bytes, row.tile.softmax_registers
    estimate = row.tile.smem_bytes(row.padded_head_dim, 2)
    assert smem <= estimate <= smem + 2048
    assert found(row).first_role_registers >= registers
    rest = (row.tile.softmax_roles - 1) * registers + row.tile.load_registers
    assert 128 * (found(row).first_role_registers + rest) <= REGISTERS_PER_SM


# fp16 differs from bf16 by one instruction: the loops of some rows stand for all.
MUCH_WORK = [row for row in SIXTEEN_BITS if row.tile.num_ctas == 1 and not row.one_round]


@pytest.mark.slow
@pytest.mark.parametrize("row", MUCH_WORK, ids=map(name_of, MUCH_WORK))
def test_fp16_compiles_to_the_same_loops(row):
    fp16 = resources(compiled(torch.float16, row.padded_head_dim, row.causal, row.tile))
    assert [loop.products for loop in fp16.loops] == [loop.products for loop in found(row).loops]


def test_a_serialised_loop_is_seen():
    listing = """
    .L_x_1:
        /*0000*/ HGMMA.64x128x16.F32.BF16 R24, gdesc[UR40], R24, gsb0 ;
        /*0010*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0020*/ HGMMA.64x128x16.F32.BF16 R24, gdesc[UR36], R24, gsb0 ;
        /*0030*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0040*/ MUFU.EX2 R3, R3 ;
        /*0050*/ STL [R1], R3 ;
        /*0060*/ @P1 BRA `(.L_x_1) ;
        /*0070*/ BRA `(.L_x_1) ;
    """
    (loop,) = steady_loops(*instructions(listing))
    assert (loop.products, loop.waits, loop.spills, loop.exp2, loop.early_exp2) == (2, 2, 1, 1, 0)


def barrier_counts(ptx: str) -> collections.Counter[int]:
    return collections.Counter(int(n) for n in re.findall(r"mbarrier\.init\S*\s+\[[^\]]*\],\s*(\d+)", ptx))


def expected_counts(row: Row) -> collections.Counter[int]:
    """By channels/arrivals.py, channel by channel."""
    expected: collections.Counter[int] = collections.Counter()
    tile, shared = row.tile, row.tile.num_ctas == 2
    assert isinstance(tile, HopperTile)

    def ring(slots: int, consumers: int, *, multicast: bool = False) -> None:
        expected[hardware_arrivals(filled_arrivals(filling_roles=1), two_ctas=False)] += slots
        expected[hardware_arrivals(freed_arrivals(consuming_roles=consumers), two_ctas=False)] += slots
        if multicast:
            expected[hardware_arrivals(handover_arrivals(1, num_ctas=2, multicast=True), two_ctas=True)] += slots

    roles = tile.softmax_roles
    ring(tile.query_slots, roles)
    ring(tile.kv_slots, roles, multicast=shared)  # keys
    if tile.transpose_registers:
        ring(tile.kv_slots, 1, multicast=shared)  # values as they are loaded
        ring(tile.kv_slots, roles)  # and transposed, each CTA's its own
    else:
        ring(tile.kv_slots, roles, multicast=shared)
    expected[hardware_arrivals(signal_arrivals(sending_roles=1), two_ctas=False)] += roles  # turns
    return expected


@every_row
def test_barriers_are_initialised_with_the_derived_counts(row):
    """What channels/arrivals.py says of each channel is what the compiled kernel counts, barrier by barrier."""
    ptx = compiled(torch.bfloat16, row.padded_head_dim, row.causal, row.tile).asm["ptx"]
    assert barrier_counts(ptx) == expected_counts(row)


@functools.cache
def in_fp8(row: Row) -> Any:
    return compiled(torch.float8_e4m3fn, row.padded_head_dim, row.causal, row.tile)


@fp8_rows
def test_fp8_has_what_the_tile_and_the_channels_say(row):
    kernel = in_fp8(row)
    estimate = row.tile.smem_bytes(row.padded_head_dim, 1)
    assert kernel.metadata.shared <= estimate <= kernel.metadata.shared + 2048
    assert barrier_counts(kernel.asm["ptx"]) == expected_counts(row)
    asked = {int(n) for n in re.findall(r"setmaxnreg\.\w+\S*\s+(\d+)", kernel.asm["ptx"])}
    assert {row.tile.load_registers, row.tile.transpose_registers} - {0} <= asked
    # A launch of 384 threads begins with 168 registers each, 512 short of all there are: the first role pays, if all
    # are asked for.
    short = 8 if kernel.metadata.num_warps == 12 else 0
    assert first_role_registers(kernel.asm["ptx"]) >= row.tile.softmax_registers - short
    assert kernel.metadata.num_warps <= 32


@fp8_rows
def test_fp8_steps_are_neither_serialised_nor_spilled(row):
    loops = resources(in_fp8(row)).loops
    assert len(loops) == row.tile.softmax_roles * (2 if row.causal else 1)
    per_step = (row.padded_head_dim + row.tile.block_n) // (2 * WGMMA_DEPTH)
    assert {(loop.products, loop.waits, loop.spills) for loop in loops} == {(per_step, 2, 0)}


@fp8_rows
def test_fp8_starts_before_values_are_transposed_and_waits_for_them(row):
    kernel, before = in_fp8(row), row.tile.transposes_before(1)
    assert kernel.metadata.launch_pdl == before
    assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == before


@every_row
def test_16_bits_start_after_what_is_before(row):
    kernel = compiled(torch.bfloat16, row.padded_head_dim, row.causal, row.tile)
    assert not kernel.metadata.launch_pdl
    assert "griddepcontrol" not in kernel.asm["ptx"]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_kernel_that_transposes_values(head_dim):
    """One slot and the transposed tile; both barriers expect one arrive; nothing is spilled."""
    kernel = compiled_transpose(torch.float8_e5m2, head_dim)
    tiles = 2 * 128 * head_dim
    assert tiles < kernel.metadata.shared <= tiles + 1024
    assert barrier_counts(kernel.asm["ptx"]) == {1: 2}
    assert kernel.asm["ptx"].count("griddepcontrol.launch_dependents") == 1
    assert not kernel.metadata.launch_pdl
    code, _ = instructions(disassemble(kernel))
    assert [count(code, name) for name in ("UTMALDG", "UTMASTG", "STL", "LDL")] == [1, 1, 0, 0]


SCRATCH = """
import torch
from gluon_attn.forward.launch import compiled
from gluon_attn.forward.table import HOPPER
row = HOPPER[0]
print("scratch", compiled(torch.bfloat16, row.padded_head_dim, row.causal, row.tile).metadata.profile_scratch_size)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["consan", ""])
def test_the_sanitizer_reaches_the_kernel(mode):
    """Instrumented, a kernel keeps what it watches in global memory: with the sanitizer on, and only then."""
    environment = os.environ | {"TRITON_INSTRUMENTATION_MODE": mode}
    run = subprocess.run([sys.executable, "-c", SCRATCH], env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    (size,) = re.findall(r"^scratch (\d+)$", run.stdout, re.MULTILINE)
    assert (int(size) > 0) == (mode == "consan")
