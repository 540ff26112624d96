"""Programs that have claimed several parts of shared key blocks: none waits for a part that waits for itself."""

import pytest
import torch

import gluon_cpu
from tests.gluon_cpu.attention import BackwardRun, normal_qkv
from tests.slow import slow_if

# Head dim, query heads, Sq, Sk; parts; schedules (programs that run at a time, seed) that ended in a deadlock when the
# reduce role told at once that it is first to add to some rows.
CASES = {
    "D=128": (128, 1, 768, 256, 4, ((2, 1), (4, 8), (4, 20))),
    "D=64, two query heads": (64, 2, 1024, 256, 4, ((2, 1), (4, 2), (4, 8))),
    "D=256": (256, 1, 768, 128, 4, ((2, 6), (4, 8), (4, 10))),
}

# Head dim, query heads, KV heads, tokens, programs, parts. Under a causal mask the first key blocks of all heads are
# shared first.
CAUSAL = {"D=64": (64, 4, 1, 1024, 9, 16), "D=128": (128, 8, 2, 512, 9, 16), "D=256": (256, 8, 1, 512, 9, 16)}


@pytest.mark.parametrize("case", slow_if(lambda case: case != "D=128", CASES))
def test_who_waits_for_a_part_holds_nobody_up(case):
    head_dim, heads, q_len, kv_len, parts, schedules = CASES[case]
    qkv = normal_qkv(heads=heads, kv_heads=1, q_len=q_len, kv_len=kv_len, head_dim=head_dim, dtype=torch.float16)
    run = BackwardRun(*qkv, causal=False, deterministic=False, programs=4)
    assert run.shared_parts == parts
    for resident, seed in schedules:
        run(mode="lowered", resident=resident, schedule=gluon_cpu.Schedule("pct", seed=seed))
    run.check(case)


@pytest.mark.parametrize("case", slow_if(lambda case: case != "D=128", CAUSAL))
def test_more_parts_than_programs(case):
    head_dim, heads, kv_heads, length, programs, parts = CAUSAL[case]
    qkv = normal_qkv(heads=heads, kv_heads=kv_heads, q_len=length, kv_len=length, head_dim=head_dim)
    run = BackwardRun(*qkv, causal=True, deterministic=False, programs=programs)
    assert run.shared_parts == parts
    for resident, seed in ((programs, 0), (2, 1), (3, 2)):
        run(mode="lowered", resident=resident, schedule=gluon_cpu.Schedule("pct", seed=seed))
    run.check(case)
