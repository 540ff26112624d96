"""`python -m gluon_attn`: run attention here, on a card or else on gluon_cpu, and print what it saw."""

import atexit
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context

import torch

from . import attention, reference_attention
from .cpu import find_race
from .device import Device
from .forward.configs import HopperTile
from .forward.launch import compiled
from .forward.table import BLACKWELL, HOPPER, Row, pick_tile
from .problem import Problem
from .resources import resources
from .runtime.compiler import assembler_version, check_triton_version

# The attention of one layer of Llama-3-8B over a prompt of 4096 tokens.
PREFILL = Problem(
    dtype=torch.bfloat16,
    batch=1,
    heads=32,
    kv_heads=8,
    q_len=4096,
    kv_len=4096,
    head_dim=128,
    causal=True,
    scale=128**-0.5,
    layout="bhsd",
)
LSE_TOLERANCE = 1e-3  # LSE is fp32, near 10 here, of products that the tensor cores sum with truncation
SCHEDULES = 10
DTYPE_LABELS = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3"}
FP8_SHIFT = 2.0**8  # what the kernels multiply P with, where it is in e4m3
EXECUTION_COLUMNS = "for      dtype  mask    CTAs  error of O  plain torch  of LSE   schedules  findings  seconds"
KERNEL_COLUMNS = (
    "for      head dim  mask    CTAs  tile        registers           smem KB  instr  products  TMA ld/st  "
    "spills: loop  other"
)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Attention on gluon_cpu, for a card with few processors, so that each program has several tiles to compute."""

    device: Device
    causal: bool
    num_ctas: int
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 64


HOPPER_CARD = replace(Device.hopper(), sm_count=4)
BLACKWELL_CARD = replace(Device.blackwell(), sm_count=4)
EXECUTIONS = (
    Execution(device=HOPPER_CARD, causal=False, num_ctas=1),
    Execution(device=HOPPER_CARD, causal=True, num_ctas=2),
    Execution(device=BLACKWELL_CARD, causal=False, num_ctas=1),
    Execution(device=BLACKWELL_CARD, causal=True, num_ctas=1),
    Execution(device=BLACKWELL_CARD, causal=False, num_ctas=2),
    Execution(device=BLACKWELL_CARD, causal=True, num_ctas=2),
    Execution(device=BLACKWELL_CARD, causal=True, num_ctas=4),
    Execution(device=BLACKWELL_CARD, causal=True, num_ctas=1, dtype=torch.float8_e4m3fn),
)


def architecture(arch: int) -> str:
    return f"sm_{arch}a"


def mask(causal: bool) -> str:
    return "causal" if causal else "full"


def execute(job: Execution) -> tuple[str, str | None]:
    """(A row under EXECUTION_COLUMNS, what is wrong or None.)"""
    start = time.time()
    torch.manual_seed(0)
    # Of the largest tile, that of four CTAs, a whole one and a part.
    q = torch.randn(1, 2, 300 * job.num_ctas, job.head_dim).to(job.dtype)
    k, v = (torch.randn(1, 1, 500, job.head_dim).to(job.dtype) for _ in range(2))
    call = partial(attention, q, k, v, causal=job.causal, num_ctas=job.num_ctas, device=job.device, return_lse=True)
    out, lse = call()
    want, want_lse = reference_attention(q.double(), k.double(), v.double(), causal=job.causal)
    plain = plain_attention(q, k, v, job.causal)
    out_error, plain_error = largest(out - want), largest(plain - want)
    seen = want_lse > float("-inf")
    lse_error = largest(lse[seen] - want_lse[seen])
    finding = find_race(call, SCHEDULES)
    row = (
        f"{architecture(job.device.arch):<8} {DTYPE_LABELS[job.dtype]:<6} {mask(job.causal):<7} {job.num_ctas:<5} "
        f"{out_error:<11.1e} {plain_error:<12.1e} {lse_error:<8.1e} {SCHEDULES:<10} "
        f"{0 if finding is None else 1:<9} {time.time() - start:.1f}"
    )
    return row, finding or wrong(out_error, plain_error, lse_error)


def largest(x: torch.Tensor) -> float:
    return x.abs().max().item()


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Plain PyTorch in the inputs' dtype; of fp8 inputs in fp32, but for P, which fp8 products need in e4m3."""
    if q.dtype != torch.float8_e4m3fn:
        return reference_attention(q, k, v, causal=causal)[0]
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
        scores = scores.masked_fill(hidden, float("-inf"))
    p = (scores - scores.amax(-1, keepdim=True).clamp(min=-1e30)).exp() * FP8_SHIFT
    out = p.to(q.dtype).float() @ v.float() / p.sum(-1, keepdim=True).clamp(min=1e-30)
    return out.to(torch.bfloat16)


def wrong(out_error: float, plain_error: float, lse_error: float) -> str | None:
    """None if the errors are those of rounding."""
    if out_error <= 2 * plain_error and lse_error <= LSE_TOLERANCE:  # false of NaN
        return None
    return f"wrong: expected errors of at most {2 * plain_error:.1e} (O) and {LSE_TOLERANCE:.0e} (LSE)"


def listed() -> list[tuple[Row, int]]:
    """Kernels to compile, and for which architecture: Hopper's 16-bit ones; of Blackwell's, which take the compiler ten
    seconds each, those for sm_100 of D=128 without a mask on one and two CTAs."""
    blackwell = [
        row
        for row in BLACKWELL
        if (row.padded_head_dim, row.causal) == (128, False) and 100 in row.tile.archs and row.tile.num_ctas < 4
    ]
    chosen = [(row, 90) for row in HOPPER] + [(row, 100) for row in blackwell]
    return [(row, arch) for row, arch in chosen if row.element_bytes == 2]


def describe(row: Row, arch: int) -> str:
    """Compile a row's kernel (bf16): a row under KERNEL_COLUMNS."""
    tile = row.tile
    found = resources(compiled(torch.bfloat16, row.padded_head_dim, row.causal, tile, arch=arch))
    in_loops = sum(loop.spills for loop in found.loops)
    further = tile.softmax_roles - 1 if isinstance(tile, HopperTile) else 2  # besides the first role, correction there
    registers = [found.first_role_registers, *[tile.softmax_registers] * further, tile.load_registers]
    size, tma = f"{tile.block_m:>4} x {tile.block_n}", f"{found.tma_loads}/{found.tma_stores}"
    return (
        f"{architecture(arch):<8} {row.padded_head_dim:<9} {mask(row.causal):<7} {tile.num_ctas:<5} {size:<11} "
        f"{'+'.join(map(str, registers)):<19} {found.smem_bytes / 1024:<8.1f} {found.instructions:<6} "
        f"{found.products:<9} {tma:<10} {in_loops:<13} {found.spills - in_loops}"
    )


def quiet_exit() -> None:
    """Triton 3.9's bindings leak a few objects when they compile a reduction, and say so on exit in thirty lines."""
    atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno()))


def prepare_process() -> None:
    quiet_exit()
    torch.set_num_threads(1)  # each core has a process already


def run_without_a_card() -> None:
    """Execute attention on the CPU and look for races; compile kernels and print what they take. On all cores."""
    start = time.time()
    rows = listed()
    # Not forked: torch has threads.
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=prepare_process) as pool:
        executed = [pool.submit(execute, job) for job in EXECUTIONS]
        described = [pool.submit(describe, row, arch) for row, arch in rows]
        print("No Hopper or Blackwell card here: kernels are executed on the CPU, role by role, and watched for races.")
        print("2 query heads, 1 KV head, 300 queries for each CTA, 500 keys, D=64\n")
        print(EXECUTION_COLUMNS, flush=True)
        for done in executed:
            row, problem = done.result()
            print(row, flush=True)
            if problem is not None:
                pool.shutdown(cancel_futures=True)
                sys.exit(problem)
        print("\nNothing ran on a card.\n")
        count = {arch: sum(a == arch for _, a in rows) for arch in (90, 100)}
        print(f"The {count[90]} Hopper kernels of the tuning table for 16 bits and {count[100]} of the Blackwell ones,")
        print(f"compiled (bf16), assembler {assembler_version()}. Registers are those of the first role, + the further")
        print("softmax roles', + those of the load role's warpgroup.\n")
        print(KERNEL_COLUMNS, flush=True)
        for line in described:
            print(line.result(), flush=True)
    print(f"\n{time.time() - start:.0f} s.")


def milliseconds(call, runs: int = 30) -> float:  # type: ignore[no-untyped-def]  # any call without arguments
    """Median over `runs`, by CUDA events, after a warm-up."""
    for _ in range(5):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def run_prefill(device: Device) -> None:
    """Run PREFILL on the card, check it against the reference, time it against torch's SDPA through cuDNN."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    p = PREFILL
    print(
        f"{device.name}: Llama-3-8B prefill, {p.heads} query heads, {p.kv_heads} KV heads, D={p.head_dim}, S={p.q_len}"
    )
    torch.manual_seed(0)
    q = torch.randn(p.batch, p.heads, p.q_len, p.head_dim, dtype=p.dtype, device="cuda")
    k, v = (torch.randn(p.batch, p.kv_heads, p.kv_len, p.head_dim, dtype=p.dtype, device="cuda") for _ in range(2))

    out, lse = attention(q, k, v, causal=p.causal, return_lse=True)
    # A KV head at a time: the reference materialises all scores, in float64.
    group = p.heads // p.kv_heads
    errors = []
    for head in range(p.kv_heads):
        rows = slice(head * group, (head + 1) * group)
        one = (q[:, rows], k[:, head : head + 1], v[:, head : head + 1])
        want, want_lse = reference_attention(*(t.double() for t in one), causal=p.causal)
        plain, _ = reference_attention(*one, causal=p.causal)
        found = (out[:, rows] - want, plain - want, lse[:, rows] - want_lse)
        errors.append(torch.stack([difference.abs().max() for difference in found]))
    out_error, plain_error, lse_error = torch.stack(errors).amax(dim=0).tolist()  # NaN, if there is one
    print(f"largest error against float64: O {out_error:.1e} (plain bf16: {plain_error:.1e}), LSE {lse_error:.1e}")
    if problem := wrong(out_error, plain_error, lse_error):
        sys.exit(problem)

    def cudnn() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=p.causal, enable_gqa=True)

    flops = 4 * p.batch * p.heads * p.q_len * p.kv_len * p.head_dim / 2
    ours, theirs = milliseconds(lambda: attention(q, k, v, causal=p.causal)), milliseconds(cudnn)
    print(f"ours:  {ours:.3f} ms, {flops / ours / 1e9:.0f} TFLOP/s")
    print(f"cuDNN: {theirs:.3f} ms, {flops / theirs / 1e9:.0f} TFLOP/s (torch SDPA, same run)")
    print(f"ours runs at {theirs / ours:.2f} times cuDNN's speed")

    row = Row(p.padded_head_dim, p.causal, pick_tile(p, device))
    print(f"\nThe kernel, assembler {assembler_version()}:\n{KERNEL_COLUMNS}")
    print(describe(row, device.arch))


def card() -> Device | None:
    """The card here, if the kernels are for it."""
    if not torch.cuda.is_available():
        return None
    found = Device.of(torch.device("cuda", torch.cuda.current_device()))
    try:
        found.require_supported()
    except RuntimeError as error:
        print(error)
        return None
    return found


def main() -> None:
    check_triton_version()
    quiet_exit()
    if found := card():
        run_prefill(found)
    else:
        run_without_a_card()


if __name__ == "__main__":
    # By the module's own name, under which other processes find its functions; they do not import a __main__.
    from gluon_attn.__main__ import main as run

    run()
