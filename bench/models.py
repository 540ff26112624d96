"""What our attention does for a model: a Llama of random weights, with the layers of one of 8B, in transformers.

    python -m bench.models --out FILE             # on a Hopper card, some minutes; needs transformers
    python -m bench.models --only train           # or prefill, batches, losses or wide_losses, or some of them
    python -m bench.models --only prefill --rounds 30    # with more rounds, what a gain of 1 % is told from noise by
    python -m bench.models --show FILE            # anywhere

Training steps (forward, loss, backward, AdamW) and prefills (forward, logits of the last position) of 16384 tokens in
bf16, by one attention after the other on the same weights. Then transformers' continuous batching, which needs 5.24:
prompts of unlike lengths are there at once, and each gets some new tokens. Then the losses of a smaller model of that
shape that learns text from the same start by each, and those of layers of 8B: are ours as near to torch's as those of
torch's kernels are to each other?
"""

import argparse
import contextlib
import gc
import itertools
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from transformers.utils import is_flash_attn_2_available

from bench.gradients import deterministic, save
from bench.provenance import SEED, provenance
from bench.report import markdown
from bench.timing import Timing, time_interleaved
from gluon_attn import hf, torch_sdpa
from gluon_attn.training import WINDOW, Shape, averaged, disagreement, farthest, losses_of

Call = Callable[[], object]

TOKENS = 16384  # of a step
LENGTHS = [2048, 8192, 16384]
SHAPE = Shape(layers=4, heads=32, kv_heads=8, head_dim=128, vocabulary=32000)
RUNS, WARMUP = 3, 1  # in a round: each takes tenths of a second


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Prompts whose lengths are log-normal, 95 of 100 from `shortest` to `longest`, and the rest cut off there."""

    count: int
    shortest: int
    longest: int
    new_tokens: int  # of each

    def lengths(self) -> list[int]:
        middle = math.sqrt(self.shortest * self.longest)
        normal = torch.randn(self.count, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
        lengths = middle * (normal * math.log(self.longest / middle) / 2).exp()
        return [int(length) for length in lengths.round().clamp(self.shortest, self.longest)]


REQUESTS = Requests(count=64, shortest=100, longest=2000, new_tokens=32)
PAGE = 256  # keys, transformers' default

LEARNS = Shape(layers=4, heads=8, kv_heads=2, head_dim=128, vocabulary=256, batch=8, length=1024)
LEARNS_WIDE = replace(SHAPE, batch=2, length=2048)
STEPS, LEARNING_RUNS = 3 * WINDOW, 3
LEARNING_RATE, LEARNING_RATE_WIDE = 1e-3, 1e-4  # at 1e-3 layers of 8B would not settle

# What transformers is told to call, and what is on meanwhile.
ATTENTION: dict[str, tuple[str, Callable[[], contextlib.AbstractContextManager[None]]]] = {
    "sdpa": ("sdpa", contextlib.nullcontext),
    "sdpa, enabled()": ("sdpa", torch_sdpa.enabled),
    "gluon_attn": (hf.NAME, contextlib.nullcontext),
    "sdpa, deterministic": ("sdpa", deterministic),
    "gluon_attn, deterministic": (hf.NAME, deterministic),
    "sdpa, FlashAttention-2": ("sdpa", partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)),
    "sdpa, plain torch": ("sdpa", partial(sdpa_kernel, SDPBackend.MATH)),
}
IN_BATCHES = ["sdpa", "flash_attention_2", "gluon_attn"]  # the second where its package is
PREFILLS = ["sdpa", "sdpa, enabled()", "gluon_attn"]
TRAINS = [*PREFILLS, "sdpa, deterministic", "gluon_attn, deterministic"]
JUDGED = ["sdpa, enabled()", "gluon_attn"]
PEERS = ["sdpa", "sdpa, FlashAttention-2", "sdpa, plain torch"]

# Kernels of attention, by name: ours, FlashAttention-2's, cuDNN's, and fmha of torch's memory-efficient attention.
OF_ATTENTION = re.compile(r"attention|prepare_backward|finish_backward|flash|sdpa|cudnn::fusion|fmha")


def model_of(shape: Shape, dtype: torch.dtype, device: str) -> Any:
    """Of random weights, the same each time; an MLP has 3.5 times the width, as in 8B."""
    width = shape.heads * shape.head_dim
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=width, intermediate_size=width * 7 // 2,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, max_position_embeddings=TOKENS,
    )  # fmt: skip
    torch.manual_seed(SEED)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def by(name: str, model: Any, call: Call) -> Call:
    """The call with an attention of ATTENTION."""
    implementation, context = ATTENTION[name]

    def run() -> object:
        model.set_attn_implementation(implementation)
        with context():
            return call()

    return run


def training_step(model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    optimizer.zero_grad()
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()


def prefill(model: Any, tokens: Tensor) -> None:
    with torch.no_grad():
        model(tokens, use_cache=False, logits_to_keep=1)


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens, use_cache=False).logits


def measure_training(model: Any, lengths: Iterable[int], rounds: int) -> list[dict[str, Any]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    step = partial(training_step, model, optimizer)
    return [measure(model, step, TRAINS, length, rounds) for length in lengths]


def measure_prefill(model: Any, lengths: Iterable[int], rounds: int) -> list[dict[str, Any]]:
    return [measure(model, partial(prefill, model), PREFILLS, length, rounds) for length in lengths]


def measure(
    model: Any, run: Callable[[Tensor], object], names: Iterable[str], length: int, rounds: int
) -> dict[str, Any]:
    """TOKENS tokens in sequences of a length, by each attention; what torch refuses, or has no memory for, is told."""
    gc.collect()  # what a part before left would count as memory of this one
    tokens = torch.randint(model.config.vocab_size, (TOKENS // length, length), device=model.device)
    calls, alone, refused = {}, {}, {}
    for name in names:
        call = by(name, model, partial(run, tokens))
        try:
            call()  # compiles; the first makes the optimizer's state
            alone[name] = {"peak_gib": peak_gib(call), "attention_ms": attention_ms(call)}
        except RuntimeError as error:
            refused[name] = f"{type(error).__name__}: {str(error)[:300]}"
        else:
            calls[name] = call
    timings = time_interleaved(calls, rounds=rounds, runs=RUNS, warmup=WARMUP)
    results = {name: result_of(timing, TOKENS) | alone[name] for name, timing in timings.items()}
    return {"length": length, "results": results, "refused": refused}


def result_of(timing: Timing, tokens: int) -> dict[str, Any]:
    return {
        "ms": timing.median * 1e3,
        "tokens_per_second": tokens / timing.median,
        "spread": timing.spread,
        "ms_of_rounds": [seconds * 1e3 for seconds in timing.round_medians],
    }


def measure_batches(model: Any, requests: Requests, rounds: int) -> list[dict[str, Any]]:
    """All requests by each attention, whose order is turned around in each round. Tokens are those of prompts, and new.

    A round makes a manager, with its pages and CUDA graphs, and times answers when they are there, as in a server.
    """
    lengths, vocabulary = requests.lengths(), model.config.vocab_size
    prompts = [torch.randint(vocabulary, (n,), device=model.device).tolist() for n in lengths]
    names = [name for name in IN_BATCHES if name != "flash_attention_2" or is_flash_attn_2_available()]
    seconds: dict[str, list[list[float]]] = {}
    alone, refused = {}, {}
    for turn in range(rounds):
        for name in [name for name in names[:: (-1) ** turn] if name not in refused]:
            gc.collect()  # as in `measure`
            try:
                with serving(model, name, prompts, requests.new_tokens) as answer_all:
                    answer_all()  # captures CUDA graphs; transformers has two sets, so the next one may do so too
                    if name not in alone:
                        alone[name] = {"peak_gib": peak_gib(answer_all), "attention_ms": attention_ms(answer_all)}
                    seconds.setdefault(name, []).append([seconds_of(answer_all) for _ in range(RUNS)])
            except RuntimeError as error:  # NotImplementedError is one
                refused[name] = f"{type(error).__name__}: {str(error)[:300]}"
    tokens = sum(lengths) + len(lengths) * requests.new_tokens
    results = {}
    for name in [name for name in names if name not in refused]:
        timing = Timing(
            statistics.median(itertools.chain(*seconds[name])), tuple(map(statistics.median, seconds[name]))
        )
        results[name] = result_of(timing, tokens) | alone[name]
    what = f"{requests.count} prompts of {min(lengths)} to {max(lengths)}"
    return [{"length": what, "requests": asdict(requests), "tokens": tokens, "results": results, "refused": refused}]


@contextlib.contextmanager
def serving(model: Any, name: str, prompts: list[list[int]], new_tokens: int) -> Iterator[Call]:
    """A call that answers all prompts, by an attention of IN_BATCHES; its manager runs meanwhile.

    Room for all of them at once, and no more: by default a cache of pages takes 90 % of the card. No page is shared, or
    a prompt that was answered before would not be computed again.
    """
    if not hf.layers_gather_keys():
        raise NotImplementedError(
            f"batches: expected transformers {'.'.join(map(str, hf.FIRST_WITH_BATCHES))} or newer, got "
            f"{transformers.__version__}; install such a one, or leave it out by --only"
        )
    model.set_attn_implementation(hf.NAME if name == "gluon_attn" else name)
    context = hf.continuous_batching(model) if name == "gluon_attn" else contextlib.nullcontext()
    pages = transformers.ContinuousBatchingConfig(
        num_blocks=sum(-(-(len(prompt) + new_tokens) // PAGE) for prompt in prompts), page_size=PAGE,
        max_requests_per_batch=len(prompts), safety_margin=0.0, allow_block_sharing=False, auto_switch_to_flash=False,
    )  # fmt: skip
    settings = transformers.GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    manages = partial(
        model.continuous_batching_context_manager, generation_config=settings, continuous_batching_config=pages
    )
    with context, manages() as manager:
        yield partial(answers, manager, prompts)


def answers(manager: Any, prompts: list[list[int]]) -> list[list[int]]:
    """The new tokens of each prompt."""
    done: dict[str, list[int]] = {}
    asked = manager.add_requests(prompts)
    while len(done) < len(asked):
        answer = manager.get_result(timeout=1)
        if answer is not None:
            if answer.error is not None:
                raise RuntimeError(f"a request failed: {answer.error}")
            done[answer.request_id] = answer.generated_tokens
        elif not manager.is_running():
            raise RuntimeError(f"transformers' manager ended with {len(done)} of {len(asked)} requests answered")
    return [done[request] for request in asked]


def seconds_of(call: Call) -> float:
    """Of the host, for a call that gives the host its numbers."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def peak_gib(call: Call) -> float:
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() / 2**30


def attention_ms(call: Call) -> dict[str, float]:
    """The kernels of attention that a call runs, and the milliseconds that each takes in all; by this one sees whose
    they are."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return of_attention(profiled.key_averages())


def of_attention(events: Iterable[Any]) -> dict[str, float]:
    return {
        event.key: event.self_device_time_total / 1e3
        for event in events
        if event.device_type == DeviceType.CUDA and OF_ATTENTION.search(event.key)
    }


def measure_losses(
    shape: Shape, steps: int, device: str, runs: int, learning_rate: float = LEARNING_RATE
) -> dict[str, list[list[float]]]:
    """Of each run at each step, by each attention, under bf16 autocast."""
    found: dict[str, list[list[float]]] = {name: [] for name in [*PEERS, *JUDGED]}
    for _, name in itertools.product(range(runs), found):
        model = model_of(shape, torch.float32, device)
        train = partial(losses_of, model, partial(logits_of, model), shape, steps, device, learning_rate)
        losses = by(name, model, train)()
        assert isinstance(losses, Tensor)
        found[name].append(losses.tolist())
    return found


def peer_of(name: str) -> str:
    """SDPA, which is deterministic too if `name` is."""
    return "sdpa, deterministic" if name in ATTENTION and ATTENTION[name][1] is deterministic else "sdpa"


def ratio(results: dict[str, Any], name: str) -> float:
    """Of tokens per second, over those of its peer."""
    peer = peer_of(name)
    if peer not in results:
        return float("nan")
    return results[name]["tokens_per_second"] / results[peer]["tokens_per_second"]


def off_by(results: dict[str, Any], name: str) -> float:
    """What the ratio may be off by, 0.01 for 1 %, in 95 of 100 such runs: by those of single rounds, in which both were
    timed one soon after the other. NaN if there are too few."""
    own, of_peer = (results.get(n, {}).get("ms_of_rounds", []) for n in (name, peer_of(name)))
    ratios = [math.log(b / a) for a, b in zip(own, of_peer, strict=False)]
    return 1.96 * statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 4 else math.nan


COLUMNS: dict[str, Callable[[dict[str, Any], str], str]] = {
    "tokens/s": lambda results, name: f"{results[name]['tokens_per_second']:.0f}",
    "× sdpa": lambda results, name: f"{ratio(results, name):.3f}",
    "× sdpa may be off by, %": lambda results, name: f"{off_by(results, name) * 100:.1f}",
    "spread, %": lambda results, name: f"{results[name]['spread'] * 100:.1f}",
    "in kernels of attention, ms": lambda results, name: f"{sum(results[name]['attention_ms'].values()):.1f}",
    "peak memory, GiB": lambda results, name: f"{results[name]['peak_gib']:.2f}",
}


def show_points(what: str, points: list[dict[str, Any]]) -> None:
    """A table for each of COLUMNS, and the kernels that ran."""
    names = dict.fromkeys(name for point in points for name in [*point["results"], *point["refused"]])
    for column, cell in COLUMNS.items():
        rows = {
            name: [cell(point["results"], name) if name in point["results"] else "-" for point in points]
            for name in names
        }
        print(markdown([f"{what}: {column}", *(str(point["length"]) for point in points)], rows))
    for name in names:
        kernels = dict.fromkeys(k for p in points if name in p["results"] for k in p["results"][name]["attention_ms"])
        print(f"{name}: {', '.join(kernel[:80] for kernel in kernels) or 'no kernels of attention seen'}")
        for point in points:
            if name in point["refused"]:
                print(f"{name}, {point['length']}: {point['refused'][name]}")
    print()


def show_losses(losses: dict[str, list[list[float]]]) -> None:
    """Of the windows, medians of the runs' means, and how far one run is off them at most; and the verdict."""
    runs = {name: torch.tensor(of_one) for name, of_one in losses.items()}
    rows = {name: [f"{loss:.4f}" for loss in (*averaged(run).tolist(), farthest(run))] for name, run in runs.items()}
    head = [f"to {WINDOW * (1 + i)}" for i in range(len(rows[PEERS[0]]) - 1)]
    print(markdown(["mean loss of steps", *head, "one run is off by"], rows))
    wrong = disagreement({name: runs[name] for name in JUDGED}, {name: runs[name] for name in PEERS})
    print(wrong or "ours is within the noise of torch's kernels")


def show(found: dict[str, Any]) -> None:
    for what, part in (("training step", "train"), ("prefill", "prefill"), ("continuous batching", "batches")):
        if part in found:
            show_points(what, found[part])
    for part, of in (("losses", "a smaller model"), ("wide_losses", "layers of 8B")):
        if part in found:
            print(f"losses of {of}")
            show_losses(found[part])


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "train": lambda args: measure_training(speed_model(args.layers), args.lengths, args.rounds),
    "prefill": lambda args: measure_prefill(speed_model(args.layers), args.lengths, args.rounds),
    "batches": lambda args: measure_batches(speed_model(args.layers), REQUESTS, args.rounds),
    "losses": lambda args: measure_losses(LEARNS, STEPS, "cuda", LEARNING_RUNS),
    "wide_losses": lambda args: measure_losses(LEARNS_WIDE, STEPS, "cuda", LEARNING_RUNS, LEARNING_RATE_WIDE),
}


def speed_model(layers: int) -> Any:
    return model_of(replace(SHAPE, layers=layers), torch.bfloat16, "cuda")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.models", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, help="result file to write (JSON)")
    parser.add_argument("--show", type=Path, help="print the tables of a result file, and measure nothing")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--layers", type=int, default=SHAPE.layers, help="of the model that is timed")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=5, help=f"of {RUNS} runs of each, interleaved")
    parser.add_argument("--commit", help="of the tree that is measured, if git cannot tell")
    args = parser.parse_args()
    for length in args.lengths:
        if length < 1 or TOKENS % length:
            parser.error(f"--lengths: expected divisors of {TOKENS}, got {length}")
    if args.show:
        show(json.loads(args.show.read_text(encoding="utf-8")))
        return
    if not torch.cuda.is_available():
        sys.exit("bench.models: expected a Hopper card, got none; use --show FILE to see a result file")
    # Without it torch refuses cuBLAS under use_deterministic_algorithms. It is set for all that is measured.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    hf.register()
    found: dict[str, Any] = {
        "provenance": provenance(args.commit) | {"transformers": transformers.__version__},
        "model": asdict(replace(SHAPE, layers=args.layers)),
    }
    for part in args.only:
        found[part] = PARTS[part](args)
        save(found, args.out)
    show(found)


if __name__ == "__main__":
    main()
