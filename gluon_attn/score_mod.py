"""Functions that change scores within a kernel, between the product Q Kᵀ and the softmax, and their derivatives."""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .checks import check_softcap, type_name
from .kernels.common.score_mods import cap, cap_backward, slope
from .named import interned

MAX_TENSORS = 4
# e^55 is below 2^80: sums of 2^20 such exponentials times values of 2^27 are numbers in fp32, and e^-55 is one in bf16.
NEAR_ZERO = 55.0
TENSOR_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}


def source_key(functions: Sequence[Any], numbers: tuple[Any, ...]) -> str:
    """For Triton's cache: of the source of these functions, None for one that there is not, and of the numbers."""
    sources = [f and f"{f.fn.__module__}.{f.fn.__qualname__} {f.cache_key}" for f in functions]
    return hashlib.sha256(repr((sources, *numbers)).encode()).hexdigest()


def refuse_in_a_graph(of: str) -> None:
    """NotImplementedError while torch.compile or torch.export traces what makes one. of: which argument it is for."""
    if is_compiling():
        raise NotImplementedError(
            f"{of}: expected one that is made outside of what torch.compile or torch.export traces, got one made "
            "within; make it before"
        )


def check_functions(of: str, **functions: Any) -> None:
    """That the first is a jitted function, and the others too, or None. of: what is given them."""
    for i, (name, function) in enumerate(functions.items()):
        if not hasattr(function, "cache_key") and (i == 0 or function is not None):
            raise TypeError(
                f"{of}: expected {name} to be a function under gluon_attn.jit, got {type(function).__name__}; "
                "decorate it"
            )


def types_of_tensors(of: str, tensors: Sequence[Tensor]) -> tuple[str, ...]:
    """Triton's types of what a function reads, checked."""
    if not isinstance(tensors, tuple | list):
        raise TypeError(f"{of}: expected tensors to be a tuple, got {type_name(tensors)}; give (tensor,) for one")
    if len(tensors) > MAX_TENSORS:
        raise ValueError(f"{of}: expected at most {MAX_TENSORS} tensors, got {len(tensors)}; join some of them")
    for i, t in enumerate(tensors):
        if not isinstance(t, Tensor) or t.dtype not in TENSOR_TYPES:
            got = t.dtype if isinstance(t, Tensor) else type(t).__name__
            raise TypeError(
                f"{of}: expected tensors[{i}] to be a tensor of one of {list(TENSOR_TYPES)}, got {got}; convert it"
            )
    return tuple(TENSOR_TYPES[t.dtype] for t in tensors)


def checked_constants(of: str, constants: Any) -> tuple[float | int, ...]:
    """What functions are given before what they read, as a tuple that is hashable."""
    if not isinstance(constants, tuple | list):
        raise TypeError(f"{of}: expected constants to be a tuple, got {type_name(constants)}; give (number,) for one")
    for i, constant in enumerate(constants):
        if not isinstance(constant, int | float):
            raise TypeError(
                f"{of}: expected constants[{i}] to be an int or a float, got {type_name(constant)}; give all else as "
                "tensors"
            )
    return tuple(constants)


@dataclass(frozen=True, kw_only=True)
class ScoreFunction:
    """What a kernel is compiled with of a `ScoreMod`: all but its tensors. Hashable.

    tensors: Triton's types of what it reads. before, after: what scores are multiplied with before the function, and
    what comes out of it. by_distance: forward is instead `forward(head, batch, *constants, *tensors) -> slope`, and
    scores are reduced by the slope times the distance of query and key. near_zero: what comes out of it is at most
    NEAR_ZERO from 0. handle: of a caller's own, see named.py. written: the constants, which 1, 1.0 and True are not
    alike in.
    """

    forward: Any
    backward: Any | None = None
    constants: tuple[float | int, ...] = ()
    before: float = 1.0
    after: float = 1.0
    aligned: bool = False
    tensors: tuple[str, ...] = ()
    by_distance: bool = False
    near_zero: bool = False
    handle: str = field(default="", compare=False, repr=False)
    written: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "written", repr(self.constants))

    @property
    def cache_key(self) -> str:
        """For Triton's cache: of the source of both functions, with all that they call, and of the numbers."""
        kind = (self.aligned, self.by_distance, self.near_zero)
        numbers = (self.constants, self.before, self.after, kind, self.tensors)
        return source_key((self.forward, self.backward), numbers)

    def __str__(self) -> str:
        return f"ScoreFunction({self.cache_key})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself, as a function's copy is: so that a model may be copied that has one."""
        return self


class ScoreMod:
    """A change of scores that is computed within the kernel: jitted functions, and the tensors that they read.

    Args:
        forward: `forward(score, q_index, k_index, head, batch, *constants, *tensors) -> score`, a function under
            `gluon_attn.jit`. score: fp32, a tile of scale · q · k. q_index, k_index: int32, the positions of its
            queries and keys in the sequence, which broadcast against the tile. In the last blocks they go on beyond its
            end, so a load by position needs a mask: `gl.load(table + k_index, mask=k_index < length, other=0.0)`.
            head: of the query, and batch: int32 scalars. It returns a tile of the same shape. Which way the tile lies
            is left open, so the function has to be elementwise.
        backward: `backward(dscore, score, modified, q_index, k_index, head, batch, *constants, *tensors)`: dscore, the
            gradient of `modified`, which `forward` made of `score`, times the derivative of `forward`. None: the call
            has no gradients.
        constants: numbers that a kernel is compiled with.
        tensors: up to four, contiguous, on q's card, of fp32, fp16, bf16, int32 or int64. The functions are given
            pointers, and load from them with `gl.load`. They have no gradients.
        aligned: count q_index as masks do, from the bottom right: query i is at i + Sk - Sq.

    Two of them made of the same functions and constants share a kernel, whatever their tensors.

    Raises TypeError for a function that is not under `gluon_attn.jit`, for a constant that is no number and for a
    tensor of another dtype, ValueError for more than four tensors. The call refuses tensors that are not contiguous,
    not on q's card, or of several elements at an address that is no multiple of 16 bytes.
    """

    def __init__(
        self,
        forward: Any,
        backward: Any | None = None,
        *,
        constants: tuple[float | int, ...] = (),
        tensors: tuple[Tensor, ...] = (),
        aligned: bool = False,
    ) -> None:
        refuse_in_a_graph("score_mod")
        check_functions("score_mod", forward=forward, backward=backward)
        self.function = interned(
            ScoreFunction(
                forward=forward,
                backward=backward,
                constants=checked_constants("score_mod", constants),
                aligned=aligned,
                tensors=types_of_tensors("score_mod", tensors),
            )
        )
        self.tensors = tuple(tensors)


def compiled_part(score_mod: object) -> tuple[ScoreFunction | None, tuple[Tensor, ...]]:
    """(what a kernel is compiled with, what it reads)."""
    if score_mod is None:
        return None, ()
    if not isinstance(score_mod, ScoreMod):
        raise TypeError(
            f"score_mod: expected a gluon_attn.ScoreMod or None, got {type(score_mod).__name__}; make one of a "
            "function under gluon_attn.jit"
        )
    return score_mod.function, score_mod.tensors


def softcap(limit: float) -> ScoreFunction:
    """limit · tanh(score / limit). The card's tanh is right to 2^-11 of itself."""
    # torch.compile warns of a cache, which it traces past anyway.
    return capped(limit) if is_compiling() else capped_once(limit)


def capped(limit: float) -> ScoreFunction:
    check_softcap(limit)
    return ScoreFunction(
        forward=cap, backward=cap_backward, before=1 / limit, after=limit, near_zero=limit <= NEAR_ZERO
    )


def kind_of(function: ScoreFunction | None) -> str | None:
    """ "softcap" or "alibi"; None for none, and for a caller's own."""
    if function is None:
        return None
    if function.by_distance:
        return "alibi"
    return "softcap" if function.forward is cap else None


capped_once = functools.lru_cache(maxsize=64, typed=True)(capped)  # typed: True is no 1.0 that was asked for before


def alibi(slopes: Tensor) -> ScoreFunction:
    """score - slope · |i + Sk - Sq - j|, of query i and key j; slopes: (H,) or (B, H) fp32."""
    of_batch = slopes.shape[-1] if slopes.dim() == 2 else 0
    return ScoreFunction(forward=slope, backward=slope, constants=(of_batch,), by_distance=True, tensors=("fp32",))
