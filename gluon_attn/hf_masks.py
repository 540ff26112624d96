"""The masks of transformers' models by these kernels: what makes them, and what is known of one when it comes back.

Masks are those of SDPA, so that the fallback has what it needs: None where all keys are seen, or by `is_causal` those
up to the query, and a tensor otherwise. One thing is unlike SDPA: with fewer queries than keys, None is aligned to the
bottom right. SDPA has None there for an empty static cache, aligned to the top left; and a model that drops queries
after the mask is made (Gemma 4) makes up for that by SDPA's name. So an empty static cache has a tensor here.
"""

import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from .checks import Window
from .refusals import unusual

# Attribute of a mask that is causal, aligned to the bottom right, maybe with a sliding window, and nothing else: the
# mask's version, as code that writes to the mask leaves the attribute there; and the window, for `attention`.
KNOWN = "_gluon_attn_known"

# Likewise of a mask that is causal within each of several sequences, which padding tokens are as well, maybe with a
# window: the version, and those sequences.
KNOWN_SEQUENCES = "_gluon_attn_known_sequences"
# And the parts of these in a call with `cu_seq_lens_q`, as `shorter` found them: the version, that, and the parts.
KNOWN_PARTS = "_gluon_attn_known_parts"


# Models that transformers does not give to SDPA, for their soft caps or sinks, and whose layers say of themselves that
# they are causal.
CAUSAL_BY_THEMSELVES = frozenset({"gemma2", "gpt_oss", "vaultgemma"})


class Sequences(NamedTuple):
    """Of a batch whose rows follow each other, as `attention_varlen` takes them; and the window that a mask says."""

    starts_q: Tensor
    starts_k: Tensor
    longest_q: int
    longest_k: int
    window: Window = (None, None)


def mask_of(sdpa_mask: Callable[..., Tensor | None], **options: Any) -> Tensor | None:
    """SDPA's mask, as `noted` makes it; but for a model that transformers does not give to SDPA that of its eager
    attention, which its layers may add to scores themselves, and which says whether they are causal."""
    if not relies_on_masks(options.get("config")):
        return noted(sdpa_mask, options)
    whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    seen = noted(lambda **given: sdpa_mask(**given | whole), options)
    mask = additive(seen, options["dtype"])
    for name in (KNOWN, KNOWN_SEQUENCES):
        if mask is not None and hasattr(seen, name):
            setattr(mask, name, (mask._version, getattr(seen, name)[1]))
    return mask


def noted(sdpa_mask: Callable[..., Tensor | None], options: dict[str, Any]) -> Tensor | None:
    """SDPA's mask; also where SDPA goes without one because it aligns causal masks to the top left. It says what it is
    where that is known."""
    mask = sdpa_mask(**options)
    q_len = options["q_length"] if "q_length" in options else len(options["cache_position"])
    kv_len = options["kv_length"]
    if q_len == 1:
        return mask
    if not options.get("allow_is_causal_skip", True):
        note_sequences(mask, q_len, kv_len, options)
        return mask
    if mask is None:
        return mask if q_len >= kv_len else sdpa_mask(**{**options, "allow_is_causal_skip": False})
    window = None
    if can_be_asked(mask, options.get("attention_mask")) and continues(q_len, kv_len, options):
        window = window_of(options.get("mask_function"), options.get("local_size"))
    if window is None:
        note_sequences(mask, q_len, kv_len, options)
    else:
        setattr(mask, KNOWN, (mask._version, window))
    return mask


def is_in_a_graph() -> bool:
    """Whether one is made now: by a compiler, a tracer or a stream's capture."""
    if is_compiling() or torch.jit.is_tracing():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def can_be_asked(*tensors: Tensor | None) -> bool:
    """Whether what masks hold may be looked at, and kept with them. It may not while a graph is made, by a compiler, a
    tracer or a stream's capture; and a tensor that stands for others, or for none, does not tell."""
    if is_in_a_graph():
        return False
    there = [t for t in tensors if t is not None]
    return not any(t.is_inference() or unusual(t) or torch._is_functional_tensor(t) for t in there)


def relies_on_masks(config: Any) -> bool:
    """Whether layers of a model may be causal by their mask alone, or compute attention themselves."""
    if config is None or getattr(config, "model_type", None) in CAUSAL_BY_THEMSELVES:
        return False
    return not is_given_to_sdpa(type(config).__module__, type(config).__name__)


@torch.compiler.assume_constant_result  # so under torch.compile it is called while the graph is made
def is_given_to_sdpa(module_of_config: str, name: str) -> bool:
    """Whether transformers gives models of such a config to SDPA: by those of the file of models, which lies beside it,
    that have this config. A part of them, as one for audio, may have its own. If none has it, by any."""
    package, _, file = module_of_config.rpartition(".")
    found = vars(sys.modules.get(f"{package}.{file.replace('configuration_', 'modeling_')}", ModuleType(""))).values()
    models = [of for of in found if isinstance(of, type) and hasattr(of, "_supports_sdpa")]
    with_config = [of for of in models if getattr(getattr(of, "config_class", None), "__name__", None) == name]
    return any(of._supports_sdpa is True for of in with_config or models)


def note_sequences(mask: Tensor | None, q_len: int, kv_len: int, options: dict[str, Any]) -> None:
    """Let the mask say which sequences it is made of, if it is known."""
    padding = options.get("attention_mask")
    if mask is None or q_len != kv_len or not can_be_asked(mask, padding):
        return
    sequences = sequences_of(mask, padding, options.get("local_size"))
    if sequences is not None:
        setattr(mask, KNOWN_SEQUENCES, (mask._version, sequences))


def sequences_of(mask: Tensor, padding: Tensor | None, size: Any = None) -> Sequences | None:
    """Those within which a mask (B, 1, S, S), True where a query sees a key, is causal, maybe with a window; None if it
    is another mask. The chunks of a chunked mask are sequences too.

    padding: (B, S), 0 or False for tokens whose rows nobody reads: several in a row are a sequence too. size: that of
    the sliding window, if its maker says that it has one. It waits for the card, as transformers does when it makes the
    mask; once, for all layers.
    """
    batch, _, length, _ = mask.shape
    if mask.dtype != torch.bool or (padding is not None and padding.shape != (batch, length)):
        return None
    seen, at = mask[:, 0], torch.arange(length, device=mask.device)
    is_read = torch.ones(batch, length, dtype=torch.bool, device=mask.device) if padding is None else padding.bool()
    begins = is_read & (seen.view(torch.uint8).argmax(-1) == at)
    begins[:, 1:] |= is_read[:, 1:] != is_read[:, :-1]
    begins[:, 0] = True
    first = torch.where(begins, at, 0).cummax(-1).values[..., None]
    row = at[:, None]
    causal = (at >= first) & (at <= row)

    def is_other_than(expected: Tensor) -> bool:
        return bool(((seen != expected) & is_read[..., None]).any())

    window: Window = (None, None)
    if is_other_than(causal):
        if not isinstance(size, int) or is_other_than(causal & (at > row - size)):
            return None
        window = (size - 1, 0)  # the query's own position counts there
    starts = torch.cat([begins.flatten().nonzero()[:, 0], torch.tensor([batch * length], device=mask.device)]).int()
    return Sequences(starts, starts, length, length, window)


def continues(q_len: int, kv_len: int, options: dict[str, Any]) -> bool:
    """Whether the queries are the last positions of the keys, and no token is padding."""
    first_query, padding = options.get("q_offset"), options.get("attention_mask")
    if not isinstance(first_query, int) or first_query + q_len != options.get("kv_offset", 0) + kv_len:
        return False
    return padding is None or bool(padding.all())


def window_of(mask_function: Any, size: Any) -> Window | None:
    """What a causal mask's function lets a query see; None if it is not known to be such a function. size: of the
    sliding window that its maker says it has."""
    if mask_function is causal_mask_function:
        return None, 0
    if isinstance(size, int) and same_code(mask_function, sliding_window_causal_mask_function(size)):
        return size - 1, 0  # the query's own position counts there
    return None


def same_code(one: Any, other: Any) -> bool:
    """Whether two functions are of the same source, and what they close over is, or is equal."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same_code, one, other))
    if not isinstance(one, FunctionType) or not isinstance(other, FunctionType):
        return type(one) is type(other) is int and one == other
    cells = [tuple(cell.cell_contents for cell in f.__closure__ or ()) for f in (one, other)]
    return one.__code__ is other.__code__ and same_code(*cells)


def fits(mask: Tensor | None, query: Tensor, key: Tensor) -> bool:
    """Whether a mask is of these queries and keys, of which a model may have dropped some."""
    return mask is None or mask.shape[-2:] == (query.shape[2], key.shape[2])


def known_window(mask: Tensor | None) -> Window | None:
    """Of a mask that `mask_of` knows."""
    version, window = getattr(mask, KNOWN, (None, None))
    return window if mask is not None and version is not None and version == mask._version else None


def known_sequences(
    mask: Tensor | None, query: Tensor, key: Tensor, causal: bool, others: dict[str, Any]
) -> tuple[Sequences | None, bool]:
    """(sequences that the batch is made of, whether each is causal), as a mask that `mask_of` knows says, or
    `cu_seq_lens_q`, or both. None: it is not known to be made of several."""
    causal = causal or mask is not None
    if mask is not None and known_window(mask) is None:
        sequences = sequences_of_mask(mask, query, key)
        return (shorter(mask, query, sequences, others) if sequences and is_packed(others) else sequences), causal
    if not is_packed(others) or query.shape[0] != 1 or others.get("max_length_q") is None:
        return None, causal
    if not fits(mask, query, key):
        return None, causal
    k_starts, k_longest = others.get("cu_seq_lens_k"), others.get("max_length_k")
    starts, longest = others["cu_seq_lens_q"], others["max_length_q"]
    return Sequences(
        starts, starts if k_starts is None else k_starts, longest, longest if k_longest is None else k_longest
    ), causal


def sequences_of_mask(mask: Tensor, query: Tensor, key: Tensor) -> Sequences | None:
    version, sequences = getattr(mask, KNOWN_SEQUENCES, (None, None))
    same = version is not None and version == mask._version and fits(mask, query, key)
    return sequences if same and mask.shape[0] == query.shape[0] else None


def shorter(mask: Tensor, query: Tensor, sequences: Sequences, others: dict[str, Any]) -> Sequences | None:
    """The parts into which `cu_seq_lens_q` divides those of a mask. It waits for the card, once for all layers."""
    starts, k_starts = others["cu_seq_lens_q"], others.get("cu_seq_lens_k")
    version, given, found = getattr(mask, KNOWN_PARTS, (None, None, None))
    if version != mask._version or given is not starts:
        if not can_be_asked(mask, starts):
            return None
        if not (k_starts is None or k_starts is starts or torch.equal(k_starts, starts)):
            return None
        found, of_mask = sequences, sequences.starts_q
        if tells_of(starts, query):
            cuts = torch.cat([of_mask, starts.to(of_mask)]).unique()
            found = sequences._replace(starts_q=cuts, starts_k=cuts)
        setattr(mask, KNOWN_PARTS, (mask._version, starts, found))
    return found


def is_packed(others: dict[str, Any]) -> bool:
    """Whether there are several sequences, for which their number suffices: where they end is known to the card."""
    starts = others.get("cu_seq_lens_q")
    return starts is not None and len(starts) > 2


def mask_for_none(query: Tensor, key: Tensor, causal: bool, others: dict[str, Any], always: bool) -> Tensor | None:
    """What a model's None hides, True where a query sees a key; None where SDPA knows it, unless `always` asks for it.

    Causal is aligned to the bottom right, in each of the sequences if several are packed.
    """
    q_len, kv_len = query.shape[2], key.shape[2]
    packed = is_packed(others)
    if not packed and (not causal or q_len == 1 or (q_len == kv_len and not always)):
        return None
    if packed:
        return seen_in_sequences(query, key, causal, others)
    return seen_in_rows(query, key, causal)


def seen_from_the_top_left(query: Tensor, key: Tensor) -> Tensor:
    """(1, 1, Sq, Sk), True where a query sees a key, causal as SDPA has it."""
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]


def seen_in_rows(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    """(B, 1, Sq, Sk), True where a query sees a key, each row a sequence."""
    starts = [torch.arange(query.shape[0] + 1, device=query.device) * t.shape[2] for t in (query, key)]
    return seen_within(query, key, causal, *starts)


def seen_in_sequences(query: Tensor, key: Tensor, causal: bool, others: dict[str, Any]) -> Tensor:
    """(B, 1, Sq, Sk), True where a query sees a key, of those that `cu_seq_lens_q` tells of. If it tells of other
    tokens, as after a step of `generate` or with a static cache of several rows, each row is a sequence, as for SDPA.
    """
    starts, k_starts = others["cu_seq_lens_q"], others.get("cu_seq_lens_k")
    k_starts = starts if k_starts is None else k_starts
    of_these = tells_of(starts, query) & tells_of(k_starts, key)
    apart = seen_within(query, key, causal, starts, k_starts)
    return torch.where(of_these, apart, seen_in_rows(query, key, causal))


def tells_of(starts: Tensor, tokens: Tensor) -> Tensor:
    """Whether starts of sequences are of these tokens (B, H, S, D). At the end of one row there may be room."""
    ends, batch = starts[-1].to(tokens.device), tokens.shape[0]
    there = batch * tokens.shape[2]
    return ends <= there if batch == 1 else ends == there


def apart(mask: Tensor, query: Tensor, key: Tensor, others: dict[str, Any]) -> Tensor:
    """The mask, which hides other sequences of `cu_seq_lens_q` as well."""
    seen = seen_in_sequences(query, key, False, others)
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)


def seen_within(query: Tensor, key: Tensor, causal: bool, q_starts: Tensor, k_starts: Tensor) -> Tensor:
    """(B, 1, Sq, Sk), True where both are in the same sequence; causal: and the key is not after the query."""
    (batch, _, q_len, _), kv_len = query.shape, key.shape[2]
    q_sequence, q_left = places(q_starts, batch, q_len, query.device)
    k_sequence, k_left = places(k_starts, batch, kv_len, query.device)
    sees = q_sequence[:, :, None] == k_sequence[:, None, :]
    if causal:
        sees = sees & (k_left[:, None, :] >= q_left[:, :, None])
    return sees[:, None]


def places(starts: Tensor, batch: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each token, (batch, length): which sequence it is in, and how many tokens from its end. starts: of sequences,
    and the end of the last, counted through the whole batch."""
    tokens, ends = torch.arange(batch * length, device=device), starts[1:].to(device)
    sequence = torch.bucketize(tokens, ends, right=True)
    left = ends[sequence.clamp(max=len(ends) - 1)] - tokens
    return sequence.view(batch, length), left.view(batch, length)


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """As eager attention takes it."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)
