"""`python -m bench.counters`: time and profiler's counts of the three ways to store O that docs/epilogues.md explains.

The kernel is that of bench/epilogues.py. Counting runs this command again, under ncu (Nsight Compute).
"""

import argparse
import csv
import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.epilogues import HEAD_DIMS, PROGRAMS, WAYS, Way, machine_counts, run
from bench.provenance import SEED, output_of, provenance
from bench.timing import time_interleaved

METRICS = {
    # Cycles lost at the data banks that shared memory and L1 have in common. `arbitration`: those of all that others
    # won, tensor cores and copies among them; the rest is due to the addresses. Counted in passes of their own.
    "shared_store_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "shared_load_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "global_store_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_gds_op_st.sum",
    "all_conflicts": "l1tex__data_bank_conflicts_pipe_lsu.sum",
    "arbitration": "l1tex__data_bank_conflicts_type_arbitration.sum",
    # What threads store. A request is an instruction of a warp; local memory has what was spilled.
    "global_store_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "global_store_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "local_store_sectors": "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum",
    # What leaves the processors, by threads and by TMA. A sector written in part counts in full, in bytes too.
    "sectors_to_l2": "l1tex__m_l1tex2xbar_write_sectors.sum",
    "bytes_to_l2": "l1tex__m_l1tex2xbar_write_bytes.sum",
    # What arrives at L2: from the processors, and in all, with what one half of L2 passes on to the other.
    "l2_sectors_from_sm": "lts__t_sectors_srcunit_tex_op_write.sum",
    "l2_sectors": "lts__t_sectors_op_write.sum",
    "l2_requests": "lts__t_requests_op_write.sum",
    # Instructions of warps, of every role.
    "instructions": "smsp__inst_executed.sum",
}
CHOICE = ["--profile-from-start", "off", "--clock-control", "none", "--metrics", ",".join(METRICS.values())]
FORMAT = ["--csv", "--page", "raw", "--print-units", "base"]
NCU_SECONDS = 120
OUTPUT_BYTES = 2**26
HEADS = 32


@dataclass(frozen=True)
class Variant:
    """A launch that is counted: O of 64 MiB in bf16, in HEADS heads, stored in that way."""

    head_dim: int
    way: Way

    @property
    def length(self) -> int:
        return OUTPUT_BYTES // (2 * self.head_dim * HEADS)

    def call(self) -> Callable[[], None]:
        """The launch, its tensors made."""
        torch.manual_seed(SEED)
        x = torch.randn(self.length, self.head_dim, dtype=torch.bfloat16, device="cuda")
        w = torch.randn(HEADS, self.head_dim, self.head_dim, dtype=torch.bfloat16, device="cuda")
        o = x.new_empty(HEADS, self.length, self.head_dim)
        return lambda: run(x, w, o, self.way)


VARIANTS = [Variant(head_dim, way) for head_dim in HEAD_DIMS for way in reversed(WAYS)]


def launch_all() -> None:
    for variant in VARIANTS:
        call = variant.call()
        call()  # loads the kernel; only the next one is counted
        torch.cuda.synchronize()
        with torch.cuda.profiler.profile():
            call()
            torch.cuda.synchronize()


def recorded(call: Callable[[], None]) -> Callable[[], None]:
    """The call as a CUDA graph: the host's share of a launch is longer than these kernels run."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return functools.partial(replay, graph, call)


def replay(graph: torch.cuda.CUDAGraph, call: Callable[[], None]) -> None:
    """call: what the graph was recorded from. A graph keeps addresses only; the call holds the tensors."""
    graph.replay()


def timed() -> list[float]:
    """Median microseconds of each variant, the three ways of a head dim by rounds, the L2 cache cold."""
    found = []
    for head_dim in HEAD_DIMS:
        calls: dict[str, Callable[[], object]] = {v.way: recorded(v.call()) for v in VARIANTS if v.head_dim == head_dim}
        times = time_interleaved(calls)
        found += [times[v.way].median * 1e6 for v in VARIANTS if v.head_dim == head_dim]
    return found


def profiled() -> str:
    """What ncu prints. Raises SystemExit if there is none, or if it fails."""
    ncu = shutil.which("ncu")
    if ncu is None:
        sys.exit("bench.counters: needs ncu (Nsight Compute, of the CUDA toolkit), found none in PATH")
    command = [ncu, *CHOICE, *FORMAT, sys.executable, "-m", "bench.counters", "--child"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NCU_SECONDS)
    except subprocess.TimeoutExpired:
        sys.exit(f"bench.counters: ncu was not done after {NCU_SECONDS} s; nothing was written")
    printed = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in printed:
        fix = "run it as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        sys.exit(f"bench.counters: ncu may not read the card's counters (ERR_NVGPUCTRPERM); {fix}")
    if done.returncode:
        sys.exit(f"bench.counters: ncu failed with exit status {done.returncode}:\n{printed[-3000:]}")
    return done.stdout


def parse(printed: str, launches: int) -> list[dict[str, int]]:
    """The counts of each launch, in order, by their names in METRICS. Raises SystemExit if any is missing."""
    lines = list(csv.reader(line for line in printed.splitlines() if line.startswith('"')))
    names, rows = (lines[0], lines[2:]) if lines else ([], [])  # the second line has the units
    if len(rows) != launches:
        sys.exit(f"bench.counters: expected {launches} launches from ncu, got {len(rows)}:\n{printed[-3000:]}")
    found = []
    for row in rows:
        cells = dict(zip(names, row, strict=True))
        counts = {name: cells.get(metric, "").replace(",", "") for name, metric in METRICS.items()}
        missing = [METRICS[name] for name, count in counts.items() if not count.isdecimal()]
        if missing:
            sys.exit(f"bench.counters: expected counts of every metric from ncu, got none of {', '.join(missing)}")
        found.append({name: int(count) for name, count in counts.items()})
    return found


def entry(variant: Variant, microseconds: float, counts: dict[str, int]) -> dict[str, Any]:
    return {
        "head_dim": variant.head_dim,
        "way": variant.way,
        "microseconds": round(microseconds, 2),
        "sectors_per_output_sector": round(counts["sectors_to_l2"] / (OUTPUT_BYTES // 32), 3),
        "sectors_per_l2_request": round(counts["l2_sectors"] / counts["l2_requests"], 3),
    } | counts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.counters", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/latest_counters.json"), help="the result file")
    parser.add_argument("--commit", help="commit of the measured tree, where git cannot tell")
    parser.add_argument("--child", action="store_true", help="what ncu is given to run: only launch the kernels")
    args = parser.parse_args()
    found = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit(f"bench.counters: needs a Hopper card, found {found}; nothing was counted")
    if args.child:
        return launch_all()
    # Timed first: what it compiles, ncu's run finds in the cache.
    times, counted = timed(), parse(profiled(), len(VARIANTS))
    entries = [entry(*row) for row in zip(VARIANTS, times, counted, strict=True)]
    for key in entries[0]:
        print(f"{key:26}" + "".join(f"{e[key]:>16,}" if key in METRICS else f"{e[key]:>16}" for e in entries))
    report = {
        "provenance": provenance(args.commit) | {"ncu": output_of("ncu", "--version").rpartition("\n")[2]},
        "kernel": "the kernel of this page",
        "output_bytes": OUTPUT_BYTES,
        "programs": PROGRAMS * HEADS,
        "metrics": METRICS,
        "machine_code": [{"head_dim": v.head_dim, "way": v.way} | machine_counts(v.head_dim, v.way) for v in VARIANTS],
        "variants": entries,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
