"""Prints what every kernel for Hopper takes of a card, one JSON object a line, with the Triton of the Python that runs
it: so that two releases of Triton can be compared.

    python -m tests.gluon_attn.kernels.hopper_kernels [--jobs 2]
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from gluon_attn.backward.launch import builds_of
from gluon_attn.backward.table import HOPPER as BACKWARD
from gluon_attn.forward.launch import build_of, transpose_build
from gluon_attn.forward.table import HOPPER
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.resources import resources
from gluon_attn.runtime.assembler import disassemble, is_serialised
from gluon_attn.runtime.kernel import Build

PARTS = ("preprocess", "main", "postprocess")


def every_kernel() -> Iterator[tuple[str, Callable[[], Build]]]:
    """All rows of the forward's table, the kernel that transposes V, and of the backward's the three kernels."""
    dtypes = {2: torch.bfloat16, 1: torch.float8_e4m3fn}
    for i, row in enumerate(HOPPER):
        mask = "causal" if row.causal else "full"
        name = f"forward, row {i}, D={row.padded_head_dim}, {mask}, {8 * row.element_bytes} bits"
        yield name, partial(build_of, dtypes[row.element_bytes], row.padded_head_dim, row.mask, row.config)
    for head_dim in sorted({row.padded_head_dim for row in HOPPER if row.element_bytes == 1}):
        yield f"transpose, D={head_dim}", partial(transpose_build, torch.float8_e4m3fn, head_dim)
    for head_dim, config in BACKWARD.items():
        for part, name in enumerate(PARTS):
            yield f"backward, {name}, D={head_dim}, full", partial(backward_build, part, head_dim, False, False, False)
        for causal, deterministic, parted in ((True, False, False), (True, True, False), (False, False, True)):
            kind = "fixed order" if deterministic else "parted" if parted else "any order"
            name = f"backward, main, D={head_dim}, {'causal' if causal else 'full'}, {kind}"
            yield name, partial(backward_build, 1, head_dim, causal, deterministic, parted)


def backward_build(part: int, head_dim: int, causal: bool, deterministic: bool, parted: bool) -> Build:
    mask = Mask(causal=causal)
    return builds_of(torch.bfloat16, head_dim, mask, BACKWARD[head_dim], deterministic, parted)[part]


def measure(name: str, build: Callable[[], Build]) -> dict[str, Any]:
    start = time.monotonic()
    kernel = build().compile(90)
    seconds = time.monotonic() - start
    found = asdict(resources(kernel))
    serialised = is_serialised(disassemble(kernel))
    return {"name": name, "seconds": round(seconds, 2), "serialised": serialised, "num_warps": kernel.metadata.num_warps} | found


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--jobs", type=int, default=1)
    options = command.parse_args()
    # Not forked: torch has threads.
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(measure, *kernel) for kernel in every_kernel()]:
            print(json.dumps(done.result()), flush=True)


if __name__ == "__main__":
    main()
