"""What can be chosen for gradients."""

import dataclasses
import re

import pytest

from bench.tune.command import Batch
from bench.tune.gradients import Gradients
from gluon_attn.backward import table as backward_table
from tests.bench.tune.fakes import BEST_OF_GRADIENTS, GRADIENTS, H200, OF_GRADIENTS, FakeCard, tuned
from tests.gluon_attn.problems import problem


def test_gradients_are_searched_too(tmp_path):
    [found], _, said = tuned(
        FakeCard(BEST_OF_GRADIENTS), tmp_path / "p.json", Batch((GRADIENTS,), of_gradients=True), generations=6
    )
    assert found.row.config == BEST_OF_GRADIENTS
    assert (found.measured.chosen, found.measured.in_use) == ("64x128 q3do2ds1dq2 r32", "64x128 q2do2ds1dq2 r24")
    assert "gradients of q (1, 12, 3000, 96), k (1, 4, 3000, 96), bf16, no mask" in said
    left = [int(line.split()[2]) for line in said if re.match(r"generations left: \d at most, about \d+ s if", line)]
    assert left == list(range(5, 5 - len(left), -1))
    assert len(left) >= 2


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (256, 256), (192, 128)])
def test_configs_of_gradients(head_dims):
    """None of the table's is pruned; neighbours have names of their own; some of the first are no neighbours."""
    asked = problem(head_dim=head_dims[0], head_dim_v=head_dims[1])
    choices = Gradients(asked, H200, backward_table.PACKAGED)
    first, beside = choices.first(), list(choices.neighbours(choices.in_use))
    assert choices.in_use in first
    assert choices.why_pruned(choices.in_use) is None
    assert choices.in_use not in beside
    for found in (first, beside):
        assert len({choices.name(config) for config in found}) == len(set(found)) == len(found)
    assert len([config for config in first if choices.why_pruned(config) is None]) > 3
    assert {*first} - {*beside, choices.in_use}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"block_m": 128, "query_slots": 1, "dout_slots": 1, "dq_slots": 1}, "needs 288 registers a thread that comp"),
        ({"query_slots": 4, "dout_slots": 4}, "config: expected a config that fits the 232448 bytes of shared memory"),
        ({"keys": 64}, "config: expected keys=128 at head_dim 128, got 64"),
        ({"dq_slots": 3}, "config: expected a config that fits the 232448 bytes of shared memory"),
    ],
)
def test_what_is_pruned_of_gradients(fields, why):
    config = dataclasses.replace(backward_table.HOPPER[128], **fields)
    assert str(OF_GRADIENTS.why_pruned(config)).startswith(why)
