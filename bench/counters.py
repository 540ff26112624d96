"""`python -m bench.counters`: what the profiler counts when O is stored in each of the three ways of docs/epilogues.md.

It runs itself under ncu (Nsight Compute), which reads the counters of one launch of each kernel.
"""

import argparse
import csv
import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from bench.candidates import label
from bench.peers import ours
from bench.points import DTYPES, Point
from bench.precompile import precompile
from bench.provenance import output_of, provenance
from gluon_attn.forward.configs import HopperTile
from gluon_attn.forward.table import HOPPER

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
}
CHOICE = ["--profile-from-start", "off", "--clock-control", "none", "--metrics", ",".join(METRICS.values())]
FORMAT = ["--csv", "--page", "raw", "--print-units", "base"]


def tiles_of(head_dim: int) -> list[HopperTile]:
    """The table's tile for every length, no mask, 16 bits and one CTA; that, and O stored in the other ways."""
    kind = (head_dim, False, 2, 1, False)
    rows = (r for r in HOPPER if (r.padded_head_dim, r.causal, r.element_bytes, r.min_kv_len, r.one_round) == kind)
    tma = next(r.tile for r in rows if isinstance(r.tile, HopperTile) and r.tile.num_ctas == 1)
    registers = dataclasses.replace(tma, epilogue="registers", stage_in_queries=False)
    return [tma, dataclasses.replace(tma, epilogue="rows"), registers]


POINTS = [Point(head_dim=head_dim, causal=False, length=2048) for head_dim in (64, 128, 256)]
VARIANTS = [(point, tile) for point in POINTS for tile in tiles_of(point.head_dim)]


def launch_all() -> None:
    for point, tile in VARIANTS:
        call = ours(point, point.tensors(), tile=tile)
        call()  # loads the kernel; only the next one is counted
        torch.cuda.synchronize()
        with torch.cuda.profiler.profile():
            call()
            torch.cuda.synchronize()


def profiled() -> str:
    """What ncu prints. Raises SystemExit if there is none, or if it fails."""
    ncu = shutil.which("ncu")
    if ncu is None:
        sys.exit("bench.counters: needs ncu (Nsight Compute, of the CUDA toolkit), found none in PATH")
    command = [ncu, *CHOICE, *FORMAT, sys.executable, "-m", "bench.counters", "--child"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
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


def entry(point: Point, tile: HopperTile, counts: dict[str, int]) -> dict[str, Any]:
    row_bytes = point.head_dim * DTYPES[point.dtype].itemsize + 4  # of O and LSE
    sectors = point.batch * point.heads * point.length * row_bytes // 32
    ratios = {
        "sectors_per_output_sector": round(counts["sectors_to_l2"] / sectors, 3),
        "sectors_per_l2_request": round(counts["l2_sectors"] / counts["l2_requests"], 3),
    }
    return {"name": point.name, "epilogue": tile.epilogue, "tile": label(tile)} | ratios | counts


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
    jobs = [(DTYPES[point.dtype], point.head_dim, point.causal, tile) for point, tile in VARIANTS]
    print(f"compiled {len(list(precompile(jobs, arch=90)))} kernels", flush=True)
    counted = parse(profiled(), len(VARIANTS))
    entries = [entry(point, tile, counts) for (point, tile), counts in zip(VARIANTS, counted, strict=True)]
    for key in entries[0]:
        print(f"{key:26}" + "".join(f"{e[key]:>23,}" if key in METRICS else f"{e[key]:>23}" for e in entries))
    made = provenance(args.commit) | {"ncu": output_of("ncu", "--version").rpartition("\n")[2]}
    args.out.write_text(json.dumps({"provenance": made, "metrics": METRICS, "variants": entries}, indent=1) + "\n")
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
