"""`python -m gluon_attn warmup`: compile kernels ahead into Triton's cache, so that no first call waits for that."""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context

import torch

from . import tuning
from .backward.table import padded_head_dims
from .bias import Bias
from .checks import checked_window
from .demo import card, prepare_process, quiet_exit, say
from .device import Device
from .explain import window
from .features import APART
from .forward.fits import LARGEST_HEAD_DIM_V
from .forward.plan import LARGEST_LENGTH
from .gradients import ARCHS as BACKWARD_ARCHS
from .kernels.common.mask import Mask
from .launchable import Features, Job, backward_jobs, forward_jobs, reached, unlike
from .problem import Problem
from .runtime.compat import knobs
from .runtime.compiler import check_triton_version
from .tensors import FP8_DTYPES, MAX_HEAD_DIM, NAMED_DTYPES

ARCHS = {"sm_90": 90, "sm_100": 100, "sm_103": 103}
SINKS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LARGEST_HEAD_DIM_V_OF = {90: MAX_HEAD_DIM, 100: LARGEST_HEAD_DIM_V, 103: LARGEST_HEAD_DIM_V}
BAR_WIDTH = 24
# Of arguments of a call that exclude others: the option for it.
OPTIONS = {
    "softcap": "--softcap",
    "alibi_slopes": "--alibi",
    "bias": "--bias",
    "segment_ids": "--documents",
    "cu_seqlens_q": "--packed",
}


def main(arguments: Sequence[str]) -> None:
    quiet_exit()
    command, options = parsed(arguments)
    device = card() if options.arch is None else None
    if options.arch is not None:
        arch = ARCHS[options.arch]
    elif device:
        arch = device.arch
    else:
        command.error(f"--arch: expected one of {', '.join(ARCHS)}, as there is no card; H100 and H200 are sm_90")
    try:
        check_triton_version(arch)
        jobs = unlike(jobs_of(options, arch, device))
    except (RuntimeError, ValueError) as error:
        command.error(str(error))
    compile_all(jobs, arch, options.jobs)


def parsed(arguments: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    command = argparse.ArgumentParser(prog="python -m gluon_attn warmup", description=__doc__)
    command.add_argument("--head-dim", type=int, nargs="+", default=[64, 128], metavar="D", help="default: 64 128")
    command.add_argument("--head-dim-v", type=int, metavar="D", help="of V, if it is another one")
    command.add_argument(
        "--dtype", choices=NAMED_DTYPES, nargs="+", default=["bf16"], help="of q, k and v (default: bf16)"
    )
    masks = command.add_mutually_exclusive_group()
    masks.add_argument("--causal", action="store_true", help="causal kernels only (default: those without a mask too)")
    masks.add_argument("--full", action="store_true", help="kernels without a mask only")
    command.add_argument(
        "--window",
        type=window,
        default=(None, None),
        metavar="LEFT,RIGHT",
        help="besides, of that window: keys before a query's own and after it; a sliding window of 1024 is 1023,0",
    )
    command.add_argument("--chunk", type=int, metavar="N", help="besides, of chunks of so many keys")
    command.add_argument("--documents", action="store_true", help="all of them for documents, by segment ids")
    command.add_argument("--softcap", type=float, metavar="CAP", help="all of them with that cap on scores")
    command.add_argument("--alibi", action="store_true", help="all of them with slopes, one for each head")
    command.add_argument("--sinks", choices=SINKS, metavar="DTYPE", help="all of them with sinks: fp32, fp16 or bf16")
    command.add_argument(
        "--bias", choices=SINKS, metavar="DTYPE", help="all of them with a bias, of each query: fp32, or --dtype's"
    )
    command.add_argument("--bias-of-keys", action="store_true", help="with a bias that queries have in common")
    command.add_argument("--bias-gradient", action="store_true", help="the bias has gradients too")
    command.add_argument("--packed", action="store_true", help="all of them for packed sequences")
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
    if options.window[1] == 0 and options.full:
        command.error("--window: with no key after a query it is causal; leave out --full")
    try:
        checked_window(options.window, options.chunk)
    except ValueError as error:
        command.error(f"--{error}")
    for option, given in {"--bias-of-keys": options.bias_of_keys, "--bias-gradient": options.bias_gradient}.items():
        if given and options.bias is None:
            command.error(f"{option}: expected with --bias only; give its dtype, as in --bias bf16")
    if options.bias_gradient and not options.backward:
        command.error("--bias-gradient: expected with --backward only; add --backward")
    if options.bias_gradient and options.bias_of_keys and options.deterministic:
        command.error("--deterministic: not supported with the gradient of a bias that queries have in common")
    for first, second in APART:
        pair = [OPTIONS.get(first, ""), OPTIONS.get(second, "")]
        given = [getattr(options, option.removeprefix("--")) if option else None for option in pair]
        if all(value is not None and value is not False for value in given):
            command.error(f"{pair[1]}: not supported together with {pair[0]}, as in calls; leave one out")
    return command, options


def jobs_of(options: argparse.Namespace, arch: int, device: Device | None = None) -> Iterator[Job]:
    """What calls with these options may launch, whatever their lengths. Some may be there twice.

    device: to leave out rows of table files for other cards; default: for any card of the architecture.
    Raises ValueError for what there is no kernel for.
    """
    table = tuning.rows_of_arch(arch) if device is None else tuning.rows_for(device)
    backward_table = tuning.backward_rows_of_arch(arch) if device is None else tuning.backward_rows_for(device)
    dtypes = [NAMED_DTYPES[name] for name in options.dtype]
    features = Features(
        cap=options.softcap,
        slopes=options.alibi,
        sinks=options.sinks and SINKS[options.sinks],
        of_bias=options.bias_gradient,
        documents=options.documents,
        packed=options.packed,
    )
    if options.bias is not None:
        bias = Bias(dtype=SINKS[options.bias], each_row=not options.bias_of_keys, shared=options.bias_of_keys)
        features = replace(features, bias=bias)
        require_bias(bias, dtypes)
    if options.backward:
        require_gradients(dtypes, arch)
    for head_dim in options.head_dim:
        head_dim_v = head_dim if options.head_dim_v is None else options.head_dim_v
        multiple = 16 if any(dtype in FP8_DTYPES for dtype in dtypes) else 8
        of_v = "--head-dim" if options.head_dim_v is None else "--head-dim-v"
        for option, given, largest in (
            (of_v, head_dim_v, LARGEST_HEAD_DIM_V_OF[arch]), ("--head-dim", head_dim, MAX_HEAD_DIM),
        ):  # fmt: skip
            if not 0 < given <= largest or given % multiple:
                raise ValueError(
                    f"{option}: expected a multiple of {multiple} up to {largest} for sm_{arch}, got {given}"
                )
        forward, backward = (
            (Problem.padded(head_dim), Problem.padded(head_dim_v)),
            padded_head_dims(head_dim, head_dim_v),
        )
        for name, dtype in zip(options.dtype, dtypes, strict=True):
            for mask, keys in masks_of(options).items():
                parts = (
                    "causal" if mask.causal else "full",
                    f"{mask.left} before" * (mask.left is not None),
                    f"{mask.right} after" * (mask.right is not None),
                    f"chunks of {mask.chunk}" * (mask.chunk is not None),
                    name,
                    "packed" * features.packed,
                    "bias" * (features.bias is not None),
                )
                kind = " ".join(filter(None, parts))
                rows = reached(table, mask, keys)
                limits = keys if mask.limits_keys and not features.packed else None
                yield from forward_jobs(
                    f"{named(*forward)} {kind}", dtype, forward[0], mask, features, arch, rows, forward[1], limits
                )
                if options.backward and dtype not in FP8_DTYPES:
                    of_kind = f"{named(*backward)} {kind}", dtype, backward[0], mask, features, options.deterministic
                    yield from backward_jobs(*of_kind, reached(backward_table, mask, keys), backward[1])


def masks_of(options: argparse.Namespace) -> dict[Mask, tuple[int, int]]:
    """Masks of kernels, and how many keys a query sees there at least and at most, as far as that decides on a row.
    Causal ones, others, or both; each without limits too. And without some of them: a limit that hides nothing at a
    call's lengths is left out of its kernel, unless sequences are packed, whose lengths are not known."""
    left, right = options.window
    found: dict[Mask, tuple[int, int]] = {}
    kinds = [causal for causal, other in ((False, options.causal), (True, options.full)) if not other]
    choices = ({None: 0, limit: 0} for limit in (left, right, options.chunk))
    for (before, after, chunk), causal in itertools.product(itertools.product(*choices), kinds):
        mask = Mask(causal=causal, left=before, right=after, chunk=chunk)
        if (before, after, chunk) == (None, None, None):
            found[mask] = 1, LARGEST_LENGTH
            continue
        if right == 0 and not mask.causal:  # no call is that has such a window
            continue
        keys = mask.most_keys(LARGEST_LENGTH)
        if options.packed:
            if (before, after, chunk) == (left, right, options.chunk):
                # A row is chosen as if there were no limit to the right where few queries are the rule.
                found.setdefault(mask, (1, keys if mask.causal else LARGEST_LENGTH))
            continue
        # More keys than these, or a limit would not be there; and at most so many, or another one would.
        more_than = [before + 1] if before is not None else []
        more_than += [chunk] if chunk is not None and mask.causal else []
        at_most = [left + 1] if left is not None and before is None else []
        at_most += [options.chunk] if options.chunk is not None and chunk is None else []
        if not more_than or not at_most or max(more_than) < min(at_most):
            fewest, most = min(keys, max(more_than, default=1)), min(keys, *at_most, LARGEST_LENGTH)
            others = found.get(mask, (fewest, most))
            found[mask] = min(fewest, others[0]), max(most, others[1])
    return found


def named(head_dim: int, head_dim_v: int) -> str:
    return f"D={head_dim}" + f"/{head_dim_v}" * (head_dim_v != head_dim)


def require_bias(bias: Bias, dtypes: Sequence[torch.dtype]) -> None:
    for dtype in dtypes:
        if dtype in FP8_DTYPES or bias.dtype not in (dtype, torch.float32):
            raise ValueError(f"--bias: expected fp32, or the dtype of q, fp16 or bf16; got {bias.dtype} and {dtype}")


def require_gradients(dtypes: Sequence[torch.dtype], arch: int) -> None:
    if arch not in BACKWARD_ARCHS:
        raise ValueError(f"--backward: expected --arch sm_90, as no other card has gradients so far, got sm_{arch}")
    if all(dtype in FP8_DTYPES for dtype in dtypes):
        raise ValueError("--backward: expected fp16 or bf16 among --dtype, as fp8 has no gradients; leave it out")


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
