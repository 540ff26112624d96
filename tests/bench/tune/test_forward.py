"""What can be chosen for a forward pass."""

import pytest
import torch

from bench.tune.forward import Forward
from gluon_attn import HopperConfig
from gluon_attn.forward.configs import label
from gluon_attn.forward.table import PACKAGED, hopper_config
from tests.bench.tune.fakes import CHOICES, H200, name_of
from tests.gluon_attn.problems import problem


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (256, 256), (192, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_no_config_of_the_table_is_pruned(dtype, head_dims, causal):
    asked = problem(dtype=dtype, head_dim=head_dims[0], head_dim_v=head_dims[1], causal=causal)
    rows = [row for row in PACKAGED if row.is_of_kind(asked, H200)]
    assert rows
    assert [row for row in rows if Forward(asked, H200, PACKAGED).why_pruned(row.config) is not None] == []


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (hopper_config(3, 128, 1, 1, 160), "needs 192 registers a softmax thread, has 160"),
        (hopper_config(2, 128, 2, 4, 232), "config: expected a config that fits the 232448 bytes of shared memory"),
        (hopper_config(2, 64, 1, 2, 232, last_heads_longest_first=True), "an order of row blocks"),
        (hopper_config(1, 64, 1, 2, 232, turns=True), "turns of one role"),
        (hopper_config(2, 64, 1, 2, 216, transpose_registers=24), "config: expected transpose_registers=0"),
    ],
)
def test_what_is_pruned_before_it_is_compiled(config, why):
    assert str(CHOICES.why_pruned(config)).startswith(why)


@pytest.mark.parametrize("row", PACKAGED, ids=lambda row: label(row.config))
def test_neighbours_differ_and_have_names_of_their_own(row):
    found = list(CHOICES.neighbours(row.config))
    assert row.config not in found
    assert len({name_of(config) for config in [row.config, *found]}) == len(set(found)) + 1 == len(found) + 1


def test_a_neighbour_with_more_roles_has_the_registers_for_it():
    found = [c for c in CHOICES.neighbours(hopper_config(2, 64, 2, 2, 232)) if isinstance(c, HopperConfig)]
    assert {c.softmax_roles: c.softmax_registers for c in found if c.softmax_roles != 2} == {1: 232, 3: 160, 4: 120}
