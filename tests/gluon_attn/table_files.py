"""Table files, for tests of what they say and of what they serve."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from gluon_attn import tuning
from gluon_attn.backward.table import HOPPER, BackwardRow
from gluon_attn.device import Device
from gluon_attn.forward.table import Row, hopper_config
from tests.gluon_attn.problems import problem

H200 = Device.hopper()
H100 = dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3")
PROVENANCE = {"date": "2026-11-25", "commit": "abc", "card": "NVIDIA H200", "torch": "2.11", "triton": "3.9.0"}
# Unlike what the packaged table has for the problem.
CONFIG = hopper_config(2, 64, 1, 3, 232, turns=True)
ROW = Row(128, False, CONFIG, min_kv_len=512, max_kv_len=2048, q_lens=(512, 2048), sequence_heads=(16, 64))
ASKED = problem()
MEASURED = tuning.Measured(shape={"batch": 2}, ms={"a": 1.0, "b": 1.1}, chosen="a", in_use="b", gain=0.1, spread=0.01)


def content(rows=(ROW,), devices=(H200,)) -> dict[str, Any]:
    return tuning.as_json(devices, PROVENANCE, rows, [None] * len(rows))


BACKWARD_CONFIG = dataclasses.replace(HOPPER[128], query_slots=3, ds_slots=1, load_registers=32)
BACKWARD_ROW = BackwardRow((128, 128), BACKWARD_CONFIG, False, min_kv_len=512, max_kv_len=2048, q_lens=(512, 2048))


def gradients(row: BackwardRow = BACKWARD_ROW, devices: Sequence[Device] = (H200,)) -> dict[str, Any]:
    return tuning.as_json(devices, PROVENANCE, [], [], [row], [MEASURED])


def qkv() -> list[torch.Tensor]:
    return [torch.zeros(1, 16, 512, 128, dtype=torch.bfloat16) for _ in range(3)]
