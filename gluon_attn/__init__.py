"""Warp-specialised, multi-CTA attention kernels in Gluon, called from PyTorch."""

from .api import attention
from .reference import reference_attention
from .tuning import TileConfig

__all__ = ["TileConfig", "attention", "reference_attention"]
