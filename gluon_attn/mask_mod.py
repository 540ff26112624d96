"""Functions that say, within a kernel, which keys a query sees, and which blocks of keys are left out."""

from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor

from .kernels.common.documents import keys_of_documents, rows_of_documents, same_document
from .named import interned
from .score_mod import check_functions, checked_constants, refuse_in_a_graph, source_key, types_of_tensors


@dataclass(frozen=True, kw_only=True)
class MaskFunction:
    """What a kernel is compiled with of a `MaskMod`: all but its tensors. Hashable. The fields are as there; tensors:
    Triton's types of what it reads. found_before: they are made by the kernel before, see documents.py, and have room
    for whole blocks. handle, written: as of a `ScoreFunction`."""

    function: Any
    keys: Any | None = None
    rows: Any | None = None
    constants: tuple[float | int, ...] = ()
    aligned: bool = False
    lengths: bool = False
    found_before: bool = False
    tensors: tuple[str, ...] = ()
    most_keys: int | None = None
    handle: str = field(default="", compare=False, repr=False)
    written: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "written", repr(self.constants))

    @property
    def cache_key(self) -> str:
        """For Triton's cache: of the source of all functions, with all that they call, and of the numbers."""
        functions = (self.function, self.keys, self.rows)
        return source_key(functions, (self.constants, self.aligned, self.lengths, self.found_before, self.tensors))

    def __repr__(self) -> str:
        return f"MaskFunction({self.cache_key})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself, as a function's copy is: so that a model may be copied that has one."""
        return self


class MaskMod:
    """Which keys a query sees, as a function that is computed within the kernel, and what it reads.

    Args:
        function: `function(q_index, k_index, head, batch, *constants, *tensors) -> bool`, under `gluon_attn.jit`:
            whether a query sees a key. q_index, k_index: int32, positions in the sequence, which broadcast against each
            other to a tile of scores; none is beyond the last of its sequence. head: of the query, and batch: int32
            scalars. Which way the tile lies is left open, so the function has to be elementwise.
        keys: `keys(first_row, last_row, q_len, k_len, head, batch, *constants, *tensors) -> (first_key, end_key)`:
            int32 scalars. Queries first_row to last_row see no key before first_key, nor any from end_key on: such
            blocks are left out. Or four numbers: besides, all of these queries see all keys full_first to full_end - 1,
            of which the function is then not asked. None: no block is left out.
        rows: the same for gradients, from keys to queries: `rows(first_key, last_key, q_len, k_len, kv_head, batch,
            *constants, *tensors) -> (first_row, end_row)`, or with (full_first, full_end) besides. It has to hold for
            all query heads of the KV head. None: no block is left out.
        constants: numbers that a kernel is compiled with.
        tensors: contiguous, on q's card, of fp32, fp16, bf16, int32 or int64. The functions are given pointers, and
            load from them with `gl.load`. Together with those of a `ScoreMod`, up to four.
        aligned: count q_index as masks do, from the bottom right: query i is at i + Sk - Sq. Not so first_row.
        lengths: give `function` q_len and k_len too, after batch.
        most_keys: how many keys a query sees at most, about, if `keys` leaves most of them out. None: any number. Under
            a causal mask the sizes of blocks are then chosen as for a window of so many keys. Another number costs
            time, and changes nothing else.

    Where the ranges leave out a key that the function lets through, it may be seen or not. Two of them made of the same
    functions and constants share a kernel, whatever their tensors.

    Raises TypeError for a function that is not under `gluon_attn.jit`, for a constant that is no number and for a
    tensor of another dtype, ValueError for more than four tensors, and for a most_keys that is not an int from 1 on.
    The call refuses tensors that are not contiguous or not on q's card, and compiling the kernel fails for ranges of
    another count of numbers.
    """

    def __init__(
        self,
        function: Any,
        *,
        keys: Any | None = None,
        rows: Any | None = None,
        constants: tuple[float | int, ...] = (),
        tensors: tuple[Tensor, ...] = (),
        aligned: bool = False,
        lengths: bool = False,
        most_keys: int | None = None,
    ) -> None:
        refuse_in_a_graph("mask_mod")
        check_functions("mask_mod", function=function, keys=keys, rows=rows)
        if most_keys is not None and (type(most_keys) is not int or most_keys < 1):
            raise ValueError(f"most_keys: expected an int from 1 on, or None, got {most_keys!r}; leave it out")
        self.function = interned(
            MaskFunction(
                function=function,
                keys=keys,
                rows=rows,
                constants=checked_constants("mask_mod", constants),
                aligned=aligned,
                lengths=lengths,
                tensors=types_of_tensors("mask_mod", tensors),
                most_keys=most_keys,
            )
        )
        self.tensors = tuple(tensors)


# Of segment ids, as `prepare_documents` leaves them.
DOCUMENTS = MaskFunction(
    function=same_document,
    keys=keys_of_documents,
    rows=rows_of_documents,
    lengths=True,
    found_before=True,
    tensors=("i32",),
)


def compiled_part(mask_mod: object) -> tuple[MaskFunction | None, tuple[Tensor, ...]]:
    """(what a kernel is compiled with, what it reads)."""
    if mask_mod is None:
        return None, ()
    if not isinstance(mask_mod, MaskMod):
        raise TypeError(
            f"mask_mod: expected a gluon_attn.MaskMod or None, got {type(mask_mod).__name__}; make one of a function "
            "under gluon_attn.jit"
        )
    return mask_mod.function, mask_mod.tensors
