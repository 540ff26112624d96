"""What a call of attention is given besides q, k and v: as one thing that every function passes on."""

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .checks import Window, check_of_heads, check_read, type_name
from .device import Device
from .features import refuse_together
from .forward.configs import ForwardConfig
from .forward.launch import NOT_GIVEN
from .mask_mod import DOCUMENTS, MaskFunction
from .memory import refuse_address
from .problem import Lengths, Problem
from .score_mod import MAX_TENSORS, ScoreFunction, alibi, softcap
from .tensors import TMA_ALIGNMENT_BYTES, in_bhsd

Kept = TypeVar("Kept")


class Options(NamedTuple):
    """All of `attention`'s arguments that are no tensors, but for `return_lse`. Hashable."""

    causal: bool = False
    window: Window = (None, None)
    chunk: int | None = None
    softcap: float | None = None
    score_mod: ScoreFunction | None = None
    scale: float | None = None
    layout: str = "bhsd"
    deterministic: bool | None = None
    num_ctas: int | None = None
    config: ForwardConfig | None = None
    device: Device | None = None
    mask_mod: MaskFunction | None = None
    card_is_shared: bool = False  # with what runs at the same time, so that a program may begin late: see `Plan.of`
    max_seqlens: tuple[int, int] | None = None  # of queries and of keys, if sequences are packed; in no launch's key


class Extras(NamedTuple):
    """The tensors that a call may have besides q, k and v."""

    out: Tensor | None = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    cu_seqlens_q: Tensor | None = None  # where packed sequences begin, and the last ends
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None
    q_segment_ids: Tensor | None = None
    k_segment_ids: Tensor | None = None
    bias: Tensor | None = None
    of_score_mod: tuple[Tensor, ...] = ()
    of_mask_mod: tuple[Tensor, ...] = ()

    @property
    def scales(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.q_scale, self.k_scale, self.v_scale

    @property
    def is_empty(self) -> bool:
        """Whether there are none. A chain, as a loop takes three times as long in each call. Its value is not returned,
        as torch.compile knows `not` of a tuple in conditions only."""
        if self is NO_EXTRAS:  # as most calls have it
            return True
        a, b, c, d, e, f, g, h, i, j, m, n, read, read_by_mask = self
        if a is b is c is d is e is f is g is h is i is j is m is n is None and not read and not read_by_mask:  # noqa: SIM103
            return True
        return False

    def each(self) -> tuple[Tensor | None, ...]:
        """One by one."""
        return (*self[:-2], *self.of_score_mod, *self.of_mask_mod)

    def named(self) -> dict[str, Any]:
        """Those that are there, one by one, as an error calls them."""
        if self.is_empty:
            return {}
        named = {name: t for name, t in zip(SINGLE, self[:-2], strict=True) if t is not None}
        return named | self.of_functions()

    def of_functions(self) -> dict[str, Tensor]:
        """The same of those alone that functions read."""
        of_score_mod = {f"score_mod.tensors[{i}]": t for i, t in enumerate(self.of_score_mod)}
        return of_score_mod | {f"mask_mod.tensors[{i}]": t for i, t in enumerate(self.of_mask_mod)}

    def given(self) -> dict[str, Tensor | None]:
        """What a launch is given, by the name that it has there, in a dict of its own."""
        given = NONE_GIVEN.copy()
        if self.is_empty:
            return given
        given.update(zip(SINGLE, self[:-2], strict=True))
        read = self.of_score_mod if self.alibi_slopes is None else (self.alibi_slopes,)
        for i, t in enumerate((*read, *self.of_mask_mod)):
            given[f"aux{i}"] = t
        return given

    def check_alignment(self) -> None:
        """That functions may read several elements at a time of what they are given: kernels are compiled so. One
        element is at a multiple of its own size. ValueError names the first tensor that begins elsewhere."""
        if not self.of_score_mod and not self.of_mask_mod:
            return
        for name, t in self.of_functions().items():
            if t.data_ptr() % TMA_ALIGNMENT_BYTES and t.numel() > 1:
                refuse_address(name, t)


NO_EXTRAS = Extras()
SINGLE = Extras._fields[:-2]  # those that are one tensor each
NONE_GIVEN: dict[str, Tensor | None] = {**NOT_GIVEN, **dict.fromkeys(SINGLE)}

Key = tuple[Any, ...]
MAX_KEPT = 4096  # calls


def keep(kept: dict[Key, Kept], key: Key, what: Kept) -> None:
    """For the next call like this one. Of shapes that never end it does not grow without end."""
    if len(kept) >= MAX_KEPT:
        kept.clear()
    kept[key] = what


def identity(t: Tensor) -> Key:
    """What a launch may depend on of a tensor."""
    return t.shape, t.stride(), t.dtype, t.device


def key_of(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options) -> Key:
    """All that a launch depends on, but for the tables in use, and for what may differ from call to call. True, 1 and
    1.0 are equal, their types not."""
    key = (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, options[:-1], type(options.causal), type(options.scale), type(options.num_ctas),
        type(options.softcap), type(options.chunk), *map(type, options.window),
    )  # fmt: skip
    if extras.is_empty:
        return key
    return *key, *[t if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in extras.each()]


def lengths_of(extras: Extras, options: Options) -> Lengths | None:
    """Of packed sequences, as they are given."""
    if options.max_seqlens is None:
        return None
    return extras.cu_seqlens_q, extras.cu_seqlens_k, *options.max_seqlens, extras.seqused_k


def problem_of(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options) -> Problem:
    """What a call poses, checked; see `Problem.of`."""
    refuse_together(arguments_of(extras, options))
    score_mod, mask_function = score_function_of(q, extras, options), mask_function_of(q, k, extras, options)
    if score_mod is not None and mask_function is not None:
        read = len(score_mod.tensors) + len(mask_function.tensors)
        if read > MAX_TENSORS:
            raise NotImplementedError(
                f"score_mod: expected at most {MAX_TENSORS} tensors together with those of the mask (of segment_ids: "
                f"1), got {read}; join some of them"
            )
    return Problem.of(
        q,
        k,
        v,
        causal=options.causal,
        window=options.window,
        chunk=options.chunk,
        score_mod=score_mod,
        mask_function=mask_function,
        sinks=extras.sinks,
        scale=options.scale,
        layout=options.layout,
        out=extras.out,
        scales=extras.scales,
        lengths=lengths_of(extras, options),
        bias=extras.bias,
    )


def arguments_of(extras: Extras, options: Options) -> set[str]:
    """Names of those among the arguments of a call that not all go together."""
    given = {
        "softcap": options.softcap,
        "score_mod": options.score_mod,
        "mask_mod": options.mask_mod,
        "cu_seqlens_q": options.max_seqlens,
        "bias": extras.bias,
        "alibi_slopes": extras.alibi_slopes,
        "segment_ids": extras.k_segment_ids if extras.q_segment_ids is None else extras.q_segment_ids,
    }
    return {name for name, value in given.items() if value is not None}


def score_function_of(q: Tensor, extras: Extras, options: Options) -> ScoreFunction | None:
    """What becomes of scores, checked."""
    if options.softcap is not None:
        return softcap(options.softcap)
    if extras.alibi_slopes is not None:
        batch, heads = in_bhsd(q, options.layout).shape[:2]
        if extras.cu_seqlens_q is not None:
            batch = len(extras.cu_seqlens_q) - 1
        check_of_heads("alibi_slopes", extras.alibi_slopes, q, ((heads,), (batch, heads)), (torch.float32,))
        return alibi(extras.alibi_slopes)
    for i, t in enumerate(extras.of_score_mod):
        check_read(f"score_mod.tensors[{i}]", t, q)
    return options.score_mod


def mask_function_of(q: Tensor, k: Tensor, extras: Extras, options: Options) -> MaskFunction | None:
    """Which keys a query sees besides, checked."""
    ids = {"q": extras.q_segment_ids, "k": extras.k_segment_ids}
    for i, t in enumerate(extras.of_mask_mod):
        check_read(f"mask_mod.tensors[{i}]", t, q)
    if ids["q"] is None and ids["k"] is None:
        return options.mask_mod
    for name, of in (("q", q), ("k", k)):
        given, shape = ids[name], (of.shape[0], of.shape[2 if options.layout == "bhsd" else 1])
        todo = "give (q_segment_ids, k_segment_ids), or one tensor for both"
        if not isinstance(given, Tensor):
            raise TypeError(
                f"segment_ids: expected a torch.Tensor of shape {shape} for {name}, got {type_name(given)}; {todo}"
            )
        if given.dtype != torch.int32:
            raise TypeError(
                f"segment_ids: expected dtype torch.int32, got {given.dtype}; convert with .to(torch.int32)"
            )
        if tuple(given.shape) != shape:
            raise ValueError(
                f"segment_ids: expected shape {shape}, an id for each position of {name}, got {tuple(given.shape)}; "
                f"{todo}"
            )
        check_read("segment_ids", given, q)
    return DOCUMENTS


def both_segment_ids(segment_ids: object) -> tuple[Any, Any]:
    """Those of queries and of keys, whatever they are."""
    if isinstance(segment_ids, tuple | list):
        if len(segment_ids) != 2:
            raise TypeError(
                f"segment_ids: expected a tensor, or two, of queries and of keys, got {len(segment_ids)}; give "
                "(q_segment_ids, k_segment_ids)"
            )
        return segment_ids[0], segment_ids[1]
    return segment_ids, segment_ids
