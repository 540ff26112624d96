"""MLIR types, parsed."""

import re
from dataclasses import dataclass
from functools import cached_property

from .text import matching, split_top

BITS = {
    "i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64,
    "f8E4M3FN": 8, "f8E5M2": 8, "index": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Scalar:
    """i32, f32, index, ..., or `ptr` with its pointee in `pointee`."""

    name: str
    pointee: str = ""

    @property
    def bytes(self) -> int:
        return 8 if self.name == "ptr" else max(1, BITS[self.name] // 8)

    @property
    def is_float(self) -> bool:
        return self.name[0] in "fb"


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...]
    element: Scalar
    layout: str  # MLIR text, aliases resolved


@dataclass(frozen=True)
class MemDesc:
    """A view of shared or tensor memory; `alloc_shape` is the allocation's, larger than `shape` for a slice."""

    shape: tuple[int, ...]
    element: Scalar
    layout: str
    space: str  # "shared" or "tensor"
    alloc_shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorDesc:
    shape: tuple[int, ...]
    element: Scalar
    layout: str


@dataclass(frozen=True)
class Token:
    """async tokens and everything else without a value at run time."""

    text: str


Type = Scalar | Tensor | MemDesc | TensorDesc | Token


class TypeParser:
    """Parses types with the module's attribute aliases."""

    def __init__(self) -> None:
        self.aliases: dict[str, str] = {}
        self.known: dict[str, Type] = {}

    @cached_property
    def alias_pattern(self) -> re.Pattern[str]:
        return re.compile(r"#[A-Za-z_]\w*(?![\w.])")

    def resolve(self, text: str) -> str:
        """Attribute text with every alias replaced by what it stands for."""
        previous = None
        while previous != text:
            previous = text
            text = self.alias_pattern.sub(lambda m: self.aliases.get(m[0], m[0]), text)
        return text

    def parse(self, text: str) -> Type:
        text = text.strip()
        if text not in self.known:
            self.known[text] = self._parse(text)
        return self.known[text]

    def _element(self, text: str) -> Scalar:
        parsed = self.parse(text)
        if not isinstance(parsed, Scalar):
            raise NotImplementedError(f"element type {text}")
        return parsed

    def _parse(self, text: str) -> Type:
        if text in BITS:
            return Scalar(text)
        if text[0] in "su" and text[1:] in BITS:  # descriptors tell signed from unsigned; their copies do not care
            return Scalar(text[1:])
        if text.startswith("!tt.ptr<"):
            return Scalar("ptr", split_top(text[len("!tt.ptr<") : -1])[0])
        for prefix in ("tensor<", "!tt.tensordesc<", "!ttng.tensordesc_im2col<", "!ttg.memdesc<"):
            if text.startswith(prefix):
                inside = text[len(prefix) : matching(text, len(prefix) - 1)]
                return self._shaped(prefix, split_top(inside))
        return Token(text)

    def _shaped(self, prefix: str, parts: list[str]) -> Type:
        m = re.match(r"((?:\d+x)*)(.*)", parts[0])
        assert m
        shape = tuple(int(s) for s in m[1].split("x") if s)
        element = self._element(m[2])
        layout = self.resolve(parts[1]) if len(parts) > 1 else ""
        if prefix == "tensor<":
            return Tensor(shape, element, layout)
        if prefix != "!ttg.memdesc<":
            return TensorDesc(shape, element, layout)
        space = "tensor" if "tensor_memory" in self.resolve(parts[2]) else "shared"
        alloc = shape
        for extra in parts[3:]:
            if re.fullmatch(r"\d+(x\d+)*", extra):
                alloc = tuple(int(s) for s in extra.split("x"))
        return MemDesc(shape, element, layout, space, alloc)
