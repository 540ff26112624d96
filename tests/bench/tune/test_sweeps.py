"""Which problems `--sweep` tunes; that the points that are compared everywhere are is in test_command.py."""

import torch

from bench.features import SHAPES
from bench.tune.command import Batch
from bench.tune.sweeps import SWEEPS
from tests.bench.tune.fakes import H200


def test_other_sweeps_are_what_the_tables_have_rows_for_besides():
    """Each with kernels of its own, on which the package's rows and the candidates are tried."""
    found = {name: SWEEPS[name].problems() for name in SWEEPS}
    assert {name: len(problems) for name, problems in found.items()} == {
        "bf16": 24, "e4m3": 24, "d256": 24, "d192": 12, "features": 10,
        "backward": 24, "backward_d256": 12, "backward_d192": 12, "backward_features": 8,
    }  # fmt: skip
    assert {(p.head_dim, p.head_dim_v) for p in found["d256"] + found["d192"]} == {(256, 256), (192, 128)}
    assert found["backward_d192"] == found["d192"]
    assert found["backward_d256"] == tuple(p for p in found["d256"] if p.dtype == torch.bfloat16)
    shapes = {(p.batch, p.heads, p.kv_heads, p.q_len, p.kv_len, p.head_dim) for p in found["features"]}
    assert shapes == {(s.batch, s.heads, s.kv_heads, s.length, s.length, s.head_dim) for s in SHAPES}
    kinds = {(p.head_dim, p.left, p.scores, p.causal) for p in found["features"]}
    of_features = [(127, None), (1023, None), (None, "softcap"), (None, "alibi"), (None, "bias")]
    assert kinds == {(d, left, scores, True) for d in (64, 128) for left, scores in of_features}
    assert {p.score_mod.after for p in found["features"] if p.score_mod and p.scores == "softcap"} == {30}
    assert set(found["backward_features"]) == {p for p in found["features"] if p.scores != "bias"}
    for name, sweep_of in SWEEPS.items():
        assert sweep_of.of_gradients == name.startswith("backward")
        for problem in found[name]:
            choices = Batch((problem,), sweep_of.of_gradients, for_package=True).choices(problem, H200)
            assert [c for c in choices.first() if c != choices.in_use and choices.why_pruned(c) is None]
