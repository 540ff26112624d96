"""What benches of both passes share: gradients as a call, what a peer refuses, a run that writes as it goes, and how
FlashAttention-4's figures are carried over from the run that had them."""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.provenance import provenance

PASSES = ("forward", "backward")
Call = Callable[[], Any]
Found = dict[str, Any]
# Of torch: cuDNN's and FlashAttention-2's words for a call or a card, Python's for an older `varlen_attn`.
REFUSALS = ("not supported", "only supports", "no available kernel", "unexpected keyword argument")

# FlashAttention-4 was measured on an H200 in a run that had cuDNN's plain causal call of these shapes: batch, heads,
# length, head dim. Where that call is timed again, the ratio of its two times carries over what was measured beside it.
ANCHOR = (1, 16, 16384, 128)
ANCHOR_NAME = "cudnn causal D=128 B=1 H=16 16384"
ANCHOR_MS = {"forward": 1.758, "backward": 5.138}


def by_cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A causal call."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )


def inputs_of(which: str, tensors: list[Tensor]) -> list[Tensor]:
    """The same, to be differentiated if the pass asks for it."""
    return [t.requires_grad_() for t in tensors] if which == "backward" else tensors


def anchor(which: str, device: str) -> tuple[Call, list[Tensor]]:
    """(the call whose time is ANCHOR_MS, its inputs)."""
    tensors = inputs_of(which, [torch.randn(ANCHOR, dtype=torch.bfloat16, device=device) for _ in range(3)])
    return partial(by_cudnn, *tensors), tensors


def carried(tflops: float, which: str, results: Mapping[str, Mapping[str, float]]) -> float | None:
    """What `tflops` of the run of ANCHOR_MS amount to in this one; None if the anchor is not among its results."""
    now = results.get(ANCHOR_NAME)
    return None if now is None else tflops * ANCHOR_MS[which] / now["ms"]


def gradients_of(forward: Call, inputs: Sequence[Tensor]) -> Call:
    """All kernels of the backward pass, through autograd."""
    out = forward()
    return partial(torch.autograd.grad, out, inputs, torch.randn_like(out), retain_graph=True)


def calls_of(
    which: str, forwards: Mapping[str, tuple[Call, Sequence[Tensor]]]
) -> tuple[dict[str, Call], dict[str, str]]:
    """(the calls of a pass, why others are not among them). forwards: what computes O, by name, and its inputs. Ours
    refuse nothing."""
    calls: dict[str, Call] = {}
    missing: dict[str, str] = {}
    for name, (forward, inputs) in forwards.items():
        try:
            call = forward if which == "forward" else gradients_of(forward, inputs)
            call()
            calls[name] = call
        except (ImportError, RuntimeError, TypeError) as error:
            if name.startswith("ours") or not is_refusal(error):
                raise
            missing[name] = str(error)
    return calls, missing


def is_refusal(error: Exception) -> bool:
    """Whether it says that something is not there, or does not take the call, and not that the call failed."""
    said = str(error).lower()
    return isinstance(error, ImportError | NotImplementedError) or any(words in said for words in REFUSALS)


def run(args: argparse.Namespace, points: Iterable[Found], table: Callable[[Found], str]) -> None:
    """Time the points one after the other, write the result file after each, print the table in the end.

    args: of `python -m bench`. points: each is timed when it is asked for, and has a name.
    """
    found: Found = {"provenance": provenance(args.commit), "points": []}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for point in points:
        found["points"].append(point)
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print("timed", point["name"], flush=True)
    print(table(found))
    print(f"written: {args.out}")
