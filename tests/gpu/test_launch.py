"""Around the kernel: streams, graphs, devices, memory, caches; in a process of their own."""

import concurrent.futures
import contextlib
import dataclasses
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

import gluon_attn.forward.launch as attention_launch
from gluon_attn import ForwardConfig, attention
from gluon_attn.apart import Apart, Skipped
from gluon_attn.device import Device
from gluon_attn.forward.table import pick_config
from gluon_attn.gradients import attention_backward
from gluon_attn.problem import Problem
from gluon_attn.testing import Surrounded, check, check_gradients, config_for_reuse, normal, normal_qkv
from tests.gpu.checks import outcomes_of, settle

pytestmark = pytest.mark.timeout(1800)

Sizes = dict[str, Any]
# One kernel, and two: at D=256 V is always transposed before.
KINDS: tuple[Sizes, ...] = ({"dtype": torch.bfloat16, "head_dim": 128}, {"dtype": torch.float8_e4m3fn, "head_dim": 256})

LAUNCHES: dict[str, Callable[[], None]] = {}


def launch_test(function: Callable[[], None]) -> Callable[[], None]:
    LAUNCHES[function.__name__] = function
    return function


def run_and_check(q: Tensor, k: Tensor, v: Tensor, *, num_ctas: int | None = None, **options: Any) -> None:
    out, lse = attention(q, k, v, **options, num_ctas=num_ctas, return_lse=True)
    check(q, k, v, out, lse, **options, what=f"{tuple(q.shape)} {options}")


def raises(error: type[Exception], message: str, *args: Any, **kwargs: Any) -> None:
    """attention(...) raises exactly this error."""
    with pytest.raises(error, match=message) as caught:
        attention(*args, **kwargs)
    assert type(caught.value) is error, f"expected {error.__name__}, got {caught.value!r}"


def picked(q: Tensor, k: Tensor, v: Tensor, *, num_ctas: int, causal: bool = False) -> ForwardConfig:
    return pick_config(Problem.of(q, k, v, causal=causal), Device.of(q.device), num_ctas)


# ---------------------------------------------------------------------------------------------------------------------
# What is returned
# ---------------------------------------------------------------------------------------------------------------------


@launch_test
def outputs() -> None:
    for layout, dtype in itertools.product(("bhsd", "bshd"), (torch.float16, torch.bfloat16)):
        q, k, v = normal_qkv(batch=2, heads=4, kv_heads=2, q_len=70, kv_len=90, dtype=dtype, layout=layout)
        alone = attention(q, k, v, layout=layout)
        assert isinstance(alone, Tensor), "without return_lse, O alone is returned"
        out, lse = attention(q, k, v, layout=layout, return_lse=True)
        assert torch.equal(alone, out), "return_lse changes O"
        assert (out.shape, out.dtype, out.device, out.stride()) == (q.shape, q.dtype, q.device, q.stride())
        assert (lse.shape, lse.dtype, lse.device) == ((2, 4, 70), torch.float32, q.device)
        assert not out.requires_grad


@launch_test
def out_is_returned() -> None:
    q, k, v = normal_qkv(q_len=70)
    out = torch.full_like(q, float("nan"))
    assert attention(q, k, v, out=out) is out
    check(q, k, v, out, None)
    # In the memory order of the other layout, and in the midst of a larger tensor.
    strided = torch.full_like(q.transpose(1, 2).contiguous(), float("nan")).transpose(1, 2)
    attention(q, k, v, out=strided)
    assert torch.equal(strided, out)
    around = Surrounded(q.shape, q.dtype)
    attention(q, k, v, out=around.view)
    assert torch.equal(around.view, out)
    around.check_outside_untouched()


@launch_test
def inputs_are_not_written() -> None:
    tensors = normal_qkv(q_len=333, kv_heads=1)
    copies = [t.clone() for t in tensors]
    for num_ctas, causal in itertools.product((1, 2), (False, True)):
        attention(*tensors, num_ctas=num_ctas, causal=causal)
    assert all(map(torch.equal, tensors, copies))


# B, H, Hkv, Sq, Sk
EMPTY = {
    "no batch": (0, 2, 2, 5, 7),
    "no heads": (2, 0, 0, 5, 7),
    "no queries": (2, 4, 2, 0, 7),
    "no keys": (2, 4, 2, 5, 0),
    "no queries, no keys": (2, 4, 2, 0, 0),
}


@launch_test
def empty_dimensions() -> None:
    for what, (batch, heads, kv_heads, q_len, kv_len) in EMPTY.items():
        for layout, causal, given in itertools.product(("bhsd", "bshd"), (False, True), (False, True)):
            sizes: dict[str, Any] = {
                "batch": batch,
                "heads": heads,
                "kv_heads": kv_heads,
                "q_len": q_len,
                "kv_len": kv_len,
            }
            q, k, v = normal_qkv(**sizes, layout=layout)
            around = Surrounded(q.shape, q.dtype)
            out, lse = attention(
                q, k, v, causal=causal, layout=layout, return_lse=True, out=around.view if given else None
            )
            assert (out.shape, out.dtype, lse.shape) == (q.shape, q.dtype, (batch, heads, q_len)), what
            assert bool((out == 0).all()), f"{what}: O is not 0"
            assert bool((lse == float("-inf")).all()), f"{what}: LSE is not -inf"
            if given:
                assert out.data_ptr() == around.view.data_ptr(), f"{what}: O is not in `out`"
                around.check_outside_untouched()


@launch_test
def with_and_without_gradients() -> None:
    q, k, v = (t.requires_grad_() for t in normal_qkv(q_len=130))
    for modes in (torch.no_grad, torch.inference_mode):
        with modes():
            run_and_check(q, k, v, causal=True)
    assert attention(q, k, v, causal=True, return_lse=True)[0].requires_grad
    # Neither has spoilt the other: both again, now with everything cached.
    with torch.no_grad():
        run_and_check(q, k, v, causal=True)
    assert attention(q, k, v, causal=True, return_lse=True)[0].requires_grad
    run_and_check(q.detach(), k.detach(), v.detach(), causal=True)


@launch_test
def bad_tensors_are_refused() -> None:
    q, k, v = normal_qkv(q_len=64)
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "out": torch.empty_like(q)}
    attention(**given)  # the same shapes and strides are good, and known
    for name, t in given.items():
        shifted = torch.empty(t.numel() + 8, dtype=t.dtype, device="cuda")[1 : t.numel() + 1].view(t.shape)
        raises(ValueError, rf"^{name}: expected .*16 bytes.*got", **(given | {name: shifted}))
    for name in ("k", "v", "out"):
        raises(ValueError, rf"^{name}: expected .*cuda.*got cpu", **(given | {name: given[name].cpu()}))
    raises(TypeError, r"^k: expected .*bfloat16.*got", q, k.half(), v)
    attention(**given)


@launch_test
def a_config_that_does_not_fit_is_refused() -> None:
    q, k, v = normal_qkv(q_len=64, head_dim=256)
    config = dataclasses.replace(picked(q, k, v, num_ctas=1), kv_slots=16)
    raises(ValueError, r"^config: expected .*232448.*got", q, k, v, config=config)


# ---------------------------------------------------------------------------------------------------------------------
# Streams, graphs, devices
# ---------------------------------------------------------------------------------------------------------------------

SLEEP_CLOCKS = 200_000_000  # 0.1 s


@launch_test
def runs_on_the_current_stream() -> None:
    """The inputs are ready late on a side stream; a launch on another stream would read them too early."""
    late = normal_qkv(q_len=300, kv_heads=1, seed=1)
    q, k, v = (torch.full_like(t, float("nan")) for t in late)
    attention(*late, causal=True)  # compiled and loaded: that would wait for the whole device
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attention(*late, causal=True)  # leaves memory for the outputs behind: to ask the driver for it may wait too
        stream.synchronize()
        torch.cuda._sleep(SLEEP_CLOCKS)
        for tensor, values in zip((q, k, v), late, strict=True):
            tensor.copy_(values)
        out, lse = attention(q, k, v, causal=True, return_lse=True)
        finished = stream.record_event()
    assert not finished.query(), "the launch waited for the stream"
    stream.synchronize()
    check(*late, out, lse, causal=True)


@launch_test
def graph_capture_and_replay() -> None:
    for num_ctas, causal in itertools.product((1, 2), (False, True)):
        options: dict[str, Any] = {"causal": causal, "num_ctas": num_ctas, "return_lse": True}
        q, k, v = normal_qkv(q_len=513, kv_len=700, kv_heads=1)
        given = torch.full_like(q, float("nan"))
        attention(q, k, v, **options)  # compiles; a capture cannot
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = attention(q, k, v, **options)
            attention(q, k, v, **options, out=given)
        for seed in (1, 2, 3):
            for static, fresh in zip((q, k, v), normal_qkv(q_len=513, kv_len=700, kv_heads=1, seed=seed), strict=True):
                static.copy_(fresh)
            for result in (out, lse, given):
                result.fill_(float("nan"))
            graph.replay()
            check(q, k, v, out, lse, causal=causal, what=f"replay {seed}, {options}")
            assert torch.equal(given, out)


@launch_test
def in_a_thread_that_has_called_cuda_for_nothing_else() -> None:
    """Forward in one of Python's, backward in autograd's, with kernels that another thread has loaded."""
    q, k, v = normal_qkv(q_len=300)
    dout = torch.ones_like(q)
    want, lse = attention(q, k, v, return_lse=True)
    attention_backward(dout, None, q, k, v, want, lse, causal=False)
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    out = attention(*inputs)
    assert isinstance(out, Tensor)
    torch.cuda.synchronize()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        got = pool.submit(attention, q, k, v).result()
    check_gradients(q, k, v, dout, torch.autograd.grad(out, inputs, dout))
    assert isinstance(got, Tensor)
    assert isinstance(want, Tensor)
    assert torch.equal(got, want)


@launch_test
def fp8_with_values_transposed_before() -> None:
    """Two kernels and memory between them: captured and replayed, and on two streams at once."""
    for num_ctas, layout in itertools.product((1, 2), ("bhsd", "bshd")):
        sizes: dict[str, Any] = {"q_len": 513, "kv_len": 701, "heads": 4, "kv_heads": 2, "layout": layout}
        q, k, v = normal_qkv(**sizes, dtype=torch.float8_e4m3fn)
        problem = Problem.of(q, k, v, causal=True, layout=layout)
        config = config_for_reuse(problem, Device.of(q.device), num_ctas)
        assert config.transposes_before(1)
        options: dict[str, Any] = {"causal": True, "layout": layout}
        attention(q, k, v, **options, config=config)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = attention(q, k, v, **options, config=config, return_lse=True)
        for seed in (1, 2, 3):
            fresh = normal_qkv(**sizes, dtype=torch.float8_e4m3fn, seed=seed)
            for static, values in zip((q, k, v), fresh, strict=True):
                static.copy_(values)
            out.fill_(float("nan"))
            graph.replay()
            check(q, k, v, out, lse, **options, what=f"replay {seed}, {config}")
        inputs = [normal_qkv(**sizes, dtype=torch.float8_e4m3fn, seed=seed) for seed in (4, 5)]
        expected = [torch.full_like(out, float("nan")) for _ in inputs]
        for qkv, given in zip(inputs, expected, strict=True):
            attention(*qkv, **options, config=config, out=given)
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in inputs]
        for _ in range(20):
            found = [torch.full_like(out, float("nan")) for _ in inputs]
            torch.cuda.synchronize()
            for stream, qkv, given in zip(streams, inputs, found, strict=True):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(SLEEP_CLOCKS // 100)  # both are enqueued before either begins
                    attention(*qkv, **options, config=config, out=given)
            torch.cuda.synchronize()
            assert all(map(torch.equal, found, expected)), f"{config}"


@launch_test
def transposed_values_are_waited_for() -> None:
    """Attention starts while V is still being transposed, into memory that has the transposed V of the call before."""
    q, k, _ = normal_qkv(batch=1, heads=64, q_len=128, kv_len=16384, dtype=torch.float8_e4m3fn)
    values = [normal(*k.shape, dtype=k.dtype, seed=seed) for seed in (1, 2)]
    config = config_for_reuse(Problem.of(q, k, values[0]), Device.of(q.device), num_ctas=1)
    expected = []
    for v in values:
        out, lse = attention(q, k, v, config=config, return_lse=True)
        torch.cuda.synchronize()
        check(*(t[:, :2] for t in (q, k, v, out, lse)))
        expected.append(out)
    out = torch.empty_like(out)
    for i in range(40):
        attention(q, k, values[i % 2], config=config, out=out)
        assert torch.equal(out, expected[i % 2]), f"launch {i}"


@launch_test
def capture_of_a_first_call() -> None:
    """Lengths that were never launched, within a capture: only the kernels themselves are known."""
    for kind in KINDS:
        warm = normal_qkv(q_len=256, **kind)
        config = picked(*warm, num_ctas=1)
        attention(*warm, config=config)
        q, k, v = normal_qkv(q_len=257, kv_len=391, **kind)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = attention(q, k, v, config=config, return_lse=True)
        out.fill_(float("nan"))
        graph.replay()
        check(q, k, v, out, lse, what=f"{kind}")


@launch_test
def a_device_that_is_not_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        raise Skipped("needs two cards")
    for current, used in ((0, 1), (1, 0)):
        with torch.cuda.device(current):
            for kind in KINDS:
                q, k, v = (t.to(f"cuda:{used}") for t in normal_qkv(q_len=300, **kind))
                run_and_check(q, k, v, causal=True)
            assert torch.cuda.current_device() == current


# ---------------------------------------------------------------------------------------------------------------------
# Caches and memory
# ---------------------------------------------------------------------------------------------------------------------


@launch_test
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


@launch_test
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


@launch_test
def freed_memory_is_not_used() -> None:
    """Each call's tensors are freed before the next one's are made."""
    addresses = set()
    for seed, q_len in enumerate((512, 511, 512, 300, 512)):
        q, k, v = normal_qkv(q_len=q_len, seed=seed)
        addresses.add(q.data_ptr())
        run_and_check(q, k, v, causal=True)
        del q, k, v
    assert len(addresses) < 5, "no address came twice: this tested nothing"


@launch_test
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


@launch_test
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
            for batch, heads, kv_heads, q_len, kv_len in (
                (1, 2, 2, 513, 513),
                (1, 2, 2, 1, 1),
                (1, 1, 1, 1, 4096),
                (1, 1, 1, 16, 17),
                (16, 16, 16, 16, 16),
                (3, 6, 2, 1000, 77),
                (1, 32, 1, 4097, 4097),
                (2, 2, 2, 8192, 31),
            ):
                sizes: dict[str, Any] = {
                    "batch": batch,
                    "heads": heads,
                    "kv_heads": kv_heads,
                    "q_len": q_len,
                    "kv_len": kv_len,
                }
                for layout, scale, head_dim in (
                    ("bhsd", None, q.shape[3]),
                    ("bshd", 1.0, q.shape[3] - 16 // q.itemsize),
                ):
                    tensors = normal_qkv(**sizes, layout=layout, head_dim=head_dim, dtype=q.dtype)
                    attention(*tensors, config=config, causal=causal, scale=scale, layout=layout, return_lse=True)
            torch.cuda.synchronize()
            assert compiles() == first, f"{compiles()} compiles after {first} for the first call"


@launch_test
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


def run_test(name: str) -> None:
    LAUNCHES[name]()


# The order of memory tests matters little: one process has them all.
APART = Apart(function="tests.gpu.test_launch:run_test", group=lambda name: "launches")


@pytest.fixture(scope="module")
def outcome(request):
    yield from outcomes_of(APART, request)


@pytest.mark.parametrize("name", LAUNCHES)
def test_launch(name, outcome):
    settle(outcome(name))
