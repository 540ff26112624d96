"""Mutants that are right kernels, and why: by the kernel, the operation, and the line where it is."""

import re
from dataclasses import dataclass
from pathlib import Path

import channels
from gluon_attn.forward.configs import HopperConfig
from gluon_attn.kernels.blackwell.forward import kernel as blackwell_kernel
from gluon_attn.kernels.hopper.backward import kernel as backward_kernel
from gluon_attn.kernels.hopper.forward import kernel as hopper_kernel
from gluon_attn.kernels.hopper.transpose import kernel as transpose_kernel
from tests.gluon_cpu.mutated_kernels import KERNELS, Featured, Kernel


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
    if isinstance(kernel, Kernel | Featured) and isinstance(kernel.config, HopperConfig) and not kernel.config.turns
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

KEYS_SKIPPED = line_of(HOPPER, "wires.py", "k, keys = self.keys.acquire()")
VALUES_SKIPPED = line_of(HOPPER, "wires.py", "v, values = self.values.acquire()")
SKIPS = f"{KEYS_SKIPPED}|{VALUES_SKIPPED}"

SKIPS_LATE = in_softmax("ends = ends.skip()", slice(1))
SKIPS_EARLY = in_softmax("ends = ends.skip()", LAST)

LOADED_ONCE = line_of(HOPPER_TRANSPOSE, "kernel.py", "slot, empty = empty.acquire()")
FILLED_INIT = line_of(CHANNELS, "shared_memory.py", "init_barriers(self.filled, filled_arrivals(filling_roles=1))")
FREED_INIT = line_of(CHANNELS, "shared_memory.py", "init_barriers(self.freed, freed_arrivals(self.CONSUMERS))")

HELD_FIRST = line_of(BLACKWELL, "mma.py", "held, scores = wires.scores.producer(QUERY_TILE).acquire()")
FIRST_TURN = line_of(BLACKWELL, "softmax.py", "ends = ends.take_turn()", FIRST)

FIRST_KEY = line_of(BLACKWELL, "copies.py", "k, keys_values = keys_values.acquire_keys()", FIRST)
SECOND_QUERY = line_of(BLACKWELL, "copies.py", "q, queries = queries.acquire()", slice(1, 2))
QUERIES_DRAIN = line_of(BLACKWELL, "copies.py", "queries.drain()")
KEYS_DRAIN = line_of(BLACKWELL, "copies.py", "keys_values.drain()")

GRADIENTS = r"gradients, D=[^|]*"
LOADED_BEFORE = line_of(BACKWARD, "preprocess.py", "slot, _ = loaded.producer().acquire()")
DOUT_LOADED = line_of(BACKWARD, "load.py", "dout, douts = douts.acquire()")
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
GRIDS_WAITED_FOR = line_of(BACKWARD, "reduce.py", "gdc_wait()")

TOLD_BEFORE_WAITING = line_of(BACKWARD, "reduce.py", "sums = sums.told()", FIRST)
SHARED_IN_ORDER = r"gradients, D=[^|]*, shared, in order"
STATISTICS_WAITED_FOR = line_of(
    BACKWARD,
    "load.py",
    "gdc_wait()  # for the statistics, which the kernel before computes; passes at once after the first wait",
)
CLAIM_ACQUIRED = line_of(BACKWARD, "work.py", "slot, end = end.acquire()")
CLAIM_TOLD = line_of(BACKWARD, "work.py", "slot.publish()")
CLAIM_READ = line_of(BACKWARD, "work.py", "slot.release_accessed()")
LIST_WAITED_FOR = line_of(
    BACKWARD,
    "work.py",
    "gdc_wait()  # for the kernel that sets the count to 0; and, in all roles, for the list of packed sequences",
)
FIRST_CLAIM = line_of(
    BACKWARD, "work.py", "return claim(order, claims.producer() if CLAIMS else claims.consumer(), CLAIMS)"
)
NEXT_CLAIM = line_of(BACKWARD, "work.py", "following = claim(self.order, self.end[0], self.CLAIMS)")
ALL_ADDED = line_of(BACKWARD, "finish.py", "tma.wait_stores_done()")
SUMS_LOADED = line_of(BACKWARD, "finish.py", "slot, next_sums = next_sums.acquire()")


EXPLAINED: tuple[Explanation, ...] = (
    Explanation(
        rf"gradients, D=[^|]*, in order \| .*async_tma_store_wait .* {ALL_ADDED}",
        "in a fixed order the reduce role has waited for its last addition already, to tell of it",
    ),
    Explanation(
        rf"gradients, D=(128|192/128, \w+), full, shared[^|]* \| delete: wait_barrier #\d+ partition0 .* {NEXT_CLAIM}",
        "each part has more steps than the rings have slots: when load has asked for the last, the other roles have "
        "begun, and so have read the claim",
    ),
    Explanation(
        rf"{GRADIENTS} \| delete: wait_barrier .* {SUMS_LOADED}",
        "the finish role itself frees each slot of sums before it fills it again: the wait passes at once",
    ),
    Explanation(
        rf"{SHARED_IN_ORDER} \| .*(async_tma_store_wait|atomic_rmw) .* {TOLD_BEFORE_WAITING}",
        "of two key blocks nobody waits for the one that waits",
    ),
    Explanation(
        rf"{GRADIENTS} \| delete: fence_async_shared .* ({CLAIM_TOLD}|{CLAIM_READ})",
        "what is claimed is stored and read by threads: no engine sees it",
    ),
    Explanation(
        rf"(?![^|]*window){GRADIENTS} \| release -> relaxed: atomic_rmw .* {TOLD_BEFORE_WAITING}",
        "who waits has added, not stored: its exchange hands on the release of who stored, and sums do not race; with "
        "a window it may have stored, where its keys are the first that a row block sees",
    ),
    Explanation(
        rf"{GRADIENTS} \| delete: grid_dependency_wait .* ({STATISTICS_WAITED_FOR}|{GRIDS_WAITED_FOR})",
        "the load role has waited before its first claim, of which it has told the others",
    ),
    Explanation(
        rf"gradients, D=64, packed[^|]* \| delete: grid_dependency_wait #\d+ (default|partition1) at {LIST_WAITED_FOR}",
        "the load role has waited before its first claim, which the other roles wait for before they read the list",
    ),
    Explanation(
        rf"{GRADIENTS} \| delete: wait_barrier #\d+ partition0 .* {CLAIM_ACQUIRED} < {FIRST_CLAIM}",
        "the first claim's slot is free: its first acquire passes at once",
    ),
    Explanation(
        rf"gradients, D=192/128, dv[^|]* \| count .* init_barrier .* ({FILLED_INIT}|{FREED_INIT}).*, ([89]|10) of 1.$",
        "the launch of dV has no dQ: of the last channel it uses the memory, and nobody arrives there or waits",
    ),
    Explanation(
        rf"gradients, kernel before[^|]* \| "
        rf"(delete: wait_barrier .* {LOADED_BEFORE}|count .* init_barrier .* {FREED_INIT})",
        "the slot is filled once: its first acquire passes at once, and nobody frees it",
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
        rf"gradients, D=192/128, dv[^|]* \| delete: wait_barrier .* {ZEROS_LOADED}",
        "the slot of K has been acquired before, which is freed after the last dO of the key block before",
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
        rf"(window|documents), [^|]* \| delete: wait_barrier #\d+ \w+ at (shared_memory\.py:\d+ < )+"
        rf"{KEYS_SKIPPED} < {SKIPS_EARLY}",
        "V of the block before, which has been waited for, is loaded after these keys",
    ),
    Explanation(
        rf"documents, [^|]*, turns \| delete: wait_barrier #\d+ partition0 at (shared_memory\.py:\d+ < )+"
        rf"({SKIPS}) < {SKIPS_LATE}",
        "the last role: its turn for the block before came after the first had freed the slot's last lap",
    ),
    Explanation(
        rf"(window|documents), [^|]*, turns \| delete: wait_barrier #\d+ partition0 at (shared_memory\.py:\d+ < )+"
        rf"{VALUES_SKIPPED} < {SKIPS_EARLY}",
        "the last role: its turn came after the first had freed the slot's last lap, in the step before",
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
        rf"{ON_BLACKWELL} \| delete: wait_barrier .* ({QUERIES_DRAIN}|{KEYS_DRAIN}.*, (1 of [23]|2 of 3|[123] of 4)$)",
        "at the end: freed before the last products, which the correction role waits for; the last slot is not",
    ),
)


def reason_of(kernel: str, name: str) -> str:
    return next((e.reason for e in EXPLAINED if re.match(e.pattern, f"{kernel} | {name}")), "")
