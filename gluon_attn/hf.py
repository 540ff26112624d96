"""Hugging Face transformers' models by these kernels, under `attn_implementation="gluon_attn"`.

What they do not compute goes to transformers' own attention, which computes that model today, with one warning for
each reason: to its SDPA, or to the model's eager attention for what SDPA lacks.

Masks are those of SDPA, so that the fallback has what it needs: None where all keys are seen, or by `is_causal` those
up to the query, and a tensor otherwise. One thing is unlike SDPA: with fewer queries than keys, None is aligned to the
bottom right. SDPA has None there for an empty static cache, aligned to the top left; and a model that drops queries
after the mask is made (Gemma 4) makes up for that by SDPA's name. So an empty static cache has a tensor here.

Continuous batching (`generate_batch`) has no masks: it packs the new tokens of all requests, and gathers the keys of
each from its pages. These calls are known by what they say of the pages, and nothing else computes them.
"""

import collections
import contextlib
import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from .api import attention
from .checks import Window
from .device import Device
from .features import NOT_THERE
from .support import supports
from .varlen import attention_varlen

NAME = "gluon_attn"
# For continuous batching transformers asks for a name with "flash" in it, and makes no masks then. Such a name may only
# be set by hand: `set_attn_implementation` looks for a package or a kernel of the hub that is called so. No 2 or 3 may
# come after "flash", which would promise `flash_attn_with_kvcache`.
NAME_IN_BATCHES = "gluon_attn_flash"
FIRST_WITH_BATCHES = 5, 24  # before it, attention itself wrote to the pages

BY_EAGER = ("softcap", "s_aux", "sinks")  # transformers' SDPA computes as if they were not there, or refuses
OURS = {"softcap": "softcap", "s_aux": "sinks", "sinks": "sinks"}  # and what `attention` calls them
# The model gives these instead of a mask, because it has another name for attention than SDPA's.
INSTEAD_OF_A_MASK = ("indices", "block_indices")
# Arguments that say nothing of the numbers, or are looked at by name.
NO_EFFECT = frozenset(
    {
        "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "logits_to_keep", "max_length_k",
        "max_length_q", "num_items_in_batch", "output_hidden_states", "output_router_logits", "position_ids",
        "return_dict", "seq_idx", "sliding_window", "use_cache",
    }
)  # fmt: skip
# What continuous batching says of its pages: read and written before attention is called.
OF_PAGES = frozenset({"logits_indices", "logits_processor_args", "read_index", "write_index"})

# Attribute of a mask that is causal, aligned to the bottom right, maybe with a sliding window, and nothing else: the
# mask's version, as code that writes to the mask leaves the attribute there; and the window, for `attention`.
KNOWN = "_gluon_attn_known"

# Likewise of a mask that is causal within each of several sequences, which padding tokens are as well: the version, and
# those sequences.
KNOWN_SEQUENCES = "_gluon_attn_known_sequences"

Attend = Callable[..., tuple[Tensor, Tensor | None]]

_warned: set[tuple[str, str]] = set()
# How many `continuous_batching` are entered, by id of a model's config, which they hold. They are left in any order.
_lock = threading.Lock()
_entered: collections.Counter[int] = collections.Counter()


def register(device: Device | None = None) -> None:
    """Register attention and its masks with transformers: both, as without its mask a batch's padding is ignored.

    device: as for `attention`.
    """
    sdpa, sdpa_mask = AttentionInterface()["sdpa"], AttentionMaskInterface()["sdpa"]
    for name in (NAME, NAME_IN_BATCHES):
        AttentionInterface.register(name, functools.partial(attend, sdpa, device=device))
        AttentionMaskInterface.register(name, functools.partial(mask_of, sdpa_mask))


@contextlib.contextmanager
def continuous_batching(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Within it, `model.generate_batch` and transformers' other ways to continuous batching take these kernels.

    model: by `attn_implementation="gluon_attn"`. What else it computes within has the numbers of outside, up to
    rounding. A manager has to be made within. Parts of the model that have another implementation keep it.

    Raises:
        NotImplementedError: transformers, or the model, has no continuous batching that these kernels can serve.
        ValueError: the model's attention is another one.
    """
    refuse_other_batches(model)
    configs = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
    with _lock:
        ours = {at: c for at, c in configs.items() if c._attn_implementation in (NAME, NAME_IN_BATCHES)}
        for at, config in ours.items():
            _entered[at] += 1
            set_name(config, NAME_IN_BATCHES)
    try:
        yield model
    finally:
        with _lock:
            for at, config in ours.items():
                _entered[at] -= 1
                if not _entered[at]:
                    del _entered[at]
                    if config._attn_implementation == NAME_IN_BATCHES:
                        set_name(config, NAME)


def set_name(config: PreTrainedConfig, name: str) -> None:
    """By the setter that `from_config` uses; "" is the config itself: otherwise its parts' configs are set as well."""
    config._attn_implementation = {"": name}


def refuse_other_batches(model: PreTrainedModel) -> None:
    """What `continuous_batching` raises."""
    name, instead = type(model).__name__, 'call model.set_attn_implementation("sdpa") and generate_batch without it'
    if not layers_gather_keys():
        wanted = ".".join(map(str, FIRST_WITH_BATCHES))
        raise NotImplementedError(
            f"continuous_batching: expected transformers {wanted} or newer, whose layers gather the "
            f"requests' keys by PagedAttentionCache.update(kwargs=...), got {transformers_version}; "
            f"install such a one, or {instead}"
        )
    if model.config._attn_implementation not in (NAME, NAME_IN_BATCHES):
        raise ValueError(
            f'model: expected attn_implementation="{NAME}", got {model.config._attn_implementation!r}; '
            f'call gluon_attn.hf.register() and model.set_attn_implementation("{NAME}")'
        )
    if not getattr(model, "_supports_flash_attn", False):
        raise NotImplementedError(
            f"model: expected one whose attention needs no mask tensor, got {name}, which transformers does not give "
            f"to flash-attention; {instead}"
        )
    if getattr(model.config.get_text_config(), "prefix_lm", False):
        raise NotImplementedError(
            f"prefix_lm: expected a model that is causal without a mask, got {name}, whose prompts see later "
            f"tokens; {instead}, or set config.prefix_lm=False"
        )
    why = supports_heads_of(model)
    if why is not None:
        raise NotImplementedError(f"{why}; or {instead}")


def supports_heads_of(model: PreTrainedModel) -> str | None:
    """Why not, by the numbers in the model's config, of one new token: dtype, head dim, the card.

    None: they are taken, or the config has not one number for all layers. Each layer asks again in its calls.
    """
    config = model.config.get_text_config()
    try:
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
    # RuntimeError: transformers' AmbiguousGlobalPerLayerAttributeError, which older ones lack. TypeError: a list.
    except (AttributeError, RuntimeError, TypeError):
        return None
    if not all(isinstance(number, int) for number in (heads, kv_heads, head_dim)):
        return None
    q, k, v = (torch.empty(1, n, head_dim, dtype=model.dtype, device=model.device) for n in (heads, kv_heads, kv_heads))
    starts = torch.tensor([0, 1], dtype=torch.int32, device=model.device)
    device: Device | None = AttentionInterface()[NAME].keywords["device"]
    return supports(
        q, k, v, causal=True, device=device, needs_grad=False,
        cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=1, max_seqlen_k=1,
    )  # fmt: skip


def layers_gather_keys() -> bool:
    """Whether with continuous batching a layer gives attention the keys of all requests, and their lengths."""
    if tuple(int(number) for number in transformers_version.split(".")[:2]) < FIRST_WITH_BATCHES:
        return False
    try:
        from transformers.generation.continuous_batching import PagedAttentionCache
    except ImportError:
        return False
    return "kwargs" in inspect.signature(PagedAttentionCache.update).parameters


class Sequences(NamedTuple):
    """Of a batch whose rows follow each other, as `attention_varlen` takes them."""

    starts_q: Tensor
    starts_k: Tensor
    longest_q: int
    longest_k: int


def mask_of(sdpa_mask: Callable[..., Tensor | None], **options: Any) -> Tensor | None:
    """SDPA's mask; also where SDPA goes without one because it aligns causal masks to the top left."""
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
    if not is_compiling() and not mask.is_inference() and continues(q_len, kv_len, options):
        window = window_of(options.get("mask_function"), options.get("local_size"))
        if window is not None:
            setattr(mask, KNOWN, (mask._version, window))
    else:
        note_sequences(mask, q_len, kv_len, options)
    return mask


def note_sequences(mask: Tensor | None, q_len: int, kv_len: int, options: dict[str, Any]) -> None:
    """Let the mask say which sequences it is made of, if it is known."""
    if mask is None or is_compiling() or mask.is_inference() or q_len != kv_len:
        return
    sequences = sequences_of(mask, options.get("attention_mask"))
    if sequences is not None:
        setattr(mask, KNOWN_SEQUENCES, (mask._version, sequences))


def sequences_of(mask: Tensor, padding: Tensor | None) -> Sequences | None:
    """Those within which a mask (B, 1, S, S), True where a query sees a key, is causal; None if it is another mask.

    padding: (B, S), 0 or False for tokens whose rows nobody reads: several in a row are a sequence too. It waits for
    the card, as transformers does when it makes the mask; once, for all layers.
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
    if bool(((seen != ((at >= first) & (at <= at[:, None]))) & is_read[..., None]).any()):
        return None
    starts = torch.cat([begins.flatten().nonzero()[:, 0], torch.tensor([batch * length], device=mask.device)]).int()
    return Sequences(starts, starts, length, length)


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
    """(sequences that the batch is made of, whether each is causal), as a mask that `mask_of` knows says, or, without
    one, `cu_seq_lens_q`. None: it is not known to be made of several."""
    version, sequences = getattr(mask, KNOWN_SEQUENCES, (None, None))
    if mask is not None:
        same = version is not None and version == mask._version and fits(mask, query, key)
        return (sequences if same else None), True
    if not is_packed(others) or query.shape[0] != 1 or others.get("max_length_q") is None:
        return None, causal
    k_starts, k_longest = others.get("cu_seq_lens_k"), others.get("max_length_k")
    starts, longest = others["cu_seq_lens_q"], others["max_length_q"]
    return Sequences(
        starts, starts if k_starts is None else k_starts, longest, longest if k_longest is None else k_longest
    ), causal


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, options: dict[str, Any]
) -> tuple[Tensor | None, str | None]:
    """(O (B, S, H, D), None), or (None, why it is not ours)."""
    lengths: dict[str, Any] = dict(
        zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), sequences, strict=True)
    )
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    why = supports(q, k, v, **lengths, **options)
    if why is not None:
        return None, why
    out: Any = attention_varlen(q, k, v, **lengths, **options)
    return out.view(query.shape[0], query.shape[2], *out.shape[1:]).contiguous(), None


def attend(
    sdpa: Attend,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    device: Device | None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """(B, S, H, D), and no weights but from eager attention; query (B, H, S, D), key and value (B, Hkv, S, D)."""
    refuse_what_is_nowhere(others)
    if others.get("write_index") is not None:
        refuse_of_pages(dropout, attention_mask, others)
        return attend_to_pages(device, module, query, key, value, scaling, is_causal, others), None
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    asked = [name for name, argument in others.items() if name not in NO_EFFECT and asks(argument)]
    window = known_window(attention_mask) if fits(attention_mask, query, key) else None

    sequences, each_causal = known_sequences(attention_mask, query, key, causal, others)
    why = reason(
        [name for name in asked if name not in OURS], dropout, attention_mask, window, causal, key, others,
        sequences is not None,
    )  # fmt: skip
    if why is None and query.shape[2] > 1:
        options: dict[str, Any] = {
            "causal": causal or window is not None, "window": window or (None, None), "scale": scaling,
            "device": device, "deterministic": others.get("deterministic") or None,
            **{OURS[name]: others[name] for name in asked if name in OURS},
        }  # fmt: skip
        if sequences is not None:
            packed, why = attend_packed(query, key, value, sequences, options | {"causal": each_causal})
            if packed is not None:
                return packed, None
    if why is None and query.shape[2] > 1:
        why = supports(query, key, value, **options)
        if why is None:
            out: Any = attention(query, key, value, **options)
            return out.transpose(1, 2).contiguous(), None

    by_eager = any(name in asked for name in BY_EAGER)
    if why is not None:  # None: a single query, which is right here, but slow for want of a kernel that splits the keys
        warn(why, "the model's eager attention" if by_eager else "transformers' SDPA")
    if attention_mask is None:
        attention_mask = mask_for_none(query, key, causal, others, always=by_eager)
    options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **others}
    if by_eager:
        eager = eager_of(module, asked)
        return eager(module, query, key, value, additive(attention_mask, query.dtype), **options)
    return sdpa(module, query, key, value, attention_mask, **options)


def attend_to_pages(
    device: Device | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    is_causal: bool | None,
    others: dict[str, Any],
) -> Tensor:
    """(1, S, H, D) of continuous batching: each request's new tokens, and the keys that were gathered for it.

    Rows after the last request's are there for a CUDA graph: nobody reads them, and nothing is written to them.
    """
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    size = others.get("sliding_window")
    if size is not None and not causal:
        refuse_in_batches("sliding_window: expected a causal layer, got one that is not, whose window has two sides")
    left = None if size is None else size - 1  # the query's own position counts there
    options: dict[str, Any] = {
        "causal": causal, "window": (left, None), "scale": scaling, "device": device,
        "deterministic": others.get("deterministic") or None,
        **{OURS[name]: others[name] for name in OURS if asks(others.get(name))},
    }  # fmt: skip
    lengths = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    out, why = attend_packed(query, key, value, Sequences(*(others[name] for name in lengths)), options)
    if out is None:
        refuse_in_batches(str(why))
    return out


def refuse_of_pages(dropout: float, mask: Tensor | None, others: dict[str, Any]) -> None:
    """NotImplementedError for what continuous batching asks for besides what `attend_to_pages` knows."""
    if mask is not None:
        raise NotImplementedError(
            "attention_mask: expected none with continuous batching, got a tensor; make the manager, or call "
            "generate_batch, within gluon_attn.hf.continuous_batching(model)"
        )
    if dropout:
        refuse_in_batches("dropout: dropout is not supported so far")
    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
        if others.get(name) is None or isinstance(others[name], dict):
            refuse_in_batches(f"{name}: expected that of the layer, got {type(others.get(name)).__name__}")
    for name, argument in others.items():
        if name not in NO_EFFECT | OF_PAGES and name not in OURS and asks(argument):
            refuse_in_batches(f"{name}: {NOT_THERE.get(name, 'what it asks for')} is not supported so far")


def refuse_in_batches(why: str) -> NoReturn:
    raise NotImplementedError(
        f'{why}, with continuous batching; for it choose another attention, as by model.set_attn_implementation("sdpa")'
    )


def asks(value: Any) -> bool:
    return value is not None and (isinstance(value, Tensor) or bool(value))


def refuse_what_is_nowhere(others: dict[str, Any]) -> None:
    """NotImplementedError for what neither SDPA nor eager attention would do right, called from here."""
    if others.get("cache") is not None:
        raise NotImplementedError(
            "cache: continuous batching of a transformers before 5.24 is not supported; install a newer one, or choose "
            'another attention, as by model.set_attn_implementation("sdpa")'
        )
    for name in INSTEAD_OF_A_MASK:
        if others.get(name) is not None:
            raise NotImplementedError(
                f"{name}: attention to chosen keys is not supported so far, and models give no mask for it but under "
                'the name of "sdpa"; call model.set_attn_implementation("sdpa")'
            )


def reason(
    asked: list[str],
    dropout: float,
    mask: Tensor | None,
    window: Window | None,
    causal: bool,
    key: Tensor,
    others: dict[str, Any],
    of_sequences: bool,
) -> str | None:
    """Why it is not ours to compute, besides what `supports` says. window: that the mask is known to be. of_sequences:
    whether the batch is known to be made of several."""
    for name in asked:
        return f"{name}: {NOT_THERE.get(name, 'what it asks for')} is not supported so far"
    if dropout:
        return "dropout: dropout is not supported so far"
    if mask is not None and window is None and not of_sequences:
        return "attention_mask: a mask other than causal, within sequences too, or a window is not supported so far"
    if is_packed(others) and not of_sequences:
        return "cu_seq_lens_q: packed sequences in a batch of several rows are not supported so far"
    size = others.get("sliding_window")
    if mask is None and causal and size is not None and key.shape[2] > size:
        return "sliding_window: expected a mask that says so too, got none"
    return None


def is_packed(others: dict[str, Any]) -> bool:
    """Whether there are several sequences, for which their number suffices: where they end is known to the card."""
    starts = others.get("cu_seq_lens_q")
    return starts is not None and len(starts) > 2


def mask_for_none(query: Tensor, key: Tensor, causal: bool, others: dict[str, Any], always: bool) -> Tensor | None:
    """What a model's None hides, True where a query sees a key; None where SDPA knows it, unless `always` asks for it.

    Causal is aligned to the bottom right, in each of the sequences if several are packed.
    """
    (batch, _, q_len, _), kv_len = query.shape, key.shape[2]
    packed = is_packed(others)
    if not packed and (not causal or q_len == 1 or (q_len == kv_len and not always)):
        return None
    if packed:
        q_starts = others["cu_seq_lens_q"]
        k_starts = q_starts if others.get("cu_seq_lens_k") is None else others["cu_seq_lens_k"]
    else:
        q_starts, k_starts = (torch.arange(batch + 1, device=query.device) * n for n in (q_len, kv_len))
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


def eager_of(module: nn.Module, asked: list[str]) -> Attend:
    """The model's own attention in plain PyTorch: beside the module's class, or beside one that it is derived from."""
    for cls in type(module).__mro__:
        eager = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if eager is not None:
            return eager
    raise NotImplementedError(
        f"{', '.join(name for name in asked if name in BY_EAGER)}: transformers' SDPA leaves it out, and there is no "
        f"eager_attention_forward beside {type(module).__name__} to compute it; "
        'call model.set_attn_implementation("eager")'
    )


@torch.compiler.assume_constant_result  # so under torch.compile it is called while the graph is made
def warn(why: str, instead: str) -> None:
    key = (why.partition(", got")[0], instead)  # without the numbers, which may be others in each call
    if key not in _warned:
        _warned.add(key)
        warnings.warn(f"gluon_attn leaves attention to {instead}: {why}", stacklevel=3)
