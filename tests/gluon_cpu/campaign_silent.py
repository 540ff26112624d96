"""Every kernel of the tuning table under many schedules: no finding, and the same numbers under each.

    python -m tests.gluon_cpu.campaign_silent [--seeds 200]

Prints a line for each kernel and dtype, and ends with status 1 at the first finding.
"""

import argparse
import dataclasses
import sys
import time

import torch

import gluon_cpu
from gluon_attn import attention
from gluon_attn.device import Device
from gluon_attn.tuning import TABLE, Row
from tests.gpu.checks import check

POLICIES = ("random", "late", "early", "pct", "starve")
# Few programs, so that each walks several tiles. Odd lengths, more keys than queries.
DEVICE = dataclasses.replace(Device.hopper(), sm_count=4)
Q_LEN, KV_LEN = 333, 401


def watch(row: Row, dtype: torch.dtype, seeds: int) -> str:
    """Run `row`'s kernel under `seeds` schedules of each policy. Raises what is found."""
    torch.manual_seed(0)
    q = torch.randn(1, 4, Q_LEN, row.padded_head_dim, dtype=dtype)
    k, v = (torch.randn(1, 2, KV_LEN, row.padded_head_dim, dtype=dtype) for _ in range(2))
    start, first, runs = time.time(), None, 0
    for seed in range(seeds):
        for policy in POLICIES:
            with gluon_cpu.machine(schedule=gluon_cpu.Schedule(policy, seed)):
                found = attention(q, k, v, causal=row.causal, tile=row.tile, device=DEVICE, return_lse=True)
            if first is None:
                check(q, k, v, *found, causal=row.causal)
                first = found
            assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True)), f"other numbers: {policy} {seed}"
            runs += 1
    name = f"D={row.padded_head_dim} {'causal' if row.causal else 'full'} {row.tile.num_ctas} CTAs {dtype}"
    return f"{name:<40} {runs} schedules, no finding, {time.time() - start:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="schedules of each policy")
    seeds = parser.parse_args().seeds
    for row in TABLE:
        for dtype in (torch.bfloat16, torch.float16):
            try:
                print(watch(row, dtype, seeds), flush=True)
            except gluon_cpu.Finding as finding:
                sys.exit(f"{row}: {dtype}: replay with {finding.schedule!r}:\n{finding}")


if __name__ == "__main__":
    main()
