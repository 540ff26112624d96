"""Views of tensor memory that share columns: numbers with one CTA and several, and races between them."""

import pytest
import torch

import gluon_cpu
from tests.compat import TensorMemoryLayout, allocate_tensor_memory, cluster, gl, jit, mbarrier
from tests.gluon_cpu.support import addresses, load_matrix, new_barrier, poisoned, same, small_integers

CLUSTERS = [(1, False), (2, False), (2, True), (4, False), (4, True)]


@jit
def all_in_the_columns_of_scores(x_ptr, out_ptr, CGA: gl.constexpr, PAIR: gl.constexpr, MATRIX: gl.constexpr):
    """Of S[1]: P (bf16) in columns 0 to 63, alpha in column 64, sevens from 96 on. Of S[0]: fp8 in 32 to 63."""
    M: gl.constexpr = 128 * gl.num_ctas()
    WIDE: gl.constexpr = TensorMemoryLayout((128, 128), col_stride=1, cga_layout=CGA, two_ctas=PAIR)
    COLUMN: gl.constexpr = TensorMemoryLayout((128, 1), col_stride=1, cga_layout=CGA, two_ctas=PAIR)
    scores = allocate_tensor_memory(gl.float32, [2, M, 128], WIDE)
    x = load_matrix(x_ptr, M, 128, MATRIX)
    for i in gl.static_range(2):
        scores.index(i).store(gl.convert_layout(x + i, scores.index(i).get_reg_layout()))
    p = scores.index(1).slice(0, 64).reinterpret(gl.bfloat16, [M, 128], WIDE)
    p.store(gl.convert_layout((x * 2.0).to(gl.bfloat16), p.get_reg_layout()))
    alpha = scores.index(1).slice(64, 1).reinterpret(gl.float32, [M, 1], COLUMN)
    ALPHA: gl.constexpr = alpha.get_reg_layout()
    alpha.store(gl.arange(0, M, gl.SliceLayout(1, ALPHA)).to(gl.float32)[:, None])
    tail = scores.index(1).slice(96, 32)
    tail.store(gl.full([M, 32], 7.0, gl.float32, tail.get_reg_layout()))
    narrow = scores.index(0).slice(32, 32).reinterpret(gl.float8e5, [M, 128], WIDE)
    narrow.store(gl.convert_layout(x.to(gl.float8e5), narrow.get_reg_layout()))
    for i in gl.static_range(2):
        gl.store(addresses(out_ptr + i * M * 128, M, 128, MATRIX), gl.convert_layout(scores.index(i).load(), MATRIX))
    gl.store(addresses(out_ptr + 2 * M * 128, M, 128, MATRIX), gl.convert_layout(p.load().to(gl.float32), MATRIX))


@pytest.mark.parametrize(("num_ctas", "pair"), CLUSTERS)
def test_views_that_share_columns(blackwell_launch, num_ctas, pair):
    cga = tuple((1 << i, 0) for i in range(num_ctas.bit_length() - 1))
    matrix = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], [list(c) for c in cga])
    rows = 128 * num_ctas
    x, out = small_integers(rows, 128), poisoned(3, rows, 128)
    blackwell_launch(all_in_the_columns_of_scores, (1,), x, out, CGA=cga, PAIR=pair, MATRIX=matrix, num_ctas=num_ctas)
    first, second = x.clone(), x + 1
    first[:, 32:64] = x.to(torch.float8_e5m2).view(torch.float32)
    second[:, :64] = (x * 2).to(torch.bfloat16).view(torch.float32)
    second[:, 64] = torch.arange(rows)
    second[:, 96:] = 7
    same(out.view(torch.int32), torch.stack([first, second, x * 2]).view(torch.int32))


@jit
def store_weights(weights, stored):
    LAYOUT: gl.constexpr = weights.get_reg_layout()
    weights.store(gl.full(weights.shape, 1.0, gl.bfloat16, LAYOUT))  # <- weights over the scores
    mbarrier.arrive(stored)


@jit
def read_scores(scores, stored, out_ptr):
    LAYOUT: gl.constexpr = scores.get_reg_layout()
    gl.store(addresses(out_ptr, scores.shape[0], scores.shape[1], LAYOUT), scores.load(LAYOUT))
    mbarrier.wait(stored, 0)


@jit
def two_roles_in_one_tile(out_ptr, FIRST: gl.constexpr, CGA: gl.constexpr):
    """One role puts P into columns 0 to 31, another reads 32 columns of S from FIRST on."""
    M: gl.constexpr = 128 * gl.num_ctas()
    PAIR: gl.constexpr = len(CGA) > 0
    WIDE: gl.constexpr = TensorMemoryLayout((128, 64), col_stride=1, cga_layout=CGA, two_ctas=PAIR)
    scores = allocate_tensor_memory(gl.float32, [M, 64], WIDE)
    scores.store(gl.zeros([M, 64], gl.float32, scores.get_reg_layout()))
    stored = new_barrier(1)
    if PAIR:
        cluster.barrier()
    else:
        gl.barrier()
    weights = scores.slice(0, 32).reinterpret(gl.bfloat16, [M, 64], WIDE)
    gl.warp_specialize(
        [(read_scores, (scores.slice(FIRST, 32), stored, out_ptr)), (store_weights, (weights, stored))], [4]
    )
    if PAIR:
        cluster.barrier()


@pytest.mark.parametrize("num_ctas", [1, 2, 4])
def test_weights_in_the_columns_of_scores_that_are_still_read(blackwell_launch, num_ctas):
    cga = tuple((1 << i, 0) for i in range(num_ctas.bit_length() - 1))
    rows = 128 * num_ctas
    out = poisoned(rows, 32)
    blackwell_launch(two_roles_in_one_tile, (1,), out, FIRST=32, CGA=cga, num_ctas=num_ctas)
    same(out, torch.zeros(rows, 32))
    with pytest.raises(gluon_cpu.DataRace, match=r"scores, tensor memory of CTA \d, columns 16 to 31"):
        blackwell_launch(two_roles_in_one_tile, (1,), poisoned(rows, 32), FIRST=16, CGA=cga, num_ctas=num_ctas)
