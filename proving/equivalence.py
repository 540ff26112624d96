"""What a kernel computes, as a PyTorch function, for the verifier to compare with: equal for real numbers.

The verifier follows the values through the whole kernel as exact real numbers, without any rounding, so that the two
are equal or not, and no tolerance is involved.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .launch import Launch, Scalar
from .ptx import strip_comment
from .rewrites import Rewrite


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A tensor of the kernel, contiguous. name: of the kernel's parameter. dtype: torch's name of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


def allocation(name: str) -> str:
    """The verifier's name of the global memory behind a parameter: each part after its length."""
    return f"6:global{len(name)}:{name}"


@dataclass(frozen=True, kw_only=True)
class Equivalence:
    """reference: the source of a Python file that defines `reference(*inputs, *scalars)`, which returns the outputs.

    It calls its arguments as the kernel calls its parameters, and uses no name but those: the verifier traces it apart
    from any module, where not even torch is there, only the methods of tensors.
    inputs, outputs: its arguments and results, in its order. scalars: names of the kernel's numbers that it takes after
    them. rewrites: what this proof does to the PTX beyond what all do.
    """

    reference: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    scalars: tuple[str, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()

    def binding(self, launch: Launch) -> dict[str, Any]:
        """The verifier's `reference_binding.json`: which tensor of the reference is which memory of the kernel."""
        values = {arg.name: arg.value for arg in launch.arguments if isinstance(arg, Scalar)}
        if missing := [name for name in self.scalars if name not in values]:
            raise ValueError(f"scalars: expected numbers that the kernel takes ({list(values)}), got {missing}")
        side = {
            "allocations": {allocation(t.name): t.name for t in self.inputs},
            "parameters": {},
            "layouts": {allocation(t.name): layout(t) for t in self.inputs},
        }
        arguments: list[dict[str, Any]] = [
            {"name": t.name, "allocation": allocation(t.name), "dtype": t.dtype} for t in self.inputs
        ]
        arguments += [{"name": name, "value": values[name]} for name in self.scalars]
        return {
            "schema": "spverify.equivalence-mapping.v1",
            "left_inputs": side,
            "right_inputs": side,
            "outputs": {"kind": "dense_tensors", "tensors": [output(t) for t in self.outputs]},
            "output_value_semantics": "ideal_real",
            "reference": {"arguments": arguments},
        }


def strides_bytes(tensor: Operand) -> list[int]:
    strides, step = [], ELEMENT_BYTES[tensor.dtype]
    for extent in reversed(tensor.shape):
        strides.append(step)
        step *= extent
    return strides[::-1]


def layout(tensor: Operand) -> dict[str, Any]:
    return {
        "source_offset": 0,
        "target_offset": 0,
        "element_bytes": ELEMENT_BYTES[tensor.dtype],
        "shape": list(tensor.shape),
        "source_strides_bytes": strides_bytes(tensor),
        "target_strides_bytes": strides_bytes(tensor),
    }


def output(tensor: Operand) -> dict[str, Any]:
    return {
        "left_allocation": allocation(tensor.name),
        "right_allocation": allocation(tensor.name),
        "left_offset": 0,
        "right_offset": 0,
        "element_bytes": ELEMENT_BYTES[tensor.dtype],
        "shape": list(tensor.shape),
        "left_strides_bytes": strides_bytes(tensor),
        "right_strides_bytes": strides_bytes(tensor),
    }


def without(pattern: str) -> Callable[[str], tuple[str, int]]:
    """A rewrite that takes away every statement that matches `pattern`, keeping its line."""
    statement = re.compile(pattern)

    def rewrite(ptx: str) -> tuple[str, int]:
        lines, count = ptx.split("\n"), 0
        for i, line in enumerate(lines):
            if statement.match(strip_comment(line)):
                lines[i] = f"\t// left out: {strip_comment(line)}"
                count += 1
        return "\n".join(lines), count

    return rewrite


def leave_barriers_valid(ptx: str) -> tuple[str, int]:
    """Without the invalidation of barriers at the end of their lives.

    Why: the verifier's step from memory to values knows no `mbarrier.inval`. Exact for values: nothing uses a barrier
    after it, which the proof of safety, made with it in place, shows.
    """
    return without(r"(@!?%p\d+ )?mbarrier\.inval\.")(ptx)
