"""Hooks leave a call to what was there before, where a kernel cannot be made, and on cards that never ran it."""

import copy
import gc
import warnings
import weakref
from typing import Any, NoReturn

import pytest
import torch

from gluon_attn import api, attention, cpu, gradients, hooks, sdpa_calls, torch_sdpa
from gluon_attn.device import Device
from gluon_attn.hooks import TORCH, refusal
from gluon_attn.runtime import kernel
from gluon_attn.runtime.kernel import KernelUnavailable, NotInCapture, available
from tests.gluon_attn.sdpa import HOPPER, by_cudnn, by_flash, q_of

NO_COMPILER = "Failed to find C compiler"

LAUNCHES_ON_CPU = cpu.launches_on_cpu


def fail(*args: Any) -> NoReturn:
    raise RuntimeError(NO_COMPILER)


@pytest.fixture
def without_gradients(monkeypatch):
    """Their kernels cannot be made, and none is there yet."""
    monkeypatch.setattr(cpu, "backward_on_cpu", fail)
    monkeypatch.setattr(gradients, "_launches", {})
    monkeypatch.setattr(sdpa_calls, "_backward", {})
    monkeypatch.setattr(hooks, "_warned", set())


@pytest.fixture
def without_a_compiler(monkeypatch, without_gradients):
    """No kernel can be made."""
    monkeypatch.setattr(cpu, "launches_on_cpu", fail)
    monkeypatch.setattr(api, "_launches", {})
    monkeypatch.setattr(sdpa_calls, "_forward", {})


def test_the_call_itself_says_what_is_wrong(without_a_compiler):
    q = q_of()
    with pytest.raises(KernelUnavailable, match=rf"could not be compiled or loaded: RuntimeError: {NO_COMPILER}; see"):
        attention(q, q, q, device=HOPPER)


def test_a_call_that_failed_keeps_no_tensor_alive(without_a_compiler):
    """Its launch is kept, to fail at once the next time."""

    def attempt() -> weakref.ref[Any]:
        q = q_of()
        with pytest.raises(KernelUnavailable):
            attention(q, q, q, device=HOPPER)
        return weakref.ref(q)

    gone = attempt()
    gc.collect()
    assert api._launches
    assert gone() is None


@pytest.mark.parametrize(
    "error",
    [RuntimeError("Triton Error [CUDA]: out of memory"), torch.OutOfMemoryError("CUDA out of memory.")],
    ids=str,
)
def test_without_memory_the_next_call_tries_again(monkeypatch, without_a_compiler, error):
    q = q_of()

    def full(*args: Any) -> NoReturn:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(cpu, "launches_on_cpu", full)
        with pytest.raises(KernelUnavailable, match=r"could not be compiled or loaded: .*out of memory"):
            attention(q, q, q, device=HOPPER)
    assert not api._launches
    monkeypatch.setattr(cpu, "launches_on_cpu", LAUNCHES_ON_CPU)
    attention(q, q, q, device=HOPPER)


@pytest.mark.parametrize("by", [by_flash, by_cudnn])
def test_sdpa_goes_on_without_it(by, originals, without_a_compiler):
    q = q_of().requires_grad_()
    handle = torch_sdpa.override("CPU", HOPPER)
    try:
        for warned in (1, 0):  # once
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                by(q, q, q)
            assert [NO_COMPILER in str(w.message) for w in caught if "gluon_attn" in str(w.message)] == [True] * warned
    finally:
        handle.remove()
    name = "flash" if by is by_flash else "cudnn"
    assert [called for called, *_ in originals.calls] == 2 * [f"_scaled_dot_product_{name}_attention"]


@pytest.mark.parametrize("by", [by_flash, by_cudnn])
def test_gradients_go_on_without_theirs(by, originals, without_gradients):
    q = q_of().requires_grad_()
    handle = torch_sdpa.override("CPU", HOPPER)
    try:
        out = by(q, q, q)[0]
        with pytest.warns(UserWarning, match=f"gluon_attn leaves attention to torch: .* {NO_COMPILER}"):
            out.sum().backward()
    finally:
        handle.remove()
    name = "flash" if by is by_flash else "cudnn"
    assert [called for called, *_ in originals.calls] == [f"_scaled_dot_product_{name}_attention_backward"]


@pytest.mark.parametrize("packed", [False, True])
def test_models_of_transformers_go_on_without_it(packed, ran, without_a_compiler):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    from gluon_attn import hf
    from tests.gluon_attn.hf_models import by, logits, model_of, tokens

    inputs, model = tokens(32, batch=1), model_of("Llama")
    starts = torch.tensor([0, 10, 32], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 22, "max_length_k": 22}
    given = lengths if packed else {}
    exact = copy.deepcopy(model).float()
    parts = (inputs[:, :10], inputs[:, 10:]) if packed else (inputs,)
    want = torch.cat([logits(part)(exact)[0] for part in parts], 1)
    with pytest.warns(UserWarning, match=f"gluon_attn leaves attention to transformers' SDPA: .* {NO_COMPILER}"):
        got = by(hf.NAME, model, logits(inputs, **given))[0]
    assert (got - want).norm() < 0.05 * want.norm()
    assert [who for who, _ in ran].count("SDPA") == 2  # of each layer


@pytest.mark.parametrize("error", [TypeError, ValueError, NotImplementedError])
def test_refusals_stay_what_they_are(error):
    def refuse() -> NoReturn:
        raise error("no")

    with pytest.raises(error, match=r"^no$"), TORCH:
        available(refuse)


def test_nothing_is_loaded_while_a_graph_is_captured(monkeypatch):
    """Which would end the capture."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(NotInCapture, match="not loaded, and cannot be while a CUDA graph is captured"):
        kernel.Build(kernel=None, blocks={}, constants={}).compile(90)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("own", "given", "left"),
    [
        (Device.hopper(), None, False),
        (Device.blackwell(), None, True),
        (Device.blackwell_ultra(), None, True),
        (Device.blackwell(), Device.blackwell(), False),
    ],
)
def test_cards_that_never_ran_these_kernels_are_left_alone(own, given, left, monkeypatch):
    monkeypatch.setattr(hooks, "supports", lambda *args, **options: None)
    monkeypatch.setattr(hooks.Device, "of", lambda device: own)
    q = q_of()
    why = refusal(q, q, q, device=given)
    assert (why is not None) == left
    assert why is None or "never run; to try them, give the hook device=Device.of(...)" in why
