"""What is done on the card: its own path, with other kernels on the CPU."""

import dataclasses
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from bench.timing import Timing
from bench.tune import card as on_card
from bench.tune.card import RealCard
from bench.tune.watch import Watch
from gluon_attn import ForwardConfig, api, attention
from gluon_attn.backward import table as backward_table
from gluon_attn.backward.configs import HopperBackward
from gluon_attn.backward.plan import BackwardPlan
from gluon_attn.bias import Bias
from gluon_attn.forward import launch
from gluon_attn.forward.plan import Plan
from gluon_attn.forward.table import pick_config
from gluon_attn.problem import Problem
from gluon_attn.reference import reference_attention
from gluon_attn.runtime.kernel import Build
from gluon_attn.score_mod import alibi, softcap
from gluon_attn.tensors import empty_output
from gluon_attn.testing import backward_call
from tests.bench.tune.fakes import ASKED, BEST, H200, IN_USE, taken
from tests.gluon_attn.problems import problem


@pytest.fixture
def stand_in(monkeypatch):
    """The card's own path, with another attention on the CPU that takes the same arguments. What it is told to get
    wrong, by config."""
    asked = problem(batch=1, heads=4, kv_heads=2, q_len=64, kv_len=32, head_dim=64, causal=True)
    wrong: dict[ForwardConfig, Callable[[torch.Tensor, torch.Tensor], None]] = {}

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, config: Any = None, **options: Any
    ) -> Any:
        assert (q.shape, k.shape, v.shape, causal) == ((1, 4, 64, 64), (1, 2, 32, 64), (1, 2, 32, 64), True)
        right, right_lse = reference_attention(q, k, v, causal=causal)
        out = options.get("out", torch.empty_like(q))
        lse = right_lse.float()
        if wrong.get(config) is not skipped:
            out.copy_(right)
        if config in wrong:
            wrong[config](out, lse)
        return (out, lse) if options.get("return_lse") else out

    monkeypatch.setattr(on_card, "attention", attend)
    return asked, RealCard(H200, 1, 1.0, where="cpu"), wrong


def skipped(out: torch.Tensor, lse: torch.Tensor) -> None:
    """Nothing is stored: what is in O's memory stays there."""


def test_what_a_config_computes_is_held_against_the_config_in_use(stand_in):
    """Some rows of the problem see no key: their LSE is -inf."""
    asked, card, wrong = stand_in
    assert card.try_out(asked, IN_USE, IN_USE) is None
    assert card.try_out(asked, BEST, IN_USE) is None
    for makes_it, says in (
        (lambda out, lse: out.mul_(1.01), None),
        (lambda out, lse: out.mul_(1.1), "O is off by 0.1"),
        (lambda out, lse: out[0, 0, 40].fill_(float("nan")), "O is off by nan"),
        (lambda out, lse: lse.mul_(1.1), "LSE is off by 0.1"),
        (skipped, "O is off by nan"),
    ):
        wrong[BEST] = makes_it
        said = card.try_out(asked, BEST, IN_USE)
        assert (said is None) == (says is None), said
        assert says is None or said.startswith(says)
    assert card.works()


def test_times_are_by_config(stand_in, monkeypatch):
    asked, card, _ = stand_in
    awake: list[object] = []

    def timed(calls: dict[str, Any], rounds: int) -> dict[str, Timing]:
        return {name: Timing(1.0, tuple(float(i) for _ in range(rounds))) for i, name in enumerate(calls)}

    monkeypatch.setattr(on_card, "time_interleaved", timed)
    monkeypatch.setattr(card, "wake", awake.append)
    for _ in range(2):
        assert card.time(asked, [BEST, IN_USE], 2) == [(0.0, 0.0), (1.0, 1.0)]
    assert len(awake) == 1  # the second time it has not idled
    assert card.slowest_s > 0  # though nothing was tried in this process: from it comes how long timing may take


def test_a_kernel_that_two_shapes_share_is_compiled_once(monkeypatch):
    """In one call, and over calls."""
    card = RealCard(H200, 1, 1.0, where="cpu")
    given: list[Any] = []

    def answer(jobs: Sequence[Any], within_s: float) -> Iterator[tuple[int, Any]]:
        assert within_s == 9
        given.extend(jobs)
        yield from ((i, taken()) for i, _ in enumerate(jobs))

    monkeypatch.setattr(card.workers, "run", answer)
    other, causal = dataclasses.replace(ASKED, q_len=64, batch=1), dataclasses.replace(ASKED, causal=True)
    jobs = [(ASKED, IN_USE), (ASKED, BEST), (other, IN_USE), (causal, IN_USE)]
    assert dict(card.compile(jobs, 9)) == dict.fromkeys(range(4), taken())
    assert dict(card.compile([(other, BEST), (causal, BEST)], 9)) == dict.fromkeys(range(2), taken())
    assert [(asked.causal, config) for asked, _, config, _ in given] == [
        (False, IN_USE), (False, BEST), (True, IN_USE), (True, BEST),
    ]  # fmt: skip


@pytest.mark.parametrize("of_gradients", [False, True])
def test_the_peer_computes_the_same(monkeypatch, of_gradients):
    """By another backend on the CPU; in bf16 where the problem is in fp8."""
    for dtype in (torch.bfloat16, *([] if of_gradients else [torch.float8_e4m3fn])):
        asked = problem(batch=1, heads=4, kv_heads=2, q_len=32, kv_len=32, head_dim=64, causal=True, dtype=dtype)
        card = RealCard(H200, 1, 1.0, where="cpu")
        monkeypatch.setattr(on_card, "PEER", torch.nn.attention.SDPBackend.MATH)
        call = card.peer(asked, of_gradients)
        assert call is not None
        q, k, v = (t.to(torch.bfloat16) for t in card.inputs(asked))
        found = call()
        if of_gradients:
            assert [grad.shape for grad in found] == [q.shape, k.shape, v.shape]
        else:
            torch.testing.assert_close(found, reference_attention(q, k, v, causal=True)[0], rtol=0.02, atol=0.02)


def test_limits_of_the_mask_are_what_is_timed(monkeypatch):
    """Forward and backward, on the CPU; the peer has no such mask."""
    card, given = RealCard(H200, 1, 1.0, where="cpu"), []
    monkeypatch.setattr(on_card, "PEER", torch.nn.attention.SDPBackend.MATH)  # which computes on the CPU

    def attend(*_: Any, **options: Any) -> Any:
        given.append({name: options[name] for name in ("causal", "window", "chunk")})
        q = card.tensors[0]
        return (q, q[..., 0]) if options.get("return_lse") else q

    monkeypatch.setattr(on_card, "attention", attend)
    plain = problem(batch=1, heads=4, kv_heads=2, q_len=64, kv_len=64, head_dim=64, causal=True)
    every: list[dict[str, Any]] = [{"left": 20}, {"right": 5, "causal": False}, {"chunk": 16}]
    for limits in every:
        asked = dataclasses.replace(plain, **limits)
        card.call(asked, BEST)()
        window = asked.left, asked.right
        assert given.pop() == {"causal": asked.causal, "window": window, "chunk": asked.chunk}
        assert card.peer(plain, of_gradients=False) is not None
        card.inputs(asked)
        assert card.peer(asked, of_gradients=False) is None
        launched: list[Any] = []
        monkeypatch.setattr(on_card, "backward_call", lambda *_, to=launched, **options: to.append(options))
        card.call(asked, backward_table.HOPPER[64])
        assert launched == [given.pop() | {"score_mod": None, "read": []}]


SCORES: dict[str, dict[str, Any]] = {
    "softcap": {"score_mod": softcap(30.0)},
    "alibi": {"score_mod": alibi(torch.empty(4))},
    "bias": {"bias": Bias(dtype=torch.bfloat16, each_row=True, shared=True)},
}


@pytest.fixture
def on_cpu(monkeypatch):
    """What runs on the card, executed on the CPU."""
    monkeypatch.setattr(on_card, "attention", partial(attention, device=H200))
    monkeypatch.setattr(on_card, "backward_call", partial(backward_call, device=H200))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("kind", SCORES)
def test_changed_scores_are_what_is_timed(kind):
    """By the kernels on the CPU: the problem that attention() poses is the one that was asked for."""
    asked = dataclasses.replace(problem(batch=1, heads=4, kv_heads=2, q_len=24, kv_len=37, head_dim=64), **SCORES[kind])
    assert asked.scores == kind
    card = RealCard(H200, 1, 1.0, where="cpu")
    posed: list[Problem] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "require_fits", lambda config, problem, device: posed.append(problem))
        config = pick_config(asked, H200)
        assert card.try_out(asked, config, config) is None
    assert {dataclasses.replace(p, scale=asked.scale) for p in posed} == {asked}
    assert card.peer(asked, of_gradients=False) is None
    without = dataclasses.replace(asked, score_mod=None, bias=None)
    plain, *_ = card.outputs(without, pick_config(without, H200)).values()
    changed, *_ = card.outputs(asked, config).values()
    assert not torch.equal(plain, changed)


LIMITS: dict[str, dict[str, Any]] = {"window": {"left": 5, "causal": True}, "chunk": {"chunk": 16}}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("kind", ["softcap", "alibi", *LIMITS])
def test_gradients_are_those_of_what_is_timed(kind):
    """By the kernels on the CPU, as attention's own."""
    plain = problem(batch=1, heads=4, kv_heads=2, q_len=24, kv_len=40, head_dim=64)
    asked = dataclasses.replace(plain, **(SCORES | LIMITS)[kind])
    card = RealCard(H200, 1, 1.0, where="cpu")
    config = backward_table.pick_config(asked)
    got = card.outputs(asked, config)
    q, k, v = (t.detach().requires_grad_() for t in card.inputs(asked))
    out = attention(q, k, v, **card.options, device=H200)
    assert isinstance(out, torch.Tensor)
    want = torch.autograd.grad(out, [q, k, v], card.gradients[0])
    for name, grad in zip(("dQ", "dK", "dV"), want, strict=True):
        assert torch.equal(got[name], grad.float()), name


@pytest.mark.parametrize("kind", [None, *SCORES])
def test_a_job_is_sent_to_another_process(kind):
    asked = problem() if kind is None else dataclasses.replace(problem(heads=4), **SCORES[kind])
    without, sent, config, device = pickle.loads(pickle.dumps(on_card.job_of(asked, BEST, H200)))
    assert (on_card.problem_of_job(without, sent), config, device) == (asked, BEST, H200)


def test_what_the_peer_does_not_compute_has_no_times(monkeypatch):
    def refuse(*_: Any) -> Any:
        raise RuntimeError("no available kernel")

    monkeypatch.setattr(on_card, "sdpa", refuse)
    asked = problem(batch=1, heads=4, kv_heads=2, q_len=32, kv_len=32, head_dim=64)
    assert RealCard(H200, 1, 1.0, where="cpu").time_beside_peer(asked, [IN_USE], 3) == []


def test_what_runs_on_the_card_is_watched(stand_in, monkeypatch):
    """Each has a time within which it ends, longer for more runs."""
    asked, _, _ = stand_in
    limits: list[float] = []

    class Seen(Watch):
        def within(self, seconds: float) -> Any:
            limits.append(seconds)
            return super().within(seconds)

    monkeypatch.setattr(on_card, "time_interleaved", lambda calls, rounds: {n: Timing(1.0, (1.0,)) for n in calls})
    with RealCard(H200, 1, 1.0, Seen(), where="cpu") as card:
        card.try_out(asked, BEST, IN_USE)
        card.last_s = float("inf")  # it has not idled
        card.time(asked, [BEST, IN_USE], 1)
        card.time(asked, [BEST, IN_USE], 9)
    assert limits[:2] == [on_card.STARTING_S, on_card.HANG_S]
    assert on_card.HANG_S < limits[2] < limits[3]
    assert card.watch.until.value == 0


def test_what_is_compiled_ahead_is_what_a_call_compiles(monkeypatch):
    """In the child process and in a call of attention."""
    asked = problem(batch=1, heads=4, kv_heads=2, q_len=32, kv_len=64, head_dim=64)
    config = pick_config(asked, H200)
    builds: list[tuple[Any, int]] = []
    monkeypatch.setattr(Build, "compile", lambda build, arch: builds.append((build, arch)))
    monkeypatch.setattr(on_card, "resources", lambda kernel: taken())
    launch.compiled.cache_clear()
    on_card.compile_one(on_card.job_of(asked, config, H200))
    launch.compiled.cache_clear()
    monkeypatch.setattr(launch, "CardLaunch", lambda *_: None)
    q, k, v = (torch.empty(1, n, s, 64, dtype=torch.bfloat16, device="meta") for n, s in ((4, 32), (2, 64), (2, 64)))
    plan = Plan.of(Problem.of(q, k, v, causal=False), config, H200)
    launch.launches_on_card(plan, q, k, v, empty_output(q, v))
    launch.compiled.cache_clear()
    assert len(builds) == 2
    assert builds[0] == builds[1]


def test_gradients_on_the_cards_path(stand_in, monkeypatch):
    """By other kernels on the CPU: inputs once, all three gradients looked at, in memory of NaN."""
    asked, card, _ = stand_in
    config = backward_table.HOPPER[64]
    other = dataclasses.replace(config, load_registers=32)
    calls: list[tuple[HopperBackward, bool]] = []
    off = {"dQ": 0.0, "dK": 0.0, "dV": 0.0}

    def call_of(config: HopperBackward, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, **options: Any) -> Any:
        of_problem = [options.pop(name) for name in ("causal", "window", "chunk", "score_mod", "read")]
        assert of_problem == [True, (None, None), None, None, []]
        assert (dout.shape, out.shape, lse.shape) == (q.shape, q.shape, q.shape[:3])
        calls.append((config, bool(options)))
        if options:
            assert options["output"](q).isnan().all()
            assert options["workspaces"]("lse", lse).isnan().all()
            whole = torch.zeros(3, dtype=torch.int32)
            assert options["workspaces"]("added", whole) is whole
        error = [off[name] if config == other else 0.0 for name in ("dQ", "dK", "dV")]
        return lambda: tuple(t * (1 + e) for t, e in zip((q, k, v), error, strict=True))

    monkeypatch.setattr(on_card, "backward_call", call_of)
    assert card.try_out(asked, other, config) is None
    for name in off:
        off[name] = 0.1
        assert str(card.try_out(asked, other, config)).startswith(f"{name} is off by 0.1")
        off[name] = 0.0
    assert [timed for timed in calls if not timed[1]] == [(other, False)]  # what is timed is made once
    assert len([timed for timed in calls if timed[0] == config]) == 1


def test_kernels_of_gradients_depend_on_whether_key_blocks_are_shared():
    config = backward_table.HOPPER[128]
    asked = problem(batch=1, kv_len=100, q_len=2**14)
    plain = problem()
    assert [BackwardPlan.of(p, config, H200).shared > 0 for p in (asked, plain)] == [True, False]
    assert on_card.kernel_of(asked, config, H200) != on_card.kernel_of(plain, config, H200)
    assert on_card.kernel_of(asked, BEST, H200) == on_card.kernel_of(plain, BEST, H200)
