"""All inline assembly of the project: arithmetic only, each piece with a twin in Python that says what it computes."""

import numpy as np

from gluon_attn.compat import constexpr_function, gl, jit


@constexpr_function
def round_pair_asm(dtype):
    return f"cvt.rn.{'bf16x2' if dtype == gl.bfloat16 else 'f16x2'}.f32 $0, $2, $1;"


@jit
def round_pair(low, high, dtype: gl.constexpr):
    """Two fp32 tensors rounded to the nearest even `dtype` (bf16 or fp16), packed into one uint32 tensor.

    The hardware does both with one instruction. Written in Gluon it stays two conversions and two byte permutations:
    the compiler does not see that the halves it packs are the halves it has just converted together.
    """
    ASM: gl.constexpr = round_pair_asm(dtype)
    return gl.inline_asm_elementwise(ASM, "=r,f,f", [low, high], dtype=gl.uint32, is_pure=True, pack=1)


def round_pair_twin(low: np.ndarray, high: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """What `round_pair` computes; `dtype` is ml_dtypes.bfloat16 or numpy.float16."""
    halves = (np.asarray(x, np.float32).astype(dtype).view(np.uint16).astype(np.uint32) for x in (low, high))
    return next(halves) | next(halves) << 16
