"""Functions that a caller has written, by name: operators of torch take no objects.

A name is made of the source, so that a graph may be saved, and served by another process. It is made when a graph asks
for it, not with the `ScoreMod`: helpers of its functions may be defined later.
"""

import itertools
import threading
from dataclasses import fields, replace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

F = TypeVar("F", bound=Any)  # a ScoreFunction or a MaskFunction

_numbers = itertools.count()
_by_parts: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()
_by_handle: WeakValueDictionary[str, Any] = WeakValueDictionary()
_by_name: dict[str, Any] = {}  # of those that graphs have: they are kept
_one_at_a_time = threading.Lock()  # threads that make functions, or look among all of them


def interned(function: F) -> F:
    """The one of these functions, constants and types, with a handle: a graph that is made with one serves all."""
    values = (getattr(function, field.name) for field in fields(function))
    parts = (type(function), *(id(value) if hasattr(value, "cache_key") else repr(value) for value in values))
    with _one_at_a_time:
        found = _by_parts.get(parts)  # its functions are alive, as it is: so no other has their ids
        if found is None:
            found = replace(function, handle=f"{type(function).__name__} {next(_numbers)}")
            _by_handle[found.handle] = found
            _by_parts[parts] = found
    return found


@torch.compiler.assume_constant_result
def name_of(handle: str) -> str:
    """That of the function with this handle, which torch.compile takes for a constant, and looks at in each call."""
    function = _by_handle[handle]
    name: str = function.cache_key
    _by_name[name] = function
    return name


def function_named(argument: str, name: str | None) -> Any:
    """What `name_of` named, in this process or in the one that saved the graph. argument: of the call."""
    if name is not None and name not in _by_name:
        with _one_at_a_time:
            functions = list(_by_handle.values())
        _by_name.update({function.cache_key: function for function in functions})
    if name is not None and name not in _by_name:
        raise NotImplementedError(
            f"{argument}: expected functions that this process knows, as the graph has no others, got none of their "
            "source; import the module that makes them, and keep what it makes"
        )
    return None if name is None else _by_name[name]
