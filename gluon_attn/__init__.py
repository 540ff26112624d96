"""Warp-specialised, multi-CTA attention kernels in Gluon, called from PyTorch."""

from . import runtime as runtime  # first, as it looks whether `channels` is the package that the others import
from . import tuning as tuning
from .api import attention
from .checks import check_cu_seqlens
from .forward.configs import BlackwellConfig, ForwardConfig, HopperConfig
from .mask_mod import MaskMod
from .reference import reference_attention
from .runtime.compat import jit
from .score_mod import ScoreMod
from .support import supports
from .varlen import attention_varlen

__all__ = [
    "BlackwellConfig",
    "ForwardConfig",
    "HopperConfig",
    "MaskMod",
    "ScoreMod",
    "attention",
    "attention_varlen",
    "check_cu_seqlens",
    "jit",
    "reference_attention",
    "supports",
]
