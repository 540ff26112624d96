"""Warp-specialised, multi-CTA attention kernels in Gluon, called from PyTorch."""

from .api import attention
from .forward.configs import BlackwellTile, HopperTile, TileConfig
from .reference import reference_attention

__all__ = ["BlackwellTile", "HopperTile", "TileConfig", "attention", "reference_attention"]
