"""What a proof is about: one compiled kernel and the numbers of one launch of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Scalar:
    name: str
    value: int | float | bool


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """storage: the name of the memory behind it; two parameters that name the same one may alias. words: int32 in it
    that are known, by index; see contents.py."""

    name: str
    storage: str
    words: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TensorMap:
    """A TMA descriptor. The compiled kernel takes its 128-byte map, then each extent and each stride as a scalar.

    shape, strides: of the tensor, strides in elements. box: what one copy of one CTA moves. All in the host's order,
    the innermost dimension last. element_type, swizzle, fill: in the verifier's words.
    """

    name: str
    storage: str
    offset_bytes: int
    element_type: str
    element_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str
    fill: str


Argument = Scalar | Pointer | TensorMap


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of a compiled kernel.

    grid: in clusters, as Triton counts. threads: of a CTA, the warps of all roles. arguments: in the order of the
    kernel's signature, without its compile-time ones. scratch: whether Triton passes memory in the global scratch and
    in the profile scratch parameter that end every kernel's list.
    """

    ptx: str
    grid: tuple[int, int, int]
    num_ctas: int
    threads: int
    shared_bytes: int
    arguments: tuple[Argument, ...]
    scratch: tuple[bool, bool]
