"""Every kernel of the tuning table under many schedules: no finding, and the same numbers under each.

    python -m tests.gluon_cpu.campaign_silent [--seeds 200] [--only TEXT] [--seconds N] [--lowered] [...]

Prints a line for each kernel and dtype, and ends with status 1 at the first finding.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

import gluon_cpu
from gluon_attn.device import Device
from gluon_attn.forward.configs import BlackwellTile, HopperTile
from gluon_attn.forward.table import TABLE, Row
from tests.gluon_cpu.attention import Run, kv_scales, normal_qkv

POLICIES = ("random", "late", "early", "pct", "starve")
HOPPER, BLACKWELL, BLACKWELL_ULTRA = Device.hopper(), Device.blackwell(), Device.blackwell_ultra()
DEVICES = {device.arch: device for device in (HOPPER, BLACKWELL, BLACKWELL_ULTRA)}
DTYPES = {1: (torch.float8_e4m3fn, torch.float8_e5m2), 2: (torch.bfloat16, torch.float16)}


def run_of(row: Row, dtype: torch.dtype) -> Run:
    """The smallest launch in which programs walk several tiles and every ring comes around. Odd lengths."""
    tile = row.tile
    kind: dict[str, Any] = {"head_dim": row.padded_head_dim, "dtype": dtype}
    if isinstance(tile, BlackwellTile):
        # Two tiles, a head each, for one program. Five key blocks: 20 tiles of K and V, the longest ring has 16 slots.
        q, k, v = normal_qkv(heads=2, q_len=256 * tile.num_ctas - 15, kv_len=601, **kind)
        scales = kv_scales(1, 2) if row.element_bytes == 1 else ()
        programs = None if tile.dynamic else 1
    else:
        assert isinstance(tile, HopperTile)
        # Or two heads: pairs of the first one's row blocks, and then those of the second one by one.
        heads, q_len = (
            (2, 5 * tile.block_m - 15) if getattr(tile, "last_heads_in_turn", False) and row.causal else (4, 333)
        )
        q, k, v = normal_qkv(heads=heads, kv_heads=heads // 2, q_len=q_len, kv_len=401, **kind)
        scales = kv_scales(1, heads // 2) if row.element_bytes == 1 else ()
        programs = 2 // tile.num_ctas
        tiles = heads * -(-q_len // tile.block_m) // programs
        assert tiles > tile.query_slots, f"the ring of the queries does not come around in {tiles} tiles"
    device = DEVICES[tile.archs[0]]
    return Run(q, k, v, *scales, causal=row.causal, device=device, tile=tile, programs=programs)


def schedules(seeds: Iterable[int], policies: Iterable[str]) -> Iterator[gluon_cpu.Schedule]:
    return itertools.starmap(gluon_cpu.Schedule, ((policy, seed) for seed in seeds for policy in policies))


def watch(
    row: Row,
    dtype: torch.dtype,
    chosen: Iterable[gluon_cpu.Schedule],
    seconds: float = float("inf"),
    mode: str | None = None,
) -> str:
    """Run `row`'s kernel under these schedules, or for some seconds. Raises what is found."""
    run = run_of(row, dtype)
    start, first, runs = time.time(), None, 0
    for schedule in chosen:
        run(schedule=schedule, mode=mode)
        if first is None:
            run.check()
            first = run.out.clone(), run.lse.clone()
        same = all(torch.equal(a, b) for a, b in zip(first, (run.out, run.lse), strict=True))
        assert same, f"other numbers under {schedule}"
        runs += 1
        if time.time() > start + seconds:
            break
    return f"{name_of(row, dtype):<60} {runs} schedules, no finding, {time.time() - start:.0f} s"


def name_of(row: Row, dtype: torch.dtype) -> str:
    tile, mask = row.tile, "causal" if row.causal else "full"
    roles = f" {tile.softmax_roles} roles" if isinstance(tile, HopperTile) else ""
    kind = f"{tile.num_ctas} CTAs{roles} {str(dtype).removeprefix('torch.')}"
    return f"sm_{tile.archs[0]} D={row.padded_head_dim} {mask} {kind}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="schedules of each policy")
    parser.add_argument("--first", type=int, default=0, help="seed, to go on where an earlier run ended")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most, for each kernel and dtype")
    parser.add_argument("--lowered", action="store_true", help="kernels of one CTA in lowered mode, as the others are")
    parser.add_argument("--only", default="", help="only kernels with this in their name, as in 'sm_100 D=64'")
    options = parser.parse_args()
    torch.set_num_threads(1)
    mode = "lowered" if options.lowered else None
    chosen = [
        (row, dtype) for row in TABLE for dtype in DTYPES[row.element_bytes] if options.only in name_of(row, dtype)
    ]
    if not chosen:
        sys.exit(f"no kernel has {options.only!r} in its name, which is like {name_of(TABLE[0], torch.bfloat16)!r}")
    for row, dtype in chosen:
        try:
            seeds = range(options.first, options.first + options.seeds)
            print(watch(row, dtype, schedules(seeds, options.policies), options.seconds, mode), flush=True)
        except gluon_cpu.Finding as finding:
            sys.exit(f"{row}: {dtype}: replay with {finding.schedule!r}:\n{finding}")


if __name__ == "__main__":
    main()
