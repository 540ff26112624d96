"""The grid of lengths, head dims, heads, masks, soft caps and sinks on the card, in processes of their own."""

import pytest

from gluon_attn.apart import Apart
from gluon_attn.testing import poison_free_memory
from tests.gluon_attn.test_features_grid import CASES, HEADS, KERNEL_OF, ROWS, WINDOWS, check
from tests.gpu.checks import outcomes_of, settle

pytestmark = pytest.mark.timeout(1800)

OF_ROW = {row: [case for case in CASES if case.row == row] for row in ROWS}


def run(row: str) -> None:
    for case in OF_ROW[row]:
        print(case, flush=True)
        (q_len, kv_len), (d, d_v), (heads, _) = case.lengths, case.head_dims, HEADS[case.heads]
        of_q, of_out = (case.batch, heads, q_len, d), (case.batch, heads, q_len, d_v)
        of_kv = (case.batch, heads, kv_len, d)
        poison_free_memory((of_q, case.dtype), (of_kv, case.dtype), (of_out, case.dtype))
        check(case, "cuda")


def same_kernels(row: str) -> object:
    """Rows that one process computes, so that a kernel is compiled once."""
    case = OF_ROW[row][0]
    return KERNEL_OF[case.head_dims], WINDOWS.index(case.window)


APART = Apart(function="tests.gpu.test_grid:run", group=same_kernels, processes=12)


@pytest.fixture(scope="module")
def outcome(request):
    yield from outcomes_of(APART, request)


@pytest.mark.parametrize("name", ROWS)
def test_grid(name, outcome):
    settle(outcome(name))
