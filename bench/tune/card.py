"""The card that is here, as a search uses it."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from bench.ahead import Failed, Workers
from bench.peers import sdpa
from bench.provenance import SEED
from bench.timing import time_interleaved
from bench.tune.search import Config
from bench.tune.watch import Watch
from gluon_attn import attention
from gluon_attn.backward.configs import HopperBackward
from gluon_attn.backward.launch import main_kernels
from gluon_attn.backward.plan import BackwardPlan
from gluon_attn.bias import row_stride
from gluon_attn.device import Device
from gluon_attn.forward.launch import compiled_for
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.problem import Problem
from gluon_attn.resources import Resources, resources
from gluon_attn.score_mod import alibi, kind_of, softcap
from gluon_attn.tensors import empty_output
from gluon_attn.testing import backward_call, poison_free_memory

STARTING_S = 60.0  # the first use of a card in a process
HANG_S = 20.0  # a launch takes milliseconds; a kernel that is compiled already, less than a second to load
RUNS_OF_A_ROUND = 20  # `time_interleaved` runs each call 19 times in a round
LOADING_S = 0.5  # a kernel that another process has tried
# Of O and of gradients, relative to what the config in use computes, by bytes of an element: P is rounded to 8 bits in
# bf16, to 4 or 3 in fp8, in each config at another scale.
LARGEST_ERROR = {2: 0.02, 1: 0.1}
IDLE_S = 1.0  # after which a card has lowered its clocks
WAKING_S = 0.3
Sent = tuple[str, float]  # of a function that changes scores: of which kind, and its number
PEER = SDPBackend.CUDNN_ATTENTION
Job = tuple[Problem, Sent | None, Config, Device]


class RealCard:
    """Raises nothing for a kernel that hangs: the process is ended by who watches it. As a context manager it ends its
    child processes."""

    def __init__(
        self, device: Device, at_once: int, limit_s: float, watch: Watch | None = None, where: str = "cuda"
    ) -> None:
        self.device, self.where = device, where
        self.watch = watch or Watch()
        self.workers = Workers(compile_one, at_once=at_once, limit_s=limit_s)
        self.known: dict[Any, Resources | Failed] = {}  # by what a kernel depends on, which several problems share
        self.of: Problem | None = None
        self.tensors: list[Tensor] = []
        self.gradients: list[Tensor] = []  # dO, O and LSE, which they are computed from
        self.options: dict[str, Any] = {}  # of attention(), besides
        self.calls: dict[HopperBackward, Callable[[], Any]] = {}  # of that problem
        self.slowest_s = 0.0  # of the calls that were tried, with what the host does around one
        self.expected: dict[str, Tensor] = {}
        self.last_s = 0.0  # when something ran

    def __enter__(self) -> "RealCard":
        with self.watch.within(STARTING_S):
            self.works()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.workers.__exit__(kind, error, at)

    def compile(
        self, jobs: Sequence[tuple[Problem, Config]], within_s: float
    ) -> Iterator[tuple[int, Resources | Failed]]:
        numbers: dict[Any, list[int]] = {}  # of the jobs that a kernel is for
        for i, (problem, config) in enumerate(jobs):
            numbers.setdefault(kernel_of(problem, config, self.device), []).append(i)
        new = []
        for kernel, of_kernel in numbers.items():
            if kernel in self.known:
                yield from ((i, self.known[kernel]) for i in of_kernel)
            else:
                new.append(kernel)
        work = [job_of(*jobs[numbers[kernel][0]], self.device) for kernel in new]
        for number, answer in self.workers.run(work, within_s):
            self.known[new[number]] = answer
            yield from ((i, answer) for i in numbers[new[number]])

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
            self.options = options_of(problem, self.where)
        return self.tensors

    def call(self, problem: Problem, config: Config) -> Callable[[], Any]:
        """As it is timed."""
        q, k, v = self.inputs(problem)
        if isinstance(config, HopperBackward):
            if config not in self.calls:
                self.calls[config] = self.backward(problem, config)
            return self.calls[config]
        options = self.options
        return lambda: attention(q, k, v, **options, config=config)

    def backward(self, problem: Problem, config: HopperBackward, **options: Any) -> Callable[[], Any]:
        """options: of `backward_call`."""
        q, k, v = self.inputs(problem)
        if not self.gradients:
            out, lse = attention(q, k, v, **self.options, return_lse=True)
            self.gradients = [torch.randn_like(out), out, lse]
        dout, out, lse = self.gradients
        read = [self.options["alibi_slopes"]] if problem.scores == "alibi" else []
        of_problem = mask_of(problem) | {"score_mod": problem.score_mod, "read": read}
        return backward_call(config, dout, q, k, v, out, lse, **of_problem, **options)

    def outputs(self, problem: Problem, config: Config) -> dict[str, Tensor]:
        """All that a call computes, into memory of NaN: what it leaves out might lie there from the call before."""
        q, k, v = self.inputs(problem)
        if isinstance(config, HopperBackward):
            grads = self.backward(problem, config, output=of_nan, workspaces=lambda _, memory: of_nan(memory))()
            return {name: grad.float() for name, grad in zip(("dQ", "dK", "dV"), grads, strict=True)}
        out = of_nan(empty_output(q, v))
        if self.where == "cuda":
            poison_free_memory(((problem.batch, problem.heads, problem.q_len), torch.float32))
        out, lse = attention(q, k, v, **self.options, config=config, out=out, return_lse=True)
        # -inf is of a row that sees no key
        return {"O": out.float(), "LSE": torch.where(lse == float("-inf"), 0.0, lse)}

    def try_out(self, problem: Problem, config: Config, in_use: Config) -> str | None:
        with self.watch.within(HANG_S):
            self.inputs(problem)
            if not self.expected:
                self.expected = self.outputs(problem, in_use)
            wrong = difference(self.outputs(problem, config), self.expected, LARGEST_ERROR[problem.dtype.itemsize])
            self.clock(self.call(problem, config))
        return wrong

    def clock(self, call: Callable[[], Any]) -> None:
        started = time.perf_counter()
        call()
        self.wait()
        self.slowest_s = max(self.slowest_s, time.perf_counter() - started)

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
        return self.interleaved([self.call(problem, config) for config in configs], rounds)

    def time_beside_peer(self, problem: Problem, configs: Sequence[Config], rounds: int) -> list[Sequence[float]]:
        peer = self.peer(problem, of_gradients=isinstance(configs[0], HopperBackward))
        if peer is None:
            return []
        return self.interleaved([peer, *(self.call(problem, config) for config in configs)], rounds)

    def peer(self, problem: Problem, of_gradients: bool) -> Callable[[], Any] | None:
        """cuDNN's attention, through torch; in bf16 where the problem is in fp8. None if it computes no such thing."""
        if problem.mask != Mask(causal=problem.causal) or problem.scores is not None:
            return None
        q, k, v = (t.to(torch.bfloat16) if problem.dtype.itemsize == 1 else t for t in self.inputs(problem))
        call: Callable[[], Any] = partial(sdpa, PEER, q, k, v, problem.causal)
        try:
            with self.watch.within(HANG_S):
                if of_gradients:
                    inputs = q, k, v = [t.detach().requires_grad_() for t in (q, k, v)]
                    out = sdpa(PEER, q, k, v, problem.causal)
                    call = partial(torch.autograd.grad, out, inputs, torch.randn_like(out), retain_graph=True)
                call()
                self.wait()
        except RuntimeError:
            return None
        return call

    def interleaved(self, calls: Sequence[Callable[[], Any]], rounds: int) -> list[Sequence[float]]:
        """Seconds of each call in each round."""
        runs, has_idled = len(calls) * rounds, time.monotonic() - self.last_s > IDLE_S
        if not self.slowest_s:  # what was tried in an earlier process is not tried again in this one
            for call in calls:
                with self.watch.within(HANG_S):
                    self.clock(call)
        with self.watch.within(HANG_S + runs * (LOADING_S + RUNS_OF_A_ROUND * self.slowest_s)):
            if has_idled:
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


def mask_of(problem: Problem) -> dict[str, Any]:
    """As arguments of attention()."""
    return {"causal": problem.causal, "window": (problem.left, problem.right), "chunk": problem.chunk}


def options_of(problem: Problem, where: str) -> dict[str, Any]:
    """Likewise, with what changes scores, in memory there."""
    options = mask_of(problem)
    if problem.score_mod is not None and kind_of(problem.score_mod) == "softcap":
        options["softcap"] = problem.score_mod.after
    elif problem.scores == "alibi":  # the slopes of ALiBi's paper: a geometric sequence over the heads
        options["alibi_slopes"] = 2.0 ** (-8 * torch.arange(1, problem.heads + 1, device=where) / problem.heads)
    elif problem.scores == "bias":
        size = 1, 1, problem.q_len, row_stride(problem.kv_len)
        options["bias"] = torch.randn(size, dtype=problem.dtype, device=where)[..., : problem.kv_len]
    return options


def job_of(problem: Problem, config: Config, device: Device) -> Job:
    """What another process is sent: a jitted function cannot be."""
    sent = None
    if problem.score_mod is not None:
        kind = kind_of(problem.score_mod)
        assert kind is not None  # a function that is asked for by an option
        sent = (kind, problem.score_mod.after)
    return replace(problem, score_mod=None), sent, config, device


def problem_of_job(problem: Problem, sent: Sent | None) -> Problem:
    if sent is None:
        return problem
    kind, number = sent
    return replace(problem, score_mod=softcap(number) if kind == "softcap" else alibi(torch.empty(problem.heads)))


def of_nan(like: Tensor) -> Tensor:
    """Memory of that shape, of NaN; if it has whole numbers, as it is."""
    return torch.full_like(like, float("nan")) if like.is_floating_point() else like


def kernel_of(problem: Problem, config: Config, device: Device) -> tuple[Any, ...]:
    """What the kernel depends on, which several problems may share."""
    shared = isinstance(config, HopperBackward) and BackwardPlan.of(problem, config, device).shared > 0
    head_dims = problem.padded_head_dim, problem.padded_head_dim_v
    return problem.dtype, head_dims, problem.mask, problem.score_mod, problem.bias, config, shared


def difference(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], largest: float) -> str | None:
    """What is off by more than `largest` of its norm."""
    for name, right in expected.items():
        error = float((got[name] - right).norm() / right.norm().clamp(min=1e-30))
        if not error <= largest:  # true of NaN
            return f"{name} is off by {error:.3g}, relative to what the config in use computes"
    return None


def compile_one(job: Job) -> Resources:
    """Into Triton's cache; in a child process. Of several kernels, what the one takes whose loops spill most."""
    without, sent, config, device = job
    problem = problem_of_job(without, sent)
    warnings.simplefilter("ignore")  # products that the assembler has serialised: then it is slow, which is timed
    torch.set_num_threads(1)
    if isinstance(config, HopperBackward):
        found = map(resources, main_kernels(BackwardPlan.of(problem, config, device)).values())
        return max(found, key=lambda of_part: max((loop.spills for loop in of_part.loops), default=0))
    return resources(compiled_for(problem, config, device.arch))
