"""Values that mean nothing: what an integer division by zero leaves.

The hardware goes on after one, with some number or other. That is no defect as long as nobody looks at the number, as
in a tile after the last whose stores are masked off. So the number goes along, marked, and a finding comes where it
decides something: an address, a mask, a branch, or what a tensor of the launch ends up with. Whoever
lets that finding pass goes on with the number, which is 0.
"""

import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType, TracebackType
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin


class PoisonUse(Exception):
    """A marked value decides something; the scheduler turns it into a finding with the line of the use.

    line: of the division, in the generated code.
    """

    def __init__(self, line: int) -> None:
        super().__init__("the result of an integer division by zero is used")
        self.line = line


# Of the launch that runs: told of a use, it raises the finding, or returns if the launch goes on after it.
JUDGE: ContextVar[Callable[[PoisonUse], None] | None] = ContextVar("gluon_cpu_poison", default=None)


def use(line: int) -> None:
    """A marked value decides something here. line: of the division."""
    found, judge = PoisonUse(line), JUDGE.get()
    if judge is None:
        raise found
    trace: TracebackType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # as if it was raised, for the line of the use
        trace = TracebackType(trace, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    judge(found.with_traceback(trace))


class Poisoned(NDArrayOperatorsMixin):
    """An array, or with shape () a scalar, of which the elements in `marks` mean nothing. line: see `PoisonUse`."""

    def __init__(self, data: Any, marks: Any, line: int) -> None:
        self.line = line
        self.data = np.asarray(data)
        self.marks = np.broadcast_to(np.asarray(marks, np.bool_), self.data.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def dtype(self) -> Any:
        return self.data.dtype

    @property
    def size(self) -> int:
        return self.data.size

    @property
    def ndim(self) -> int:
        return self.data.ndim

    # Elementwise: an element of the result is marked if one of those it comes from is.

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__" or "out" in kwargs or ufunc.signature is not None:
            use(self.line)
            return getattr(ufunc, method)(*map(plain, inputs), **kwargs)
        result = ufunc(*map(plain, inputs), **kwargs)
        marks = np.zeros((), np.bool_)
        for x in inputs:
            marks = marks | marks_of(x)
        if isinstance(result, tuple):
            return tuple(mark(r, np.broadcast_to(marks, np.shape(r)), self.line) for r in result)
        return mark(result, np.broadcast_to(marks, np.shape(result)), self.line)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.where:
            condition, yes, no = args
            chosen = np.where(plain(condition), plain(yes), plain(no))
            marks = np.where(plain(condition), marks_of(yes), marks_of(no)) | marks_of(condition)
            return mark(chosen, np.broadcast_to(marks, chosen.shape), self.line)
        if function not in MOVES:
            use(self.line)
            return function(*map(all_plain, args), **{name: all_plain(value) for name, value in kwargs.items()})
        data = function(*strip(args, plain), **kwargs)
        return mark(data, function(*strip(args, marks_like), **kwargs), self.line)

    # The same elements in another shape, order or type.

    def moved(self, name: str, *args: Any) -> Any:
        return mark(getattr(self.data, name)(*args), getattr(self.marks, name)(*args), self.line)

    def reshape(self, *args: Any) -> Any:
        return self.moved("reshape", *args)

    def transpose(self, *args: Any) -> Any:
        return self.moved("transpose", *args)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, Poisoned):
            use(key.line)
            key = key.data
        return mark(self.data[key], self.marks[key], self.line)

    def astype(self, dtype: Any, **kwargs: Any) -> Any:
        return mark(self.data.astype(dtype, **kwargs), self.marks, self.line)

    def view(self, dtype: Any) -> Any:
        if np.dtype(dtype).itemsize != self.data.itemsize:
            return self.used().view(dtype)
        return mark(self.data.view(dtype), self.marks, self.line)

    # Whatever needs the number itself.

    def used(self) -> Any:
        use(self.line)
        return self.data

    def __bool__(self) -> bool:
        return bool(self.used())

    def __int__(self) -> int:
        return int(self.used())

    def __index__(self) -> int:
        return int(self.used())

    def __float__(self) -> float:
        return float(self.used())

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.array(self.used(), dtype)

    def __iter__(self) -> Any:
        return iter(self.used())

    def __len__(self) -> int:
        return len(self.used())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.used(), name)


MOVES = {
    np.reshape, np.transpose, np.broadcast_to, np.expand_dims, np.squeeze, np.moveaxis, np.swapaxes, np.take,
    np.concatenate, np.stack, np.repeat, np.flip, np.ascontiguousarray,
}  # fmt: skip


def strip(args: Any, how: Callable[[Any], Any]) -> tuple[Any, ...]:
    """The arguments of a numpy function with `how` in place of each array: the first of them, or a list of them."""
    first, *rest = args
    return (type(first)(how(x) for x in first) if isinstance(first, list | tuple) else how(first), *rest)


def plain(x: Any) -> Any:
    return x.data if isinstance(x, Poisoned) else x


def all_plain(x: Any) -> Any:
    """An argument of a numpy function: an array, or a list of them."""
    return type(x)(map(plain, x)) if isinstance(x, list | tuple) else plain(x)


def marks_of(x: Any) -> Any:
    return x.marks if isinstance(x, Poisoned) else np.zeros((), np.bool_)


def marks_like(x: Any) -> Any:
    return x.marks if isinstance(x, Poisoned) else np.zeros(np.shape(x), np.bool_)


def mark(data: Any, marks: Any, line: int) -> Any:
    """As generated code has it, if no element is marked: an array, or Python's integers and booleans."""
    if np.any(marks):
        return Poisoned(data, marks, line)
    if np.ndim(data):
        return data
    kind = np.asarray(data).dtype.kind
    return bool(data) if kind == "b" else int(data) if kind in "iu" else data


def used_by(x: Any, wanted: Any = True) -> Any:
    """The plain elements of x, for a use of those that are `wanted`: none of them may be marked."""
    if not isinstance(x, Poisoned):
        return x
    if np.any(x.marks & np.asarray(plain(wanted), np.bool_)):
        use(x.line)
    return x.data


def divide(a: Any, b: Any, whole: Callable[[Any, Any], Any]) -> Any:
    """`whole(a, b)` of integers; where b is 0, 0 and marked. Called by a function that the generated code calls."""
    by_zero = plain(b) == 0
    marks = by_zero | marks_of(a) | marks_of(b)
    if not np.any(marks):
        return whole(a, b)
    divisor: Any
    if np.ndim(by_zero):
        divisor = np.where(by_zero, np.ones((), plain(b).dtype), plain(b))
    else:
        divisor = 1 if by_zero else plain(b)
    data, zeros, wide = np.broadcast_arrays(whole(plain(a), divisor), by_zero, marks)
    return mark(np.where(zeros, np.zeros((), data.dtype), data), wide, sys._getframe(2).f_lineno)
