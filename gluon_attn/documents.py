"""The kernel before attention that prepares what a mask of documents reads; see kernels/common/documents.py."""

from functools import lru_cache

import torch

from .kernels.common.documents import STRETCH, STRETCHES, WHOLE, prepare_documents
from .problem import Problem
from .runtime.compat import CompiledKernel
from .runtime.kernel import Build, Kernel, Launch, Pointer, Scalar

PREPARE = Kernel(
    prepare_documents,
    Pointer("documents_ptr", "documents", "i32"),
    Pointer("q_ids_ptr", "q_segment_ids", "i32"),
    Pointer("k_ids_ptr", "k_segment_ids", "i32"),
    Scalar("q_len"),
    Scalar("k_len"),
)


def documents_build(*, of_keys: bool) -> Build:
    """of_keys: for gradients."""
    return Build(kernel=PREPARE, blocks={}, constants={"OF_KEYS": of_keys}, num_warps=8)


@lru_cache(maxsize=32)
def compiled_documents(*, of_keys: bool, arch: int = 90, device_index: int | None = None) -> CompiledKernel:
    """device_index: the card to launch it on; None: to look at only."""
    return documents_build(of_keys=of_keys).compile(arch)


def padded_lengths(problem: Problem) -> tuple[int, int]:
    """Of queries and of keys."""
    whole = WHOLE.value
    return -(-problem.q_len // whole) * whole, -(-problem.kv_len // whole) * whole


def documents_launch(problem: Problem, *, of_keys: bool) -> Launch:
    return Launch(
        build=documents_build(of_keys=of_keys),
        programs=problem.batch * max(padded_lengths(problem)) // (STRETCH.value * STRETCHES.value),
        views={},
        scalars={"q_len": problem.q_len, "k_len": problem.kv_len},
    )


def documents_given(problem: Problem) -> dict[str, str]:
    """What the kernel of attention is given of it, as `Launch.given`."""
    before = 0 if problem.score_mod is None else len(problem.score_mod.tensors)
    return {f"aux{before}": "documents"}


def documents_shape(problem: Problem) -> tuple[int, int]:
    """Of what it writes, int32."""
    return problem.batch, sum(padded_lengths(problem)) // STRETCH.value * (STRETCH.value + 4)


def empty_documents(problem: Problem, device: torch.device) -> torch.Tensor:
    return torch.empty(documents_shape(problem), dtype=torch.int32, device=device)
