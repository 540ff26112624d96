"""The card that is here, as a search uses it."""

import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from bench.ahead import Failed, Workers
from bench.provenance import SEED
from bench.timing import time_interleaved
from bench.tune.search import Config
from gluon_attn import attention
from gluon_attn.backward.configs import HopperBackward
from gluon_attn.backward.launch import main_kernel
from gluon_attn.backward.plan import BackwardPlan
from gluon_attn.device import Device
from gluon_attn.forward.launch import compiled_for
from gluon_attn.problem import Problem, empty_output
from gluon_attn.resources import Resources, resources
from gluon_attn.testing import backward_call, poison_free_memory

AGAIN = 3  # what the process ends with, for another to go on
HANG_S = 60.0  # a launch takes milliseconds
RUNS_OF_A_ROUND = 20  # `time_interleaved` runs each call 19 times in a round
# Of O and of gradients, relative to what the config in use computes, by bytes of an element: P is rounded to 8 bits in
# bf16, to 4 or 3 in fp8, in each config at another scale.
LARGEST_ERROR = {2: 0.02, 1: 0.1}
IDLE_S = 1.0  # after which a card has lowered its clocks
WAKING_S = 0.3
Job = tuple[Problem, Config, Device]


class RealCard:
    """Raises nothing for a kernel that hangs: the process ends. As a context manager it ends its child processes."""

    def __init__(self, device: Device, at_once: int, limit_s: float, where: str = "cuda") -> None:
        self.device, self.where = device, where
        self.workers = Workers(compile_one, at_once=at_once, limit_s=limit_s)
        self.known: dict[Any, Resources | Failed] = {}  # by what a kernel depends on, which several problems share
        self.of: Problem | None = None
        self.tensors: list[Tensor] = []
        self.gradients: list[Tensor] = []  # dO, O and LSE, which they are computed from
        self.calls: dict[HopperBackward, Callable[[], Any]] = {}  # of that problem
        self.slowest_s = 0.0  # of the calls that were tried, with what the host does around one
        self.expected: dict[str, Tensor] = {}
        self.last_s = 0.0  # when something ran

    def __enter__(self) -> "RealCard":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.workers.__exit__(kind, error, at)

    def compile(self, problem: Problem, configs: Sequence[Config]) -> Iterator[tuple[int, Resources | Failed]]:
        kernels = [kernel_of(problem, config, self.device) for config in configs]
        new = []
        for i, kernel in enumerate(kernels):
            if kernel in self.known:
                yield i, self.known[kernel]
            else:
                new.append(i)
        jobs: list[Job] = [(problem, configs[i], self.device) for i in new]
        for number, answer in self.workers.run(jobs):
            self.known[kernels[new[number]]] = answer
            yield new[number], answer

    def inputs(self, problem: Problem) -> list[Tensor]:
        if self.of != problem:
            self.of, self.expected, self.tensors, self.gradients = problem, {}, [], []
            self.calls.clear()
            torch.manual_seed(SEED)
            sizes = (
                (problem.heads, problem.q_len, problem.head_dim),
                (problem.kv_heads, problem.kv_len, problem.head_dim),
                (problem.kv_heads, problem.kv_len, problem.head_dim_v),
            )
            self.tensors = [
                torch.randn(problem.batch, *size, dtype=torch.bfloat16, device=self.where).to(problem.dtype)
                for size in sizes
            ]
        return self.tensors

    def call(self, problem: Problem, config: Config) -> Callable[[], Any]:
        """As it is timed."""
        q, k, v = self.inputs(problem)
        if isinstance(config, HopperBackward):
            if config not in self.calls:
                self.calls[config] = self.backward(problem, config)
            return self.calls[config]
        return lambda: attention(q, k, v, causal=problem.causal, config=config)

    def backward(self, problem: Problem, config: HopperBackward, **options: Any) -> Callable[[], Any]:
        """options: of `backward_call`."""
        q, k, v = self.inputs(problem)
        if not self.gradients:
            out, lse = attention(q, k, v, causal=problem.causal, return_lse=True)
            self.gradients = [torch.randn_like(out), out, lse]
        dout, out, lse = self.gradients
        return backward_call(config, dout, q, k, v, out, lse, causal=problem.causal, **options)

    def outputs(self, problem: Problem, config: Config) -> dict[str, Tensor]:
        """All that a call computes, into memory of NaN: what it leaves out might lie there from the call before."""
        q, k, v = self.inputs(problem)
        if isinstance(config, HopperBackward):
            grads = self.backward(problem, config, output=of_nan, workspaces=lambda _, memory: of_nan(memory))()
            return {name: grad.float() for name, grad in zip(("dQ", "dK", "dV"), grads, strict=True)}
        out = of_nan(empty_output(q, v))
        if self.where == "cuda":
            poison_free_memory(((problem.batch, problem.heads, problem.q_len), torch.float32))
        out, lse = attention(q, k, v, causal=problem.causal, config=config, out=out, return_lse=True)
        # -inf is of a row that sees no key
        return {"O": out.float(), "LSE": torch.where(lse == float("-inf"), 0.0, lse)}

    def try_out(self, problem: Problem, config: Config, in_use: Config) -> str | None:
        with ends_if_hung(f"{config} hangs"):
            self.inputs(problem)
            if not self.expected:
                self.expected = self.outputs(problem, in_use)
            wrong = difference(self.outputs(problem, config), self.expected, LARGEST_ERROR[problem.dtype.itemsize])
            started = time.perf_counter()
            self.call(problem, config)()
            self.wait()
            self.slowest_s = max(self.slowest_s, time.perf_counter() - started)
        return wrong

    def wait(self) -> None:
        """Until all is done that was begun."""
        if self.where == "cuda":
            torch.cuda.synchronize()
        self.last_s = time.monotonic()

    def works(self) -> bool:
        try:
            return float(torch.ones(1, device=self.where).sum()) == 1
        except RuntimeError:
            return False

    def time(self, problem: Problem, configs: Sequence[Config], rounds: int) -> list[Sequence[float]]:
        calls = [self.call(problem, config) for config in configs]
        runs = len(calls) * rounds
        with ends_if_hung(f"one of {len(calls)} configs hangs", HANG_S + runs * (1 + RUNS_OF_A_ROUND * self.slowest_s)):
            if time.monotonic() - self.last_s > IDLE_S:
                self.wake(calls[0])
            found = time_interleaved({str(i): call for i, call in enumerate(calls)}, rounds=rounds)
            self.wait()
        return [found[str(i)].round_medians for i in range(len(calls))]

    def wake(self, call: Callable[[], Any]) -> None:
        """The first to be timed would have lower clocks than the others."""
        until = time.monotonic() + WAKING_S
        while time.monotonic() < until:
            call()
            self.wait()


def of_nan(like: Tensor) -> Tensor:
    """Memory of that shape, of NaN; if it has whole numbers, as it is."""
    return torch.full_like(like, float("nan")) if like.is_floating_point() else like


def kernel_of(problem: Problem, config: Config, device: Device) -> tuple[Any, ...]:
    """What the kernel depends on, which several problems may share."""
    shared = isinstance(config, HopperBackward) and BackwardPlan.of(problem, config, device).shared > 0
    return problem.dtype, problem.padded_head_dim, problem.padded_head_dim_v, problem.mask, config, shared


def difference(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], largest: float) -> str | None:
    """What is off by more than `largest` of its norm."""
    for name, right in expected.items():
        error = float((got[name] - right).norm() / right.norm().clamp(min=1e-30))
        if not error <= largest:  # true of NaN
            return f"{name} is off by {error:.3g}, relative to what the config in use computes"
    return None


def compile_one(job: Job) -> Resources:
    """Into Triton's cache; in a child process."""
    problem, config, device = job
    warnings.simplefilter("ignore")  # products that the assembler has serialised: then it is slow, which is timed
    torch.set_num_threads(1)
    if isinstance(config, HopperBackward):
        return resources(main_kernel(BackwardPlan.of(problem, config, device)))
    return resources(compiled_for(problem, config, device.arch))


@contextlib.contextmanager
def ends_if_hung(what: str, limit_s: float = HANG_S) -> Iterator[None]:
    """Ends the process if the block takes longer: a kernel that hangs can be stopped in no other way."""

    def end() -> None:
        print(f"\nbench tune: {what}", file=sys.stderr, flush=True)
        os._exit(AGAIN)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
