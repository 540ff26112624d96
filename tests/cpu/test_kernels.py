"""Every kernel of the tuning table compiles, and its machine code has what its speed rests on. No card is needed."""

import collections
import functools
import os
import re
import subprocess
import sys

import pytest
import torch

from channels.arrivals import filled_arrivals, freed_arrivals, handover_arrivals, hardware_arrivals, signal_arrivals
from gluon_attn.launch import compiled
from gluon_attn.resources import Resources, instructions, resources, steady_loops
from gluon_attn.tile import REGISTERS_PER_SM
from gluon_attn.tuning import HOPPER

IDS = [f"D={r.padded_head_dim}, {'causal' if r.causal else 'full'}, {r.tile.num_ctas} CTAs" for r in HOPPER]
every_row = pytest.mark.parametrize("row", HOPPER, ids=IDS)
WGMMA_DEPTH = 16  # columns of the left operand that one product instruction takes, at 16 bits


@functools.cache
def found(row) -> Resources:
    return resources(compiled(torch.bfloat16, row.padded_head_dim, row.causal, row.tile))


@every_row
def test_each_role_has_a_steady_loop_for_each_kind_of_block(row):
    kinds = 2 if row.causal else 1  # masked and unmasked blocks
    assert len(found(row).loops) == row.tile.softmax_roles * kinds


@every_row
def test_products_are_not_serialised(row):
    # One wait for QKᵀ and one for PV. An assembler that serialises the products waits after each instruction of them.
    per_step = (row.padded_head_dim + row.tile.block_n) // WGMMA_DEPTH
    assert {(loop.products, loop.waits) for loop in found(row).loops} == {(per_step, 2)}


@every_row
def test_the_softmax_stays_beside_the_product(row):
    for loop in found(row).loops:
        assert loop.exp2 >= row.tile.block_n // 2  # a thread has two rows, a quad shares them
        assert loop.hidden_exp2 == loop.exp2


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


@every_row
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
    assert (loop.products, loop.waits, loop.spills, loop.exp2, loop.hidden_exp2) == (2, 2, 1, 1, 0)


def test_the_main_command_says_what_it_did():
    if torch.cuda.is_available():
        pytest.skip("this machine has a card: the command runs attention on it, as tests/gpu does")
    run = subprocess.run([sys.executable, "-m", "gluon_attn"], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert "Nothing ran on a card." in lines
    executed = [line.split() for line in lines if re.match(r"(full|causal) +[12] ", line)]
    assert [(row[0], row[1], row[5], row[6]) for row in executed] == [
        (mask, ctas, "100", "0") for mask in ("full", "causal") for ctas in "12"
    ]
    assert len([line for line in lines if line.startswith(("64", "128", "256"))]) == len(HOPPER)
    assert not run.stderr


@every_row
def test_barriers_are_initialised_with_the_derived_counts(row):
    """What channels/arrivals.py says of each channel is what the compiled kernel counts, barrier by barrier."""
    ptx = compiled(torch.bfloat16, row.padded_head_dim, row.causal, row.tile).asm["ptx"]
    counts = collections.Counter(int(n) for n in re.findall(r"mbarrier\.init\S*\s+\[[^\]]*\],\s*(\d+)", ptx))
    roles, shared = row.tile.softmax_roles, row.tile.num_ctas == 2
    slots, kv_slots = row.tile.query_slots + 2 * row.tile.kv_slots, 2 * row.tile.kv_slots
    expected = collections.Counter({hardware_arrivals(filled_arrivals(filling_roles=1), two_ctas=False): slots})
    expected[hardware_arrivals(freed_arrivals(consuming_roles=roles), two_ctas=False)] += slots
    expected[hardware_arrivals(signal_arrivals(sending_roles=1), two_ctas=False)] += roles
    if shared:
        handover = handover_arrivals(loading_roles=1, num_ctas=2, multicast=True)
        expected[hardware_arrivals(handover, two_ctas=True)] += kv_slots
    assert counts == expected


SCRATCH = """
import torch
from gluon_attn.launch import compiled
from gluon_attn.tuning import HOPPER
row = HOPPER[0]
print("scratch", compiled(torch.bfloat16, row.padded_head_dim, row.causal, row.tile).metadata.profile_scratch_size)
"""


@pytest.mark.parametrize("mode", ["consan", ""])
def test_the_sanitizer_reaches_the_kernel(mode):
    """Instrumented, a kernel keeps what it watches in global memory: with the sanitizer on, and only then."""
    environment = os.environ | {"TRITON_INSTRUMENTATION_MODE": mode}
    run = subprocess.run([sys.executable, "-c", SCRATCH], env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    (size,) = re.findall(r"^scratch (\d+)$", run.stdout, re.MULTILINE)
    assert (int(size) > 0) == (mode == "consan")
