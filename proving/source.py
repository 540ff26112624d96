"""What a proof is of, without compiling it: a hash of all that its PTX and the verifier's input are made from.

To compile every kernel takes minutes, and Triton's front end a second each. So a record keeps this hash beside the key
of what was proved (store.py): as long as it is the same, so is the key. It is of what the front end makes of the
kernel, which holds all that the compiler reads of it and no comment or line number; of Triton's version; of the
arguments of the launch; and of the code of this package that makes the verifier's input of these.
"""

import ast
import functools
import hashlib
import io
import json
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .compat import TensorDescriptor

# The files of this package that decide what the verifier is given.
ADAPTER = (
    *("attention_ptx", "branches", "capture", "compat", "contents", "dispatch", "equivalence", "halves"),
    *("kernel_input", "launch", "loads", "prove", "ptx", "reductions", "registers", "rewrites"),
)


def hash_of(*texts: str) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


@functools.cache
def adapter() -> str:
    """A hash of this package's code in those files."""
    folder = Path(__file__).parent
    return hash_of(*(code_of((folder / f"{name}.py").read_text(encoding="utf-8")) for name in ADAPTER))


def code_of(text: str) -> str:
    """Python without comments, docstrings and empty lines. Not its syntax tree, which differs between Pythons."""
    lines = text.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):  # a docstring
                lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def arguments_text(values: Mapping[str, Any], run_time: Iterable[str]) -> str:
    """The arguments of a launch, `run_time` being the names of those that are not known when compiling: shapes, strides
    and numbers, and which tensors share memory."""
    storages: dict[int, int] = {}

    def place(tensor: Tensor) -> tuple[int, int]:
        return storages.setdefault(tensor.untyped_storage().data_ptr(), len(storages)), int(tensor.storage_offset())

    def described(value: Any) -> Any:
        if isinstance(value, TensorDescriptor):
            return list(map(int, value.shape)), list(map(int, value.strides)), value.padding, *place(value.base)
        if isinstance(value, Tensor):
            return place(value)
        return value.item() if hasattr(value, "item") else value

    return repr([(name, described(values[name])) for name in run_time])
