"""The overrides of torch's operators are turned on and off: in any order, by several threads, by torch's own switch."""

import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library, get_kernel
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
    sdpa_kernel,
)

from gluon_attn import attention, reference_attention, sdpa_calls, torch_sdpa
from tests.gluon_attn.sdpa import CUDNN, HOPPER, RNG, SDPA, Originals, by_cudnn, by_flash, q_of


def test_afterwards_all_is_as_before(originals):
    q = q_of()
    for _ in range(2):
        torch_sdpa.override("CPU", HOPPER).remove()
        assert (SDPA(q, q, q)[0] == 7).all()
    assert len(originals.calls) == 2
    originals.library._destroy()
    with pytest.raises(NotImplementedError):
        SDPA(q, q, q)


def test_hooks_are_not_imported_unasked():
    """With all that they import, and register."""
    program = "import sys, gluon_attn; sys.exit(bool({'gluon_attn.torch_sdpa', 'gluon_attn.flash'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


def test_registered_and_not_active():
    assert torch_sdpa.NAME in list_flash_attention_impls()
    assert current_flash_attention_impl() is None


def test_without_cuda_nothing_changes():
    """A program that turns it on runs on such a machine too."""
    if torch.version.cuda:
        pytest.skip("this torch is built with CUDA")
    q = q_of()
    want = F.scaled_dot_product_attention(q, q, q)
    try:
        activate_flash_attention_impl(torch_sdpa.NAME)
        assert current_flash_attention_impl() == torch_sdpa.NAME
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), want)
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(SDPA.default.name(), "CUDA")
    finally:
        restore_flash_attention_impl()
    with torch_sdpa.enabled():
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), want)


def order() -> list[SDPBackend]:
    """Of the backends that are on."""
    return torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)


def test_order_and_backends_stay_within():
    before = torch._C._get_sdp_priority_order(), order()
    with torch_sdpa.enabled():
        assert (torch._C._get_sdp_priority_order(), order()) == before
    ordered = [SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]
    with sdpa_kernel(ordered, set_priority=True), torch_sdpa.enabled():
        assert order() == ordered
    with torch_sdpa.enabled():
        torch.backends.cuda.enable_cudnn_sdp(False)
        assert SDPBackend.CUDNN_ATTENTION not in order()
    try:
        assert SDPBackend.CUDNN_ATTENTION not in order()  # as the user said within
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    with pytest.raises(KeyError), torch_sdpa.enabled():
        raise KeyError
    assert (torch._C._get_sdp_priority_order(), order()) == before
    assert not torch_sdpa._registered


class OfCuda:
    """Stand-ins for CUDA's kernels, where there are none. They are called past the dispatcher, as no tensor here is
    CUDA's; and `supports` refuses all, so that a call of ours shows in `asked`, and its handing on in `calls`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.originals = Originals("CUDA")
        self.asked: list[Any] = []
        patch.setattr(sdpa_calls, "refusal", self.refuse)
        patch.setattr(sdpa_calls, "_left", {})

    def refuse(self, *_: Any, **__: Any) -> str:
        self.asked.append(1)
        return "not today"

    def is_ours(self, op: Any, *others: Any) -> bool:
        before, q = len(self.asked), q_of()
        sdpa_calls._left.clear()  # else it would not be asked again
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
        assert (get_kernel(op.default, "CUDA").call_boxed(keys, q, q, q, *others)[0] == 7).all()
        return len(self.asked) > before

    def ours(self) -> tuple[bool, bool]:
        """Whether the flash operator is ours, whether cuDNN's is."""
        found = self.is_ours(SDPA), self.is_ours(CUDNN, None, True)
        assert [name for name, *_ in self.originals.calls[-2:]] == [
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_cudnn_attention",
        ]
        return found


@pytest.fixture
def of_cuda(monkeypatch) -> Iterator[OfCuda]:
    if torch.version.cuda:
        pytest.skip("this torch is built with CUDA")
    made = OfCuda(monkeypatch)
    yield made
    restore_flash_attention_impl(_raise_warn=False)
    made.originals.library._destroy()


def test_enabled_overrides_both_activated_the_flash_operators(of_cuda):
    assert of_cuda.ours() == (False, False)
    with torch_sdpa.enabled():
        assert of_cuda.ours() == (True, True)
    assert of_cuda.ours() == (False, False)
    activate_flash_attention_impl(torch_sdpa.NAME)
    assert of_cuda.ours() == (True, False)
    restore_flash_attention_impl()
    assert of_cuda.ours() == (False, False)


def test_enabled_and_activated_in_any_order(of_cuda):
    with torch_sdpa.enabled():
        for _ in range(2):
            activate_flash_attention_impl(torch_sdpa.NAME)
        with torch_sdpa.enabled():  # what was there before is not the one that was activated, which has no cuDNN's
            assert of_cuda.ours() == (True, True)
            restore_flash_attention_impl()
            assert of_cuda.ours() == (True, True)
        assert of_cuda.ours() == (True, True)
    assert of_cuda.ours() == (False, False)


def test_cudnns_stay_where_their_lse_has_other_strides(of_cuda, monkeypatch):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    with torch_sdpa.enabled():
        assert of_cuda.ours() == (True, False)


def test_left_in_any_order(originals):
    """As several threads leave it, each with others still within."""
    q = q_of()
    ours = attention(q, q, q, device=HOPPER)
    assert isinstance(ours, Tensor)
    for leaves_first in (0, 1):
        handles = [torch_sdpa.override("CPU", HOPPER) for _ in range(2)]
        entered = [torch_sdpa.enabled() for _ in range(2)]
        for context in entered:
            context.__enter__()
        assert torch.equal(by_cudnn(q, q, q)[0], ours)
        handles.pop(leaves_first).remove()
        entered.pop(leaves_first).__exit__(None, None, None)
        for by in (by_flash, by_cudnn):
            assert torch.equal(by(q, q, q)[0], ours)
            assert (by(q, q, q, dropout_p=0.5)[0] == 7).all()  # handed on through one that is off
        handles.pop().remove()
        entered.pop().__exit__(None, None, None)
        for by in (by_flash, by_cudnn):
            assert (by(q, q, q)[0] == 7).all()
    assert not torch_sdpa._registered


def test_many_threads(originals):
    """Each turns it on and off in its own time, while the others are in our kernels; afterwards it is off."""
    q = q_of()
    want = attention(q, q, q, device=HOPPER)
    assert isinstance(want, Tensor)

    def work(_: int) -> bool:
        handle = torch_sdpa.override("CPU", HOPPER)
        try:
            with torch_sdpa.enabled():
                return all(torch.equal(by(q, q, q)[0], want) for by in (by_flash, by_cudnn))
        finally:
            handle.remove()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(12)))
    assert all((by(q, q, q)[0] == 7).all() for by in (by_flash, by_cudnn))
    assert not torch_sdpa._registered


class Another:
    """An implementation of FlashAttention of somebody else's, as FA3's and FA4's are registered: with 9 for O."""

    def __init__(self) -> None:
        self.library = Library("aten", "IMPL", "CPU")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.library.impl(SDPA.default.name(), self.forward, allow_override=True)

    @staticmethod
    def forward(q: Tensor, *_: Any, **__: Any) -> Any:
        o, lse = torch.full_like(q, 9), torch.zeros(q.shape[:3])
        return o, lse, None, None, q.shape[2], q.shape[2], *RNG, torch.empty(0)

    def remove(self) -> None:
        self.library._destroy()


def number_handed_on() -> float:
    """In O of a call that is not ours, which tells whose it is."""
    q = q_of()
    return float(by_flash(q, q, q, dropout_p=0.5)[0].flatten()[0])


def test_another_implementation_that_leaves_within(originals, monkeypatch):
    """Calls go to it while it is there, and to torch's own then, also through what is turned on after that."""
    name = "_scaled_dot_product_flash_attention"
    monkeypatch.setitem(torch_sdpa._own, ("CPU", name), get_kernel(f"aten::{name}", "CPU"))
    another = Another()
    assert number_handed_on() == 9
    handle = torch_sdpa.override("CPU", HOPPER)
    assert number_handed_on() == 9
    another.remove()
    assert number_handed_on() == 7
    later = torch_sdpa.override("CPU", HOPPER)
    assert number_handed_on() == 7
    handle.remove()
    assert number_handed_on() == 7
    later.remove()
    assert number_handed_on() == 7


def test_another_implementation_that_was_there_at_import_and_left(originals):
    another = Another()
    handle = torch_sdpa.override("CPU", HOPPER)
    another.remove()
    with pytest.raises(RuntimeError) as refused:
        number_handed_on()
    assert refused.value.__notes__ == [torch_sdpa.GONE]
    handle.remove()
    assert number_handed_on() == 7


def test_torchs_own_kernels_are_those_in_cpp(originals):
    """Of stand-ins in Python none is kept: they come and go."""
    torch_sdpa.keep_own("CPU")
    assert not any(key == "CPU" for key, _ in torch_sdpa._own)
    if torch.version.cuda:
        assert ("CUDA", "_scaled_dot_product_flash_attention") in torch_sdpa._own


def test_the_stand_ins_are_not_ours():
    """Else the tests above would say nothing."""
    q = q_of()
    want, want_lse = reference_attention(q.double(), q.double(), q.double())
    assert (want - 7).abs().min() > 1
    assert (want_lse - 7).abs().max() > 1
