"""The tensors that `outputs=` names: every element of them must be written."""

from typing import Any


def is_descriptor(x: Any) -> bool:
    return hasattr(x, "base") and hasattr(x, "block_shape") and hasattr(x, "strides")


def base_of(descriptor: Any) -> Any:
    """The tensor that a descriptor is of; its first element may lie elsewhere, see `elements_before`."""
    base = descriptor.base
    return base.tensor if hasattr(base, "elements_before") else base


def elements_before(descriptor: Any) -> int:
    """How many elements the first one of a descriptor lies before that of its tensor. 0, unless its base is an object
    that has `tensor`, `elements_before` and, for Triton, `data_ptr()` and `dtype`."""
    return getattr(descriptor.base, "elements_before", 0)


class Wanted:
    """Of one launch, or, if `shared`, of all launches of a `machine`: then each entry must be of one of them.

    outputs: arguments themselves, or names of parameters.
    Raises TypeError for anything but a list.
    """

    def __init__(self, outputs: Any, *, shared: bool = False) -> None:
        if not isinstance(outputs, list | tuple | set | frozenset):
            raise TypeError(f"outputs: expected a list of arguments or their names, got {brief(outputs)}: write [...]")
        self.entries = list(outputs)
        self.shared = shared
        self.met: set[int] = set()
        self.known: dict[str, None] = {}  # names of tensors, of all launches

    def names(self, values: list[tuple[str, Any]], is_tensor: Any) -> set[str]:
        """The arguments that the entries mean; ValueError for an entry that is none, unless `shared`."""
        tensors = [(name, value) for name, value in values if is_descriptor(value) or is_tensor(value)]
        self.known |= dict.fromkeys(name for name, _ in tensors)
        wanted = set()
        for i, entry in enumerate(self.entries):
            found = {name for name, value in tensors if means(entry, name, value)}
            if found:
                self.met.add(i)
            wanted |= found
        if not self.shared:
            self.refuse_unmet()
        return wanted

    def refuse_unmet(self) -> None:
        """ValueError for an entry that is no argument: it would check nothing."""
        for i, entry in enumerate(self.entries):
            if i not in self.met:
                of = "any launch" if self.shared else "this launch"
                raise ValueError(
                    f"outputs: expected tensors among the arguments, got {brief(entry)}, which is no argument of {of}; "
                    f"give the argument itself (a view of it is another tensor), or its name, one of {list(self.known)}"
                )


def means(entry: Any, name: str, value: Any) -> bool:
    if isinstance(entry, str):
        return name == entry or name.startswith(entry + ".")  # of a tuple, all
    return value is entry or (is_descriptor(value) and base_of(value) is entry)


def brief(entry: Any) -> str:
    shape = getattr(entry, "shape", None)
    return repr(entry) if shape is None else f"a {type(entry).__name__} of shape {tuple(shape)}"
