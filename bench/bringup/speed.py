"""What is timed on a card: against what torch has, and lever by lever against the tuning table."""

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.peers import BACKENDS, sdpa
from bench.points import Point
from bench.precompile import precompile
from bench.provenance import clocks
from bench.timing import Timing, time_interleaved
from gluon_attn import ForwardConfig, attention
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.testing import check

from . import cases, device_at_hand, levers
from .runner import Notes

LENGTHS = (1024, 4096, 16384)
LEVER_LENGTH = 4096
ROUNDS = 9
CHECKED_ROWS = 512  # of the first head, against float64

Calls = dict[str, Callable[[], Any]]


def working(notes: Notes, what: str, calls: Calls) -> tuple[Calls, list[str]]:
    """Those of the calls that run, and the names of those that fail, unless there is no kernel for them; with the
    errors noted. Hangs are for the step's time limit."""
    good: Calls = {}
    bad: list[str] = []
    for name, call in calls.items():
        print(f"{what}: {name}", flush=True)
        try:
            call()
            torch.cuda.synchronize()
        except (RuntimeError, ValueError, AssertionError) as error:
            notes.put(f"{what}: {name} failed", str(error)[:2000])
            notes.say(f"{what}: {name} failed: {(str(error).strip().splitlines() or [''])[0][:150]}")
            if not isinstance(error, NotImplementedError):  # which is a RuntimeError
                bad.append(name)
        else:
            good[name] = call
    return good, bad


def run_checked(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """The last rows of one head: under the mask, which is aligned to the bottom right, they stand for themselves."""
    out, lse = attention(q, k, v, **options, return_lse=True)
    rows = slice(-CHECKED_ROWS, None)
    one = q[:1, :1, rows], k[:1, :1], v[:1, :1]
    check(*one, out[:1, :1, rows], lse[:1, :1, rows], causal=options["causal"])


def partials(*qkv: Tensor, **options: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A call of attention, once checked and once to be timed."""
    return functools.partial(run_checked, *qkv, **options), functools.partial(attention, *qkv, **options)


def sweep(head_dim: int, causal: bool, notes: Notes) -> None:
    """bf16, and where there is a kernel e4m3, against torch's SDPA in bf16, in the same rounds."""
    wrong: list[str] = []
    for length in LENGTHS:
        point = Point(head_dim=head_dim, causal=causal, length=length)
        q, k, v = point.tensors()
        what = f"S={length}"
        sdpas: Calls = {name: functools.partial(sdpa, backend, q, k, v, causal) for name, backend in BACKENDS.items()}
        baselines, _ = working(notes, what, sdpas)
        ours = {"ours": partials(q, k, v, causal=causal)}
        ours |= {f"ours, {n} CTAs": partials(q, k, v, causal=causal, num_ctas=n) for n in device_at_hand.cta_counts()}
        ours["ours, e4m3"] = partials(*dataclasses.replace(point, dtype="e4m3").arguments([q, k, v]), causal=causal)
        right, failed = working(notes, what, {name: checked for name, (checked, _) in ours.items()})
        wrong += (f"{what}, {name}" for name in failed)
        calls = baselines | {name: ours[name][1] for name in right}
        timings = time_interleaved(calls, rounds=ROUNDS)
        found = {
            name: {
                "ms": timing.median * 1e3,
                "tflops": point.flops / timing.median / 1e12,
                "spread": timing.spread,
                **{f"times {b}": timings[b].median / timing.median for b in baselines},
            }
            for name, timing in timings.items()
        }
        notes.put(what, {"clocks": clocks(), "timed": found})
        for name, row in found.items():
            ratios = ", ".join(f"{row[f'times {b}']:.3f} times {b}" for b in baselines)
            notes.say(f"{what}: {name}: {row['tflops']:.0f} TFLOP/s ±{row['spread'] / 2:.1%}; {ratios}")
    assert not wrong, f"wrong, or did not run: {'; '.join(wrong)}"


# ---------------------------------------------------------------------------------------------------------------------
# Levers
# ---------------------------------------------------------------------------------------------------------------------

TABLE = "table"


def gains(timings: dict[str, Timing]) -> dict[str, float]:
    """Of each variant: how many times the table's speed it has, less 1."""
    return {name: timings[TABLE].median / timing.median - 1 for name, timing in timings.items() if name != TABLE}


def noise(timings: dict[str, Timing], name: str) -> float:
    """What a gain must exceed: the spreads of both, each half to a side, added."""
    return (timings[TABLE].spread + timings[name].spread) / 2


def winners(timings: dict[str, Timing]) -> list[str]:
    """The variants that are faster than the table beyond the noise, the fastest first."""
    gained = gains(timings)
    return sorted((name for name in gained if gained[name] > noise(timings, name)), key=lambda n: -gained[n])


def combined(table: ForwardConfig, configs: dict[str, ForwardConfig], names: list[str]) -> ForwardConfig:
    """The table's config with the changes of all these variants: of a field the first one's, and only what is valid."""
    changes: levers.Change = {}
    for name in names:
        further = {**levers.differences(table, configs[name]), **changes}
        try:
            dataclasses.replace(table, **further)
        except ValueError:
            continue
        changes = further
    return dataclasses.replace(table, **changes)


def compare_levers(head_dim: int, causal: bool, notes: Notes) -> None:
    """Each lever turned on its own against the table's config; then the gains together: a proposal for the table."""
    q, k, v = Point(head_dim=head_dim, causal=causal, length=LEVER_LENGTH).tensors()
    table = cases.table_config(q.dtype, head_dim, causal, None, LEVER_LENGTH)
    configs = {TABLE: table, **levers.variants(table, device_at_hand.device().arch)}
    configs |= {
        f"{n} CTAs": cases.table_config(q.dtype, head_dim, causal, n, LEVER_LENGTH)
        for n in device_at_hand.cta_counts()
        if n != table.num_ctas
    }

    wrong: list[str] = []

    def timed(named: dict[str, ForwardConfig]) -> dict[str, Timing]:
        both = {name: partials(q, k, v, causal=causal, config=config) for name, config in named.items()}
        right, failed = working(notes, "lever", {name: checked for name, (checked, _) in both.items()})
        wrong.extend(failed)
        assert TABLE in right, "the table's own config does not run"
        calls = {name: both[name][1] for name in right}
        return time_interleaved(calls, rounds=ROUNDS)

    try:
        for _ in precompile(
            {(q.dtype, head_dim, head_dim, Mask(causal=causal), config) for config in configs.values()},
            device_at_hand.device().arch,
        ):
            pass
    except Exception as error:  # it only saves time: what does not compile is found below, by name
        notes.say(f"compiling ahead failed: {error}")
    timings = timed(configs)
    notes.put("table", device_at_hand.fields_of(table))
    notes.put("gains", {n: {"gain": g, "noise": noise(timings, n)} for n, g in gains(timings).items()})
    for name, gain in sorted(gains(timings).items(), key=lambda item: -item[1]):
        notes.say(f"{gain:+.1%} (noise {noise(timings, name):.1%}): {name}")

    candidates = {name: configs[name] for name in winners(timings)[:1]}
    together = combined(table, configs, [name for name in winners(timings) if not name.endswith("CTAs")])
    if together not in (table, *candidates.values()):
        candidates["together: " + levers.label(table, together)] = together
    final = timed({TABLE: table, **candidates})
    best = next(iter(winners(final)), TABLE)
    notes.put("proposal", device_at_hand.fields_of(configs[TABLE] if best == TABLE else candidates[best]))
    if best == TABLE:
        notes.say("proposal: the table as it is")
    else:
        notes.say(f"proposal: {best}: {gains(final)[best]:+.1%} (noise {noise(final, best):.1%})")
    notes.put("median_ms", {name: statistics.median(t.round_medians) * 1e3 for name, t in final.items()})
    assert not wrong, f"wrong, or did not run: {'; '.join(wrong)}"
