"""The campaign on features: none is left out, and a run of it tells wrong numbers."""

import pytest
import torch

from gluon_attn.device import Device
from gluon_attn.features import FEATURES as LISTED
from tests.gluon_cpu.campaign_silent import schedules, watch, with_features
from tests.gluon_cpu.features import ARGUMENTS, FEATURES, FeatureBackwardRun, FeatureCall, FeatureRun

# Of what gluon_attn has, what campaigns have elsewhere, or what is a choice of numbers or of a config.
ELSEWHERE = {
    "causal", "bias", "unequal lengths", "grouped heads", "head dim 128", "head dim 256", "v's head dim", "layout",
    "scale", "return_lse", "deterministic", "out", "q_scale", "num_ctas 2", "num_ctas 4",
}  # fmt: skip


def test_no_feature_is_left_out():
    assert set(ARGUMENTS) | ELSEWHERE == set(LISTED)
    names = list(with_features())
    for name in FEATURES:
        kinds = [kernel.partition(": ")[2] for kernel in names if kernel.startswith(f"feature {name}: ")]
        for kind in ("Hopper, D=64", "Hopper, D=64, 2 CTAs", "Blackwell, D=64", "backward, D=64, in order"):
            assert kind in kinds, name


@pytest.mark.parametrize("name", ["window", "packed, causal"])
def test_a_run_tells_wrong_numbers(name):
    call = FeatureCall(name, (100, 200), heads=2, kv_heads=1)
    run = FeatureRun(call, device=Device.hopper(), programs=1)
    run()
    run.check()
    run.out[..., -1:, :] = 0
    with pytest.raises(AssertionError):
        run.check()
    back = FeatureBackwardRun(call, deterministic=True, programs=1)
    back()
    back.check()
    back.grads["dk"] *= 1.05
    with pytest.raises(AssertionError, match="dk is off by"):
        back.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in with_features() if name.endswith((": Hopper, D=64", ": backward, D=64"))]
)
def test_no_finding_under_a_few_schedules(name):
    assert watch(name, with_features()[name](), schedules([0], ("random", "late", "starve"))) == 3


def test_poisoned_outputs_are_written_before_each_run():
    """Otherwise a run could pass by the numbers of the one before."""
    run = FeatureRun(FeatureCall("sinks", (70, 90), heads=2, kv_heads=1), device=Device.hopper(), programs=1)
    run()
    first = run.out.clone()
    run.out.zero_()
    run()
    assert torch.equal(run.out, first)
