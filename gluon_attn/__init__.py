"""Warp-specialised, multi-CTA attention kernels in Gluon, called from PyTorch."""

from .api import attention
from .reference import reference_attention
from .tile import BlackwellTile, HopperTile, TileConfig

__all__ = ["BlackwellTile", "HopperTile", "TileConfig", "attention", "reference_attention"]
