"""Functions of a caller's own, on scores and as masks, under torch.compile and torch.export, on gluon_cpu."""

import copy
import gc
import io
import threading
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from channels.compat import gl, jit
from gluon_attn import MaskMod, ScoreMod, attention, attention_varlen, named
from gluon_attn.device import Device
from gluon_attn.gradients import attention_backward

HOPPER = Device.hopper()


@jit
def add(score, q_index, k_index, head, batch, FACTOR: gl.constexpr, table):
    return score + gl.load(table + head) * FACTOR * gl.where(q_index > k_index + 8, 1, 0)


@jit
def add_backward(dscore, score, modified, q_index, k_index, head, batch, FACTOR: gl.constexpr, table):
    return dscore


@jit
def of_parity(q_index, k_index, head, batch, offset):
    return (q_index + k_index + gl.load(offset)) % 2 == 0


def functions(numbers: tuple[float, float] = (1.0, 2.0), factor: int = 3, offset: int = 0) -> list[Any]:
    table, first = torch.tensor(numbers), torch.tensor([offset], dtype=torch.int32)
    return [ScoreMod(add, add_backward, constants=(factor,), tensors=(table,)), MaskMod(of_parity, tensors=(first,))]


def qkv() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, 40, 64, generator=generator).bfloat16().requires_grad_() for heads in (2, 1, 1)]


def model(q: Tensor, k: Tensor, v: Tensor, scores: ScoreMod, mask: MaskMod) -> Any:
    return attention(q, k, v, causal=True, score_mod=scores, mask_mod=mask, device=HOPPER)


def packed(q: Tensor, k: Tensor, v: Tensor, scores: ScoreMod, mask: MaskMod) -> Any:
    starts = torch.tensor([0, 24, 40], dtype=torch.int32)
    q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
    return attention_varlen(q, k, v, starts, starts, 24, 24, score_mod=scores, mask_mod=mask, device=HOPPER)


@pytest.mark.parametrize("function", [model, packed])
def test_compiled_whole_they_are_what_they_are_in_eager_mode(function):
    """With gradients; other tensors make no other graph, other numbers that a kernel is compiled with do."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    inputs, seen = qkv(), []
    for graphs, mods in ((1, functions()), (1, functions((-4.0, 5.0), offset=1)), (2, functions(factor=-3))):
        results = [fn(*inputs, *mods) for fn in (compiled, function)]
        assert torch.equal(*results)
        grads = [torch.autograd.grad(out.float().square().sum(), inputs) for out in results]
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)
        seen.append(results[0])
        assert counter.frame_count == graphs
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


def test_modes_see_them():
    inputs, mods = qkv(), functions()
    want = torch.autograd.grad(model(*inputs, *mods).float().sum(), inputs)
    with FlopCounterMode(display=False) as counter:
        grads = torch.autograd.grad(model(*inputs, *mods).float().sum(), inputs)
    assert counter.get_total_flops() == (2 + 5) * 2 * 2 * 64 * (40 * 41 // 2)
    for one, other in zip(grads, want, strict=True):
        torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)


class Exported(torch.nn.Module):
    def __init__(self, mods: list[Any]) -> None:
        super().__init__()
        self.mods = mods

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return model(q, k, v, *self.mods)


def test_a_model_that_has_them_may_be_copied():
    """As for a mean of its weights: the copy has tensors of its own, and the same functions."""
    inputs, mods = qkv(), functions()
    want = model(*inputs, *mods)
    copied = copy.deepcopy(Exported(mods))
    for one, other in zip(copied.mods, mods, strict=True):
        assert one.function is other.function
        one.tensors[0].add_(1)
    assert torch.equal(model(*inputs, *mods), want)
    assert not torch.equal(copied(*inputs), want)


@pytest.mark.parametrize("strict", [False, True])
def test_a_saved_graph_asks_for_functions_of_the_same_source(strict, monkeypatch):
    """As another process has it, that has made them or not."""
    inputs: tuple[Any, ...] = tuple(t.detach() for t in qkv())
    mods = functions(factor=7)
    want, file = model(*inputs, *mods), io.BytesIO()
    torch.export.save(torch.export.export(Exported(mods), inputs, strict=strict), file)
    torch.compiler.reset()
    monkeypatch.setattr(named, "_by_name", {})
    loaded = torch.export.load(file).module()
    assert torch.equal(loaded(*inputs), want)
    monkeypatch.setattr(named, "_by_name", {})
    monkeypatch.setattr(named, "_by_handle", {})
    with pytest.raises(NotImplementedError, match=r"^score_mod: expected functions that this process knows"):
        loaded(*inputs)


def test_they_are_made_before_the_graph():
    def makes(q: Tensor) -> Any:
        return attention(q, q, q, mask_mod=MaskMod(of_parity, tensors=(q,)), device=HOPPER)

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"mask_mod: expected one that is made outside of what"):
        torch.compile(makes, backend="eager", fullgraph=True)(qkv()[0])


def test_what_is_refused_of_them():
    q, k, v = qkv()
    without = ScoreMod(add, constants=(3,), tensors=(torch.zeros(2),))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"score_mod: expected one with a backward function"):
        compiled(q, k, v, without, functions()[1])
    learned = ScoreMod(add, add_backward, constants=(3,), tensors=(torch.zeros(2, requires_grad=True),))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"score_mod.tensors\[0\]: expected a tensor that does not"):
        compiled(q.detach(), k.detach(), v.detach(), learned, functions()[1])


def test_constants_are_told_apart_by_what_they_are():
    """A kernel is compiled with them as they are: 1 // 2 is another number than 1.0 / 2."""
    mods = [ScoreMod(add, constants=(c,)).function for c in (1, 1.0, True, 0.0, -0.0)]
    assert len(set(mods)) == len(mods)
    masks = [MaskMod(of_parity, constants=(c,)).function for c in (1, 1.0, True, 0.0, -0.0)]
    assert len(set(masks)) == len(masks)


def test_nothing_is_kept_that_no_graph_has():
    mod = ScoreMod(add, constants=(12345,))
    assert mod.function is ScoreMod(add, constants=(12345,)).function
    handle = mod.function.handle
    assert handle in named._by_handle
    del mod
    gc.collect()
    assert handle not in named._by_handle


def test_functions_are_looked_for_while_others_are_made(monkeypatch):
    """A name that is not known is looked for among all functions that are alive. Another thread makes one when the
    first of them is looked at: it has to wait, or the dictionary would change under the search."""
    looking, made = threading.Event(), threading.Event()

    class Watched(WeakValueDictionary[str, Any]):
        def values(self) -> Any:
            for function in super().values():
                looking.set()
                made.wait(0.5)  # in vain, as the other waits
                yield function

    monkeypatch.setattr(named, "_by_handle", Watched())
    kept = [functions(factor=factor)[0] for factor in (1000, 1001)]

    def make() -> None:
        looking.wait(60)
        kept.append(functions(factor=1002)[0])
        made.set()

    other = threading.Thread(target=make)
    other.start()
    with pytest.raises(NotImplementedError, match="of their source"):
        named.function_named("score_mod", "none has this name")
    other.join(60)
    assert len(kept) == 3


def test_what_functions_read_begins_where_kernels_may_load_several_elements():
    """A call is refused whether its kernel is there already or not, and so is its backward pass."""
    (q, k, v), (scores, mask) = qkv(), functions()
    refused = r"_mod.tensors\[0\]: expected a base address that is a multiple of 16"
    far = ScoreMod(add, add_backward, constants=(3,), tensors=(torch.zeros(9)[1:],))
    odd = MaskMod(of_parity, tensors=(torch.zeros(9, dtype=torch.int32)[1:],))
    for asked in ({"score_mod": far}, {"mask_mod": odd}):
        right = {"score_mod": scores} if "score_mod" in asked else {"mask_mod": mask}
        for _ in range(2):
            with pytest.raises(ValueError, match=refused):
                attention(q, k, v, **asked, device=HOPPER)
            out, lse = attention(q, k, v, **right, device=HOPPER, return_lse=True)
        with pytest.raises(ValueError, match=refused):
            attention_backward(out, None, q, k, v, out, lse, **asked, device=HOPPER)


def test_one_number_that_a_function_reads_may_be_anywhere():
    q, k, v = (t.detach()[:, :1].contiguous() for t in qkv())
    number = torch.tensor([5.0, 1.0])[1:]

    def out_with(number: Tensor) -> Tensor:
        mod = ScoreMod(add, constants=(3,), tensors=(number,))
        out = attention(q, k, v, score_mod=mod, device=HOPPER)
        assert isinstance(out, Tensor)
        return out

    assert torch.equal(out_with(number), out_with(number.clone()))
