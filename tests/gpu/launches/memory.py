"""Caches and memory."""

import contextlib
import dataclasses
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton

import gluon_attn.forward.launch as attention_launch
from gluon_attn import attention
from gluon_attn.testing import check, normal, normal_qkv
from tests.gpu.checks import Registry
from tests.gpu.launches.common import KINDS, SIZES, Sizes, picked, run_and_check

MEMORY = Registry()


@MEMORY
def nothing_is_remembered_of_other_options() -> None:
    """The same tensors with one thing changed at a time, there and back."""
    q, k, v = normal_qkv(batch=2, heads=4, q_len=128)
    changes: list[dict[str, Any]] = [
        {},
        {"causal": True},
        {"scale": 0.5},
        {"scale": 0.25, "causal": True},
        {"layout": "bshd"},
        {"layout": "bshd", "causal": True},
        {"num_ctas": 1},
        {"num_ctas": 2},
        {"num_ctas": 2, "causal": True},
        {},
        {"scale": 0.25},
    ]
    for options in changes:
        run_and_check(q, k, v, **options)
    run_and_check(q, k[:, :2], v[:, :2])
    run_and_check(q, k[:, :, :65], v[:, :, :65])
    run_and_check(q.half(), k.half(), v.half())
    run_and_check(q, v, k)


@MEMORY
def one_pointer_many_shapes() -> None:
    """Memory that is freed and used again comes with the same address, and another shape or other strides."""
    memory = [torch.empty(1 << 20, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    shapes = [(1, 2, 300, 128), (2, 4, 65, 64), (1, 1, 1000, 256), (4, 2, 300, 64), (1, 2, 256, 128)]
    for seed, shape in enumerate((*shapes, *reversed(shapes))):
        q, k, v = (t[: torch.Size(shape).numel()].view(shape) for t in memory)
        for i, t in enumerate((q, k, v)):
            t.copy_(normal(*shape, seed=3 * seed + i))
        run_and_check(q, k, v, causal=seed % 2 == 0)
    q, k, v = (t[: 2 * 64 * 64 * 64].view(2, 64, 64, 64) for t in memory)
    for i, t in enumerate((q, k, v)):
        t.copy_(normal(*t.shape, seed=i))
    for swapped in (False, True, False):  # one shape, two orders of strides
        run_and_check(*(t.transpose(1, 2) if swapped else t for t in (q, k, v)))


@MEMORY
def freed_memory_is_not_used() -> None:
    """Each call's tensors are freed before the next one's are made."""
    addresses = set()
    for seed, q_len in enumerate((512, 511, 512, 300, 512)):
        q, k, v = normal_qkv(q_len=q_len, seed=seed)
        addresses.add(q.data_ptr())
        run_and_check(q, k, v, causal=True)
        del q, k, v
    assert len(addresses) < 5, "no address came twice: this tested nothing"


@MEMORY
def no_tensor_is_kept_alive() -> None:
    def call(q_len: int, kind: Sizes) -> list[weakref.ref]:
        q, k, v = normal_qkv(q_len=q_len, kv_heads=1, **kind)
        out, lse = attention(q, k, v, causal=True, return_lse=True)
        attention(q, k, v, out=out, num_ctas=2)
        return [weakref.ref(t) for t in (q, k, v, out, lse)]

    for kind in KINDS:
        call(512, kind)
    torch.cuda.synchronize()
    gc.collect()
    base = torch.cuda.memory_allocated()
    gc.disable()  # nor may they wait for a collection
    try:
        for q_len, kind in itertools.product((512, 513, 1, 700), KINDS):
            assert [ref() for ref in call(q_len, kind)] == [None] * 5, f"a tensor of length {q_len}, {kind} is alive"
            assert torch.cuda.memory_allocated() == base, f"length {q_len}, {kind} left memory behind"
    finally:
        gc.enable()


@contextlib.contextmanager
def counting_compiles() -> Iterator[Callable[[], tuple[int, int, int]]]:
    """What is compiled inside, three ways: by Triton's launch, by `triton.compile`, and by the kernels' own caches."""
    launched = compiled = 0

    def on_launch(**_: Any) -> None:
        nonlocal launched
        launched += 1

    def on_compile(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return compile_kernel(*args, **kwargs)

    compile_kernel = triton.compile
    caches = attention_launch.compiled, attention_launch.compiled_transpose
    misses = sum(cache.cache_info().misses for cache in caches)
    assert triton.knobs.runtime.jit_post_compile_hook is None
    triton.knobs.runtime.jit_post_compile_hook = on_launch
    triton.compile = on_compile
    try:
        yield lambda: (launched, compiled, sum(cache.cache_info().misses for cache in caches) - misses)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
        triton.compile = compile_kernel


@MEMORY
def new_lengths_compile_nothing() -> None:
    for num_ctas, causal, kind in itertools.product((1, 2), (False, True), KINDS):
        q, k, v = normal_qkv(q_len=512, **kind)
        attention_launch.compiled_transpose.cache_clear()
        # A config that nobody else uses, so that the first call has something to compile.
        config = dataclasses.replace(picked(q, k, v, num_ctas=num_ctas, causal=causal), kv_slots=1)
        with counting_compiles() as compiles:
            out, lse = attention(q, k, v, config=config, causal=causal, return_lse=True)
            first = compiles()
            check(q, k, v, out, lse, causal=causal, what=str(config))
            kernels = 2 if config.transposes_before(q.itemsize) else 1
            assert max(first) == kernels, f"the first call should compile {kernels}, got {first}"
            # Triton specialises on 1 and on divisibility by 16, so some that are, and some that are not.
            for numbers in (
                (1, 2, 2, 513, 513),
                (1, 2, 2, 1, 1),
                (1, 1, 1, 1, 4096),
                (1, 1, 1, 16, 17),
                (16, 16, 16, 16, 16),
                (3, 6, 2, 1000, 77),
                (1, 32, 1, 4097, 4097),
                (2, 2, 2, 8192, 31),
            ):
                sizes: Sizes = dict(zip(SIZES, numbers, strict=True))
                for layout, scale, head_dim in (
                    ("bhsd", None, q.shape[3]),
                    ("bshd", 1.0, q.shape[3] - 16 // q.itemsize),
                ):
                    tensors = normal_qkv(**sizes, layout=layout, head_dim=head_dim, dtype=q.dtype)
                    attention(*tensors, config=config, causal=causal, scale=scale, layout=layout, return_lse=True)
            torch.cuda.synchronize()
            assert compiles() == first, f"{compiles()} compiles after {first} for the first call"


@MEMORY
def a_tensor_of_more_than_2_31_elements() -> None:
    heads, q_len, kv_len, head_dim = 1 << 14, (1 << 11) + 1, 65, 64
    assert heads * q_len * head_dim > 1 << 31
    q = torch.empty(1, heads, q_len, head_dim, dtype=torch.bfloat16, device="cuda")
    for part in q.chunk(16, dim=1):
        part.normal_()
    k, v = (normal(1, 1, kv_len, head_dim, seed=i) for i in (1, 2))
    out = torch.full_like(q, float("nan"))
    _, lse = attention(q, k, v, out=out, return_lse=True)
    for first in (0, heads // 2, heads - 8):
        q8, out8, lse8 = (t[:, first : first + 8] for t in (q, out, lse))
        check(q8, k, v, out8, lse8, what=f"heads from {first}")
    assert bool(lse.isfinite().all())
