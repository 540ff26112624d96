"""Which features synchronise as a plain kernel does, by the compiled kernels: mutants of those alone would say nothing
new. The others are in the campaign on mutants, each kind once."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gluon_attn.backward.table import CAUSAL
from gluon_attn.device import Device
from gluon_attn.forward.configs import BlackwellConfig, ForwardConfig
from gluon_attn.forward.table import blackwell_config, hopper_config
from tests.gluon_cpu.attention import BackwardRun, Run, normal_qkv
from tests.gluon_cpu.campaign_mutants import text_of
from tests.gluon_cpu.features import FEATURES, FeatureBackwardRun, FeatureCall, FeatureRun
from tests.gluon_cpu.mutated_kernels import KERNELS, AnyRun, Featured, FeaturedBackward, Kernel
from tests.gluon_cpu.synchronisation import synchronisation
from tests.slow import slow_if

LENGTHS = (200, 401)
CONFIGS: dict[str, tuple[Device, ForwardConfig]] = {
    "Hopper": (Device.hopper(), hopper_config(2, 64, 2, 2, 232)),
    "Hopper, turns": (Device.hopper(), hopper_config(2, 128, 2, 2, 232, turns=True, early_exp=2)),
    "Blackwell": (Device.blackwell(), blackwell_config(3, 192, exp_pieces=4, early_p=True, exp_turns=True)),
}
KINDS = (*CONFIGS, "backward", "backward, in order")
BY_KIND = slow_if(lambda kind: kind != "Hopper", KINDS)


def run_of(name: str, kind: str) -> AnyRun:
    """name: of a feature; "" for a causal mask alone."""
    call = FeatureCall(name, LENGTHS) if name else None
    qkv = normal_qkv(heads=4, kv_heads=2, q_len=LENGTHS[0], kv_len=LENGTHS[1], dtype=torch.float16)
    if kind in CONFIGS:
        device, config = CONFIGS[kind]
        if call is None:
            return Run(*qkv, causal=True, device=device, config=config, programs=1)
        return FeatureRun(call, device=device, config=config, programs=1)
    # One config for all: the table has another one where no mask is causal.
    options: dict[str, Any] = {"deterministic": kind == "backward, in order", "programs": 1, "config": CAUSAL[64]}
    if call is None:
        return BackwardRun(*qkv, causal=True, **options)
    return FeatureBackwardRun(call, **options)


@functools.cache
def of(name: str, kind: str) -> tuple[str, ...]:
    return tuple(synchronisation(text_of(run_of(name, kind))))


def without(lines: Sequence[str], *words: str) -> list[str]:
    """Those that have none of these words."""
    return [line for line in lines if not any(word in line for word in words)]


SCORES = ("softcap", "softcap, maxima", "alibi", "sinks", "score_mod")


@pytest.mark.parametrize("kind", BY_KIND)
def test_changed_scores_and_sinks_synchronise_as_without(kind):
    plain = of("", kind)
    assert len(plain) > 80
    for name in SCORES:
        assert of(name, kind) == plain, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_windows_and_chunks_synchronise_alike(kind):
    for name in ("window to both sides", "wide window", "chunk", "window, sinks, softcap"):
        assert of(name, kind) == of("window", kind), name
    assert len(of("window", kind)) > len(of("", kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_a_mask_mod_that_waits_for_the_kernel_before(kind):
    """Backward each kernel waits for the one before it anyway. Where no role skips blocks, both are a window."""
    assert of("documents, full", kind) == of("documents, alternating", kind) == of("documents", kind)
    waits = [line for line in of("documents", kind) if line not in of("mask_mod", kind)]
    if kind in CONFIGS:
        assert len(waits) == 1
        assert "grid_dependency_wait" in waits[0]
        assert without(of("documents", kind), "grid_dependency_wait") == list(of("mask_mod", kind))
    if kind not in ("Hopper", "Hopper, turns"):  # there each role skips what only others see
        assert of("mask_mod", kind) == of("window", kind)
    if kind not in CONFIGS:
        assert of("documents", kind) == of("mask_mod", kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_mod_without_ranges_has_nothing_of_its_own(kind):
    """It leaves out blocks or steps of a plain kernel."""
    assert set(of("mask_mod, no ranges", kind)) <= set(of("", kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_wait_for_the_list_and_add_nothing_else(kind):
    """Forward. Backward, a key block of packed sequences is an item, and claims have no branch for a second one."""
    for name, like in (("packed, causal", ""), ("packed, window, sinks", "window")):
        packed = of(name, kind)
        waits = sum("grid_dependency_wait" in line for line in packed)
        assert waits > sum("grid_dependency_wait" in line for line in of(like, kind))
        if kind in CONFIGS:
            assert without(packed, "grid_dependency_wait") == list(of(like, kind)), name


def test_what_differs_has_mutants():
    """Of each kind that has an own way to synchronise, one kernel forward on either card and one backward."""
    of_kind = {
        "window": ("window", "wide window"),
        "documents": ("documents", "documents, full"),
        "packed": ("packed, causal",),
    }
    for names in of_kind.values():
        assert set(names) <= set(FEATURES)
        forward = {k.config.archs[0] for k in KERNELS.values() if isinstance(k, Featured) and k.feature in names}
        assert {90, 100} <= forward
    backward = {k.feature for k in KERNELS.values() if isinstance(k, FeaturedBackward)}
    assert backward == {"wide window", "packed, causal"}  # documents are windows there, as the test above has it


def test_every_wiring_of_blackwell_has_mutants():
    """With a bias of each row, of one, and without; K and V in one channel, or each in its own, then also in pairs of
    CTAs, with multicast, and with Q and K in pieces."""
    kernels = [k for k in KERNELS.values() if isinstance(k, Kernel) and isinstance(k.config, BlackwellConfig)]
    assert {k.bias for k in kernels} == {"", "a row each", "one row"}
    apart = [k for k in kernels if k.head_dim_v not in (None, k.head_dim)]
    assert {k.config.num_ctas for k in apart} == {k.config.num_ctas for k in kernels} == {1, 2, 4}
    assert {k.head_dim > 128 for k in apart} == {False, True}
    configs = [k.config for k in apart if isinstance(k.config, BlackwellConfig)]
    assert {(config.key_slots, config.value_slots) for config in configs} == {(2, 2)}


def test_a_wait_more_or_in_another_loop_is_told():
    """The comparison is by operation, count and place: it must not be one of kinds alone."""
    text = text_of(run_of("", "Hopper"))
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if "ttng.arrive_barrier" in line)
    changed = lines[at].replace(", 1", ", 2", 1)
    assert changed != lines[at]
    for instead in ([], [lines[at]] * 2, [changed]):
        assert synchronisation("\n".join([*lines[:at], *instead, *lines[at + 1 :]])) != synchronisation(text)
    start = next(i for i, line in enumerate(lines) if "scf.for" in line and line.rstrip().endswith("{"))
    assert "scf.for" not in synchronisation("\n".join(lines[:start]))
