"""A small Hopper kernel that stores a tensor-core result in one of three ways: docs/epilogues.md explains it.

It computes O[h] = X W[h] for every head h. One warp loads, one warpgroup multiplies and stores.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from channels import SharedMemoryChannel, cluster_fence, tma
from gluon_attn.resources import INSTRUCTION
from gluon_attn.runtime.assembler import disassemble
from gluon_attn.runtime.compat import (
    CompiledKernel,
    TensorDescriptor,
    aggregate,
    constexpr_function,
    gl,
    jit,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from gluon_attn.runtime.compiler import compile_gluon

Way = Literal["registers", "rows", "tma"]
WAYS: tuple[Way, ...] = get_args(Way)
ROWS = 64  # of a tile: one warpgroup's share of a product
X_SLOTS = 2
PROGRAMS = 8  # for each head: each takes every eighth tile of its rows
HEAD_DIMS = (64, 128)
REGISTERS = 128  # of each thread: two programs fit on a processor
KINDS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@constexpr_function
def accumulator_layout(head_dim):
    """[ROWS, D] fp32 as wgmma leaves it: warp w has rows 16 w to 16 w + 15, a thread two columns of every eight."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, head_dim, 16])


@constexpr_function
def rows_layout(head_dim):
    """[ROWS, D] in 16 bits by rows: a thread has eight neighbours, 16 bytes, and D/8 threads have a row."""
    threads = head_dim // 8
    return gl.BlockedLayout([1, 8], [32 // threads, threads], [4, 1], [1, 0])


@aggregate
class Wires:
    """x: load -> multiply; X_SLOTS tiles [ROWS, D], freed when the product is done.
    w: load -> multiply; the head's W [D, D], loaded once, never freed.
    output: no channel but memory: multiply alone stages a tile of O in it, [1, ROWS, D]."""

    x: SharedMemoryChannel
    w: SharedMemoryChannel
    output: gl.shared_memory_descriptor

    @jit
    def init(self):
        self.x.init()
        self.w.init()
        cluster_fence()

    @jit
    def close(self):
        cluster_fence()
        self.x.close()
        self.w.close()


@jit
def load(wires, x_desc, w_desc):
    ROWS: gl.constexpr = x_desc.block_shape[0]
    w, _ = wires.w.producer().acquire()
    tma.load(w, w_desc, [gl.program_id(1), 0, 0])
    inputs = wires.x.producer()
    for first in range(gl.program_id(0) * ROWS, x_desc.shape[0], gl.num_programs(0) * ROWS):
        x, inputs = inputs.acquire()
        tma.load(x, x_desc, [first, 0])


@jit
def multiply(wires, x_desc, o_desc, o_ptr, WAY: gl.constexpr):
    ROWS: gl.constexpr = x_desc.block_shape[0]
    D: gl.constexpr = x_desc.block_shape[1]
    LAYOUT: gl.constexpr = accumulator_layout(D)
    w, _ = wires.w.consumer().acquire()
    inputs = wires.x.consumer()
    for first in range(gl.program_id(0) * ROWS, x_desc.shape[0], gl.num_programs(0) * ROWS):
        x, inputs = inputs.acquire()
        acc = gl.zeros([ROWS, D], gl.float32, LAYOUT)
        acc = warpgroup_mma(x.view([ROWS, D]), w.view([D, D]), acc, use_acc=False, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        x.release()
        out = acc.to(o_desc.dtype)
        if WAY == "registers":
            store_masked(out, o_ptr, first, o_desc)
        elif WAY == "rows":
            store_by_rows(out, o_ptr, first, o_desc, wires.output)
        else:
            store_by_tma(out, first, o_desc, wires.output)
    if WAY == "tma":
        tma.wait_stores_read()  # the tile must not go away while it is read


@jit
def store_masked(out, o_ptr, first, o_desc):
    """From registers straight to memory, as many bytes at a time as `out` has neighbours in a thread."""
    row = first + gl.arange(0, out.shape[0], gl.SliceLayout(1, out.type.layout))
    column = gl.arange(0, out.shape[1], gl.SliceLayout(0, out.type.layout))
    head = gl.program_id(1).to(gl.int64) * o_desc.strides[0]
    element = head + row[:, None] * o_desc.strides[1] + column[None, :]
    # Rows begin at multiples of 16 bytes; the compiler cannot know, and would store 2 bytes at a time.
    element = gl.max_contiguous(gl.multiple_of(element, [1, 8]), [1, 8])
    gl.store(o_ptr + element, out, mask=(row < o_desc.shape[1])[:, None])


@jit
def store_by_rows(out, o_ptr, first, o_desc, staged):
    tile = staged.reshape(out.shape)
    tile.store(out)
    # The compiler puts a barrier of the warpgroup between the two.
    in_rows = tile.load(rows_layout(out.shape[1]))
    gl.static_assert(gl.bank_conflicts(in_rows.type, tile.type) == 0)
    store_masked(in_rows, o_ptr, first, o_desc)


@jit
def store_by_tma(out, first, o_desc, staged):
    tma.wait_stores_read()  # of the tile before
    staged.reshape(out.shape).store(out)
    tma.store_own(o_desc, [gl.program_id(1), first, 0], staged)  # fences, then starts the copy


@jit
def project(
    x_desc,  # (S, D), blocks [ROWS, D]
    w_desc,  # (H, D, D), blocks [1, D, D]
    o_desc,  # (H, S, D), blocks [1, ROWS, D]
    o_ptr,  # the same memory
    X_SLOTS: gl.constexpr,
    WAY: gl.constexpr,
):
    """Grid: programs of a head, heads."""
    wires = Wires(
        x=SharedMemoryChannel.alloc(x_desc, SLOTS=X_SLOTS, CONSUMERS=1),
        w=SharedMemoryChannel.alloc(w_desc, SLOTS=1, CONSUMERS=1),
        output=gl.allocate_shared_memory(o_desc.dtype, o_desc.block_shape, o_desc.layout),
    )
    wires.init()
    gl.warp_specialize(
        [(multiply, (wires, x_desc, o_desc, o_ptr, WAY)), (load, (wires, x_desc, w_desc))],
        [1],  # warps of the second role; the first runs in the four that the kernel is launched with
        [24],
    )
    wires.close()


def blocks(head_dim: int) -> dict[str, list[int]]:
    """The block of each descriptor."""
    return {"x_desc": [ROWS, head_dim], "w_desc": [1, head_dim, head_dim], "o_desc": [1, ROWS, head_dim]}


def layout_of(block: list[int], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(block, KINDS[dtype])


def run(x: Tensor, w: Tensor, o: Tensor, way: Way) -> None:
    """O[h] = X W[h], in place, on the card, or within `gluon_cpu.machine()` on the CPU.

    x: (S, D); w: (H, D, D); o: (H, S, D); contiguous, fp16 or bf16, all alike; D is 64 or 128.
    Raises ValueError where they are not.
    """
    if x.ndim != 2 or x.shape[1] not in HEAD_DIMS:
        raise ValueError(f"x: expected the shape (S, D), D of {HEAD_DIMS}, got {tuple(x.shape)}")
    (length, head_dim), heads = x.shape, w.shape[0]
    want = {"x": (length, head_dim), "w": (heads, head_dim, head_dim), "o": (heads, length, head_dim)}
    for (name, shape), t in zip(want.items(), (x, w, o), strict=True):
        if t.shape != shape or t.dtype not in KINDS or t.dtype != x.dtype or not t.is_contiguous():
            raise ValueError(
                f"{name}: expected a contiguous tensor {shape} in fp16 or bf16, all alike, got {tuple(t.shape)} "
                f"{t.dtype}{'' if t.is_contiguous() else ', not contiguous'}"
            )
    if way not in WAYS:
        raise ValueError(f"way: expected one of {WAYS}, got {way!r}")
    descs = [
        TensorDescriptor.from_tensor(t, block, layout_of(block, t.dtype))
        for t, block in zip((x, w, o), blocks(head_dim).values(), strict=True)
    ]
    programs = min(PROGRAMS, -(-length // ROWS))
    project[(programs, heads)](*descs, o, X_SLOTS=X_SLOTS, WAY=way, num_warps=4, maxnreg=REGISTERS)


def compiled(head_dim: int, way: Way, dtype: torch.dtype = torch.bfloat16) -> CompiledKernel:
    """The kernel for sm_90a, to look at; needs no card."""
    name = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    types = {
        desc: f"tensordesc<{name}[{','.join(map(str, block))}],{layout_of(block, dtype)!r}>"
        for desc, block in blocks(head_dim).items()
    }
    constants = {"X_SLOTS": X_SLOTS, "WAY": way}
    return compile_gluon(project, types | {"o_ptr": f"*{name}"}, constants, arch=90, num_warps=4, num_ctas=1)


def machine_counts(head_dim: int, way: Way) -> dict[str, int]:
    """What the machine code (SASS) has of each kind of instruction, per thread or, for copies, per warpgroup."""
    code = [match[2] for match in map(INSTRUCTION.search, disassemble(compiled(head_dim, way)).splitlines()) if match]

    def count(*starts: str) -> int:
        return sum(line.startswith(starts) for line in code)

    return {
        "instructions": len(code),
        "products": count("HGMMA"),
        "staging_stores": count("STSM"),
        "staging_loads": count("LDS.128"),
        "stores_4_bytes": count("STG.E desc", "STG.E ["),
        "stores_16_bytes": count("STG.E.128"),
        "copies": count("UTMASTG"),
        "spills": count("STL", "LDL"),
    }
