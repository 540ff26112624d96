"""What `python -m gluon_attn` does: run attention here, on a card or else on the CPU, and print what it saw."""

import atexit
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, fields, replace
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

from .api import attention
from .cpu import find_race
from .device import Device
from .forward.configs import ForwardConfig, HopperConfig
from .forward.launch import compiled
from .forward.table import BLACKWELL, HOPPER, pick_config
from .gradients import attention_backward
from .kernels.common.mask import Mask
from .problem import Problem
from .reference import reference_attention
from .resources import resources
from .runtime.assembler import assembler_version
from .runtime.compiler import check_triton_version
from .testing import GradientError, gradient_errors

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
GRADIENT_COLUMNS = (
    "for      dtype  mask    sums of dQ   error of dQ (plain)  of dK (plain)      of dV (plain)      schedules  "
    "findings  seconds"
)
KERNEL_COLUMNS = (
    "for      head dim  mask    CTAs  config        registers           smem KB  instr  products  TMA ld/st  "
    "spills: loop  other  unlike its neighbours"
)
T = TypeVar("T")
QUIET_SECONDS = 10.0  # longest time without a word


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Attention on gluon_cpu, for a card with few processors, so that each program has several row blocks."""

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


@dataclass(frozen=True, kw_only=True)
class GradientExecution:
    """The gradients on gluon_cpu, in bf16, for such a card."""

    causal: bool
    deterministic: bool


GRADIENT_EXECUTIONS = (
    GradientExecution(causal=False, deterministic=False),
    GradientExecution(causal=True, deterministic=False),
    GradientExecution(causal=True, deterministic=True),
)
Job = Execution | GradientExecution
CASES = len(EXECUTIONS) + len(GRADIENT_EXECUTIONS)


def architecture(arch: int) -> str:
    return f"sm_{arch}a"


def mask(causal: bool) -> str:
    return "causal" if causal else "full"


def name_of(job: Job) -> str:
    if isinstance(job, GradientExecution):
        return f"{architecture(90)} bf16 {mask(job.causal)}, gradients{', in a fixed order' * job.deterministic}"
    ctas = "1 CTA" if job.num_ctas == 1 else f"{job.num_ctas} CTAs"
    return f"{architecture(job.device.arch)} {DTYPE_LABELS[job.dtype]} {mask(job.causal)}, {ctas}"


def execute(job: Execution, schedules: int) -> tuple[str, str | None]:
    """(A row under EXECUTION_COLUMNS, what is wrong or None.)"""
    start = time.monotonic()
    torch.manual_seed(0)
    # Of the largest row block, that of four CTAs, a whole one and a part.
    q = torch.randn(1, 2, 300 * job.num_ctas, job.head_dim).to(job.dtype)
    k, v = (torch.randn(1, 1, 500, job.head_dim).to(job.dtype) for _ in range(2))
    call = partial(attention, q, k, v, causal=job.causal, num_ctas=job.num_ctas, device=job.device, return_lse=True)
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    finding = find_race(lambda: results.append(call()), schedules)  # type: ignore[arg-type]  # with LSE, it is two
    case = f"{architecture(job.device.arch):<8} {DTYPE_LABELS[job.dtype]:<6} {mask(job.causal):<7} {job.num_ctas:<5} "
    if finding is not None:
        return f"{case}{'-':<11} {'-':<12} {'-':<8} {len(results) + 1:<10} 1", finding
    want, want_lse = reference_attention(q.double(), k.double(), v.double(), causal=job.causal)
    plain_error = largest(plain_attention(q, k, v, job.causal) - want)
    seen = want_lse > float("-inf")
    errors = [[largest(out - want), largest(lse[seen] - want_lse[seen])] for out, lse in results]
    out_error, lse_error = torch.tensor(errors).amax(0).tolist()  # NaN, if there is one
    row = (
        f"{case}{out_error:<11.1e} {plain_error:<12.1e} {lse_error:<8.1e} {schedules:<10} 0         "
        f"{time.monotonic() - start:.1f}"
    )
    return row, wrong(out_error, plain_error, lse_error)


def execute_gradients(job: GradientExecution, schedules: int) -> tuple[str, str | None]:
    """(A row under GRADIENT_COLUMNS, what is wrong or None.)"""
    start = time.monotonic()
    torch.manual_seed(0)
    q, dout = torch.randn(2, 1, 2, 200, 64).to(torch.bfloat16)
    k, v = torch.randn(2, 1, 1, 250, 64).to(torch.bfloat16)
    options: dict[str, Any] = {"causal": job.causal, "device": HOPPER_CARD}
    out, lse = attention(q, k, v, return_lse=True, **options)
    results: list[tuple[torch.Tensor, ...]] = []

    def call() -> None:
        deterministic = job.deterministic
        results.append(attention_backward(dout, None, q, k, v, out, lse, deterministic=deterministic, **options))

    finding = find_race(call, schedules)
    sums = "fixed order" if job.deterministic else "any order"
    case = f"{architecture(90):<8} bf16   {mask(job.causal):<7} {sums:<12} "
    if finding is not None:
        return f"{case}{'-':<20} {'-':<18} {'-':<18} {len(results) + 1:<10} 1", finding
    found = gradient_errors(q, k, v, dout, results, causal=job.causal)
    errors = [f"{e.error:.1e} ({e.plain_error:.1e})" for e in found]
    row = (
        f"{case}{errors[0]:<20} {errors[1]:<18} {errors[2]:<18} {schedules:<10} 0         "
        f"{time.monotonic() - start:.1f}"
    )
    return row, wrong_gradients(found)


def wrong_gradients(found: Sequence[GradientError]) -> str | None:
    """None if the errors are those of rounding."""
    wrong = [e for e in found if not e.error <= e.budget]  # true of NaN
    if not wrong:
        return None
    said = ", ".join(f"of {e.name} at most {e.budget:.1e}, got {e.error:.1e}" for e in wrong)
    return f"wrong: expected an error {said}"


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


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A kernel to compile (bf16) and describe. unlike: what tells it from others of its kind and block size."""

    arch: int
    padded_head_dim: int
    causal: bool
    config: ForwardConfig
    unlike: str = ""

    @property
    def kind(self) -> tuple[object, ...]:
        config = self.config
        return self.arch, self.padded_head_dim, self.causal, config.num_ctas, config.block_m, config.block_n


def listed() -> list[Variant]:
    """Those of the tuning table, each once: Hopper's for 16 bits; of Blackwell's, which take the compiler ten seconds
    each, those for sm_100 of D=128 without a mask on one and two CTAs."""
    blackwell = [
        row
        for row in BLACKWELL
        if (row.padded_head_dim, row.causal) == (128, False) and 100 in row.config.archs and row.config.num_ctas < 4
    ]
    chosen = [(row, 90) for row in HOPPER] + [(row, 100) for row in blackwell]
    kernels = dict.fromkeys(
        Variant(arch=arch, padded_head_dim=row.padded_head_dim, causal=row.causal, config=row.config)
        for row, arch in chosen
        if row.element_bytes == 2
    )
    return [replace(k, unlike=told_apart(k.config, [o.config for o in kernels if o.kind == k.kind])) for k in kernels]


def told_apart(config: ForwardConfig, others: Sequence[ForwardConfig]) -> str:
    """The fields that `others`, the config itself among them, do not all have alike, with the config's values.
    Without the registers, which a column shows."""
    names = [field.name for field in fields(config) if not field.name.endswith("_registers")]
    return ", ".join(
        f"{name}={getattr(config, name)}"
        for name in names
        if any(getattr(o, name) != getattr(config, name) for o in others)
    )


def describe(kernel: Variant) -> str:
    """Compile a kernel: a row under KERNEL_COLUMNS."""
    config, arch = kernel.config, kernel.arch
    found = resources(compiled(torch.bfloat16, kernel.padded_head_dim, Mask(causal=kernel.causal), config, arch=arch))
    in_loops = sum(loop.spills for loop in found.loops)
    # Softmax roles beside the first role, which on Blackwell is the correction.
    further = config.softmax_roles - 1 if isinstance(config, HopperConfig) else 2
    registers = [found.first_role_registers, *[config.softmax_registers] * further, config.load_registers]
    size, tma = f"{config.block_m:>4} x {config.block_n}", f"{found.tma_loads}/{found.tma_stores}"
    return (
        f"{architecture(arch):<8} {kernel.padded_head_dim:<9} {mask(kernel.causal):<7} {config.num_ctas:<5} {size:<11} "
        f"{'+'.join(map(str, registers)):<19} {found.smem_bytes / 1024:<8.1f} {found.instructions:<6} "
        f"{found.products:<9} {tma:<10} {in_loops:<13} {found.spills - in_loops:<6} {kernel.unlike}"
    ).rstrip()


def quiet_exit() -> None:
    """Triton 3.9's bindings leak a few objects, and say so on exit in thirty lines."""
    atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno()))


@contextlib.contextmanager
def while_read() -> Iterator[None]:
    """Ends quietly where who reads what is printed has enough, as `head`."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def prepare_process() -> None:
    quiet_exit()
    torch.set_num_threads(1)  # each core has a process already


def say(line: str = "") -> None:
    print(line, flush=True)


def result_of(future: Future[T], doing: str, start: float) -> T:
    """Wait for it, and say what is being done when there was nothing to print for long."""
    while not wait([future], QUIET_SECONDS).done:
        say(f"  ... {time.monotonic() - start:.0f} s: {doing}")
    return future.result()


def run_without_a_card(schedules: int, kernels: bool) -> str | None:
    """Execute attention on the CPU and look for races; compile kernels and print what they take. On all cores.

    Returns what was wrong, or None."""
    check_triton_version(on_cpu=True)
    start = time.monotonic()
    to_describe = listed() if kernels else []
    say("No Hopper or Blackwell card is used: kernels are executed on the CPU, role by role, and watched for races.")
    say(f"{CASES} cases, {schedules} schedules each. Errors are the largest, against float64; plain torch is attention")
    say("in the inputs' dtype. D=64.")
    if schedules == SCHEDULES and kernels:
        say("It takes about three to four minutes on two idle cores, much less once its kernels are in Triton's cache.")
    # Not forked: torch has threads.
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=prepare_process) as pool:
        executed = [pool.submit(execute, job, schedules) for job in EXECUTIONS]
        with_gradients = [pool.submit(execute_gradients, job, schedules) for job in GRADIENT_EXECUTIONS]
        described = [pool.submit(describe, kernel) for kernel in to_describe]
        say(f"\nForward: 2 query heads, 1 KV head, 300 queries a CTA, 500 keys.\n\n{EXECUTION_COLUMNS}")
        problem = say_executed(EXECUTIONS, executed, 1, start)
        if problem is None:
            say(f"\nGradients: 2 query heads, 1 KV head, 200 queries, 250 keys.\n\n{GRADIENT_COLUMNS}")
            problem = say_executed(GRADIENT_EXECUTIONS, with_gradients, 1 + len(EXECUTIONS), start)
        if problem is not None:
            pool.shutdown(cancel_futures=True)
            return problem
        if to_describe:
            say_what_is_listed(to_describe)
        for i, line in enumerate(described, 1):
            say(result_of(line, f"compiling kernel {i} of {len(described)}", start))
    compiled_too = f"; {len(to_describe)} kernels were compiled" if to_describe else ""
    say(f"\nNothing ran on a card{compiled_too}; {time.monotonic() - start:.0f} s.")
    say(
        f"All {CASES} cases, forward and gradients, agree with float64, and no race was found under "
        f"{schedules} {'schedule' if schedules == 1 else 'schedules'} each."
    )
    return None


def say_executed(
    jobs: Sequence[Job], executed: Sequence[Future[tuple[str, str | None]]], first: int, start: float
) -> str | None:
    """A row for each job, as it is done; first: the number of the first one. Returns what was wrong, or None."""
    for i, (job, done) in enumerate(zip(jobs, executed, strict=True), first):
        row, problem = result_of(done, f"executing {name_of(job)} (case {i} of {CASES})", start)
        say(row)
        if problem is not None:
            return f"{name_of(job)}: {problem}"
    return None


def say_what_is_listed(kernels: Sequence[Variant]) -> None:
    count = {arch: sum(kernel.arch == arch for kernel in kernels) for arch in (90, 100)}
    say(f"\nThe {count[90]} Hopper kernels of the tuning table for 16 bits and {count[100]} of the Blackwell ones,")
    say(f"compiled (bf16), assembler {assembler_version()}. Registers are those of the first role, + the further")
    say("softmax roles', + those of the load role's warpgroup.\n")
    say(KERNEL_COLUMNS)


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


def run_prefill(device: Device, kernels: bool) -> str | None:
    """Run PREFILL and its gradients on the card, check them against the reference, time them against torch's SDPA
    through cuDNN.

    Returns what was wrong, or None."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    check_triton_version(device.arch)
    p = PREFILL
    say(f"{device.name}: Llama-3-8B prefill, {p.heads} query heads, {p.kv_heads} KV heads, D={p.head_dim}, S={p.q_len}")
    say("Compiling the kernel, unless it is in Triton's cache, and comparing with float64: some seconds")
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
    say(f"largest error against float64: O {out_error:.1e} (plain bf16: {plain_error:.1e}), LSE {lse_error:.1e}")
    if problem := wrong(out_error, plain_error, lse_error):
        return problem
    dout = torch.randn_like(q)
    grads = gradients_of(out, lse, q, k, v, dout)
    say(f"of the gradients (plain bf16): {', '.join(f'{e.name} {e.error:.1e} ({e.plain_error:.1e})' for e in grads)}")
    if problem := wrong_gradients(grads):
        return problem

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return attention(q, k, v, causal=p.causal)

    def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=p.causal, enable_gqa=True)

    flops = 4 * p.batch * p.heads * p.q_len * p.kv_len * p.head_dim / 2
    say("\nTimed beside torch's SDPA through cuDNN, in this process. Backward: called through autograd.")
    say("         forward             backward            both")
    times = {name: milliseconds_of(call, q, k, v, dout) for name, call in (("ours", ours), ("cuDNN", cudnn))}
    of_each = flops, 2.5 * flops, 3.5 * flops  # two products forward, five backward
    for name, taken in times.items():
        cells = [f"{ms:.3f} ms {n / ms / 1e9:4.0f} TFLOP/s" for ms, n in zip(taken, of_each, strict=True)]
        say(f"{name:<8} {'  '.join(cells)}")
    forward, backward, both = (b / a for a, b in zip(times["ours"], times["cuDNN"], strict=True))
    if kernels:
        say(f"\nThe kernel, assembler {assembler_version()}:\n{KERNEL_COLUMNS}")
        config = pick_config(p, device)
        say(describe(Variant(arch=device.arch, padded_head_dim=p.padded_head_dim, causal=p.causal, config=config)))
    say(
        f"\nAll results agree with float64. Ours runs at {forward:.2f} times cuDNN's speed forward, {backward:.2f} "
        f"backward, {both:.2f} both."
    )
    return None


def gradients_of(
    out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor
) -> list[GradientError]:
    """Errors of PREFILL's gradients. Of a KV head at a time, as above; each is judged by the budget of its head, and
    the one that is worst by that is returned."""
    p = PREFILL
    dq, dk, dv = attention_backward(dout, None, q, k, v, out, lse, causal=p.causal)
    group = p.heads // p.kv_heads
    heads = []
    for head in range(p.kv_heads):
        rows, one = slice(head * group, (head + 1) * group), slice(head, head + 1)
        got = (dq[:, rows], dk[:, one], dv[:, one])
        heads.append(gradient_errors(q[:, rows], k[:, one], v[:, one], dout[:, rows], [got], causal=p.causal))
    return [max(of_one, key=GradientError.badness) for of_one in zip(*heads, strict=True)]


def milliseconds_of(call: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> list[float]:
    """Of the forward pass without gradients, the backward pass, and both."""
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    out = call(*inputs)
    return [
        milliseconds(lambda: call(q, k, v)),
        milliseconds(lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)),
        milliseconds(lambda: torch.autograd.grad(call(*inputs), inputs, dout)),
    ]


def card() -> Device | None:
    """The card here, if the kernels are for it."""
    if not torch.cuda.is_available():
        return None
    found = Device.of(torch.device("cuda", torch.cuda.current_device()))
    try:
        found.require_supported()
    except RuntimeError as error:
        say(str(error))
        return None
    return found
