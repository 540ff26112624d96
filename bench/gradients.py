"""Times the backward pass against cuDNN's, and deterministic against what torch runs when it is asked for that.

    python -m bench.gradients --out FILE          # on a Hopper card, some minutes
    python -m bench.gradients --with-forward      # a forward and a backward pass together
    python -m bench.gradients --sustained         # back to back for a while, with the energy that it takes
    python -m bench.gradients --show FILE         # anywhere
    python -m bench.gradients --host              # time of the host for one call, of little work
    python -m bench.gradients --candidates --out FILE    # every config of the backward that can be, interleaved

A backward pass is all of its kernels, called through autograd. Its FLOPs count as two and a half times those of the
forward pass: five products for two. They count the same whatever is computed again.
"""

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import sustained
from bench.passes import gradients_of
from bench.points import DTYPES, LENGTHS, MODEL_DIM, Point
from bench.provenance import provenance
from bench.sweep import measure_by_rounds
from bench.timing import host_seconds, time_interleaved
from gluon_attn import attention, attention_varlen
from gluon_attn.backward.configs import HopperBackward
from gluon_attn.backward.configs import label as label
from gluon_attn.backward.launch import Choices, compiled_backward, main_of
from gluon_attn.backward.plan import finishes
from gluon_attn.backward.table import UNLIKE, padded_head_dims, pick_config
from gluon_attn.device import Device
from gluon_attn.gradients import attention_backward
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.problem import Problem
from gluon_attn.resources import resources
from gluon_attn.runtime.launcher import Launcher
from gluon_attn.tensors import empty_output
from gluon_attn.testing import backward_call

GRAD_FLOPS = 2.5  # over those of the forward pass, where V's head dim is as Q's
MOST_SPILLS = 100  # of a loop; with more, a config is not timed


def head_dims_of(text: str) -> tuple[int, int]:
    """Of Q and of V: "192/128", or "128" for both."""
    of_q, _, of_v = text.partition("/")
    return int(of_q), int(of_v or of_q)


def points(head_dims: Sequence[tuple[int, int]], lengths: Sequence[int], kv_heads: int | None) -> list[Point]:
    """B·S = 16384 tokens, H·D = 2048, of V's D; full and causal; with kv_heads, 64 query heads."""
    grouped: dict[str, Any] = {"heads": 64, "heads_per_kv_head": 64 // kv_heads} if kv_heads else {}
    return [
        Point(head_dim=d, head_dim_v=d_v, causal=causal, length=length, **({"heads": MODEL_DIM // d_v} | grouped))
        for d, d_v in head_dims
        for causal in (False, True)
        for length in lengths
    ]


def pass_of(
    forward: Callable[[], Tensor], inputs: list[Tensor], dout: Tensor, with_forward: bool
) -> Callable[[], object]:
    """The backward pass, or both."""
    if with_forward:
        return lambda: torch.autograd.grad(forward(), inputs, dout)
    return partial(torch.autograd.grad, forward(), inputs, dout, retain_graph=True)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Within it, torch may use no other than deterministic kernels."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # which would take time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def calls_of(point: Point, with_deterministic: bool, with_forward: bool = False) -> dict[str, Callable[[], object]]:
    """cuDNN's backward pass and ours; and, if asked for, FlashAttention-2's and ours with a fixed order of sums."""
    q, _, v = point.tensors()
    dout = torch.randn_like(empty_output(q, v))

    def inputs() -> list[Tensor]:
        return [t.detach().requires_grad_() for t in point.tensors()]

    def by_torch(backend: SDPBackend) -> Callable[[], object]:
        tensors = inputs()

        def forward() -> Tensor:
            q, k, v = tensors
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=point.causal, enable_gqa=point.heads_per_kv_head > 1
                )

        return pass_of(forward, tensors, dout, with_forward)

    def ours(**options: Any) -> Callable[[], object]:
        tensors = inputs()

        def forward() -> Tensor:
            q, k, v = tensors
            out = attention(q, k, v, causal=point.causal, **options)
            assert isinstance(out, Tensor)
            return out

        return pass_of(forward, tensors, dout, with_forward)

    calls = {"cudnn": by_torch(SDPBackend.CUDNN_ATTENTION), "ours": ours()}
    if with_deterministic:
        calls["ours, deterministic"] = ours(deterministic=True)
        if point.head_dim == point.head_dim_v:  # FlashAttention-2 knows no other
            calls["fa2, deterministic"] = deterministic()(by_torch(SDPBackend.FLASH_ATTENTION))
    return calls


def measure_sustained(point: Point, with_deterministic: bool, with_forward: bool) -> dict[str, Any]:
    flops = point.backward_flops + with_forward * point.flops
    kept_up = {
        name: sustained.measure(call, flops) for name, call in calls_of(point, with_deterministic, with_forward).items()
    }
    return {
        "point": asdict(point),
        "name": point.name,
        "results": {
            name: asdict(rate)
            | {
                "joules_per_tflop": rate.joules_per_tflop,
                "ratio_to_cudnn": rate.tflops / kept_up["cudnn"].tflops,
            }
            for name, rate in kept_up.items()
        },
    }


def measure(point: Point, rounds: int, with_deterministic: bool, with_forward: bool) -> dict[str, Any]:
    timings = time_interleaved(calls_of(point, with_deterministic, with_forward), rounds=rounds)
    flops = point.backward_flops + with_forward * point.flops
    return {
        "point": asdict(point),
        "name": point.name,
        "results": {
            name: {
                "ms": t.median * 1e3,
                "tflops": flops / t.median / 1e12,
                "spread": t.spread,
                "ratio_to_cudnn": timings["cudnn"].median / t.median,
            }
            for name, t in timings.items()
        },
    }


HOST_POINT = Point(head_dim=128, causal=True, length=512, batch=1, heads=16)
HOST_LENGTHS = (300, 12, 200)  # of as many rows, as packed sequences


def packed_calls(device: str = "cuda") -> dict[str, Callable[[], object]]:
    """Of HOST_LENGTHS: forward, that to be differentiated, and backward."""
    starts = torch.tensor([0, *itertools.accumulate(HOST_LENGTHS)], dtype=torch.int32, device=device)
    tensors = [t[0].transpose(0, 1).contiguous() for t in HOST_POINT.tensors(device)]
    inputs = [t.clone().requires_grad_() for t in tensors]
    lengths: Any = (starts, starts, max(HOST_LENGTHS), max(HOST_LENGTHS))
    forward, differentiable = (
        partial(attention_varlen, q, k, v, *lengths, causal=True) for q, k, v in (tensors, inputs)
    )
    return {
        "packed forward": forward,
        "packed forward, to be differentiated": differentiable,
        "packed backward": gradients_of(differentiable, inputs),
    }


class Nothing(torch.autograd.Function):
    """Three inputs, and gradients that are there already: what autograd alone takes."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return q.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.saved_tensors


def relaunching(call: Callable[[], object]) -> Callable[[], None]:
    """What a call launches, with the arguments that it has now. Its workspaces are nobody's then: so what this computes
    is worth nothing, and it may write to what calls beside it compute with."""
    launched: list[Callable[[], None]] = []
    original = Launcher.__call__

    def kept(self: Launcher, arguments: tuple[Any, ...], stream: int) -> None:
        launched.append(partial(original, self, arguments, stream))
        original(self, arguments, stream)

    with patch.object(Launcher, "__call__", kept):
        call()

    def launch() -> None:
        for one in launched:
            one()

    return launch


def host_microseconds() -> dict[str, float]:
    """Of HOST_POINT: our forward and backward pass and cuDNN's, medians over rounds in which each is called; what of
    these the launches take, and autograd; and ours of as many rows packed."""
    q, k, v = HOST_POINT.tensors()
    dout = torch.randn_like(q)
    calls = calls_of(HOST_POINT, with_deterministic=True)
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    packed = packed_calls()  # their tensors are there before memory of the others is freed
    forward = partial(attention, q, k, v, causal=True)
    backward = torch.no_grad()(partial(attention_backward, dout, None, q, k, v, out, lse, causal=True))
    return measure_by_rounds(
        host_seconds,
        {
            "forward": forward,
            "forward, its launch alone": relaunching(forward),
            "forward, to be differentiated": partial(attention, *inputs, causal=True),
            "backward, called directly": backward,
            "backward, its launches alone": relaunching(backward),
            "backward": calls["ours"],
            "backward of nothing": partial(
                torch.autograd.grad, Nothing.apply(*inputs), inputs, dout, retain_graph=True
            ),
            "backward, deterministic": calls["ours, deterministic"],
            "backward, cuDNN": calls["cudnn"],
            **packed,
        },
    )


def configs(padded_head_dim: int, padded_head_dim_v: int | None = None) -> list[HopperBackward]:
    """Every config that its checks and shared memory allow."""
    found = []
    # More keys have no registers; at 64, dQ comes in halves of 128 columns, or in pieces.
    cuts = [("all", 64 if padded_head_dim > 128 else 128)]
    if (padded_head_dim, padded_head_dim_v) in UNLIKE:
        cuts.append(("apart", 128))
    pieces = 3 if padded_head_dim == 192 else 1
    slots = (1, 2, 3, 4)
    for (grads, keys), block_m, query_slots, dout_slots, ds_slots, in_step, dq_slots in itertools.product(
        cuts, (64, 128), slots, slots, (1, 2), (False, True), (1, 2, 3)
    ):
        try:
            config = HopperBackward(
                block_m=block_m,
                keys=keys,
                query_slots=query_slots,
                dout_slots=dout_slots,
                ds_slots=ds_slots,
                rings_in_step=in_step,
                dq_slots=dq_slots,
                q_pieces=pieces,
                grads=grads,
            )
        except ValueError:
            continue
        if config.smem_bytes(padded_head_dim, padded_head_dim_v) <= Device.hopper().smem_bytes:
            found.append(config)
    return found


def refusal(config: HopperBackward, point: Point, in_order: bool = False) -> str | None:
    """What stands against a config: the compiler, or that a step of its loops spills or waits for each product."""
    head_dims = padded_head_dims(point.head_dim, point.head_dim_v)
    choices = Choices(
        dtype=DTYPES[point.dtype],
        padded_head_dims=head_dims,
        mask=Mask(causal=point.causal),
        config=config,
        deterministic=in_order,
        finishes=finishes(config, head_dims, Device.hopper()),
    )
    try:
        mains = main_of(choices, compiled_backward(choices))
    except Exception as error:  # whatever the compiler raises, it is the result for this config
        return f"does not compile: {type(error).__name__}: {str(error)[:200]}"
    loops = [loop for main in mains.values() for loop in resources(main).loops if loop.products > 4]
    spills = max((loop.spills for loop in loops), default=0)
    return f"{spills} spills in a loop" if spills > MOST_SPILLS else None


def difference(got: Sequence[Tensor], want: Sequence[Tensor]) -> str | None:
    """What tells gradients from those of the table's config by more than rounding."""
    for name, one, other in zip("QKV", got, want, strict=True):
        off = float((one.double() - other.double()).norm() / other.double().norm())
        if not off < 0.02:  # true of NaN
            return f"wrong: d{name} is off by {off:.3f} of its norm"
    return None


def measure_candidates(point: Point, rounds: int, in_order: bool, only: Sequence[str] = ()) -> dict[str, Any]:
    """All configs of a point, the table's among them; the gradients alone, without autograd. in_order: with sums in a
    fixed order. only: the labels of some, and the table's is timed beside them."""
    q, k, v = point.tensors()
    dout = torch.randn_like(empty_output(q, v))
    out, lse = attention(q, k, v, causal=point.causal, return_lse=True)
    calls: dict[str, Callable[[], object]] = {}
    refused: dict[str, str] = {}
    head_dims = padded_head_dims(point.head_dim, point.head_dim_v)
    table = label(pick_config(Problem.of(q, k, v, causal=point.causal)))
    tried = [config for config in configs(*head_dims) if not only or label(config) in {table, *only}]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:  # leaves the kernels in Triton's cache
        reasons = list(pool.map(partial(refusal, point=point, in_order=in_order), tried))
    want = attention_backward(dout, None, q, k, v, out, lse, causal=point.causal)
    for config, why in zip(tried, reasons, strict=True):
        if why is None:
            call = backward_call(config, dout, q, k, v, out, lse, causal=point.causal, deterministic=in_order)
            why = difference(call(), want)
            calls[label(config)] = call
        if why is not None:
            calls.pop(label(config), None)
            refused[label(config)] = why
    timings = time_interleaved(calls, rounds=rounds)
    flops = point.backward_flops
    results = {
        name: {"ms": t.median * 1e3, "tflops": flops / t.median / 1e12, "spread": t.spread}
        for name, t in timings.items()
    }
    measured = {"point": asdict(point), "name": point.name, "table": table, "results": results, "refused": refused}
    show_candidates(measured)
    return measured


def show_candidates(point: dict[str, Any]) -> None:
    results, table = point["results"], point["table"]
    fastest = max(results, key=lambda name: results[name]["tflops"])
    lead = results[fastest]["tflops"] / results[table]["tflops"] if table in results else float("nan")
    refused = len(point["refused"])
    print(f"{point['name']}: fastest {fastest}, {lead:.3f} times the table's {table}; {refused} refused", flush=True)


def is_of_this_command(found: Any) -> bool:
    if not isinstance(found, dict):
        return False
    points = found.get("points", [])
    return "host_us" in found or (bool(points) and all("results" in point for point in points))


def show(found: dict[str, Any]) -> None:
    """Of any result file of this command."""
    if "host_us" in found:
        for name, us in found["host_us"].items():
            print(f"{name:36} {us:6.1f} us")
        return
    points = found["points"]
    if "table" in points[0]:
        for point in points:
            show_candidates(point)
        return
    show_table("TFLOP/s", "tflops", 0, points, with_ratio=True)
    if "joules_per_tflop" in points[0]["results"]["ours"]:
        print()
        show_table("J per TFLOP", "joules_per_tflop", 2, points)


def show_table(
    heading: str, figure: str, digits: int, points: list[dict[str, Any]], *, with_ratio: bool = False
) -> None:
    """A figure of all that was timed. with_ratio: and our rate over cuDNN's."""
    names = list(dict.fromkeys(name for point in points for name in point["results"]))
    print("| " + " | ".join([heading, *names, *["ours / cudnn"] * with_ratio]) + " |")
    print("|---" * (len(names) + 1 + with_ratio) + "|")
    for point in points:
        results = point["results"]
        cells = [f"{results[name][figure]:.{digits}f}" if name in results else "–" for name in names]
        if with_ratio:
            cells.append(f"{results['ours']['ratio_to_cudnn']:.2f}")
        print(f"| {point['name']} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gradients", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, help="result file to write (JSON)")
    parser.add_argument("--show", type=Path, help="print the table of a result file, and time nothing")
    parser.add_argument(
        "--head-dims", type=head_dims_of, nargs="+", default=[(128, 128), (64, 64)], help="as 128, or 192/128: of V 128"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--kv-heads", type=int, help="64 query heads, and so many KV heads")
    parser.add_argument("--deterministic", action="store_true", help="time that too; with --candidates, that alone")
    parser.add_argument("--with-forward", action="store_true", help="time forward and backward pass together")
    parser.add_argument("--sustained", action="store_true", help="run each for a while; read power and clock")
    parser.add_argument("--host", action="store_true", help="time the host instead, in one small problem")
    parser.add_argument("--candidates", action="store_true", help="time every config of our kernels instead")
    parser.add_argument("--only", nargs="+", default=[], metavar="LABEL", help="with --candidates: these, as printed")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--commit", help="of the tree that is measured, if git cannot tell")
    args = parser.parse_args()
    known = {label(config) for dims in args.head_dims for config in configs(*padded_head_dims(*dims))}
    if args.only and not (args.candidates and known.issuperset(args.only)):
        parser.error(f"--only: expected labels of configs of these head dims, with --candidates, got {args.only}")
    if args.show:
        shown = json.loads(args.show.read_text(encoding="utf-8"))
        if not is_of_this_command(shown):
            parser.error(f"--show: expected a result file of this command, got {args.show}")
        show(shown)
        return
    if not torch.cuda.is_available():
        sys.exit("bench.gradients: expected a Hopper card, got none; use --show FILE to see a result file")
    found: dict[str, Any] = {"provenance": provenance(args.commit), "with_forward": args.with_forward, "points": []}
    if args.host:
        found |= {"point": asdict(HOST_POINT), "host_us": host_microseconds()}
        show(found)
        save(found, args.out)
        return
    for point in points(args.head_dims, args.lengths, args.kv_heads):
        if args.candidates:
            found["points"].append(measure_candidates(point, args.rounds, args.deterministic, args.only))
        elif args.sustained:
            found["points"].append(measure_sustained(point, args.deterministic, args.with_forward))
        else:
            found["points"].append(measure(point, args.rounds, args.deterministic, args.with_forward))
        save(found, args.out)
    if not args.candidates:
        show(found)


def save(found: dict[str, Any], out: Path | None) -> None:
    if out:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
