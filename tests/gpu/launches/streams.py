"""Streams, graphs, threads, devices."""

import concurrent.futures
import itertools
from typing import Any

import torch
from torch import Tensor

from gluon_attn import attention
from gluon_attn.apart import Skipped
from gluon_attn.device import Device
from gluon_attn.gradients import attention_backward
from gluon_attn.problem import Problem
from gluon_attn.testing import check, check_gradients, config_for_reuse, normal, normal_qkv
from tests.gpu.checks import Registry
from tests.gpu.launches.common import KINDS, picked, run_and_check

STREAMS = Registry()

SLEEP_CLOCKS = 200_000_000  # 0.1 s


@STREAMS
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


@STREAMS
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


@STREAMS
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


@STREAMS
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


@STREAMS
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


@STREAMS
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


@STREAMS
def a_device_that_is_not_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        raise Skipped("needs two cards")
    for current, used in ((0, 1), (1, 0)):
        with torch.cuda.device(current):
            for kind in KINDS:
                q, k, v = (t.to(f"cuda:{used}") for t in normal_qkv(q_len=300, **kind))
                run_and_check(q, k, v, causal=True)
            assert torch.cuda.current_device() == current
