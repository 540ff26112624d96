"""`python -m gluon_attn`: run attention here, on a Hopper card or else on gluon_cpu, and print what it saw."""

import atexit
import os
import statistics
import sys
import time
from functools import partial

import torch

from . import attention, reference_attention
from .compat import assembler_version, check_triton_version
from .cpu import find_race
from .device import Device
from .launch import compiled
from .problem import Problem
from .resources import Resources, resources
from .tile import HopperTile
from .tuning import HOPPER, pick_tile

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
COLUMNS = (
    "head dim  mask    CTAs  tile        softmax regs  load  smem KB  instr  wgmma  TMA ld/st  spills: loop  other"
)


def describe(padded_head_dim: int, causal: bool, tile: HopperTile, found: Resources) -> str:
    """One row under COLUMNS."""
    in_loops = sum(loop.spills for loop in found.loops)
    softmax = f"{found.first_role_registers}" + f"+{tile.softmax_registers}" * (tile.softmax_roles - 1)
    size, tma = f"{tile.block_m:>3} x {tile.block_n}", f"{found.tma_loads}/{found.tma_stores}"
    return (
        f"{padded_head_dim:<9} {'causal' if causal else 'full':<7} {tile.num_ctas:<5} {size:<11} {softmax:<13} "
        f"{tile.load_registers:<5} {found.smem_bytes / 1024:<8.1f} {found.instructions:<6} {found.products:<6} "
        f"{tma:<10} {in_loops:<13} {found.spills - in_loops}"
    )


def progress(text: str) -> None:
    """A line that the next output overwrites; only where somebody is watching."""
    if sys.stdout.isatty():
        print(f"\r{text:<{len(COLUMNS)}}", end="\r", flush=True)


def execute_on_cpu(schedules: int = 100) -> None:
    """Execute attention on gluon_cpu, on one CTA and two, with and without a mask, and look for races."""
    torch.manual_seed(0)
    q = torch.randn(1, 4, 500, 128, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 2, 500, 128, dtype=torch.bfloat16) for _ in range(2))
    print("No Hopper card here: the kernel is executed on the CPU, role by role, and watched for races.")
    print("bf16, 4 query heads, 2 KV heads, 500 queries and keys, D=128\n")
    print("mask    CTAs  error of O  plain bf16  of LSE   schedules  findings  seconds")
    for causal, num_ctas in ((False, 1), (False, 2), (True, 1), (True, 2)):
        start = time.time()
        progress(f"{'causal' if causal else 'full'}, {num_ctas} CTAs ...")
        call = partial(attention, q, k, v, causal=causal, num_ctas=num_ctas, device=Device.hopper(), return_lse=True)
        out, lse = call()
        want, want_lse = reference_attention(q.double(), k.double(), v.double(), causal=causal)
        plain, _ = reference_attention(q, k, v, causal=causal)
        out_error, plain_error, lse_error = (x.abs().max().item() for x in (out - want, plain - want, lse - want_lse))
        finding = find_race(call, schedules)
        print(
            f"{'causal' if causal else 'full':<7} {num_ctas:<5} {out_error:<11.1e} {plain_error:<11.1e} "
            f"{lse_error:<8.1e} {schedules:<10} {0 if finding is None else 1:<9} {time.time() - start:.1f}",
            flush=True,
        )
        if finding is not None:
            sys.exit(finding)
        check_errors(out_error, plain_error, lse_error)
    print("\nNothing ran on a card.\n")


def check_errors(out_error: float, plain_error: float, lse_error: float) -> None:
    """Exit unless the errors are those of rounding."""
    if not (out_error <= 2 * plain_error and lse_error <= LSE_TOLERANCE):  # nor NaN
        sys.exit(f"wrong: expected errors of at most {2 * plain_error:.1e} (O) and {LSE_TOLERANCE:.0e} (LSE)")


def compile_all() -> None:
    """Compile every 16-bit kernel of the tuning table for sm_90a and print what each takes."""
    rows = [row for row in HOPPER if row.element_bytes == 2]
    print(f"The {len(rows)} Hopper kernels of the tuning table, compiled (bf16), assembler {assembler_version()}:\n")
    print(COLUMNS)
    start = time.time()
    for i, row in enumerate(rows, start=1):
        progress(f"compiling {i} of {len(rows)}, {time.time() - start:.0f} s ...")
        found = resources(compiled(torch.bfloat16, row.padded_head_dim, row.causal, row.tile))
        print(describe(row.padded_head_dim, row.causal, row.tile, found), flush=True)
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
    check_errors(out_error, plain_error, lse_error)

    def cudnn() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=p.causal, enable_gqa=True)

    flops = 4 * p.batch * p.heads * p.q_len * p.kv_len * p.head_dim / 2
    ours, theirs = milliseconds(lambda: attention(q, k, v, causal=p.causal)), milliseconds(cudnn)
    print(f"ours:  {ours:.3f} ms, {flops / ours / 1e9:.0f} TFLOP/s")
    print(f"cuDNN: {theirs:.3f} ms, {flops / theirs / 1e9:.0f} TFLOP/s (torch SDPA, same run)")
    print(f"ours runs at {theirs / ours:.2f} times cuDNN's speed")

    tile = pick_tile(p, device)
    taken = resources(compiled(p.dtype, p.padded_head_dim, p.causal, tile))
    print(f"\nThe kernel, assembler {assembler_version()}:\n{COLUMNS}")
    print(describe(p.padded_head_dim, p.causal, tile, taken))


def main() -> None:
    check_triton_version()
    # Triton 3.9's bindings leak a few objects when they compile a reduction, and say so on exit in thirty lines.
    atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno()))
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        run_prefill(Device.of(torch.device("cuda", torch.cuda.current_device())))
    else:
        execute_on_cpu()
        compile_all()


if __name__ == "__main__":
    main()
