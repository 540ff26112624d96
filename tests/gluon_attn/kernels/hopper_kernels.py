"""Prints what every kernel for Hopper takes of a card, a JSON object a line, with the Triton of the Python that runs
it, so that two releases of Triton can be compared: `python -m tests.gluon_attn.kernels.hopper_kernels 1/1`, or 2/16
for a sixteenth of them."""

import json
import re
import sys
from functools import partial
from typing import Any

import torch

from gluon_attn.backward.table import HOPPER as BACKWARD
from gluon_attn.backward.table import PACKAGED
from gluon_attn.forward.launch import build_of, transpose_build
from gluon_attn.forward.table import HOPPER, OTHER_HEAD_DIMS
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.launchable import Features, Job, backward_jobs, unlike
from gluon_attn.resources import count, instructions, steady_loops
from gluon_attn.runtime.assembler import disassemble, is_serialised
from tests.gluon_cpu.arguments import shard

DTYPES = {2: torch.bfloat16, 1: torch.float8_e4m3fn}


def every_kernel() -> list[Job]:
    """Of all rows of the forward's table and the backward's, with the kernels that run before and after."""
    jobs = []
    for i, row in enumerate(HOPPER):
        dtype, seen = DTYPES[row.element_bytes], "causal" if row.causal else "full"
        name = f"forward, row {i}: D={row.padded_head_dim} {seen} {8 * row.element_bytes} bits"
        jobs.append(Job(name, partial(build_of, dtype, row.padded_head_dim, row.mask, row.config)))
        if row.config.transposes_before(row.element_bytes):
            name = f"transpose D={row.padded_head_dim}"
            jobs.append(Job(name, partial(transpose_build, dtype, row.padded_head_dim)))
    for i, row in enumerate(OTHER_HEAD_DIMS):
        if (row.head_dims, row.config.num_ctas) == ((192, 128), 1):
            name = f"forward, row {i}: D=192/128 {'causal' if row.causal else 'full'} {8 * row.element_bytes} bits"
            choices = (DTYPES[row.element_bytes], 192, row.mask, row.config)
            jobs.append(Job(name, partial(build_of, *choices, padded_head_dim_v=128)))
    for head_dim in BACKWARD:
        for causal, deterministic in ((False, False), (True, False), (True, True)):
            kind = f"D={head_dim} {'causal' if causal else 'full'}"
            mask = Mask(causal=causal)
            jobs += backward_jobs(kind, torch.bfloat16, head_dim, mask, Features(), deterministic, PACKAGED)
    return unlike(jobs)


def measure(job: Job) -> dict[str, Any]:
    kernel = job.make().compile(90)
    sass = disassemble(kernel)
    code, labels = instructions(sass)
    loops = steady_loops(code, labels)
    return {
        "name": job.name,
        "smem_bytes": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "registers": sorted(map(int, re.findall(r"setmaxnreg\.\w+\S*\s+(\d+)", kernel.asm["ptx"]))),  # of the roles
        "serialised": is_serialised(sass),
        "instructions": len(code),
        "spills": count(code, "STL", "LDL"),
        "loops": [[loop.products, loop.waits, loop.exp2] for loop in loops],
        "spills_in_loops": sum(loop.spills for loop in loops),
    }


def main() -> None:
    torch.set_num_threads(1)
    part, parts = shard(sys.argv[1])
    for job in every_kernel()[part - 1 :: parts]:
        print(json.dumps(measure(job)), flush=True)


if __name__ == "__main__":
    main()
