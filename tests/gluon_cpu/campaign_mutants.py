"""Every synchronisation operation of the kernels, broken one by one: is it found?

    python -m tests.gluon_cpu.campaign_mutants [--kernel NAME] [--seeds 3] [--only TEXT] [--shard 1/4]

Each wait, arrive, commit, fence, expect, init, invalidation, cluster barrier and store wait is deleted; each count,
byte count, number of pending operations and phase is changed; each barrier of a product is dropped. A mutant runs under
a few schedules of each policy until the machine reports a finding, and under many more if none does. Of the gradients,
other bits than the right kernel's count as found, as these must not depend on the schedule. Prints a line for each, and
ends with status 1 if one survives that EXPLAINED does not explain, or if one is found that it does.
"""

import argparse
import contextlib
import itertools
import re
import sys
import time
import unittest.mock
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import channels
import gluon_cpu
from gluon_attn.device import Device
from gluon_attn.forward.configs import BlackwellConfig, ForwardConfig, HopperConfig
from gluon_attn.forward.launch import launches_of
from gluon_attn.forward.plan import Plan
from gluon_attn.forward.table import blackwell_config, hopper_config
from gluon_attn.kernels.blackwell.forward import kernel as blackwell_kernel
from gluon_attn.kernels.hopper.backward import kernel as backward_kernel
from gluon_attn.kernels.hopper.forward import kernel as hopper_kernel
from gluon_attn.kernels.hopper.transpose import kernel as transpose_kernel
from gluon_attn.problem import Problem
from gluon_cpu import front
from gluon_cpu.compat import GluonASTSource
from gluon_cpu.generate import generate
from gluon_cpu.ir.parse import parse_module
from tests.gluon_cpu.arguments import at_least_one, shard
from tests.gluon_cpu.attention import BackwardRun, Run, TransposeRun, bias_of, kv_scales, normal_qkv
from tests.gluon_cpu.mutants import Mutant, mutants

AnyRun = Run | TransposeRun | BackwardRun


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A compiled kernel and the problems (Sq, Sk) that its mutants are tried on, by one program, row block after row
    block. If V is transposed before, the kernel that does that.

    The config is not the tuning table's, which changes: the lengths are chosen for it. bias: as for `bias_of`.
    """

    head_dim: int
    causal: bool
    lengths: tuple[tuple[int, int], ...]
    config: ForwardConfig
    dtype: torch.dtype = torch.bfloat16
    bias: str = ""

    def runs(self) -> Sequence[AnyRun]:
        device = Device.blackwell() if isinstance(self.config, BlackwellConfig) else Device.hopper()
        options: dict[str, Any] = {"causal": self.causal, "device": device}
        kind: dict[str, Any] = {"head_dim": self.head_dim, "dtype": self.dtype}
        scales = kv_scales(1, 1) if self.dtype.itemsize == 1 else ()
        inputs = [normal_qkv(q_len=q, kv_len=kv, **kind) for q, kv in self.lengths]
        if self.config.transposes_before(self.dtype.itemsize):
            return [transpose_run(*qkv, self.config, device) for qkv in inputs]
        biases = [bias_of(self.bias, *qkv[:2]) for qkv in inputs]
        options |= {"config": self.config, "programs": 1}
        return [Run(*qkv, *scales, bias=bias, **options) for qkv, bias in zip(inputs, biases, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Backward:
    """One of the kernels of the gradients, as `BackwardRun` names them, and the problems (Sq, Sk) that its mutants are
    tried on, all launched each time. The main one, or a part of it, is one program and, for the first problem once
    more, two, of which one waits for the other; or, if it is deterministic, one for each key block. With `sharers`, so
    many programs share the key blocks of the first problem. head_dim_v: None: as Q's. bias: as for `bias_of`."""

    head_dim: int
    head_dim_v: int | None = None
    lengths: tuple[tuple[int, int], ...]
    causal: bool = False
    deterministic: bool = False
    which: str = "main"
    sharers: int = 0
    bias: str = ""

    def runs(self) -> Sequence[AnyRun]:
        columns: dict[str, Any] = {"head_dim": self.head_dim, "head_dim_v": self.head_dim_v}
        inputs = [
            normal_qkv(heads=2, kv_heads=1, q_len=q, kv_len=kv, dtype=torch.float16, **columns)
            for q, kv in self.lengths
        ]
        kind: dict[str, Any] = {"causal": self.causal, "deterministic": self.deterministic, "which": self.which}
        biases = [bias_of(self.bias, *qkv[:2]) for qkv in inputs]
        runs = [
            BackwardRun(*qkv, bias=bias, programs=self.sharers or 1, **kind)
            for qkv, bias in zip(inputs, biases, strict=True)
        ]
        assert all(run.sharers == self.sharers for run in runs)
        if self.which not in ("before", "after") and not self.deterministic and not self.sharers:
            runs.insert(0, BackwardRun(*inputs[0], bias=biases[0], programs=2, **kind))
        for run in runs:
            run.keep_bits()
        return runs


def transpose_run(q: Tensor, k: Tensor, v: Tensor, config: ForwardConfig, device: Device) -> TransposeRun:
    plan = Plan.of(Problem.of(q, k, v), config, device)
    before, _ = launches_of(plan, q, k, v, q)
    return TransposeRun(plan, v, before)


# Lengths such that, under a causal mask, every role has a second masked block in some row block, and skips one in
# another; that row blocks have one key block, where nothing but the channel of the queries orders one after another, or
# two, where nothing but the channel of the keys orders the first key block of one after the last but one; and that a
# role skips right after a row block of two, where it could release a slot before another has released its last lap.
# On Blackwell, queries to a CTA; a ring of three slots, which a row block of two key blocks walks around already. Three
# row blocks of one to five key blocks; row blocks of one, where nothing is rescaled; row blocks of two.
BLACKWELL_LENGTHS = ((700, 600), (520, 100), (600, 250))
# Of the gradients, by head dim: several row blocks, and key blocks of which the last is not whole, and so masked; one
# row block and several key blocks.
BACKWARD_LENGTHS = {64: ((400, 200), (100, 300)), 128: ((200, 200), (60, 300)), 256: ((200, 150), (60, 180))}
KERNELS: dict[str, Kernel | Backward] = {
    "two CTAs, turns": Kernel(
        head_dim=64,
        causal=True,
        lengths=((1160, 1229), (1600, 100), (768, 694), (800, 446)),
        config=hopper_config(2, 128, 2, 2, 232, turns=True, early_exp=2, num_ctas=2),
    ),
    "one CTA, turns": Kernel(
        head_dim=64,
        causal=True,
        lengths=((580, 649), (800, 100), (400, 517), (384, 387), (400, 416), (400, 420)),
        config=hopper_config(3, 128, 2, 2, 160, turns=True, early_exp=1),
    ),
    "one CTA, no turns": Kernel(
        head_dim=128,
        causal=False,
        lengths=((390, 650), (500, 100), (600, 200)),
        config=hopper_config(2, 128, 2, 2, 232),
    ),
    "two CTAs, O staged in Q": Kernel(
        head_dim=256,
        causal=False,
        lengths=((500, 330), (800, 60), (800, 100)),
        config=hopper_config(2, 64, 1, 2, 232, stage_in_queries=True, num_ctas=2),
    ),
    "one CTA, one role": Kernel(
        head_dim=64,
        causal=True,
        lengths=((290, 390), (400, 100), (192, 320)),
        config=hopper_config(1, 128, 2, 2, 232),
    ),
    "one CTA, fp8": Kernel(
        head_dim=64,
        causal=True,
        lengths=((580, 649), (400, 100), (384, 387), (400, 300), (400, 446)),
        config=hopper_config(2, 128, 2, 2, 216, transpose_registers=56),
        dtype=torch.float8_e4m3fn,
    ),
    "two CTAs, fp8, turns": Kernel(
        head_dim=64,
        causal=True,
        lengths=((1160, 1229), (1600, 100), (768, 694), (800, 446)),
        config=hopper_config(2, 128, 2, 2, 216, turns=True, num_ctas=2, transpose_registers=56),
        dtype=torch.float8_e4m3fn,
    ),
    "one CTA, turns, bias": Kernel(
        head_dim=64,
        causal=True,
        lengths=((580, 649), (800, 100), (400, 517), (384, 387)),
        config=hopper_config(2, 128, 2, 2, 232, turns=True, early_exp=2, integer_max=True),
        bias="a row each",
    ),
    "one CTA, bias of a row": Kernel(
        head_dim=64,
        causal=True,
        lengths=((390, 520), (500, 100), (256, 400)),
        config=hopper_config(2, 64, 2, 2, 232),
        bias="one row",
    ),
    "fp8, V transposed before": Kernel(
        head_dim=64,
        causal=False,
        lengths=((1, 333), (1, 100)),
        config=hopper_config(2, 128, 2, 2, 232),
        dtype=torch.float8_e4m3fn,
    ),
    **{
        f"Blackwell, {name}": Kernel(
            head_dim=64,
            causal=True,
            # The last is one row block, whose query tile 0 has masked key blocks and, in a cluster, unmasked ones.
            lengths=(*((q * num_ctas, kv) for q, kv in BLACKWELL_LENGTHS), (256 * num_ctas, 325 * num_ctas)),
            config=blackwell_config(slots, 192, num_ctas=num_ctas, exp_pieces=4, early_p=True, exp_turns=True),
        )
        for name, num_ctas, slots in (("one CTA", 1, 3), ("two CTAs", 2, 3), ("four CTAs", 4, 3))
    },
    **{
        f"gradients, D={head_dim}, {mask}{order}": Backward(
            head_dim=head_dim, lengths=lengths, causal=mask == "causal", deterministic=bool(order)
        )
        for head_dim, lengths in BACKWARD_LENGTHS.items()
        for mask in ("full", "causal")
        for order in ("", ", in order")
    },
    **{
        f"gradients, D=128, {mask}, shared{order}": Backward(
            head_dim=128,
            # Full, the last key block is masked. Causal, one share has no row blocks, another several without a mask.
            lengths=((512, 200 if mask == "full" else 256),),
            causal=mask == "causal",
            deterministic=bool(order),
            sharers=4 if order else 3,
        )
        for mask in ("full", "causal")
        for order in ("", ", in order")
    },
    **{
        f"gradients, D=192/128, {which}, {mask}{order}": Backward(
            head_dim=192,
            head_dim_v=128,
            lengths=BACKWARD_LENGTHS[128],
            causal=mask == "causal",
            deterministic=bool(order),
            which=which,
        )
        for which, mask, order in (
            ("dv", "full", ""),
            ("dv", "causal", ", in order"),
            ("main", "causal", ""),
            ("main", "full", ", in order"),
        )
    },
    **{
        f"gradients, D=192/128, {which}, full, shared": Backward(
            head_dim=192, head_dim_v=128, lengths=((512, 200),), sharers=3, which=which
        )
        for which in ("dv", "main")
    },
    **{
        f"gradients, D={head_dim}, bias, {bias}": Backward(
            head_dim=head_dim, lengths=BACKWARD_LENGTHS[head_dim], causal=True, bias=bias
        )
        for head_dim, bias in ((64, "a row each"), (64, "one row"), (256, "a row each"))
    },
    **{
        f"gradients, kernel {which}, D={head_dim}": Backward(
            head_dim=head_dim, lengths=lengths, deterministic=True, which=which
        )
        for head_dim, lengths in BACKWARD_LENGTHS.items()
        for which in ("before", "after")
    },
}


@dataclass(frozen=True)
class Explanation:
    """Mutants that are right kernels: "kernel | name of the mutant" matches `pattern`, from its beginning on."""

    pattern: str
    reason: str


HOPPER = Path(str(hopper_kernel.__file__)).parent
HOPPER_TRANSPOSE = Path(str(transpose_kernel.__file__)).parent
BACKWARD = Path(str(backward_kernel.__file__)).parent
BLACKWELL = Path(str(blackwell_kernel.__file__)).parent
CHANNELS = Path(str(channels.__file__)).parent


def line_of(folder: Path, file: str, text: str, which: slice = slice(None)) -> str:
    """A pattern for `file:line` of the lines of a kernel's or the channels' file that read like this, or of some."""
    lines = (folder / file).read_text(encoding="utf-8").splitlines()
    found = [str(number) for number, line in enumerate(lines, 1) if line.strip() == text]
    assert found, f"no line of {file} reads {text!r}"
    return rf"{re.escape(file)}:({'|'.join(found[which])})\b"


FIRST, LAST = slice(1), slice(-1, None)
ON_HOPPER, ON_BLACKWELL = r"(?!Blackwell|gradients)[^|]*", r"Blackwell[^|]*"


def in_load(text: str, which: slice = slice(None)) -> str:
    return line_of(HOPPER, "load.py", text, which)


def in_softmax(text: str, which: slice = slice(None)) -> str:
    return line_of(HOPPER, "softmax.py", text, which)


FREED = line_of(CHANNELS, "shared_memory.py", "mbarrier.wait(self.freed.index(at.slot()), at.previous_lap())")
ACQUIRED = line_of(CHANNELS, "shared_memory.py", "self.channel.wait_until_free(at)", FIRST)
WITHOUT_TURNS = "|".join(
    name
    for name, kernel in KERNELS.items()
    if isinstance(kernel, Kernel) and isinstance(kernel.config, HopperConfig) and not kernel.config.turns
)
TURNS_INIT = line_of(CHANNELS, "signals.py", "init_barriers(self.sent, signal_arrivals(sending_roles=1))")
LAST_FENCE = line_of(CHANNELS, "barriers.py", "cluster_fence()", LAST)
LAST_STORE_WAIT = in_softmax(
    "tma.wait_stores_read()  # before the role ends: what its stores still read must not go away"
)
ORDERED_BY_TURNS = "|".join(
    (
        in_softmax("q_slot, queries = queries.acquire()"),
        in_softmax("v, values = ends.values.acquire()", FIRST),
    )
)
KEYS_BY_TURNS = in_softmax("k, keys = ends.keys.acquire()")
BIAS_READ = in_softmax("k.release_accessed()")

WAITED_AGAIN = in_softmax(
    "ends.values.wait_again()  # passes at once, but the assembler moves no exponential past its branch"
)

SKIPS = "|".join(
    line_of(HOPPER, "wires.py", text) for text in ("k, keys = self.keys.acquire()", "v, values = self.values.acquire()")
)

LOADED_ONCE = line_of(HOPPER_TRANSPOSE, "kernel.py", "slot, empty = empty.acquire()")
FILLED_INIT = line_of(CHANNELS, "shared_memory.py", "init_barriers(self.filled, filled_arrivals(filling_roles=1))")
FREED_INIT = line_of(CHANNELS, "shared_memory.py", "init_barriers(self.freed, freed_arrivals(self.CONSUMERS))")

HELD_FIRST = line_of(BLACKWELL, "mma.py", "held, scores = wires.scores.producer(QUERY_TILE).acquire()")
FIRST_TURN = line_of(BLACKWELL, "softmax.py", "ends = ends.take_turn()", FIRST)

FIRST_KEY = line_of(BLACKWELL, "copies.py", "k, keys_values = keys_values.acquire()", FIRST)
SECOND_QUERY = line_of(BLACKWELL, "copies.py", "q, queries = queries.acquire()", slice(1, 2))
QUERIES_DRAIN = line_of(BLACKWELL, "copies.py", "queries.drain()")
KEYS_DRAIN = line_of(BLACKWELL, "copies.py", "keys_values.drain()")

GRADIENTS, IN_ORDER = r"gradients, D=[^|]*", r"gradients, D=[^|]*, in order"
LOADED_BEFORE = line_of(BACKWARD, "preprocess.py", "slot, _ = loaded.producer().acquire()")
KEYS_LOADED = line_of(BACKWARD, "load.py", "kv, keys_values = keys_values.acquire()")
DOUT_LOADED = line_of(BACKWARD, "load.py", "dout, douts = douts.acquire()")
KEYS_RELEASED = line_of(BACKWARD, "gradient.py", "kv_slot.release()")
ROWS_FOR_ALL = "full, shared|causal, shared, in order"  # each share has row blocks
ROW_OF_DBIAS = line_of(
    BACKWARD,
    "gradient.py",
    'gl.atomic_add(dbias + first + key, gl.sum(ds, axis=1), mask=key < keys.sequence.k_len, sem="relaxed")',
)
ZEROS_LOADED = line_of(BACKWARD, "load.py", "zeros, douts = douts.acquire()")
QUERIES_AGAIN = line_of(
    BACKWARD,
    "gradient.py",
    "ends.queries.wait_again()  # which passes at once: past it the assembler would move half of the exponentials",
)
LAST_DOUT_RELEASED = line_of(BACKWARD, "gradient.py", "do_slot.release()", LAST)
GRIDS_WAITED_FOR = line_of(BACKWARD, "reduce.py", "gdc_wait()")
HANDED_IN = line_of(BACKWARD, "gradient.py", "hand_in(state.dk, state.dv, operands)")

EXPLAINED: tuple[Explanation, ...] = (
    Explanation(
        rf"gradients, D=192/128, dv[^|]* \| count .* init_barrier .* ({FILLED_INIT}|{FREED_INIT}).*, (8|9|10) of 10$",
        "the launch of dV has no dQ: of the last channel it uses the memory, and nobody arrives there or waits",
    ),
    Explanation(
        rf"gradients, kernel before[^|]* \| "
        rf"(delete: wait_barrier .* {LOADED_BEFORE}|count .* init_barrier .* {FREED_INIT})",
        "the slot is filled once: its first acquire passes at once, and nobody frees it",
    ),
    Explanation(
        rf"{IN_ORDER} \| (delete: wait_barrier .* {KEYS_LOADED}|delete: arrive_barrier .* {KEYS_RELEASED}|"
        rf"count .* init_barrier .* {FREED_INIT}.*, 1 of \d+$)",
        "in order each program has one key block: the slot of K and V is filled once, and nobody waits for its end",
    ),
    Explanation(
        rf"gradients, D=(128|192/128, \w+), ({ROWS_FOR_ALL})[^|]* \| delete: grid_dependency_wait .* {HANDED_IN}",
        "who has row blocks has waited for what the kernel before wrote; a share of the one kernel left out has none",
    ),
    Explanation(
        rf"gradients, D=64, bias, one row \| delete: atomic_rmw .* {ROW_OF_DBIAS}",
        "it adds to the gradient of the bias and synchronises nothing: without it those numbers are wrong, and no more",
    ),
    Explanation(
        rf"gradients, D=192/128, dv[^|]* \| delete: wait_barrier .* {QUERIES_AGAIN}",
        "the slot has been waited for already: this wait is there for its branch",
    ),
    Explanation(
        rf"gradients, D=192/128, dv[^|]*, in order \| delete: arrive_barrier .* {LAST_DOUT_RELEASED}",
        "in order each program has one key block: after its last dO nobody waits for the slot",
    ),
    Explanation(
        rf"gradients, D=192/128, dv[^|]* \| delete: wait_barrier .* {ZEROS_LOADED}",
        "the slot of K has been acquired before, which is freed after the last dO of the key block before",
    ),
    Explanation(
        rf"gradients, D=192/128, dv[^|]* \| delete: grid_dependency_wait .* {GRIDS_WAITED_FOR}",
        "the loads have waited for the kernel before; only where no program has row blocks nobody else waits for it",
    ),
    Explanation(
        rf"gradients, D=(64|128|192/128, main)[^|]* \| delete: wait_barrier .* {DOUT_LOADED}",
        "dO is released before Q of the same step, whose slot has been acquired before",
    ),
    Explanation(
        rf"one CTA, turns \| delete: wait_barrier .* partition1 at .* < ({SKIPS})",
        "the last role: its turn for the block before came after all others had freed the slot's last lap",
    ),
    Explanation(
        r".* \| delete: barrier #",
        "a barrier among the warps of one role, which the machine runs as one; races between them are the compiler's",
    ),
    Explanation(r".* \| delete: inval_barrier ", "nothing uses a barrier's memory after the end of its life"),
    Explanation(
        rf"({WITHOUT_TURNS}) \| count .* init_barrier .* {TURNS_INIT}",
        "without turns nobody arrives on these barriers or waits for them",
    ),
    Explanation(
        rf".*O staged in Q \| delete: wait_barrier .* {FREED} < {ACQUIRED} < "
        rf"{in_load('k, keys = keys.acquire()', FIRST)}",
        "with one slot of queries, a row block's Q has been waited for, that every role frees after its last keys",
    ),
    Explanation(
        rf".*O staged in Q \| .* async_tma_store_wait .* {LAST_STORE_WAIT}",
        "where O is staged in the tile of Q, each store has been waited for already",
    ),
    Explanation(
        rf"{ON_HOPPER} \| delete: wait_barrier .* {WAITED_AGAIN}",
        "the slot has been waited for already: this wait is there for its branch",
    ),
    Explanation(
        rf"{ON_HOPPER} \| delete: cluster_barrier #\d+ kernel at (kernel|.* {LAST_FENCE})",
        "at the end: the lead waits for every arrival from its peer, and each CTA for every copy into it",
    ),
    Explanation(
        rf"{ON_HOPPER}, turns \| delete: wait_barrier #\d+ partition[01] at (shared_memory\.py:\d+ < )+"
        rf"({ORDERED_BY_TURNS}|{KEYS_BY_TURNS})",
        "the first role waits for the same copy before it hands its turn on, which orders it before the roles after it",
    ),
    Explanation(
        rf"one CTA, turns, bias \| delete: wait_barrier #\d+ partition0 at (shared_memory\.py:\d+ < )+"
        rf"({ORDERED_BY_TURNS})",
        "as without a bias; but for keys, with which comes the bias, that is read before the turn",
    ),
    Explanation(
        rf"one CTA, turns, bias \| delete: fence_async_shared #\d+ default at shared_memory\.py:\d+ < {BIAS_READ}",
        "the second role has its turn once the first has read the bias, and fences before it frees the slot: that is "
        "for both",
    ),
    Explanation(
        rf"{ON_HOPPER}, fp8[^|]* \| delete: wait_barrier .* {in_load('v, values = values.acquire()', FIRST)}",
        "the last V in the slot was transposed before any role freed the keys after it, which have been waited for",
    ),
    Explanation(
        rf"fp8, V transposed before \| (delete: wait_barrier .* {LOADED_ONCE}|count .* init_barrier .* {FREED_INIT})",
        "the slot is filled once: its first acquire passes at once, and nobody frees it",
    ),
    Explanation(
        rf"{ON_BLACKWELL} \| delete: cluster_barrier #\d+ kernel at kernel\.py:\d+$",
        "the compiler's own, at the end: after the kernel's last one no CTA touches another's memory",
    ),
    Explanation(
        rf"{ON_BLACKWELL} \| delete: wait_barrier .* {HELD_FIRST}",
        "passes at once, as nobody has filled the slot before: it is there for the slot that it returns",
    ),
    Explanation(
        rf"{ON_BLACKWELL} \| delete: wait_barrier #\d+ partition0 .* {FIRST_TURN}",
        "query tile 0's first scores are issued after PV of query tile 1's last P, for which tile 1 had taken its turn",
    ),
    Explanation(
        rf"{ON_BLACKWELL} \| delete: wait_barrier .* {SECOND_QUERY}",
        "the first query tile, which has been waited for, was freed after the last product with either",
    ),
    Explanation(
        rf"Blackwell, (one|two)[^|]* \| delete: wait_barrier .* {FIRST_KEY}",  # with four, the other pair frees it too
        "with two slots or more, the slot was freed before the last row block's queries, which have been waited for",
    ),
    Explanation(
        rf"{ON_BLACKWELL} \| delete: wait_barrier .* ({QUERIES_DRAIN}|{KEYS_DRAIN}.*, (1 of [23]|2 of 3)$)",
        "at the end: freed before the last products, which the correction role waits for; the last slot is not",
    ),
)


@contextlib.contextmanager
def instead_of_compiling(replacement: Callable[..., Any]) -> Iterator[None]:
    """Within it, launches get what `replacement` returns, called with the arguments of gluon_cpu's compile step."""
    with unittest.mock.patch.object(sys.modules["gluon_cpu.launch"], "compile_source", replacement):
        yield


class Recorded(Exception):
    """The text is there: nothing is to be run."""


def is_launched(run: AnyRun, kernel: Any, constants: Mapping[Any, Any]) -> bool:
    """Whether this is `run.launch`, and not another of its launches; of one kernel, these differ in their config."""
    build = run.launch.build
    return kernel is build.kernel.fn and build.constants.get("CONFIG") in (None, *constants.values())


def text_of(run: AnyRun) -> str:
    """The lowered text of `run.launch`: with the compiler's memory offsets, fences and cluster barriers."""
    texts: list[str] = []

    def record(kernel: Any, signature: Any, constants: Any, attrs: Any, options: Any, arch: int, mode: str) -> Any:
        if is_launched(run, kernel, constants):
            texts.append(front.build_text(GluonASTSource(kernel, signature, constants, attrs), arch, options, True))
            raise Recorded
        return front.compile_source(kernel, signature, constants, attrs, options, arch, mode)

    with instead_of_compiling(record), contextlib.suppress(Recorded):
        run(mode="lowered")
    return texts[0]


def verdict(runs: Sequence[AnyRun], mutant: Mutant, seeds: Iterable[int]) -> str:
    """What was found first, and under which schedule; "" if nothing was."""
    compiled = front.Compiled(generate(parse_module(mutant.text), True))

    def instead(kernel: Any, signature: Any, constants: Any, *rest: Any) -> Any:
        if is_launched(runs[0], kernel, constants):
            return compiled
        return front.compile_source(kernel, signature, constants, *rest)

    with instead_of_compiling(instead):
        for seed, run, policy in itertools.product(seeds, runs, gluon_cpu.POLICIES):
            schedule = gluon_cpu.Schedule(policy, seed=seed)
            try:
                run(schedule=schedule, mode="lowered")
            except gluon_cpu.Finding as finding:
                return f"{type(finding).__name__} ({policy}, seed {seed})"
            try:
                run.check()
            except AssertionError:
                return f"WRONG NUMBERS, no finding ({policy}, seed {seed})"
            if isinstance(run, BackwardRun) and not run.has_kept_bits():
                return f"other bits ({policy}, seed {seed})"
    return ""


def reason_of(kernel: str, name: str) -> str:
    return next((e.reason for e in EXPLAINED if re.match(e.pattern, f"{kernel} | {name}")), "")


def campaign(
    kernel: str, seeds: int, hunt: int, only: str, shard: tuple[int, int] = (1, 1), before: int = 0
) -> tuple[int, int, int]:
    """(mutants, those tried, unexplained survivors). Of `parts` mutants one is tried, counting on from the `before` of
    the kernels before this one."""
    part, parts = shard
    runs = KERNELS[kernel].runs()
    there = tried = survived = 0
    for mutant in mutants(text_of(runs[0])):
        if only not in mutant.name:
            continue
        there += 1
        if (before + there - part) % parts:
            continue
        tried += 1
        start = time.perf_counter()
        found = verdict(runs, mutant, range(seeds))
        reason = reason_of(kernel, mutant.name)
        if not found and not reason:
            found = verdict(runs, mutant, range(seeds, hunt))
        caught = found and not found.startswith("WRONG")
        if caught and reason:
            print(f"{kernel} | {mutant.name} | is found, but explained as harmless: {reason}")
            survived += 1
        survived += not (caught or reason)
        result = found if caught else f"{found or 'survived'}: {reason or 'NOT EXPLAINED'}"
        print(f"{kernel} | {mutant.name} | {result} | {time.perf_counter() - start:.1f} s", flush=True)
    return there, tried, survived


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="", help="only kernels whose names begin like this; default: all")
    parser.add_argument("--seeds", type=at_least_one, default=3, help="schedules of each policy")
    parser.add_argument("--only", default="", help="only mutants with this in their name")
    parser.add_argument("--hunt", type=int, default=40, help="as many for those that survive without an explanation")
    parser.add_argument("--shard", type=shard, default=(1, 1), help="I/N: part I of N, to run on several machines")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    there = total = survivors = 0
    names = [name for name in KERNELS if name.startswith(options.kernel)]
    if not names:
        parser.error(f"--kernel: no name begins with {options.kernel!r}; there are {', '.join(KERNELS)}")
    for name in names:
        of_kernel, tried, survived = campaign(name, options.seeds, options.hunt, options.only, options.shard, there)
        there, total, survivors = there + of_kernel, total + tried, survivors + survived
    if not total:
        part, parts = options.shard
        print(f"part {part} of {parts} has no mutant: {there} have {options.only!r} in their names")
        return 2
    print(f"{total} mutants, {survivors} survived without an explanation")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
