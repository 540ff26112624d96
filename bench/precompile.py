"""Compile kernels in parallel, ahead of their first use."""

import concurrent.futures
import multiprocessing
from collections.abc import Iterable, Iterator

import torch

from gluon_attn.forward.configs import ForwardConfig
from gluon_attn.forward.launch import compiled
from gluon_attn.kernels.common.mask import Mask

# The arguments of `compiled`: dtype, padded head dims of Q and of V, mask and config.
Job = tuple[torch.dtype, int, int, Mask, ForwardConfig]


def compile_to_disk(job: Job, arch: int | None) -> None:
    dtype, head_dim, head_dim_v, mask, config = job
    compiled(dtype, head_dim, mask, config, padded_head_dim_v=head_dim_v, arch=arch)


def precompile(jobs: Iterable[Job], arch: int | None = None) -> Iterator[None]:
    """Compile into Triton's cache on disk, one process for each core; yields once for each kernel that is ready.

    arch: as `compiled` has it.
    """
    # Not forked: the parent may have a CUDA context already, which a forked process cannot use.
    with concurrent.futures.ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for ready in concurrent.futures.as_completed([pool.submit(compile_to_disk, job, arch) for job in jobs]):
            ready.result()
            yield
