"""The validation of arguments, one by one. What a check raises names the argument, what it should be, what it is, and
what to do: a TypeError, a ValueError or a NotImplementedError."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .device import Device
from .kernels.common.mask import LARGEST_LIMIT
from .tensors import DTYPES, FP8_DTYPES, LAYOUTS, MAX_HEAD_DIM, PACKED, SCALES, TMA_ALIGNMENT_BYTES, output_dtype

Window = tuple[int | None, int | None]  # keys before and after a query's own position; None: no limit
# The kernel multiplies by scale · log2(e) in fp32, where that must be a normal number.
SMALLEST_SCALE, LARGEST_SCALE = 1e-37, 1e37
SMALLEST_SCALE_WITH_BIAS = 1e-30  # the kernel adds the bias divided by it
STARTS = "give where each sequence begins, from 0 on, and where the last ends, as torch.int32"
LEAST_CAP, LARGEST_CAP = 1e-6, 1e6  # scores beyond are no use
INTEGER, NUMBER = (int, torch.SymInt), (int, float, torch.SymInt, torch.SymFloat)  # as they are, and in a graph


def type_name(x: object) -> str:
    """Of a value's type, with the module of all but Python's own: numpy's bool is not Python's."""
    kind = type(x)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def check_cu_seqlens(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    seqused_k: Tensor | None = None,
) -> None:  # fmt: skip
    """That what these tensors hold poses a problem for `attention_varlen`, which does not look at it.

    It waits for the card: for debugging. Arguments are those of `attention_varlen`. Raises ValueError by name for
    starts that do not begin at 0, do not rise or go beyond the tensor, for a sequence longer than the bound, and for a
    negative seqused_k, or one of more keys than there are.
    """
    check_lengths(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)
    for kind, starts, rows, bound in (
        ("q", cu_seqlens_q, q.shape[0], max_seqlen_q), ("k", cu_seqlens_k, k.shape[0], max_seqlen_k),
    ):  # fmt: skip
        name, numbers = f"cu_seqlens_{kind}", starts.tolist()
        if numbers[-1] > rows:
            raise ValueError(
                f"{name}: expected at most the {rows} rows of {kind}, got {numbers[-1]} last; end where the "
                "last sequence does"
            )
        if numbers[0] != 0:
            raise ValueError(f"{name}: expected 0 first, got {numbers[0]}; the first sequence begins at row 0")
        for i, (first, end) in enumerate(pairwise(numbers)):
            if end < first:
                raise ValueError(
                    f"{name}: expected numbers that do not fall, got {first} before {end} at {i}; give where each "
                    "sequence begins, in the order of the rows"
                )
            if end - first > bound:
                raise ValueError(
                    f"max_seqlen_{kind}: expected at least {end - first}, as sequence {i} has so many rows, got "
                    f"{bound}; give the longest one's"
                )
    if seqused_k is not None:
        for i, (used, (first, end)) in enumerate(zip(seqused_k.tolist(), pairwise(cu_seqlens_k.tolist()), strict=True)):
            if not 0 <= used <= end - first:
                raise ValueError(
                    f"seqused_k: expected 0 to {end - first}, the keys of sequence {i}, got {used}; leave it out if "
                    "all count"
                )


def hashable(window: Any) -> Any:
    """As it is kept, also if it is given as a list; not checked."""
    return tuple(window) if isinstance(window, list) else window


def checked_window(window: object, chunk: Any) -> Window:
    """(left, right). Raises TypeError or ValueError by name."""
    left, right = two_limits("window", window, no_limit="None")
    for limit in (left, right):
        if limit is not None and not 0 <= limit <= LARGEST_LIMIT:
            raise ValueError(f"window: expected numbers from 0 to {LARGEST_LIMIT}, got {limit}; give None for no limit")
    check_chunk_type(chunk)
    if chunk is not None:
        if chunk < 1:
            raise ValueError(f"chunk: expected at least 1 key, got {chunk}; leave it out for no limit")
        if chunk > LARGEST_LIMIT:
            raise ValueError(f"chunk: expected at most {LARGEST_LIMIT} keys, got {chunk}; leave it out for no limit")
    return left, right


def check_chunk_type(chunk: object) -> None:
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, INTEGER)):
        raise TypeError(f"chunk: expected an int or None, got {type_name(chunk)}; give a number of keys")


def two_limits(name: str, window: object, *, no_limit: str) -> Window:
    """(left, right), ints or None. no_limit: how the argument says that there is none."""
    todo = f"give (left, right), keys before and after a query's own position, {no_limit} for no limit"
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"{name}: expected two numbers, got {window!r}; {todo}")
    for limit in window:
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, INTEGER)):
            raise TypeError(f"{name}: expected ints or None, got {type_name(limit)}; {todo}")
    left, right = window
    return left, right


def check_is_tensor(name: str, t: object) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(
            f"{name}: expected a torch.Tensor, got {type_name(t)}; "
            + ("leave it out" if name == "out" else "make it with torch.as_tensor")
        )


def check_layout(layout: object, *, packed: bool) -> None:
    if layout != PACKED if packed else not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(
            f"layout: expected one of {LAYOUTS}, got {layout!r}; b is the batch, h the heads, s the sequence and d "
            "the head dim"
        )


def check_num_ctas(num_ctas: object) -> None:
    if num_ctas is not None and (not isinstance(num_ctas, int) or isinstance(num_ctas, bool)):
        raise TypeError(f"num_ctas: expected an int or None, got {type_name(num_ctas)}; give 1 or 2, or leave it out")


def check_softcap(limit: Any) -> None:
    check_softcap_type(limit)
    if not LEAST_CAP <= limit <= LARGEST_CAP:  # nor NaN
        raise ValueError(
            f"softcap: expected a positive number from {LEAST_CAP} to {LARGEST_CAP}, got {limit}; leave it out for none"
        )


def check_softcap_type(limit: object) -> None:
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, NUMBER)):
        todo = "call .item() on it" if hasattr(limit, "item") else "give a number, or leave it out"
        raise TypeError(f"softcap: expected a number or None, got {type_name(limit)}; {todo}")


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {type_name(value)}; give True or False")


def check_dense(name: str, t: Tensor) -> None:
    if t.is_nested:
        raise TypeError(
            f"{name}: expected a dense tensor, got a nested one; give its .values() and .offsets() to attention_varlen"
        )
    if t.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got one of layout {t.layout}; call .to_dense() on it")


def check_kind(name: str, t: Tensor, q: Tensor, layout: str) -> None:
    """Memory format, rank, dtype and device."""
    check_dense(name, t)
    if layout == PACKED:
        if t.dim() != 3:
            raise ValueError(
                f"{name}: expected 3 dimensions, packed tokens, heads and head_dim, got {t.dim()} (shape "
                f"{tuple(t.shape)}); flatten batch and sequence into one"
            )
    elif t.dim() != 4:
        todo = "unsqueeze a batch of 1" if t.dim() < 4 else "flatten the first ones into one batch"
        raise ValueError(f"{name}: expected 4 dimensions, got {t.dim()} (shape {tuple(t.shape)}); {todo}")
    if t.dtype not in DTYPES:
        todo = "complex numbers are not supported" if t.is_complex() else "convert with .to(torch.bfloat16)"
        raise TypeError(
            f"{name}: expected dtype float16, bfloat16, float8_e4m3fn or float8_e5m2, got {t.dtype}; {todo}"
        )
    want, of = (output_dtype(q.dtype), "for q's") if name == "out" else (q.dtype, "as q")
    if t.dtype != want:
        todo = "allocate it so, or leave it out" if name == "out" else f"convert with .to({want})"
        raise TypeError(f"{name}: expected dtype {want} ({of}), got {t.dtype}; {todo}")
    if t.device != q.device:
        raise ValueError(f"{name}: expected device {q.device} (as q), got {t.device}; put all of them on one")


def check_device(device: object, q: Tensor | None = None) -> None:
    """q: what is computed; None: that is not known yet."""
    if device is not None and not isinstance(device, Device):
        on_cpu = "give Device.hopper() or Device.blackwell() to execute it on the CPU"
        todo = f"leave it out, or {on_cpu}" if q is None else on_cpu if q.device.type == "cpu" else "leave it out"
        raise TypeError(f"device: expected a gluon_attn Device or None, got {type_name(device)}; {todo}")


def check_strides(name: str, t: Tensor, *, is_written: bool = False) -> None:
    """That TMA can address the tensor by its strides."""
    todo = "leave it out" if is_written else "call .contiguous() on it, nothing is copied silently"
    if t.shape[-1] > 1 and t.stride(-1) != 1:
        raise ValueError(f"{name}: expected stride 1 in the last dimension, got {t.stride(-1)}; {todo}")
    for dim in range(t.dim() - 1):
        stride_bytes = t.stride(dim) * t.element_size()
        if t.shape[dim] > 1 and stride_bytes % TMA_ALIGNMENT_BYTES:
            raise ValueError(
                f"{name}: expected strides that are multiples of {TMA_ALIGNMENT_BYTES} bytes, "
                f"got {stride_bytes} bytes in dimension {dim}; {todo}"
            )
    if is_written:
        used = sorted((t.stride(dim), t.shape[dim]) for dim in range(t.dim()) if t.shape[dim] > 1)
        for (stride, size), (next_stride, _) in pairwise([(0, 1), *used]):
            if next_stride < max(1, stride * size):
                raise ValueError(
                    f"out: expected strides under which no two elements share memory, got {t.stride()} for shape "
                    f"{tuple(t.shape)}; allocate it in full"
                )


def check_scale_tensor(name: str, scale: Tensor | None, q: Tensor, shape: tuple[int, int]) -> None:
    """That an fp8 scale is one number for each batch and KV head, and that there are fp8 numbers to scale."""
    if scale is None:
        return
    if not isinstance(scale, Tensor):
        raise TypeError(
            f"{name}: expected a torch.Tensor or None, got {type_name(scale)}; make it with torch.full({shape}, ...)"
        )
    if scale.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got one of layout {scale.layout}; call .to_dense() on it")
    if q.dtype not in FP8_DTYPES:
        raise TypeError(f"{name}: expected None with q of {q.dtype}, as only fp8 is scaled, got a Tensor; leave it out")
    if scale.dtype != torch.float32:
        raise TypeError(f"{name}: expected dtype torch.float32, got {scale.dtype}; convert with .float()")
    if scale.device != q.device:
        raise ValueError(f"{name}: expected device {q.device} (as q), got {scale.device}; move it with .to(q.device)")
    if scale.shape != shape:
        raise ValueError(
            f"{name}: expected shape {shape} (batch, KV heads), got {tuple(scale.shape)}; one number for all is "
            "expanded by .expand(...).contiguous()"
        )
    if not scale.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous tensor, got strides {scale.stride()}; call .contiguous() on it, nothing is "
            "copied silently"
        )


def check_lengths(
    q: Tensor,
    cu_seqlens_q: object,
    cu_seqlens_k: object,
    max_seqlen_q: object,
    max_seqlen_k: object,
    seqused_k: object,
) -> int:
    """How many sequences these say are packed. What the tensors hold is on the card, and is not looked at."""
    if not isinstance(cu_seqlens_q, Tensor) or cu_seqlens_q.dim() != 1 or len(cu_seqlens_q) == 0:
        got = tuple(cu_seqlens_q.shape) if isinstance(cu_seqlens_q, Tensor) else type_name(cu_seqlens_q)
        raise (ValueError if isinstance(cu_seqlens_q, Tensor) else TypeError)(
            f"cu_seqlens_q: expected a tensor of shape (B + 1,), where each sequence begins and the last ends, got "
            f"{got}; {STARTS}"
        )
    count = len(cu_seqlens_q) - 1
    for name, t, size in (
        ("cu_seqlens_q", cu_seqlens_q, count + 1),
        ("cu_seqlens_k", cu_seqlens_k, count + 1),
        ("seqused_k", seqused_k, count),
    ):
        if t is None and name == "seqused_k":
            continue
        todo = "give how many keys of each sequence count, or leave it out" if name == "seqused_k" else STARTS
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor of shape ({size},), got {type_name(t)}; {todo}")
        if t.dtype != torch.int32:
            raise TypeError(f"{name}: expected dtype torch.int32, got {t.dtype}; convert with .int()")
        if tuple(t.shape) != (size,):
            of = "a number for each sequence" if name == "seqused_k" else "as long as cu_seqlens_q"
            raise ValueError(f"{name}: expected shape ({size},), {of}, got {tuple(t.shape)}; {todo}")
        check_read(name, t, q)
    check_seqlens(max_seqlen_q, max_seqlen_k)
    return count


def check_seqlens(max_seqlen_q: Any, max_seqlen_k: Any) -> tuple[int, int]:
    """Of the longest sequences, both."""
    check_types_of_seqlens(max_seqlen_q, max_seqlen_k)
    require_no_negative(max_seqlen_q, max_seqlen_k)
    return max_seqlen_q, max_seqlen_k


def require_no_negative(max_seqlen_q: int, max_seqlen_k: int) -> None:
    if max_seqlen_q < 0 or max_seqlen_k < 0:
        name, bound = ("max_seqlen_q", max_seqlen_q) if max_seqlen_q < 0 else ("max_seqlen_k", max_seqlen_k)
        raise ValueError(f"{name}: expected at least 0, got {bound}; give the longest sequence's length")


def check_types_of_seqlens(max_seqlen_q: object, max_seqlen_k: object) -> None:
    for name, bound in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if isinstance(bound, bool) or not isinstance(bound, INTEGER):
            todo = "call .item() on it" if hasattr(bound, "item") else "give the longest sequence's length"
            raise TypeError(f"{name}: expected an int, got {type_name(bound)}; {todo}")


def check_of_heads(
    name: str, t: object, q: Tensor, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]
) -> None:
    """That there is a number for each head."""
    expected = " or ".join(map(str, shapes))
    if not isinstance(t, Tensor):
        raise TypeError(
            f"{name}: expected a torch.Tensor of shape {expected} or None, got {type_name(t)}; make it with "
            "torch.tensor([...], device=q.device), or leave it out"
        )
    if t.dtype not in dtypes:
        names = " or ".join(map(str, dtypes))
        raise TypeError(f"{name}: expected dtype {names}, got {t.dtype}; convert with .to({dtypes[0]})")
    if tuple(t.shape) not in shapes:
        raise ValueError(
            f"{name}: expected shape {expected}, a number for each query head, got {tuple(t.shape)}; one for all is "
            f"expanded by .expand({shapes[0]}).contiguous()"
        )
    check_read(name, t, q)


def check_bias(bias: object, q: Tensor, shape: tuple[int, int, int, int], scale: float) -> None:
    """That it can be added to scores of that shape, and that TMA can address it."""
    batch, heads, q_len, kv_len = shape
    expected = f"({batch} or 1, {heads} or 1, {q_len} or 1, {kv_len})"
    if not isinstance(bias, Tensor):
        raise TypeError(
            f"bias: expected a torch.Tensor of shape {expected} or None, got {type_name(bias)}; make it with "
            "torch.as_tensor, or leave it out"
        )
    if bias.layout != torch.strided:
        raise TypeError(f"bias: expected a dense tensor, got one of layout {bias.layout}; call .to_dense() on it")
    if bias.dim() != 4:
        raise ValueError(
            f"bias: expected shape {expected}, got {tuple(bias.shape)}; view it with dimensions of size 1 where it is "
            "the same for all"
        )
    if bias.shape[3] != kv_len or any(n not in (1, size) for n, size in zip(bias.shape, shape[:3], strict=False)):
        raise ValueError(
            f"bias: expected shape {expected}, got {tuple(bias.shape)}; give it as (batch, heads, queries, keys), "
            "with 1 where it is the same for all"
        )
    if q.dtype in FP8_DTYPES:
        raise NotImplementedError(
            f"bias: not supported with q of {q.dtype}, only with float16 and bfloat16, as no kernel adds one to scores "
            "that have scales; leave it out, or convert q, k and v"
        )
    if bias.dtype not in (q.dtype, torch.float32):
        what = "a mask of bools has -inf where it hides a key" if bias.dtype == torch.bool else "convert it"
        raise TypeError(f"bias: expected dtype {q.dtype} (as q) or torch.float32, got {bias.dtype}; {what}")
    if bias.device != q.device:
        raise ValueError(f"bias: expected device {q.device} (as q), got {bias.device}; move it with .to(q.device)")
    step = TMA_ALIGNMENT_BYTES // bias.element_size()
    pad = f"pad its rows, torch.nn.functional.pad(bias, (0, {-kv_len % step}))[..., :{kv_len}]"
    if kv_len > 1 and bias.stride(3) != 1:
        raise ValueError(
            f"bias: expected stride 1 in the last dimension, got {bias.stride(3)}; "
            + (f"{pad}: nothing is copied silently" if kv_len % step else "call .contiguous() on it")
        )
    for dim in range(3):
        if bias.shape[dim] > 1 and kv_len and bias.stride(dim) % step:
            raise ValueError(
                f"bias: expected strides that are multiples of {step} elements, got {bias.stride(dim)} in dimension "
                f"{dim}; {pad if kv_len % step else 'call .contiguous() on it'}: nothing is copied silently"
            )
    if scale < SMALLEST_SCALE_WITH_BIAS:
        raise ValueError(
            f"scale: expected at least {SMALLEST_SCALE_WITH_BIAS} with a bias, got {scale}; scale q, and give 1"
        )


def check_read(name: str, t: Tensor, q: Tensor) -> None:
    """Of a tensor that a kernel reads by a pointer: where it is, and that its elements lie in order."""
    if t.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got one of layout {t.layout}; call .to_dense() on it")
    if t.device != q.device:
        raise ValueError(f"{name}: expected device {q.device} (as q), got {t.device}; move it with .to(q.device)")
    if not t.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous tensor, got strides {t.stride()}; call .contiguous() on it, nothing is "
            "copied silently"
        )


def check_head_dim(name: str, t: Tensor) -> None:
    """That a kernel has that head dim, and TMA its rows."""
    head_dim, step = t.shape[-1], TMA_ALIGNMENT_BYTES // t.element_size()
    if head_dim % step or not step <= head_dim <= MAX_HEAD_DIM:
        of_q = name == "q"
        todo = f"pad {'q and k' if of_q else 'v'} with zeros to the next multiple of {step} and " + (
            "give scale explicitly" if of_q else "drop these columns of O"
        )
        if head_dim > MAX_HEAD_DIM:
            todo = f"{MAX_HEAD_DIM} is the largest, and padding makes it no smaller: use another kernel"
        elif head_dim == 0:
            todo = "without columns there are no scores" if of_q else "without columns there is no output"
        raise ValueError(
            f"{name}: expected a head_dim that is a multiple of {step} from {step} to {MAX_HEAD_DIM}, got {head_dim}; "
            f"{todo}"
        )


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """That q (B, H, Sq, D), k (B, Hkv, Sk, D) and v (B, Hkv, Sk, Dv) fit together."""
    for name, t in (("k", k), ("v", v)):
        if t.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: expected batch {q.shape[0]} (as q), got {t.shape[0]}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k: expected head_dim {q.shape[3]} (as q), got {k.shape[3]}; v's alone may differ")
    if v.shape[1] != k.shape[1]:
        raise ValueError(f"v: expected {k.shape[1]} heads (as k), got {v.shape[1]}")
    if v.shape[2] != k.shape[2]:
        raise ValueError(f"v: expected {k.shape[2]} keys (as k), got {v.shape[2]}")
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"q: expected a number of heads that is a multiple of the {kv_heads} KV heads, got {heads}; "
            "check the layout argument"
        )


def checked_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return head_dim**-0.5
    check_scale_type(scale)
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:  # nor NaN
        raise ValueError(
            f"scale: expected a finite positive number from {SMALLEST_SCALE} to {LARGEST_SCALE}, got {scale}; "
            "leave it out for 1/sqrt(head_dim)"
        )
    return float(scale)


def check_scale_type(scale: object) -> None:
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, NUMBER)):
        todo = "call .item() on it" if hasattr(scale, "item") else "give a number"
        raise TypeError(f"scale: expected a float or None, got {type_name(scale)}; {todo}")


def check_scale_signs(scales: Sequence[Tensor | None]) -> None:
    """ValueError for a negative scale of q or k: the largest score would not be the largest after it."""
    for name, scale in zip(SCALES[:2], scales[:2], strict=True):
        if scale is not None and bool((scale < 0).any()):
            raise ValueError(
                f"{name}: expected no negative number, got {float(scale.min()):g}; negate {name[0]} and its scale"
            )
