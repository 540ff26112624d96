"""Warp-specialised, multi-CTA attention kernels in Gluon, called from PyTorch."""

from . import runtime as runtime  # first, as it looks whether `channels` is the package that the others import
from .api import attention
from .forward.configs import BlackwellTile, HopperTile, TileConfig
from .reference import reference_attention

__all__ = ["BlackwellTile", "HopperTile", "TileConfig", "attention", "reference_attention"]
