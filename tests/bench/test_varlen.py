"""The bench of packed sequences: what is called, and what is made of the times."""

import argparse
import json
from functools import partial

import pytest
import torch

from bench import passes, varlen
from bench.__main__ import main
from bench.timing import Timing
from gluon_attn import attention, attention_varlen
from gluon_attn.device import Device
from gluon_attn.reference import reference_attention

EQUAL = varlen.Shape(name="equal", lengths=(40, 40), heads=2, head_dim=64, causal=True)
MIX = varlen.Shape(name="mix", lengths=(70, 3), heads=2, head_dim=64, causal=True)


def test_the_mix_is_that_of_the_peers_figures():
    lengths = varlen.mixed()
    assert (len(lengths), sum(lengths), max(lengths)) == (64, 55244, 3013)


def test_flops_are_of_what_is_seen():
    assert MIX.flops == 4 * 2 * 64 * (70 * 71 // 2 + 3 * 4 // 2)


@pytest.fixture
def stand_ins(monkeypatch):
    """gluon_cpu for the card. Nothing is timed, but everything is called."""

    def timed(calls, rounds):
        assert all(call() is not None for call in calls.values())
        return {name: Timing(0.001 * (i + 1), (0.001,)) for i, name in enumerate(calls)}

    def by_torch(q, k, v, starts, *lengths, causal):
        out, _ = reference_attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=causal)
        return out

    monkeypatch.setattr(varlen, "time_interleaved", timed)
    monkeypatch.setattr(varlen, "host_seconds", lambda call: 1e-5)
    monkeypatch.setattr(varlen, "SHAPES", (EQUAL, MIX))
    monkeypatch.setattr(varlen, "forwards_of", partial(varlen.forwards_of, device="cpu"))
    monkeypatch.setattr(varlen, "MIX_D128", MIX)
    monkeypatch.setattr(passes, "ANCHOR", (1, 1, 40, 64))
    monkeypatch.setattr(varlen, "attention", partial(attention, device=Device.hopper()))
    monkeypatch.setattr(varlen, "attention_varlen", partial(attention_varlen, device=Device.hopper()))
    for module in (varlen, passes):
        monkeypatch.setattr(module, "by_cudnn", lambda q, k, v: reference_attention(q, k, v, causal=True)[0])
    monkeypatch.setattr(varlen, "by_torch", by_torch)
    monkeypatch.setattr(passes, "provenance", lambda commit: {"commit": commit})


def test_a_run_times_each_pass_of_each_shape(stand_ins, tmp_path, capsys):
    out = tmp_path / "found.json"
    varlen.run(argparse.Namespace(sets=["varlen"], rounds=1, out=out, commit="c"))
    found = json.loads(out.read_text())
    assert [p["name"] for p in found["points"]] == ["equal forward", "equal backward", "mix forward", "mix backward"]
    equal, _, mix, backward = found["points"]
    assert set(equal["results"]) == {"ours packed", "fa2 packed", "ours batched", "cudnn batched"}
    assert set(mix["results"]) == {"ours packed", "fa2 packed", passes.ANCHOR_NAME}
    assert set(backward["results"]) == {"ours packed", "fa2 packed", passes.ANCHOR_NAME}
    # The anchor takes 3 ms here: FlashAttention-4 is as much slower as that is than it was.
    for point in (mix, backward):
        fa4 = varlen.FA4_TFLOPS[point["pass"]] * passes.ANCHOR_MS[point["pass"]] / 3
        ours = point["results"]["ours packed"]["tflops"]
        assert point["ours_over"] == pytest.approx({"fa2 packed": 2, "fa4 packed, carried": ours / fa4})
    assert equal["ours_over"] == pytest.approx({"fa2 packed": 2, "ours batched": 3, "cudnn batched": 4})
    assert mix["results"]["ours packed"]["tflops"] == pytest.approx(MIX.flops / 0.001 / 1e12)
    assert mix["results"]["ours packed"]["host_us"] == pytest.approx(10)
    said = capsys.readouterr().out
    assert "| rate of ours packed over | fa2 packed | ours batched | cudnn batched | fa4 packed, carried |" in said
    assert "| equal forward | 2.000 | 3.000 | 4.000 | – |" in said
    assert "| mix forward | 10.0 | 10.0 | – | – |" in said


def test_what_is_called_computes_the_same(stand_ins):
    calls, missing = passes.calls_of("forward", varlen.forwards_of(EQUAL, "forward"))
    assert not missing
    want = calls["fa2 packed"]().float()
    torch.testing.assert_close(calls["ours packed"]().float(), want, atol=0.02, rtol=0)
    torch.testing.assert_close(calls["ours batched"]().flatten(0, 1).float(), want, atol=0.02, rtol=0)
    torch.testing.assert_close(calls["cudnn batched"]().transpose(1, 2).flatten(0, 1).float(), want, atol=0.02, rtol=0)


def raising(error):
    def call(*args, **kw):
        raise error

    return call


REFUSALS = [
    ImportError("cannot import name 'varlen_attn'"),
    NotImplementedError("q: gradients on sm_100 are not there"),
    RuntimeError("No available kernel. Aborting execution."),
    RuntimeError("FlashAttention only supports Ampere GPUs or newer."),
    TypeError("varlen_attn() got an unexpected keyword argument 'window_size'"),
]


@pytest.mark.parametrize("error", REFUSALS, ids=str)
def test_what_is_refused_is_missing(stand_ins, monkeypatch, error):
    monkeypatch.setattr(varlen, "by_torch", raising(error))
    calls, missing = passes.calls_of("forward", varlen.forwards_of(EQUAL, "forward"))
    assert missing == {"fa2 packed": str(error)}
    assert set(calls) == {"ours packed", "ours batched", "cudnn batched"}


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access"), TypeError("q: expected")])
def test_what_fails_is_not_taken_for_missing(stand_ins, monkeypatch, error):
    monkeypatch.setattr(varlen, "by_torch", raising(error))
    with pytest.raises(type(error), match=str(error)):
        passes.calls_of("forward", varlen.forwards_of(EQUAL, "forward"))


def test_it_is_run_alone(monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench", "--sets", "varlen", "sweep"])
    with pytest.raises(SystemExit):
        main()
