"""`supports` says what `attention` raises, and nothing where it computes; it compiles nothing."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gluon_attn import api, attention, attention_varlen, supports
from gluon_attn.call import Extras, Options
from gluon_attn.device import Device
from gluon_attn.forward.table import blackwell_config
from gluon_attn.ops import attention_op
from gluon_attn.support import REFUSALS

HOPPER, BLACKWELL = Device.hopper(), Device.blackwell()
E4M3 = torch.float8_e4m3fn


def q_of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape or (1, 4, 24, 64), dtype=dtype)


def call(q: Tensor | None = None, k: Tensor | None = None, v: Any = None, **options: Any) -> dict[str, Any]:
    q = q_of() if q is None else q
    k = q if k is None else k
    return {"q": q, "k": k, "v": k if v is None else v, "device": HOPPER, **options}


def shifted(elements: int) -> Tensor:
    return torch.zeros(4 * 24 * 64 + elements, dtype=torch.bfloat16)[elements:].view(1, 4, 24, 64)


def freed() -> Tensor:
    q = q_of()
    q.untyped_storage().resize_(0)
    return q


def freed_bias() -> Tensor:
    bias = torch.zeros(1, 4, 24, 24)
    bias.untyped_storage().resize_(0)
    return bias


Q8 = q_of(dtype=E4M3)
ALIAS = q_of()
GOOD: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": call,
    "causal, unequal lengths": lambda: call(q_of(1, 4, 24, 64), q_of(1, 2, 40, 64), causal=True),
    "bshd": lambda: call(q_of(1, 24, 4, 64), q_of(1, 40, 1, 64), layout="bshd", scale=0.5),
    "head dim 8": lambda: call(q_of(1, 2, 3, 8)),
    "head dim 256": lambda: call(q_of(1, 2, 3, 256)),
    "float16": lambda: call(q_of(dtype=torch.float16)),
    "fp8": lambda: call(Q8, q_scale=torch.ones(1, 4)),
    "no keys": lambda: call(k=q_of(1, 4, 0, 64)),
    "no queries": lambda: call(q_of(1, 4, 0, 64), q_of()),
    "no keys, a scale that is not looked at": lambda: call(Q8, Q8[:, :, :0], q_scale=-torch.ones(1, 4)),
    "expanded keys": lambda: call(k=q_of(1, 1, 24, 64).expand(1, 4, 24, 64)),
    "out": lambda: call(out=q_of()),
    "Blackwell": lambda: call(device=BLACKWELL, num_ctas=4),
    "a shift of 16 bytes": lambda: call(shifted(8)),
    "requires grad": lambda: call(q_of().requires_grad_()),
    "a bias": lambda: call(bias=torch.zeros(1, 4, 24, 24)),
    "a bias on Blackwell": lambda: call(bias=torch.zeros(1, 4, 24, 24), device=BLACKWELL),
    "a parameter": lambda: call(torch.nn.Parameter(q_of())),
}
BAD: dict[str, Callable[[], dict[str, Any]]] = {
    "no card": lambda: call(device=None),
    "another device": lambda: call(device="hopper"),
    "Ampere": lambda: call(device=Device(name="A100", capability=(8, 0), sm_count=108, smem_bytes=166912)),
    "meta": lambda: call(q_of().to("meta"), device=None),
    "float32": lambda: call(q_of(dtype=torch.float32)),
    "float64": lambda: call(q_of(dtype=torch.float64)),
    "dtypes": lambda: call(v=q_of(dtype=torch.float16)),
    "no tensor": lambda: call(v=3),
    "three dimensions": lambda: call(q_of(4, 24, 64)),
    "sparse": lambda: call(v=q_of().to_sparse()),
    "head dim 4": lambda: call(q_of(1, 2, 3, 4)),
    "head dim 264": lambda: call(q_of(1, 2, 3, 264)),
    "head dim 256 on Blackwell": lambda: call(q_of(1, 2, 3, 256), device=BLACKWELL),
    "batches": lambda: call(k=q_of(2, 4, 24, 64)),
    "head dims": lambda: call(k=q_of(1, 4, 24, 128)),
    "heads": lambda: call(k=q_of(1, 3, 24, 64)),
    "lengths of k and v": lambda: call(v=q_of(1, 4, 25, 64)),
    "last stride": lambda: call(q_of(1, 4, 64, 24).mT),
    "odd strides": lambda: call(q_of(1, 4, 24, 68)[..., :64]),
    "a shift of 2 bytes": lambda: call(shifted(1)),
    "freed": lambda: call(freed()),
    "causal": lambda: call(causal=1),
    "scale": lambda: call(scale=-1.0),
    "infinite scale": lambda: call(scale=float("inf")),
    "layout": lambda: call(layout="sbhd"),
    "return_lse": lambda: call(return_lse=1),
    "deterministic": lambda: call(deterministic="yes"),
    "num_ctas": lambda: call(num_ctas=4),
    "config": lambda: call(config=blackwell_config(3, 192)),
    "out that is q": lambda: call(ALIAS, out=ALIAS),
    "out's dtype": lambda: call(out=q_of(dtype=torch.float32)),
    "out with gradients": lambda: call(q_of().requires_grad_(), out=q_of()),
    "a scale in 16 bits": lambda: call(k_scale=torch.ones(1, 4)),
    "a scale's shape": lambda: call(Q8, k_scale=torch.ones(1, 2)),
    "a negative scale": lambda: call(Q8, k_scale=-torch.ones(1, 4)),
    "gradients in fp8": lambda: call(Q8, q_of(dtype=E4M3).requires_grad_()),
    "gradients on Blackwell": lambda: call(q_of().requires_grad_(), device=BLACKWELL),
    "dropout": lambda: call(dropout_p=0.1),
    "a negative window": lambda: call(window=(-8, 0)),
    "slopes in 16 bits": lambda: call(alibi_slopes=torch.zeros(2).half()),
    "a cap of 0": lambda: call(softcap=0.0),
    "a bias of a misplaced row": lambda: call(bias=torch.zeros(4 * 24 * 24 + 1)[1:].view(1, 4, 24, 24)),
    "a bias with two CTAs": lambda: call(bias=torch.zeros(1, 4, 24, 24), device=BLACKWELL, num_ctas=2),
    "a bias that is freed": lambda: call(bias=freed_bias()),
    "two changes of scores": lambda: call(softcap=2.0, alibi_slopes=torch.zeros(2)),
    "a mask": lambda: call(attn_mask=torch.ones(24, 24)),
    "another's name": lambda: call(is_causal=True),
    "no name at all": lambda: call(nonsense=1),
}


class NothingToDo:
    def __call__(self, tensors: dict[str, Any]) -> None:
        pass


@pytest.fixture(autouse=True)
def _launches_nothing(monkeypatch):
    """All of `attention` but the kernels: what it refuses, it refuses before."""
    monkeypatch.setattr(api, "_launches", {})
    monkeypatch.setattr("gluon_attn.cpu.launches_on_cpu", lambda *_: NothingToDo())


def raised(arguments: dict[str, Any]) -> str | None:
    try:
        attention(**arguments)
    except REFUSALS as refusal:
        return str(refusal)
    return None


@pytest.mark.parametrize("name", [*GOOD, *BAD])
def test_it_says_what_attention_raises(name):
    arguments = (GOOD | BAD)[name]()
    said = [supports(**arguments) for _ in range(2)]  # new, and as one of a kind that was there before
    assert said == [raised(arguments)] * 2
    assert (said[0] is None) == (name in GOOD)


@pytest.mark.parametrize("name", [*GOOD, *BAD])
def test_it_says_so_after_a_right_call_of_the_same_shape_too(name):
    for right in GOOD.values():
        assert supports(**right()) is None
    arguments = (GOOD | BAD)[name]()
    assert supports(**arguments) == raised(arguments)


@pytest.mark.parametrize("name", ["plain", "fp8", "requires grad", "last stride"])
def test_nothing_is_compiled(name, monkeypatch):
    def compiles(*_: object) -> None:
        raise AssertionError("compiled")

    for launcher in ("gluon_attn.cpu.launches_on_cpu", "gluon_attn.api.launches_on_card"):
        monkeypatch.setattr(launcher, compiles)
    assert (supports(**(GOOD | BAD)[name]()) is None) == (name in GOOD)


def test_its_parameters_are_those_of_attention():
    """And of attention_varlen, whose lengths need not be given."""
    theirs, ours = (dict(inspect.signature(fn).parameters) for fn in (attention, supports))
    lengths = {name for name in inspect.signature(attention_varlen).parameters if name not in theirs}
    assert all(ours.pop(name).default is None for name in {"needs_grad"} | lengths)
    assert list(ours.values()) == list(theirs.values())


@pytest.mark.parametrize("requires_grad", [False, True])
def test_gradients_by_argument(requires_grad):
    """In place of what grad mode and `requires_grad` say."""
    arguments = call(q_of().requires_grad_(requires_grad), device=BLACKWELL)
    refused = "device: expected a Hopper card, as gradients are asked for"
    assert supports(**arguments, needs_grad=False) is None
    with torch.no_grad():
        assert supports(**arguments) is None
        assert str(supports(**arguments, needs_grad=True)).startswith(refused)
    assert (supports(**arguments) is None) == (not requires_grad)


@pytest.mark.parametrize("strides", ["dense", "transposed"])
def test_autocast(strides):
    q = q_of(dtype=torch.float32) if strides == "dense" else q_of(1, 4, 64, 24, dtype=torch.float32).mT
    with torch.autocast("cpu", torch.bfloat16):
        assert supports(**call(q)) == raised(call(q))
        assert (supports(**call(q)) is None) == (strides == "dense")


def test_no_memory_under_autocast_is_no_reason(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    q = torch.ones(1, 2, 8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert supports(q, q, q, device=Device.hopper()) is None
        monkeypatch.setattr(torch, "empty_like", full)
        with pytest.raises(torch.OutOfMemoryError):
            supports(q, q, q, device=Device.hopper())


def test_no_vmap():
    def ask(q: Tensor) -> Tensor:
        answers.append(supports(q, q, q, device=HOPPER))
        return q

    answers: list[str | None] = []
    torch.vmap(ask)(q_of()[None].expand(2, 1, 4, 24, 64))
    assert "torch.vmap has batched" in str(answers)


@pytest.mark.parametrize(
    "q", [q_of(), q_of().requires_grad_(), q_of(1, 4, 64, 24).mT], ids=["plain", "grad", "strides"]
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_it_is_asked_in_a_graph(q, dynamic):
    """As a hook asks: the graph holds the one call or the other."""

    def attend(q: Tensor) -> Any:
        if supports(q, q, q, causal=True, device=HOPPER) is None:
            return attention(q, q, q, causal=True, device=HOPPER)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    torch.compile(attend, backend=backend, fullgraph=True, dynamic=dynamic)(q)
    [graph] = graphs
    assert ("gluon_attn.forward" in graph) == (q.stride(-1) == 1)
    assert ("scaled_dot_product_attention" in graph) == (q.stride(-1) != 1)


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}, {"window": (8, 0)}], ids=["plain", "softcap", "window"])
@pytest.mark.parametrize(("device", "says"), [(HOPPER, False), (None, True)], ids=["a card", "none"])
def test_in_a_graph_it_warns_of_nothing(options, device, says):
    """Of caches, which torch.compile traces past."""

    def ask(q: Tensor) -> Tensor:
        return q if supports(q, q, q, device=device, needs_grad=True, **options) is None else q * 2

    q = q_of()
    got = torch.compile(ask, backend="eager", fullgraph=True)(q)
    assert torch.equal(got, q * 2 if says else q)


def test_what_a_graph_does_not_take(monkeypatch):
    monkeypatch.setattr("gluon_attn.support.is_compiling", lambda: True)
    q = q_of()
    said = supports(q, q, q, out=q_of(), device=HOPPER)
    with pytest.raises(NotImplementedError) as caught:
        attention_op(q, q, q, Extras(out=q_of()), Options(device=HOPPER))
    assert said == str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"cu_seqlens_k": torch.tensor([0, 24], dtype=torch.int32)},
        {"max_seqlen_q": 3},
        {"max_seqlen_k": 3},
        {"seqused_k": torch.tensor([3], dtype=torch.int32)},
    ],
    ids=lambda given: next(iter(given)),
)
def test_arguments_of_packed_sequences_alone(given):
    """`attention` does not know them."""
    [name] = given
    assert str(supports(**call(**given))).startswith(f"{name}: expected with packed sequences only")
    with pytest.raises(TypeError, match=name):
        attention(**call(**given))


def test_packed_sequences_have_one_layout():
    starts = torch.tensor([0, 10, 24], dtype=torch.int32)
    packed: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 14, "max_seqlen_k": 14}
    q = q_of(24, 4, 64)
    assert supports(**call(q), **packed) is None
    assert str(supports(**call(q), layout="bshd", **packed)).startswith("layout: packed sequences have one layout")


def test_a_window_as_a_list():
    """As a JSON file or a config may have it."""
    assert supports(**call(window=[8, 0])) is None
    with pytest.raises(TypeError, match=r"^window: expected ints or None"):
        attention(**call(window=[8, [0]]))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_asked_in_a_graph_without_breaks(causal, head_dim):
    """As hooks ask: each row of the table that is looked at can be traced."""

    def f(q: torch.Tensor) -> torch.Tensor:
        why = supports(q, q, q, causal=causal, device=Device.hopper(), needs_grad=False)
        return q + 1 if why is None else q - 1

    q = torch.zeros(1, 2, 600, head_dim, dtype=torch.bfloat16)
    assert (torch.compile(f, backend="eager", fullgraph=True)(q) == 1).all()
