"""Hugging Face transformers' models by these kernels, under `attn_implementation="gluon_attn"`.

What they do not compute goes to transformers' own attention, which computes that model today, with one warning for
each reason: to its SDPA, or to the model's eager attention for what SDPA lacks.

Which masks there are, and what is known of them, is in `hf_masks`.

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
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version

from .api import attention
from .checks import Window, check_device, type_name
from .cudnn import cudnn_is_faster
from .device import Device
from .features import NOT_THERE
from .hf_masks import (
    Sequences,
    additive,
    apart,
    can_be_asked,
    fits,
    is_in_a_graph,
    is_packed,
    known_sequences,
    known_window,
    mask_for_none,
    mask_of,
    seen_from_the_top_left,
)
from .hooks import refusal, to_transformers
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

Attend = Callable[..., tuple[Tensor, Tensor | None]]

_warned: set[tuple[str, str]] = set()
# How many `continuous_batching` are entered, by id of a model's config, which they hold. They are left in any order.
_lock = threading.Lock()
_entered: collections.Counter[int] = collections.Counter()


def register(device: Device | None = None) -> None:
    """Register attention and its masks with transformers: both, as without its mask a batch's padding is ignored.

    device: as for `attention`, whose TypeError this raises. None: calls on Hopper are ours. On Blackwell, where these
    kernels were never run, give `Device.of("cuda")` to try them.
    """
    check_device(device)
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
        TypeError: it is no model of transformers.
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
    if not isinstance(getattr(model, "config", None), PreTrainedConfig):
        raise TypeError(f"model: expected a model of transformers, with its config, got {type_name(model)}; give that")
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
    return refusal(
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


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, options: dict[str, Any]
) -> tuple[Tensor | None, str | None]:
    """(O (B, S, H, D), None), or (None, why it is not ours)."""
    lengths: dict[str, Any] = dict(
        zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), sequences[:4], strict=True)
    )
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    why = refusal(q, k, v, **lengths, **options)
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
    top_left = causal and attention_mask is None and is_top_left(module, query, key, is_causal, others)

    sequences, each_causal = known_sequences(attention_mask, query, key, causal, others)
    why = reason(
        [name for name in asked if name not in OURS], dropout, attention_mask, window, causal, key, others,
        sequences is not None,
    )  # fmt: skip
    if top_left and why is None:
        why = (
            f"is_causal: without a mask SDPA aligns {query.shape[2]} queries and {key.shape[2]} keys to the top left, "
            "which these kernels do not; give a mask"
        )
    if why is None and query.shape[2] > 1:
        options: dict[str, Any] = {
            "causal": causal or window is not None, "window": window or (None, None), "scale": scaling,
            "device": device, "deterministic": others.get("deterministic") or None,
            **{OURS[name]: others[name] for name in asked if name in OURS},
        }  # fmt: skip
        if sequences is not None:
            why = "its kernel is not available"  # if nothing is returned
            with to_transformers():
                options_of_each = options | {"causal": each_causal, "window": window or sequences.window}
                packed, why = attend_packed(query, key, value, sequences, options_of_each)
                if packed is not None:
                    return packed, None
    if why is None and query.shape[2] > 1:
        why = refusal(query, key, value, **options)
        plain = attention_mask is None and not asked and options["deterministic"] is None
        if why is None and not (plain and is_left_to_cudnn(query, key, value, causal, device)):
            with to_transformers():
                out: Any = attention(query, key, value, **options)
                return out.transpose(1, 2).contiguous(), None

    by_eager = any(name in asked for name in BY_EAGER)
    # A single query is right here, but slow for want of a kernel that splits the keys: nothing is to be mended.
    if why is not None and query.shape[2] > 1:
        warn(why, "the model's eager attention" if by_eager else "transformers' SDPA")
    if attention_mask is None:
        if top_left:  # which SDPA knows without a mask
            attention_mask = seen_from_the_top_left(query, key) if by_eager else None
        else:
            attention_mask = mask_for_none(query, key, causal, others, always=by_eager)
    elif is_packed(others) and query.shape[2] > 1 and fits(attention_mask, query, key):
        attention_mask = apart(attention_mask, query, key, others)
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
        return f"attention_mask: {why_not_known(mask)}"
    if is_packed(others) and not of_sequences:
        return "cu_seq_lens_q: packed sequences in a batch of several rows, or without max_length_q, are not supported"
    size = others.get("sliding_window")
    if mask is None and causal and size is not None and key.shape[2] > size:
        return "sliding_window: expected a mask that says so too, got none"
    return None


def is_top_left(module: nn.Module, query: Tensor, key: Tensor, is_causal: bool | None, others: dict[str, Any]) -> bool:
    """Whether a causal call without a mask is one that transformers' SDPA aligns to the top left: with more queries
    than keys; and of any unlike lengths, if the layer does not say that it is causal, as one that attends to images."""
    q_len, kv_len = query.shape[2], key.shape[2]
    if q_len in (1, kv_len) or is_packed(others):
        return False
    return q_len > kv_len or (is_causal is None and not hasattr(module, "is_causal"))


def is_left_to_cudnn(query: Tensor, key: Tensor, value: Tensor, causal: bool, device: Device | None) -> bool:
    """Whether a call will want gradients, and torch's SDPA has both passes faster, by cuDNN: nothing is to be told of
    it."""
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    wanted = wanted and torch.backends.cuda.cudnn_sdp_enabled()  # or SDPA would take another
    return wanted and cudnn_is_faster(query, key, value, causal=causal, device=device, with_forward=True)


def why_not_known(mask: Tensor) -> str:
    """What keeps these kernels, which read no masks, from knowing what it says."""
    if can_be_asked(mask):
        return "a mask other than causal, within sequences too, or a window is not supported so far"
    if is_in_a_graph():
        return "what a mask says is not known in a graph, which may not look at it"
    if mask.is_inference():
        return "what masks say that are made under torch.inference_mode() is not known; use torch.no_grad()"
    return "what a mask says is not known of a tensor that stands for others, or for none"


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
