"""Scores out of tensor memory, probabilities back into it: the work of the softmax role on one key block, in pieces."""

from gluon_attn.runtime.compat import gl, jit

from ...common.operands import probability_dtype, shift_log2
from ...common.row_stats import PROPAGATE_NAN, finite
from ...common.score_mod import LOG2_E
from ..arithmetic import exp2, larger, multiply_add, row_maxima, row_sums, split_columns
from .tmem import probabilities_of


@jit
def load_scores(scores, bias, rows, block, scale, MASKED: gl.constexpr, CONFIG: gl.constexpr):
    """S in CONFIG.exp_pieces tensors side by side, -inf where masked, and the maximum of each row [ROWS] fp32, NaN if
    a score is NaN. bias: as for `with_bias`; it is freed.

    All of S is in registers before anything is written over it.
    """
    LOADS: gl.constexpr = CONFIG.load_pieces
    WIDTH: gl.constexpr = scores.shape[1] // LOADS
    pieces = ()
    row_max = None
    for i in gl.static_range(LOADS):
        piece, piece_max = load_piece(scores, bias, rows, block, scale, i * WIDTH, WIDTH, MASKED, CONFIG)
        pieces = pieces + split_columns(piece, CONFIG.exp_pieces // LOADS)
        row_max = piece_max if row_max is None else larger(row_max, piece_max)
    for i in gl.static_range(len(bias)):
        bias[i].release_accessed()
    return pieces, row_max


@jit
def with_bias(scores, bias, scale_log2, FIRST_COLUMN: gl.constexpr, PACKED: gl.constexpr):
    """Raw scores [ROWS, N], those of columns from FIRST_COLUMN on, and what is added to them, in their units. bias: the
    slot that has it, for all columns; a tuple of one, or of none."""
    if len(bias) == 0:
        return scores
    else:
        LAYOUT: gl.constexpr = scores.type.layout
        COLUMNS: gl.constexpr = scores.shape[1]
        BLOCK_N: gl.constexpr = bias[0].part(0).shape[3]
        factor = LOG2_E / scale_log2
        if bias[0].part(0).shape[2] == 1:
            row = bias[0].view([BLOCK_N]).slice(FIRST_COLUMN, COLUMNS).load(gl.SliceLayout(0, LAYOUT))
            return scores + (row.to(gl.float32) * factor)[None, :]
        else:
            tile = bias[0].view([scores.shape[0], BLOCK_N]).slice(FIRST_COLUMN, COLUMNS, dim=1).load(LAYOUT)
            return multiply_add(tile.to(gl.float32), factor, scores, PACKED)


@jit
def load_piece(
    scores,
    bias,
    rows,
    block,
    scale,
    FIRST_COLUMN: gl.constexpr,
    WIDTH: gl.constexpr,
    MASKED: gl.constexpr,
    CONFIG: gl.constexpr,
):
    piece = scores.slice(FIRST_COLUMN, WIDTH)
    CHANGED: gl.constexpr = rows.SCORE_MOD is not None or len(bias) > 0
    gl.static_assert(not (CONFIG.max_in_load and CHANGED), "the maxima of loads are those of raw scores")
    if CONFIG.max_in_load and not MASKED:
        values, row_max = piece.load_max(propagate_nan=PROPAGATE_NAN)
        row_max = gl.convert_layout(row_max, gl.SliceLayout(1, values.type.layout), assert_trivial=True)
    else:
        values = rows.modified(piece.load(), block, scale.before, FIRST_COLUMN)
        values = with_bias(values, bias, scale.log2, FIRST_COLUMN, CONFIG.packed_arithmetic)
        if MASKED:
            values = rows.mask(values, block, FIRST_COLUMN)
        row_max = row_maxima(values)
    return values, row_max


@jit
def store_piece(p, values, INDEX: gl.constexpr):
    WIDTH: gl.constexpr = values.shape[1]
    piece = p.slice(INDEX * WIDTH, WIDTH)
    LAYOUT: gl.constexpr = piece.get_reg_layout()
    piece.store(gl.convert_layout(values.to(p.dtype), LAYOUT, assert_trivial=True))


@jit
def probabilities(scores, offset, scale_log2, MASKED: gl.constexpr, CONFIG: gl.constexpr):
    """exp2(scores * scale_log2 + offset), [M, N] fp32; a masked block has zeros, which a polynomial would not give."""
    column = gl.convert_layout(offset, gl.SliceLayout(1, scores.type.layout), assert_trivial=True)[:, None]
    exponents = multiply_add(scores, scale_log2, column, CONFIG.packed_arithmetic)
    return exp2(exponents, 0 if MASKED else CONFIG.polynomial_columns, CONFIG.packed_arithmetic)


@jit
def store_probabilities(
    slot, ends, pieces, row_max, scale_log2, dtype: gl.constexpr, MASKED: gl.constexpr, CONFIG: gl.constexpr
):
    """P, for values of `dtype`, over the scores, in pieces, and the slot freed. Returns the row sums [ROWS] fp32."""
    p = probabilities_of(slot.memory, probability_dtype(dtype))
    offset = shift_log2(dtype) - finite(row_max, MASKED) * scale_log2
    sums = None
    PIECES: gl.constexpr = CONFIG.exp_pieces
    for i in gl.static_range(PIECES):
        values = probabilities(pieces[i], offset, scale_log2, MASKED, CONFIG)
        store_piece(p, values, i)
        if CONFIG.early_p and i == 2:
            slot.release()
        piece_sums = gl.convert_layout(
            row_sums(values, CONFIG.packed_arithmetic), row_max.type.layout, assert_trivial=True
        )
        sums = piece_sums if sums is None else sums + piece_sums
    if CONFIG.early_p:
        ends.tails.release()
    else:
        slot.release()
    return sums
