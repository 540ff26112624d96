"""Attention over several cards: is it that of one card, how fast is it, and how much of the transfers is hidden?

    python -m bench.distributed --out FILE      # a process for each card of this machine, over NCCL; minutes
    torchrun --nproc-per-node 8 -m bench.distributed --out FILE    # likewise; torchrun can span machines
    python -m bench.distributed --quick         # without cards: two processes, by gloo and gluon_cpu, small shapes
    python -m bench.distributed --show FILE     # anywhere

First ring attention and Ulysses are compared: with float64 on a short sequence, and with one call of one card on all of
each sequence that is timed. Then each is timed with its transfers and with none, the transfers are timed alone, and one
card computes its share of the work, which is all keys and queries of its share of the heads. The ring is timed without
its transfers' head start too. A time is that of the slowest rank, from a start that all ranks have together.
"""

import argparse
import contextlib
import datetime
import json
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from bench.gradients import GRAD_FLOPS, save
from bench.provenance import SEED, output_of, provenance
from bench.report import markdown
from bench.timing import FLUSH_BYTES
from gluon_attn import attention
from gluon_attn.device import Device
from gluon_attn.distributed import ring, ring_attention, shard, ulysses_attention, unshard
from gluon_attn.distributed.ranks import Ranks, arrive
from gluon_attn.distributed.ulysses import AllToAll
from gluon_attn.testing import check, check_gradients, last_place

FUNCTIONS: dict[str, Callable[..., Any]] = {"ring": ring_attention, "ulysses": ulysses_attention}
PASSES = {"forward": 1.0, "forward and backward": 1.0 + GRAD_FLOPS}  # and their FLOPs, over those of the forward pass
MASKS = {"full": False, "causal": True}
NAMES = ("O", "dQ", "dK", "dV")
AT_ONCE = "ring at once"  # how results name the ring without its transfers' head start
TIMEOUT = datetime.timedelta(seconds=180)  # of a rank that the others wait for; the first compile is in it


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """What is compared and timed; each length is of the whole sequence."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    lengths: list[int]
    exact_length: int  # compared with float64, whose scores have to fit in memory
    rounds: int
    runs: int  # of a round, of the longest sequence; shorter ones have more


ON_CARDS = Shapes(
    batch=1, heads=16, kv_heads=16, head_dim=128, lengths=[16384, 32768, 131072], exact_length=4096, rounds=4, runs=2
)
QUICK = Shapes(batch=1, heads=2, kv_heads=2, head_dim=64, lengths=[24], exact_length=16, rounds=1, runs=1)


@dataclass(frozen=True)
class Place:
    """Where this rank computes."""

    ranks: Ranks
    device: torch.device
    options: dict[str, Any]  # for `attention`

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    def say(self, text: str) -> None:
        if self.ranks.rank == 0:
            print(text, flush=True)


def whole_tensors(shapes: Shapes, length: int, place: Place) -> list[Tensor]:
    """q, k, v and dO of the whole sequence, the same numbers in each rank."""
    generator = torch.Generator(place.device).manual_seed(SEED)

    def normal(heads: int) -> Tensor:
        shape = (shapes.batch, heads, length, shapes.head_dim)
        return torch.randn(shape, generator=generator, device=place.device, dtype=torch.bfloat16)

    return [normal(heads) for heads in (shapes.heads, shapes.kv_heads, shapes.kv_heads, shapes.heads)]


def both_passes(function: Callable[..., Any], tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """(O, dQ, dK, dV)."""
    *inputs, dout = tensors
    inputs = [t.detach().requires_grad_() for t in inputs]
    out = function(*inputs, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


# ---------------------------------------------------------------------------------------------------------------------
# Is it right?
# ---------------------------------------------------------------------------------------------------------------------


def compare_with_float64(shapes: Shapes, place: Place) -> list[str]:
    """Where O or a gradient is beyond the budget that one card has. One rank computes in float64 what all have given
    it."""
    wrong = []
    whole = whole_tensors(shapes, shapes.exact_length, place)
    for t in whole:
        assert torch.equal(unshard(shard(t, dim=2), dim=2), t), "unshard(shard(t)) is not t in every rank"
    for name, function in FUNCTIONS.items():
        for mask, causal in MASKS.items():
            shares = [shard(t, dim=2) for t in whole]
            found = both_passes(function, shares, causal=causal, **place.options)
            out, *grads = (unshard(t, dim=2) for t in found)
            what = f"{name}, {mask}, {shapes.exact_length}"
            if place.ranks.rank == 0:
                q, k, v, dout = whole
                try:
                    check(q, k, v, out, None, causal=causal, what=what)
                    check_gradients(q, k, v, dout, grads, causal=causal, what=what)
                except AssertionError as error:
                    wrong.append(str(error))
    place.say("\n".join(wrong) or f"{shapes.exact_length}: within the budgets of one card, against float64")
    return wrong


def compare_with_one_card(shapes: Shapes, length: int, place: Place) -> list[dict[str, Any]]:
    """The largest differences of all ranks, in units of the last place at the largest number. One for each rank and one
    is the limit: a part of each rank is rounded to bf16, and the sum is."""
    whole = whole_tensors(shapes, length, place)
    compared = []
    for mask, causal in MASKS.items():
        wanted = both_passes(attention, whole, causal=causal, **place.options)
        largest = [float(t.abs().max()) for t in wanted]
        wanted = [shard(t, dim=2) for t in wanted]
        for name, function in FUNCTIONS.items():
            found = both_passes(function, [shard(t, dim=2) for t in whole], causal=causal, **place.options)
            off = {}
            for tensor, got, want, at in zip(NAMES, found, wanted, largest, strict=True):
                worst = (got.float() - want.float()).abs().max()  # NaN, if there is one
                dist.all_reduce(worst, dist.ReduceOp.MAX)
                off[tensor] = float(worst) / last_place(torch.bfloat16, at)
            within = all(by <= place.ranks.size + 1 for by in off.values())
            compared.append({"length": length, "function": name, "mask": mask, "off": off, "within": within})
            place.say(compared_line(compared[-1]))
    return compared


def compared_line(row: dict[str, Any]) -> str:
    off = ", ".join(f"{tensor} {by:.2f}" for tensor, by in row["off"].items())
    verdict = "" if row["within"] else ": WRONG"
    return f"{row['length']} {row['mask']}, {row['function']}: off from one card by {off} last places{verdict}"


# ---------------------------------------------------------------------------------------------------------------------
# How fast is it?
# ---------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_transfers() -> Iterator[None]:
    """Within it, what would come from another rank is what was to go there, in the same memory."""

    def stay(self: Ranks, outgoing_and_incoming: list[tuple[Tensor, Tensor]]) -> list[dist.Work]:
        for outgoing, incoming in outgoing_and_incoming:
            incoming.set_(outgoing)  # type: ignore[call-overload]
        return []

    same = staticmethod(lambda t, ranks: t.contiguous())
    with mock.patch.object(Ranks, "pass_on", stay), mock.patch.object(AllToAll, "apply", same):
        yield


@contextlib.contextmanager
def no_head_start() -> Iterator[None]:
    with mock.patch.object(ring, "give_head_start", return_value=None):
        yield


def transfers_of_ring(q: Tensor, k: Tensor, v: Tensor, ranks: Ranks, backward: bool) -> None:
    """What `ring_attention` sends, and nothing else."""

    def move(*tensors: Tensor) -> None:
        arrive(ranks.pass_on([(t, torch.empty_like(t)) for t in tensors]))

    for _ in range(ranks.size - 1):
        move(k, v)
    if not backward:
        return
    part = [torch.zeros_like(t) for t in (k, v)]
    sums = [torch.zeros_like(t, dtype=torch.float32) for t in (k, v)]
    for step in range(ranks.size + 1):
        move(*((k, v) if step + 1 < ranks.size else ()), *((), (), part, sums)[min(step, 3)])


def transfers_of_ulysses(q: Tensor, k: Tensor, v: Tensor, ranks: Ranks, backward: bool) -> None:
    """What `ulysses_attention` sends: q, k, v and O, and as much for their gradients."""
    for _ in range(2 if backward else 1):
        for t in (q, k, v, q):
            AllToAll.forward(mock.Mock(), t.view(ranks.size, -1), ranks)


TRANSFERS = {"ring": transfers_of_ring, "ulysses": transfers_of_ulysses}


def calls_of(whole: list[Tensor], causal: bool, backward: bool, place: Place) -> dict[str, Callable[[], object]]:
    """What is timed: by each function "with", "without" its transfers and these "alone"; the ring without their head
    start, "at once"; and one card's share."""
    *inputs, dout = [shard(t, dim=2) for t in whole]
    inputs = [t.requires_grad_(backward) for t in inputs]
    options = place.options | {"causal": causal}

    def run(function: Callable[..., Any], inputs: list[Tensor], dout: Tensor) -> Callable[[], object]:
        if backward:
            return lambda: torch.autograd.grad(function(*inputs, **options), inputs, dout)
        return lambda: function(*inputs, **options)

    def within(context: Callable[[], contextlib.AbstractContextManager], call: Callable[[], object]) -> Any:
        def run_within() -> object:
            with context():
                return call()

        return run_within

    def alone(transfers: Callable[..., None]) -> Callable[[], object]:
        tensors = [t.detach() for t in inputs]
        return lambda: transfers(*tensors, place.ranks, backward)

    share = [t[:, : t.shape[1] // place.ranks.size].detach().requires_grad_(backward) for t in whole]
    calls = {"one card": run(attention, share[:3], share[3].detach())}
    for name, function in FUNCTIONS.items():
        calls[f"{name} with"] = run(function, inputs, dout)
        calls[f"{name} without"] = within(no_transfers, calls[f"{name} with"])
        calls[f"{name} alone"] = alone(TRANSFERS[name])
    calls[AT_ONCE] = within(no_head_start, calls["ring with"])
    return calls


def time_together(
    calls: dict[str, Callable[[], object]], place: Place, *, rounds: int, runs: int
) -> dict[str, list[float]]:
    """Seconds of each call in the slowest rank: the median of each round, whose calls are in the same random order in
    all ranks. As `time_interleaved` has it: with a cold L2 cache, after a run that is not timed."""
    order = random.Random(SEED)
    token = torch.zeros((), device=place.device)
    flush = torch.empty(1 if place.on_cpu else FLUSH_BYTES, dtype=torch.int8, device=place.device)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in order.sample(list(calls), len(calls)):
            calls[name]()
            ends = []
            for _ in range(runs):
                flush.zero_()
                dist.all_reduce(token)  # on cards it is their streams that wait for each other, not the hosts
                ends.append(started(calls[name], place))
            taken = torch.tensor([end() for end in ends], dtype=torch.float64, device=place.device)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            seconds[name].append(statistics.median(taken.tolist()))
    return seconds


def started(call: Callable[[], object], place: Place) -> Callable[[], float]:
    """Start it; what is returned waits for its end, and tells the seconds between."""
    if place.on_cpu:
        start = time.perf_counter()
        call()
        taken = time.perf_counter() - start
        return lambda: taken
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    call()
    events[1].record()

    def end() -> float:
        events[1].synchronize()
        return events[0].elapsed_time(events[1]) / 1e3

    return end


def measure(shapes: Shapes, length: int, place: Place) -> list[dict[str, Any]]:
    measured = []
    whole = whole_tensors(shapes, length, place)
    runs = min(10, shapes.runs * max(shapes.lengths) // length)
    for mask, causal in MASKS.items():
        flops = 4 * shapes.batch * shapes.heads * length**2 * shapes.head_dim / (2 if causal else 1)
        for which, times in PASSES.items():
            calls = calls_of(whole, causal, which != "forward", place)
            seconds = time_together(calls, place, rounds=shapes.rounds, runs=runs)
            measured.append({"length": length, "mask": mask, "pass": which, "flops": flops * times, "seconds": seconds})
            place.say(f"{length} {mask}, {which}: timed")
    return measured


# ---------------------------------------------------------------------------------------------------------------------
# What is shown
# ---------------------------------------------------------------------------------------------------------------------


def row_of(point: dict[str, Any], function: str, cards: int) -> list[str]:
    """Of the table: TFLOP/s per card, over those of one card's share, milliseconds, and the share that is hidden: of
    the rounds the median and the quartiles."""
    seconds = {name: statistics.median(rounds) for name, rounds in point["seconds"].items()}
    rounds = point["seconds"][f"{function} with"]
    by, without, alone = (seconds[f"{function} {what}"] for what in ("with", "without", "alone"))
    hidden = [
        (1 - (one - other) / alone) * 100
        for one, other in zip(rounds, point["seconds"][f"{function} without"], strict=True)
    ]
    return [
        f"{point['flops'] / cards / by / 1e12:.0f}",
        f"{point['flops'] / cards / seconds['one card'] / 1e12:.0f}",
        f"{seconds['one card'] / by:.3f}",
        f"{(max(rounds) - min(rounds)) / by * 100:.1f}",
        f"{by * 1e3:.2f}",
        f"{without * 1e3:.2f}",
        f"{alone * 1e3:.2f}",
        f"{statistics.median(hidden):.0f}",
        quartiles(hidden, ".0f"),
    ]


def quartiles(numbers: list[float], form: str) -> str:
    low, _, high = statistics.quantiles(numbers) if len(numbers) > 1 else numbers * 3
    return f"{low:{form}} to {high:{form}}"


HEAD = [
    "TFLOP/s per card", "of one card's share", "×", "spread, %", "ms", "without transfers", "transfers alone",
    "hidden, %", "quartiles",
]  # fmt: skip


def head_start_row(seconds: dict[str, list[float]]) -> list[str]:
    """Milliseconds with the head start and without; of their ratios in a round the median and the quartiles."""
    ratios = [one / other for one, other in zip(seconds["ring with"], seconds[AT_ONCE], strict=True)]
    times = [f"{statistics.median(seconds[name]) * 1e3:.2f}" for name in ("ring with", AT_ONCE)]
    return [*times, f"{statistics.median(ratios):.3f}", quartiles(ratios, ".3f")]


def show(found: dict[str, Any]) -> None:
    for function in FUNCTIONS:
        rows = {
            f"{point['length']} {point['mask']}, {point['pass']}": row_of(point, function, found["cards"])
            for point in found["timed"]
        }
        print(markdown([f"{function}, {found['cards']} cards", *HEAD], rows))
    starts = {
        f"{point['length']} {point['mask']}, {point['pass']}": head_start_row(point["seconds"])
        for point in found["timed"]
        if AT_ONCE in point["seconds"]
    }
    if starts:
        print(markdown(["transfers of the ring, ms", "begin first", "at once", "ratio", "quartiles"], starts))
    print("\n".join([*found["wrong"], *map(compared_line, found["compared"])]))
    print(f"peak memory: {found['peak_gib']:.1f} GiB a card")


def run(shapes: Shapes, place: Place, commit: str | None) -> dict[str, Any]:
    start = time.perf_counter()
    wrong = compare_with_float64(shapes, place)
    compared = [row for length in shapes.lengths for row in compare_with_one_card(shapes, length, place)]
    timed = [row for length in shapes.lengths for row in measure(shapes, length, place)]
    peak = torch.tensor(0 if place.on_cpu else torch.cuda.max_memory_allocated(), device=place.device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    where = provenance(commit)
    if not place.on_cpu:
        where |= {"nccl": torch.cuda.nccl.version(), "links": output_of("nvidia-smi", "topo", "-m")}
    return {
        "provenance": where,
        "cards": place.ranks.size,
        "shapes": asdict(shapes),
        "wrong": wrong,
        "compared": compared,
        "timed": timed,
        "peak_gib": float(peak) / 2**30,
        "wall_s": time.perf_counter() - start,
    }


def be_rank(rank: int, size: int, args: argparse.Namespace) -> None:
    """What each process does. The environment says where the others are, as torchrun sets it."""
    if args.quick:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=TIMEOUT)
        device, options = torch.device("cpu"), {"device": Device.hopper()}
    else:
        device, options = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank))), {}
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", rank=rank, world_size=size, timeout=TIMEOUT, device_id=device)
    found = run(args.shapes, Place(Ranks.of(None), device, options), args.commit)
    if rank == 0:
        save(found, args.out)
        show(found)
    dist.destroy_process_group()
    if found["wrong"] or not all(row["within"] for row in found["compared"]):
        sys.exit("bench.distributed: several cards do not compute what one does: see above")


def free_port() -> int:
    with socket.socket() as any_socket:
        any_socket.bind(("127.0.0.1", 0))
        return any_socket.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.distributed", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, help="result file to write (JSON)")
    parser.add_argument("--show", type=Path, help="print the tables of a result file, and measure nothing")
    parser.add_argument(
        "--quick", action="store_true", help="two processes on the CPU and small shapes: try the script"
    )
    parser.add_argument("--lengths", type=int, nargs="+", help=f"of the whole sequence; default: {ON_CARDS.lengths}")
    parser.add_argument("--heads", type=int, help=f"default: {ON_CARDS.heads}; a multiple of the number of cards")
    parser.add_argument("--kv-heads", type=int, help="default: as many; likewise")
    parser.add_argument("--rounds", type=int, help=f"default: {ON_CARDS.rounds}")
    parser.add_argument("--commit", help="of the tree that is measured, if git cannot tell")
    args = parser.parse_args()
    if args.show:
        show(json.loads(args.show.read_text(encoding="utf-8")))
        return
    base = asdict(QUICK if args.quick else ON_CARDS)
    asked = {name: getattr(args, name) for name in ("lengths", "heads", "rounds") if getattr(args, name) is not None}
    args.shapes = Shapes(**base | asked | {"kv_heads": args.kv_heads or asked.get("heads", base["heads"])})
    if "RANK" in os.environ:  # torchrun started this
        be_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), args)
        return
    size = 2 if args.quick else torch.cuda.device_count()
    if size < 2:
        sys.exit(f"bench.distributed: expected two cards or more, got {size}; --quick tries it without")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    torch.multiprocessing.spawn(be_rank, (size, args), nprocs=size)


if __name__ == "__main__":
    main()
