"""The kernel's tensors, and the scales of those in fp8."""

from gluon_attn.runtime.compat import aggregate, constexpr_function, gl, jit, tma_descriptor

from .score_mod import LOG2_E, score_scale_of

# P is in [0, 1]. In fp8 it is computed times 2^8, where the numbers that matter are normal ones (e4m3 ends at 448): the
# row sum has the same factor, so that it cancels in O.
FP8_SHIFT_LOG2 = gl.constexpr(8.0)


SMALLEST_SCALE_LOG2 = gl.constexpr(1e-37)  # a normal number


@constexpr_function
def probability_dtype(dtype):
    """What P is rounded to, for values of `dtype`: of the two fp8 types the one with the smaller relative error."""
    return gl.float8e4nv if dtype.primitive_bitwidth == 8 else dtype


@constexpr_function
def shift_log2(dtype):
    """P is computed times two to this power."""
    return FP8_SHIFT_LOG2.value if dtype.primitive_bitwidth == 8 else 0.0


@constexpr_function
def unshift(dtype):
    """What takes that power out of a row sum."""
    return 2.0 ** -shift_log2(dtype)


@aggregate
class Operands:
    """The kernel's tensors, each in global memory behind its TMA descriptor; the others by pointer."""

    q: tma_descriptor  # (B, H, Sq, D), tiles [1, 1, ROWS, D]
    k: tma_descriptor  # (B, Hkv, Sk, D), tiles [1, 1, BLOCK_N, D]
    v: tma_descriptor  # as k; or, on Hopper in fp8, of V transposed, tiles [1, 1, D, BLOCK_N]
    o: tma_descriptor  # as q, or bf16
    lse: gl.tensor  # (B, H, Sq) fp32; null if nobody asked for it
    scale_log2: gl.tensor  # softmax scale times log2(e)
    sinks: gl.tuple  # of one: (H,), in natural-log units; or None
    scales: gl.tuple  # of q, k and v in fp8: (B, Hkv) fp32 each, or null for 1; in 16 bits None each

    @jit
    def kv_head(self, row_block):
        """The KV head of a row block's query head."""
        return row_block.head // (self.q.shape[1] // self.k.shape[1])

    @jit
    def scale_of(self, scales, row_block):
        """A row block's number in (B, Hkv) fp32, or 1 if `scales` is null."""
        scale = 1.0
        if scales.to(gl.int64) != 0:  # branched over: a masked load made a kernel at D=64 spill
            scale = gl.load(scales + (row_block.batch * self.k.shape[1] + self.kv_head(row_block)))
        return scale

    @jit
    def output_scale(self, row_block):
        """What a row block's output is multiplied with."""
        if self.scales[2] is None:
            return 1.0
        else:
            return self.scale_of(self.scales[2], row_block)

    @jit
    def score_scale(self, rows):
        """The ScoreScale of some rows.

        Positive: the largest raw score is to be the largest after it too, and 0 times a masked score, -inf, is NaN. A
        head that is quantised by its largest number has a scale of 0 if it is all zeros. NaN for one that is NaN or
        negative.
        """
        row_block = rows.block
        if self.scales[0] is None:
            scale = self.scale_log2
        else:
            q_scale, k_scale = self.scale_of(self.scales[0], row_block), self.scale_of(self.scales[1], row_block)
            scale = self.scale_log2 * q_scale * k_scale
            scale = gl.where(scale >= 0.0, gl.maximum(scale, SMALLEST_SCALE_LOG2), float("nan"))
        return score_scale_of(scale, rows.SCORE_MOD, row_block.head, row_block.batch, rows.aux)

    @jit
    def sink(self, row_block):
        """The sink of a row block's head, in base 2; None if there are none."""
        if self.sinks[0] is None:
            return None
        else:
            return gl.load(self.sinks[0] + row_block.head).to(gl.float32) * LOG2_E
