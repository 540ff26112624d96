"""Inline assembly by its twins: Python functions of arrays that compute what a piece of PTX does."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .values import DTYPES

Twin = Callable[..., Any]
_TWINS: dict[str, tuple[Twin, bool]] = {}


def register_asm(asm: str, twin: Twin, *, elementwise: bool = False) -> None:
    """Run `twin(*operands)` wherever a kernel has this inline assembly.

    The operands are numpy arrays (or scalars) of the element types, in order; the twin returns one array, or a tuple of
    as many as the assembly has results. Integers may come back signed or unsigned.
    elementwise: each element of a result depends on the elements at its own place only, as with `fma.rn.f32x2`.
    Assembly that takes several elements at a time (`pack` > 1) must be so: which ones depends on the layout.
    A twin of the same text, but for its spaces, takes the place of the one before.
    """
    _TWINS[normalise(asm)] = twin, elementwise


def normalise(asm: str) -> str:
    return " ".join(asm.split())


def _round_pair(dtype: Any) -> Twin:
    def twin(low: Any, high: Any) -> Any:
        low, high = (np.asarray(x, np.float32).astype(dtype).view(np.uint16).astype(np.uint32) for x in (low, high))
        return low | high << np.uint32(16)

    return twin


register_asm("cvt.rn.bf16x2.f32 $0, $2, $1;", _round_pair(DTYPES["bf16"]))
register_asm("cvt.rn.f16x2.f32 $0, $2, $1;", _round_pair(DTYPES["f16"]))

# One instruction of one number, exact here, as the functions of Gluon are.
APPROXIMATE: dict[str, Twin] = {
    "ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal, "rsqrt": lambda x: 1 / np.sqrt(x), "sqrt": np.sqrt,
    "sin": np.sin, "cos": np.cos,
}  # fmt: skip
for _name, _function in APPROXIMATE.items():
    for _suffix in ("", ".ftz"):
        register_asm(f"{_name}.approx{_suffix}.f32 $0, $1;", _function, elementwise=True)
register_asm("tanh.approx.f32 $0, $1;", np.tanh, elementwise=True)


def run_asm(info: Any, *operands: Any) -> tuple[Any, ...]:
    twin, elementwise = _TWINS.get(normalise(info.text), (None, False))
    if twin is None:
        raise NotImplementedError(
            f"inline assembly without a Python twin: {info.text!r}\n    at {info.site.where}\n"
            "  Give it one with gluon_cpu.register_asm(asm, twin)."
        )
    if info.pack > 1 and not elementwise:
        raise NotImplementedError(
            f"inline assembly on {info.pack} elements at a time: {info.text!r}\n    at {info.site.where}\n"
            "  If each element of a result depends on the elements at its own place only, say so: "
            "gluon_cpu.register_asm(asm, twin, elementwise=True)."
        )
    out = twin(*operands)
    if not isinstance(out, tuple):
        out = (out,)
    if len(out) != info.results:
        raise ValueError(f"the twin of {info.text!r} must return {info.results} arrays, got {len(out)}")
    return tuple(fit(np.asarray(o), dtype) for o, dtype in zip(out, info.dtypes, strict=True))


def fit(x: Any, dtype: Any) -> Any:
    """As the element type: integers of the same width keep their bits."""
    if x.dtype == dtype:
        return x
    if x.dtype.itemsize == dtype.itemsize and x.dtype.kind in "iu" and dtype.kind in "iu":
        return x.view(dtype)
    return x.astype(dtype)
