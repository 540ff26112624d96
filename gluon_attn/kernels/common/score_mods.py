"""Changes of scores that `attention` has by name, as anyone could write them: see `ScoreMod` in score_mod.py."""

from gluon_attn.runtime.compat import gl, jit

from ..hopper.inline_asm import tanh


@jit
def cap(score, q_index, k_index, head, batch):
    """For a soft cap: what is given and what is made of it are in units of the cap."""
    return tanh(score)


@jit
def cap_backward(dscore, score, modified, q_index, k_index, head, batch):
    return dscore * (1.0 - modified * modified)


@jit
def slope(head, batch, OF_BATCH: gl.constexpr, slopes):
    """ALiBi (Press et al., 2022), as FlashAttention-2 has it for unequal lengths. slopes: (H,) fp32, or (B, H), where
    a batch has OF_BATCH of them."""
    return gl.load(slopes + (batch * OF_BATCH + head))
