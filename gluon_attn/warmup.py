"""`python -m gluon_attn warmup`: compile kernels ahead into Triton's cache, so that no first call waits for that."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from .backward.launch import builds_of
from .backward.table import HOPPER as BACKWARD
from .demo import card, prepare_process, quiet_exit, say
from .forward.launch import build_of, transpose_build
from .forward.table import rows_by_default
from .gradients import ARCHS as BACKWARD_ARCHS
from .kernels.common.mask import Mask
from .problem import FP8_DTYPES, Problem
from .runtime.compat import knobs
from .runtime.compiler import check_triton_version
from .runtime.kernel import Build

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
ARCHS = {"sm_90": 90, "sm_100": 100, "sm_103": 103}
LARGEST_HEAD_DIM = {90: 256, 100: 128, 103: 128}
BAR_WIDTH = 24


@dataclass(frozen=True)
class Job:
    """A kernel to compile. make: can be sent to another process, unlike what it makes."""

    name: str
    make: Callable[[], Build]


def main(arguments: Sequence[str]) -> None:
    quiet_exit()
    command, options = parsed(arguments)
    if options.arch is not None:
        arch = ARCHS[options.arch]
    elif device := card():
        arch = device.arch
    else:
        command.error(f"--arch: expected one of {', '.join(ARCHS)}, as there is no card; H100 and H200 are sm_90")
    try:
        check_triton_version(arch)
        jobs = unlike(jobs_of(options, arch))
    except (RuntimeError, ValueError) as error:
        command.error(str(error))
    compile_all(jobs, arch, options.jobs)


def parsed(arguments: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    command = argparse.ArgumentParser(prog="python -m gluon_attn warmup", description=__doc__)
    command.add_argument("--head-dim", type=int, nargs="+", default=[64, 128], metavar="D", help="default: 64 128")
    command.add_argument("--dtype", choices=DTYPES, nargs="+", default=["bf16"], help="of q, k and v (default: bf16)")
    masks = command.add_mutually_exclusive_group()
    masks.add_argument("--causal", action="store_true", help="causal kernels only (default: those without a mask too)")
    masks.add_argument("--full", action="store_true", help="kernels without a mask only")
    command.add_argument("--backward", action="store_true", help="kernels of the gradients too")
    command.add_argument("--deterministic", action="store_true", help="gradients in a fixed order of sums")
    command.add_argument(
        "--arch", choices=ARCHS, help="compile for it, with or without a card (default: the card here)"
    )
    command.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="at once (default: one a core)"
    )
    options = command.parse_args(arguments)
    if options.jobs < 1:
        command.error(f"--jobs: expected 1 or more, got {options.jobs}")
    if options.deterministic and not options.backward:
        command.error("--deterministic: expected with --backward only, as all else always is; add --backward")
    return command, options


def jobs_of(options: argparse.Namespace, arch: int) -> Iterator[Job]:
    """What calls with these options may launch, whatever their lengths. Some may be there twice.

    Raises ValueError for what there is no kernel for.
    """
    dtypes = [DTYPES[name] for name in options.dtype]
    masks = [causal for causal, only_other in ((False, options.causal), (True, options.full)) if not only_other]
    if options.backward:
        require_gradients(dtypes, arch)
    for head_dim in options.head_dim:
        multiple = 16 if any(dtype in FP8_DTYPES for dtype in dtypes) else 8
        if not 0 < head_dim <= LARGEST_HEAD_DIM[arch] or head_dim % multiple:
            raise ValueError(
                f"--head-dim: expected a multiple of {multiple} up to {LARGEST_HEAD_DIM[arch]} for sm_{arch}, got "
                f"{head_dim}"
            )
        for name, dtype in zip(options.dtype, dtypes, strict=True):
            for causal in masks:
                kind = f"D={Problem.padded(head_dim)} {'causal' if causal else 'full'} {name}"
                yield from forward_jobs(kind, dtype, Problem.padded(head_dim), causal, arch)
                if options.backward and dtype not in FP8_DTYPES:
                    yield from backward_jobs(kind, dtype, Problem.padded(head_dim), causal, options.deterministic)


def require_gradients(dtypes: Sequence[torch.dtype], arch: int) -> None:
    if arch not in BACKWARD_ARCHS:
        raise ValueError(f"--backward: expected --arch sm_90, as no other card has gradients so far, got sm_{arch}")
    if all(dtype in FP8_DTYPES for dtype in dtypes):
        raise ValueError("--backward: expected fp16 or bf16 among --dtype, as fp8 has no gradients; leave it out")


def forward_jobs(kind: str, dtype: torch.dtype, padded_head_dim: int, causal: bool, arch: int) -> Iterator[Job]:
    for row in rows_by_default(padded_head_dim, causal, dtype.itemsize, arch):
        config = row.config
        served = [
            f"from {row.min_kv_len} keys" * (row.min_kv_len > 1),
            f"from {row.min_reuse} queries a KV head" * (row.min_reuse > 1),
            "little work" * row.one_round,
        ]
        name = ", ".join(filter(None, [f"forward {kind} {config.block_m} x {config.block_n}", *served]))
        yield Job(name, partial(build_of, dtype, padded_head_dim, row.mask, config))
        if config.transposes_before(dtype.itemsize):
            yield Job(f"transpose {kind}", partial(transpose_build, dtype, padded_head_dim))


def backward_jobs(
    kind: str, dtype: torch.dtype, padded_head_dim: int, causal: bool, deterministic: bool
) -> Iterator[Job]:
    """A kernel in which programs share key blocks is another one."""
    for shared in (False, True):
        choices = (dtype, padded_head_dim, Mask(causal=causal), BACKWARD[padded_head_dim], deterministic, shared)
        how = ", fixed order" * deterministic + ", shared key blocks" * shared
        for step, name in enumerate(("before", "main", "after")):
            yield Job(f"backward {kind}, {name}{how}", partial(backward_build, step, *choices))


def backward_build(step: int, *choices: Any) -> Build:
    return builds_of(*choices)[step]


def unlike(jobs: Iterable[Job]) -> list[Job]:
    """Each kernel once."""
    builds: list[Build] = []
    kept = []
    for job in jobs:
        build = job.make()
        if build not in builds:
            builds.append(build)
            kept.append(job)
    return kept


def compile_all(jobs: Sequence[Job], arch: int, at_once: int) -> None:
    """On several processes. Prints a bar on a terminal, elsewhere a line for each kernel."""
    say(f"Compiling {len(jobs)} kernels for sm_{arch}a into {knobs.cache.dir}, {min(at_once, len(jobs))} at once")
    start, hits = time.monotonic(), 0
    # Not forked: torch has threads.
    with ProcessPoolExecutor(at_once, mp_context=get_context("spawn"), initializer=prepare_process) as pool:
        names = {pool.submit(compile_job, job, arch): job.name for job in jobs}
        for done, future in enumerate(as_completed(names), 1):
            hits += future.result()
            show(done, len(jobs), time.monotonic() - start, names[future])
    say(f"Compiled {len(jobs) - hits}, in the cache before: {hits}; {time.monotonic() - start:.0f} s")


def compile_job(job: Job, arch: int) -> bool:
    """Whether the kernel was in the cache."""
    hits: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    job.make().compile(arch)
    return hits[-1]


def show(done: int, of: int, seconds: float, name: str) -> None:
    if not sys.stdout.isatty():
        say(f"{done:>3} of {of}  {seconds:4.0f} s  {name}")
        return
    full = BAR_WIDTH * done // of
    bar = "#" * full + "." * (BAR_WIDTH - full)
    # Over the line before, to its end.
    print(f"\r[{bar}] {done} of {of}  {seconds:.0f} s  {name}\x1b[K", end="\n" if done == of else "", flush=True)
