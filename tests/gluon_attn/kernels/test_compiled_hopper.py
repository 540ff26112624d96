"""Every kernel of the tuning table compiles, and its machine code has what its speed rests on. No card is needed."""

import collections
import functools
import os
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from channels.arrivals import filled_arrivals, freed_arrivals, handover_arrivals, hardware_arrivals, signal_arrivals
from gluon_attn.backward.launch import Choices, builds_of
from gluon_attn.backward.table import HOPPER as BACKWARD
from gluon_attn.forward.configs import REGISTERS_PER_SM, HopperConfig
from gluon_attn.forward.launch import compiled, compiled_transpose
from gluon_attn.forward.table import HOPPER, Row
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.resources import Resources, count, first_role_registers, instructions, resources
from gluon_attn.runtime.assembler import disassemble
from gluon_attn.tuning import kernels_of_cards
from tests.slow import slow_if


def name_of(row: Row) -> str:
    assert isinstance(row.config, HopperConfig)
    mask, bits = "causal" if row.causal else "full", 8 * row.element_bytes
    return f"D={row.padded_head_dim}, {mask}, {bits} bits, {row.config.softmax_roles} roles, {row.config.num_ctas} CTAs"


def first(**facts: Any) -> Row:
    """Of the table's rows for one CTA the first with these facts."""
    for row in HOPPER:
        if row.config.num_ctas == 1 and all(
            getattr(row, name, getattr(row.config, name, None)) == facts[name] for name in facts
        ):
            return row
    raise LookupError(f"no row of the table has {facts}")


# The assembler takes about ten seconds for each row, so a few kinds of loop stand for all in `make test`.
QUICK = (
    first(padded_head_dim=128, causal=True, element_bytes=2, integer_max=True),
    first(padded_head_dim=64, causal=True, element_bytes=1, transpose_registers=56),
)


def rows_of(element_bytes: int) -> pytest.MarkDecorator:
    rows = [row for row in (*HOPPER, *kernels_of_cards().values()) if row.element_bytes == element_bytes]
    return pytest.mark.parametrize("row", slow_if(lambda row: row not in QUICK, rows), ids=map(name_of, rows))


rows_of_16_bits, rows_of_fp8 = rows_of(2), rows_of(1)
SIXTEEN_BITS = [row for row in HOPPER if row.element_bytes == 2]
WGMMA_DEPTH = 16  # columns of the left operand that one product instruction takes, at 16 bits


@functools.cache
def kernel(row: Row, dtype: torch.dtype | None = None) -> Any:
    dtype = dtype or (torch.bfloat16 if row.element_bytes == 2 else torch.float8_e4m3fn)
    return compiled(dtype, row.padded_head_dim, row.mask, row.config)


@functools.cache
def found(row: Row) -> Resources:
    return resources(kernel(row))


@rows_of_16_bits
def test_steady_loops_of_16_bits(row):
    """Each role has a loop for each kind of block, and in it what its speed rests on."""
    config, loops = row.config, found(row).loops
    kinds = 2 if row.causal else 1  # masked and unmasked blocks
    kinds += config.integer_max  # unmasked ones twice
    assert len(loops) == config.softmax_roles * kinds
    # One wait for QKᵀ and one for PV. An assembler that serialises the products waits after each instruction of them.
    per_step = (row.padded_head_dim + config.block_n) // WGMMA_DEPTH
    assert {(loop.products, loop.waits) for loop in loops} == {(per_step, 2)}, "products are serialised"
    assert {loop.spills for loop in loops} == {0}
    # A thread has two rows, which a quad shares, and rescales each by one exponential more.
    assert {loop.exp2 for loop in loops} == {config.block_n // 2 + 2}, "each score has one exponential"
    # The product is waited for between the exponentials: after all of them it cost 3 to 15 %. The assembler moves a few
    # across, in a masked loop of a single role four; at D=256, many where nothing keeps it.
    if row.padded_head_dim < 256:
        early = config.early_exp * config.block_n // 8  # a thread has two of a quad's rows
        moved = 9 if config.early_exp else 4
        assert all(early <= loop.early_exp2 <= early + moved for loop in loops), "where the product is waited for"
    if row.causal:
        # A thread's two rows share the comparisons of the mask: of 64 scores of a thread, in 128 keys, 64 selections
        # and 34 comparisons; not shared, there would be 30 more.
        for masked, unmasked in zip(loops[::kinds], loops[kinds - 1 :: kinds], strict=True):
            assert masked.instructions - unmasked.instructions <= config.block_n * 9 // 10, "the mask's comparisons"
    if config.integer_max:
        # Three to an instruction, or nothing is gained: of 64 scores of a thread, in 128 keys, 30 fewer than as floats.
        as_integers, as_floats = loops[kinds - 2 :: kinds], loops[kinds - 1 :: kinds]
        for integers, floats in zip(as_integers, as_floats, strict=True):
            fewer = floats.instructions - integers.instructions
            assert abs(fewer - config.block_n * 30 // 128) <= 2, "maxima as integers"


@rows_of_16_bits
def test_resources_of_16_bits(row):
    """Shared memory and registers are what the config says, arrivals what channels/arrivals.py does."""
    estimate = row.config.smem_bytes(row.padded_head_dim, 2)
    assert found(row).smem_bytes <= estimate <= found(row).smem_bytes + 2048
    registers = row.config.softmax_registers
    assert found(row).first_role_registers >= registers - short(row)
    rest = (row.config.softmax_roles - 1) * registers + row.config.load_registers
    assert 128 * (found(row).first_role_registers + rest) <= REGISTERS_PER_SM
    assert barrier_counts(kernel(row).asm["ptx"]) == expected_counts(row)
    # It starts after what is before in the stream.
    assert not kernel(row).metadata.launch_pdl
    assert "griddepcontrol" not in kernel(row).asm["ptx"]


# fp16 differs from bf16 by one instruction: the loops of some rows stand for all.
MUCH_WORK = [row for row in SIXTEEN_BITS if row.config.num_ctas == 1 and not row.one_round]


@pytest.mark.slow
@pytest.mark.parametrize("row", MUCH_WORK, ids=map(name_of, MUCH_WORK))
def test_fp16_compiles_to_the_same_loops(row):
    fp16 = resources(kernel(row, torch.float16))
    assert [loop.products for loop in fp16.loops] == [loop.products for loop in found(row).loops]


def barrier_counts(ptx: str) -> collections.Counter[int]:
    return collections.Counter(int(n) for n in re.findall(r"mbarrier\.init\S*\s+\[[^\]]*\],\s*(\d+)", ptx))


def expected_counts(row: Row) -> collections.Counter[int]:
    """By channels/arrivals.py, channel by channel."""
    expected: collections.Counter[int] = collections.Counter()
    config, shared = row.config, row.config.num_ctas == 2
    assert isinstance(config, HopperConfig)

    def ring(slots: int, consumers: int, *, multicast: bool = False) -> None:
        expected[hardware_arrivals(filled_arrivals(filling_roles=1), two_ctas=False)] += slots
        expected[hardware_arrivals(freed_arrivals(consuming_roles=consumers), two_ctas=False)] += slots
        if multicast:
            expected[hardware_arrivals(handover_arrivals(1, num_ctas=2, multicast=True), two_ctas=True)] += slots

    roles = config.softmax_roles
    ring(config.query_slots, roles)
    ring(config.kv_slots, roles, multicast=shared)  # keys
    if config.transpose_registers:
        ring(config.kv_slots, 1, multicast=shared)  # values as they are loaded
        ring(config.kv_slots, roles)  # and transposed, each CTA's its own
    else:
        ring(config.kv_slots, roles, multicast=shared)
    expected[hardware_arrivals(signal_arrivals(sending_roles=1), two_ctas=False)] += roles  # turns
    return expected


def short(row: Row) -> int:
    """Of the first role's registers, what it does not get. A launch of 384 threads begins with 168 each, 1024 in all
    short of what there are: this role pays, if all are asked for."""
    assert isinstance(row.config, HopperConfig)
    asked = row.config.softmax_roles * row.config.softmax_registers + row.config.load_registers
    asked += row.config.transpose_registers
    return 8 if kernel(row).metadata.num_warps == 12 and 128 * asked > 384 * 168 else 0


@rows_of_fp8
def test_resources_of_fp8(row):
    compiled_row, ptx = kernel(row), kernel(row).asm["ptx"]
    estimate = row.config.smem_bytes(row.padded_head_dim, 1)
    assert compiled_row.metadata.shared <= estimate <= compiled_row.metadata.shared + 2048
    assert barrier_counts(ptx) == expected_counts(row)
    asked = {int(n) for n in re.findall(r"setmaxnreg\.\w+\S*\s+(\d+)", ptx)}
    assert {row.config.load_registers, row.config.transpose_registers} - {0} <= asked
    assert first_role_registers(ptx) >= row.config.softmax_registers - short(row)
    assert compiled_row.metadata.num_warps <= 32
    # It starts before the kernel that transposes values has ended, and waits for it.
    before = row.config.transposes_before(1)
    assert compiled_row.metadata.launch_pdl == before
    assert ("griddepcontrol.wait" in ptx) == before


@rows_of_fp8
def test_steady_loops_of_fp8(row):
    loops = found(row).loops
    assert len(loops) == row.config.softmax_roles * (2 if row.causal else 1)
    per_step = (row.padded_head_dim + row.config.block_n) // (2 * WGMMA_DEPTH)
    assert {(loop.products, loop.waits, loop.spills) for loop in loops} == {(per_step, 2, 0)}


def test_there_are_rows_of_each_kind():
    """What only some rows are asked above is asked of some."""
    configs = [row.config for row in SIXTEEN_BITS if isinstance(row.config, HopperConfig)]
    assert sum(config.integer_max for config in configs) == 10
    assert {row.causal for row in SIXTEEN_BITS} == {row.config.transposes_before(1) for row in HOPPER} == {False, True}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_kernel_that_transposes_values(head_dim):
    """One slot and the transposed tile; both barriers expect one arrive; nothing is spilled."""
    kernel = compiled_transpose(torch.float8_e5m2, head_dim)
    configs = 2 * 128 * head_dim
    assert configs < kernel.metadata.shared <= configs + 1024
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
print("scratch", compiled(torch.bfloat16, row.padded_head_dim, row.mask, row.config).metadata.profile_scratch_size)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["consan", ""])
def test_the_sanitizer_reaches_the_kernel(mode):
    """Instrumented, a kernel keeps what it watches in global memory: with the sanitizer on, and only then."""
    environment = os.environ | {"TRITON_INSTRUMENTATION_MODE": mode}
    run = subprocess.run([sys.executable, "-c", SCRATCH], env=environment, capture_output=True, text=True, timeout=580)
    assert run.returncode == 0, run.stderr
    (size,) = re.findall(r"^scratch (\d+)$", run.stdout, re.MULTILINE)
    assert (int(size) > 0) == (mode == "consan")


def test_sums_of_shared_key_blocks_are_no_work_for_the_vectoriser():
    """It takes seconds to look for pairs among them, of a compile that takes two; and makes vectors that the card adds
    one by one."""
    mask, config = Mask(causal=True), BACKWARD[128]
    choices = Choices(dtype=torch.bfloat16, padded_head_dims=(128, 128), mask=mask, config=config, finishes=True)
    _, alone = builds_of(choices)
    _, shared = builds_of(replace(choices, shared=True))
    of_alone, of_shared = (build.compile(90).asm["llir"] for build in (alone, shared))
    assert of_shared.count("add.f32") == 2 * config.keys * 128 // 256  # a thread's, of 256: of dK and of dV
    vectors = [len(re.findall(r"<\d+ x float>", text)) for text in (of_alone, of_shared)]
    assert vectors[0] == vectors[1]
