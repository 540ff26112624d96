"""What is measured: named sets of problems."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.provenance import SEED
from gluon_attn.problem import Problem
from gluon_attn.tensors import NAMED_DTYPES

TOKENS = 16384  # B * S of every point but the small ones
MODEL_DIM = 2048  # H * D
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
DTYPES = NAMED_DTYPES


@dataclass(frozen=True, kw_only=True)
class Point:
    """One problem: self-attention over `length` tokens.

    batch, heads: default TOKENS and MODEL_DIM, shared out. head_dim_v: default head_dim. heads_per_kv_head: 1 is MHA.
    layout: as attention() has it. baseline_length: in a point that is compared with ours on a plainer problem (MHA,
    "bhsd", multiples of a row block), that one's length.
    """

    dtype: str = "bf16"
    head_dim: int
    causal: bool
    length: int
    batch: int = 0
    heads: int = 0
    heads_per_kv_head: int = 1
    layout: str = "bhsd"
    baseline_length: int | None = None
    head_dim_v: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch", self.batch or TOKENS // self.length)
        object.__setattr__(self, "heads", self.heads or MODEL_DIM // self.head_dim)
        object.__setattr__(self, "head_dim_v", self.head_dim_v or self.head_dim)

    @property
    def padded_head_dims(self) -> tuple[int, int]:
        """Of the kernel that computes it."""
        return Problem.padded(self.head_dim), Problem.padded(self.head_dim_v)

    @property
    def flops(self) -> float:
        """2 B H S² (D + Dv) for the two products, half of it under a causal mask."""
        both = self.head_dim + self.head_dim_v
        return 2 * self.batch * self.heads * self.length**2 * both / (2 if self.causal else 1)

    @property
    def backward_flops(self) -> float:
        """Of its five products: three over columns of Q, two over those of V."""
        both = self.head_dim + self.head_dim_v
        return self.flops * (3 * self.head_dim + 2 * self.head_dim_v) / both

    @property
    def bytes(self) -> int:
        """Of Q, K, V and O (16 bits at least), each once."""
        size = DTYPES[self.dtype].itemsize
        queries, keys = self.head_dim * size, (self.head_dim + self.head_dim_v) * size
        of_row = self.heads * (queries + 2 * self.head_dim_v) + self.heads // self.heads_per_kv_head * keys
        return self.batch * self.length * of_row

    @property
    def intensity(self) -> float:
        """Operations to a byte of memory that has to be read or written."""
        return self.flops / self.bytes

    @property
    def name(self) -> str:
        extras = [self.dtype] * (self.dtype != "bf16") + [self.layout] * (self.layout != "bhsd")
        extras += [f"GQA {self.heads_per_kv_head}:1"] * (self.heads_per_kv_head > 1)
        extras += [f"B={self.batch} H={self.heads}"] * (
            (self.batch, self.heads) != (TOKENS // self.length, MODEL_DIM // self.head_dim)
        )
        extras += [f"against {self.baseline_length}"] * (self.baseline_length not in (None, self.length))
        of_v = f"/{self.head_dim_v}" * (self.head_dim_v != self.head_dim)
        return " ".join([f"D={self.head_dim}{of_v} {'causal' if self.causal else 'full'} {self.length}", *extras])

    def in_layouts(self, layouts: Sequence[str]) -> "list[Point]":
        """The point in each of these layouts; one that is compared with a plainer one keeps its own."""
        if self.baseline_length is not None:
            return [self]
        return [dataclasses.replace(self, layout=layout) for layout in layouts]

    def plainer(self) -> "Point | None":
        """The problem that this one is compared with, of as many flops but for the length."""
        if self.baseline_length is None:
            return None
        return dataclasses.replace(
            self, length=self.baseline_length, heads_per_kv_head=1, layout="bhsd", baseline_length=None
        )

    def tensors(self, device: str = "cuda") -> list[Tensor]:
        """q, k and v in (B, H, S, D), normal, in 16 bits: what the baselines compute with."""
        torch.manual_seed(SEED)
        dtype = DTYPES[self.dtype] if DTYPES[self.dtype].itemsize == 2 else torch.bfloat16
        kv_heads = self.heads // self.heads_per_kv_head
        sizes = ((self.heads, self.head_dim), (kv_heads, self.head_dim), (kv_heads, self.head_dim_v))
        shapes = [(self.batch, heads, self.length, head_dim) for heads, head_dim in sizes]
        return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]

    def arguments(self, tensors: list[Tensor]) -> list[Tensor]:
        """What attention() is called with: the same numbers in the point's dtype and layout."""
        typed = [t.to(DTYPES[self.dtype]) for t in tensors]
        return [t.transpose(1, 2).contiguous() for t in typed] if self.layout == "bshd" else typed


def sweep(dtype: str, head_dims: tuple[int, ...]) -> list[Point]:
    choices = itertools.product(head_dims, (False, True), LENGTHS)
    return [Point(dtype=dtype, head_dim=d, causal=causal, length=n) for d, causal, n in choices]


def variants() -> list[Point]:
    """GQA and the other layout against MHA in (B, H, S, D); odd lengths against the next multiple of the row block."""
    points = []
    for head_dim, causal in itertools.product((64, 128), (False, True)):
        plain = Point(head_dim=head_dim, causal=causal, length=4096, baseline_length=4096)
        points.append(dataclasses.replace(plain, heads_per_kv_head=4))
        points.append(dataclasses.replace(plain, layout="bshd"))
        # 1536 is a multiple of every row block and of every block of keys in use.
        for odd, even in ((1501, 1536), (4501, 4608)):
            points.append(
                Point(head_dim=head_dim, causal=causal, length=odd, batch=TOKENS // even, baseline_length=even)
            )
    return points


def small() -> list[Point]:
    """Little work, where the time of the host counts: one batch, 16 heads."""
    choices = itertools.product((64, 128), (False, True), (128, 256, 512, 1024))
    return [Point(head_dim=d, causal=causal, length=n, batch=1, heads=16) for d, causal, n in choices]


def uneven() -> list[Point]:
    """Causal lengths whose row blocks fill the last round of items badly."""
    return [Point(head_dim=d, causal=True, length=n) for d in (64, 128) for n in (1501, 3000)]


def d192() -> list[Point]:
    """The head dims of DeepSeek's: 192, and of V 128; 16 heads. Both passes beside each other: bench/unlike.py."""
    choices = itertools.product((False, True), LENGTHS)
    return [Point(head_dim=192, head_dim_v=128, causal=causal, length=n, heads=16) for causal, n in choices]


SETS: dict[str, list[Point]] = {
    "sweep": [p for dtype in DTYPES for p in sweep(dtype, (64, 128))],
    "d256": sweep("bf16", (256,)) + sweep("e4m3", (256,)),
    "variants": variants(),
    "small": small(),
    "uneven": uneven(),
    "d192": d192(),
}
