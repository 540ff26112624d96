"""Right kernels under many schedules: no finding, and the same numbers under each.

    python -m tests.gluon_cpu.campaign_silent [--seeds 200] [--only TEXT] [--shard 1/4] [--seconds N] [...]

They are those of the tuning table, in code and in files, and, with names that begin with "gradients", the three of each
backward pass; of both, with a bias too ("bias" in their names). With names that begin with "feature", those with masks,
changed scores, sinks and packed sequences. And, with names that begin with "twins", the right twins of small kernels
with a bug.
Prints a line for each kernel and dtype and one with the sum, and ends with status 1 at the first finding.
"""

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

import gluon_cpu
from gluon_attn.backward.configs import HopperBackward
from gluon_attn.device import Device
from gluon_attn.forward.configs import BlackwellConfig, HopperConfig
from gluon_attn.forward.table import BLACKWELL_UNLIKE, OTHER_HEAD_DIMS, TABLE, Row
from gluon_attn.tuning import gradient_kernels_of_cards, kernels_of_cards
from tests.gluon_cpu.arguments import at_least_one, shard
from tests.gluon_cpu.attention import BackwardRun, Run, bias_of, kv_scales, normal_qkv
from tests.gluon_cpu.features import FEATURES, FeatureBackwardRun, FeatureCall, FeatureRun
from tests.gluon_cpu.twins import TWINS, Twin

HOPPER, BLACKWELL, BLACKWELL_ULTRA = Device.hopper(), Device.blackwell(), Device.blackwell_ultra()
DEVICES = {device.arch: device for device in (HOPPER, BLACKWELL, BLACKWELL_ULTRA)}
# Of other head dims nobody has timed, most configs are alike.
TIMED = (*TABLE, *(row for row in OTHER_HEAD_DIMS if row.result_file is not None))
DTYPES = {1: (torch.float8_e4m3fn, torch.float8_e5m2), 2: (torch.bfloat16, torch.float16)}


def run_of(row: Row, dtype: torch.dtype) -> Run:
    """The smallest launch in which programs walk several row blocks and every ring comes around. Odd lengths."""
    config = row.config
    kind: dict[str, Any] = {"head_dim": row.padded_head_dim, "head_dim_v": row.padded_head_dim_v, "dtype": dtype}
    if isinstance(config, BlackwellConfig):
        # Two row blocks, a head each, for one program. Five key blocks: 20 tiles of K and V, of 16 slots at most.
        q, k, v = normal_qkv(heads=2, q_len=256 * config.num_ctas - 15, kv_len=601, **kind)
        scales = kv_scales(1, 2) if row.element_bytes == 1 else ()
        programs = None if config.dynamic else 1
    else:
        assert isinstance(config, HopperConfig)
        # Or two heads: pairs of the first one's row blocks, and then those of the second one by one.
        heads, q_len = (
            (2, 5 * config.block_m - 15)
            if getattr(config, "last_heads_longest_first", False) and row.causal
            else (4, 333)
        )
        q, k, v = normal_qkv(heads=heads, kv_heads=heads // 2, q_len=q_len, kv_len=401, **kind)
        scales = kv_scales(1, heads // 2) if row.element_bytes == 1 else ()
        programs = 2 // config.num_ctas
        row_blocks = heads * -(-q_len // config.block_m) // programs
        assert row_blocks > config.query_slots, f"the queries' ring does not come around in {row_blocks} row blocks"
    device = DEVICES[config.archs[0]]
    return Run(q, k, v, *scales, causal=row.causal, device=device, config=config, programs=programs)


def schedules(seeds: Iterable[int], policies: Iterable[str]) -> Iterator[gluon_cpu.Schedule]:
    return itertools.starmap(gluon_cpu.Schedule, ((policy, seed) for seed in seeds for policy in policies))


def checked_once(
    run: Run | BackwardRun | FeatureRun | FeatureBackwardRun,
    numbers: Callable[[], Iterable[torch.Tensor]],
    **kept: Any,
) -> Twin:
    """The numbers of the first run are compared with float64. kept: options of each run."""
    checked = False

    def launched(**options: Any) -> list[torch.Tensor]:
        nonlocal checked
        run(**kept, **options)
        if not checked:
            run.check()
            checked = True
        return [tensor.clone() for tensor in numbers()]

    return launched


def of_the_table(row: Row, dtype: torch.dtype) -> Twin:
    """The row's kernel."""
    run = run_of(row, dtype)
    return checked_once(run, lambda: (run.out, run.lse))


# Of gradients, by head dim: queries and keys. Of 192 V has fewer columns, and dV a launch of its own.
LENGTHS = {64: (400, 300), 128: (200, 300), 192: (200, 300), 256: (200, 150)}


def columns_of(head_dim: int) -> dict[str, Any]:
    return {"head_dim": head_dim, "head_dim_v": 128 if head_dim == 192 else head_dim}


def of_gradients(head_dim: int, causal: bool, deterministic: bool, config: HopperBackward | None = None) -> Twin:
    """The backward's kernels, with several row blocks and three key blocks, and two heads to a KV head. Two programs
    claim key blocks and add to each row block, one of them twice. If it is deterministic, the bits of dQ too are the
    same under every schedule."""
    q_len, kv_len = LENGTHS[head_dim]
    dtype = torch.float16 if causal else torch.bfloat16
    qkv = normal_qkv(heads=2, kv_heads=1, q_len=q_len, kv_len=kv_len, dtype=dtype, **columns_of(head_dim))
    run = BackwardRun(*qkv, causal=causal, deterministic=deterministic, programs=2, config=config)
    return checked_once(run, run.bits)


SHARED = {  # head dim: queries, keys, programs that share two key blocks, in a fixed order too
    64: (1024, 200, 3, 4),
    128: (512, 200, 3, 4),
    192: (512, 200, 3, 4),
    256: (512, 100, 3, 4),
}


def of_shared(head_dim: int, causal: bool, deterministic: bool, config: HopperBackward | None = None) -> Twin:
    """The same with two key blocks that three programs share, of which one ends the first and begins the second; or, in
    a fixed order, four."""
    q_len, kv_len, *programs = SHARED[head_dim]
    heads = 6 if head_dim == 256 else 2  # of fewer, causal, these key blocks have too few steps
    qkv = normal_qkv(heads=heads, kv_heads=1, q_len=q_len, kv_len=kv_len, **columns_of(head_dim))
    run = BackwardRun(*qkv, causal=causal, deterministic=deterministic, programs=programs[deterministic], config=config)
    assert run.shared_parts == programs[deterministic]
    return checked_once(run, run.bits)


# Head dim: queries, keys, of two key blocks that are in four parts.
IN_FOUR_PARTS = {64: (1536, 256), 128: (768, 256), 192: (768, 256), 256: (768, 128)}


def of_several_parts(head_dim: int, deterministic: bool) -> Twin:
    """Two programs run at a time: so each claims two parts, or one of them three."""
    q_len, kv_len = IN_FOUR_PARTS[head_dim]
    qkv = normal_qkv(heads=1, kv_heads=1, q_len=q_len, kv_len=kv_len, **columns_of(head_dim))
    run = BackwardRun(*qkv, causal=False, deterministic=deterministic, programs=4)
    assert run.shared_parts == 4
    return checked_once(run, run.bits, resident=2)


# Head dim: query heads, tokens, programs that there are processors for.
MORE_PARTS = {64: (4, 1024, 9), 128: (4, 512, 5), 192: (8, 768, 7), 256: (8, 512, 9)}


def of_more_parts(head_dim: int) -> Twin:
    """Causal, in any order: key blocks of one KV head in more parts than there are processors. Two programs run at a
    time."""
    heads, length, programs = MORE_PARTS[head_dim]
    qkv = normal_qkv(heads=heads, kv_heads=1, q_len=length, kv_len=length, **columns_of(head_dim))
    run = BackwardRun(*qkv, causal=True, deterministic=False, programs=programs)
    assert run.shared_parts > programs
    return checked_once(run, run.bits, resident=2)


def of_bias(head_dim: int, kind: str) -> Twin:
    """The forward kernel with a bias, in the table's config: programs walk several row blocks, of several key blocks.
    kind: as for `bias_of`."""
    q, k, v = normal_qkv(heads=4, kv_heads=2, q_len=333, kv_len=401, head_dim=head_dim)
    run = Run(q, k, v, causal=True, programs=2, bias=bias_of(kind, q, k))
    return checked_once(run, lambda: (run.out, run.lse))


def of_bias_on_blackwell(head_dim: int, kind: str) -> Twin:
    q, k, v = normal_qkv(heads=4, kv_heads=2, q_len=533, kv_len=401, head_dim=head_dim)
    run = Run(q, k, v, causal=True, programs=2, bias=bias_of(kind, q, k), device=Device.blackwell())
    return checked_once(run, lambda: (run.out, run.lse))


def of_unlike_head_dims(row: Row) -> Twin:
    """A row for V's head dim unlike Q's: as `of_bias`, but without one."""
    head_dim, head_dim_v = row.head_dims
    dtype = torch.bfloat16 if row.element_bytes == 2 else torch.float8_e4m3fn
    ctas = row.config.num_ctas
    q, k, v = normal_qkv(
        heads=2, kv_heads=1, q_len=533 * ctas, kv_len=401, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype
    )
    scales = kv_scales(1, 1) if row.element_bytes == 1 else ()
    arch = row.config.archs[0]
    device = Device.blackwell() if arch == 100 else Device.blackwell_ultra()
    run = Run(q, k, v, *scales, causal=row.causal, programs=2, config=row.config, device=device)
    return checked_once(run, lambda: (run.out, run.lse))


def of_gradients_with_bias(head_dim: int, kind: str) -> Twin:
    """`of_gradients`, with a bias and its gradient. kind: as for `bias_of`."""
    q_len, kv_len = LENGTHS[head_dim]
    q, k, v = normal_qkv(heads=2, kv_heads=1, q_len=q_len, kv_len=kv_len, **columns_of(head_dim))
    run = BackwardRun(q, k, v, causal=True, deterministic=False, programs=2, bias=bias_of(kind, q, k))
    return checked_once(run, run.bits)


def with_bias() -> dict[str, Callable[[], Twin]]:
    kinds: tuple[tuple[str, Callable[[int, str], Twin], tuple[int, ...]], ...] = (
        ("sm_90", of_bias, (64, 128, 256)),
        ("gradients", of_gradients_with_bias, (64, 128, 256)),
        ("sm_100", of_bias_on_blackwell, (64, 128)),
    )
    return {
        f"{name} D={head_dim} causal bias {kind}": functools.partial(of_kind, head_dim, kind)
        for name, of_kind, head_dims in kinds
        for head_dim, kind in itertools.product(head_dims, ("a row each", "one row"))
    }


def with_unlike_head_dims() -> dict[str, Callable[[], Twin]]:
    """On Blackwell, of sm_100 the causal rows, of sm_103 the others."""
    return {
        f"{name_of(row, torch.bfloat16 if row.element_bytes == 2 else torch.float8_e4m3fn)} V's {row.head_dims[1]}": (
            functools.partial(of_unlike_head_dims, row)
        )
        for row in BLACKWELL_UNLIKE
        if row.causal == (row.config.archs[0] == 100)
    }


def of_feature(name: str, device: Device, head_dim: int, num_ctas: int, dtype: torch.dtype) -> Twin:
    """The forward kernel with a feature, in the table's config: programs walk several row blocks, of several key
    blocks; lengths as in `run_of`."""
    if device.arch == 90:
        call = FeatureCall(name, (333, 401), head_dim=head_dim, dtype=dtype)
        run = FeatureRun(call, device=device, programs=2 // num_ctas, num_ctas=num_ctas)
    else:
        call = FeatureCall(name, (256 * num_ctas - 15, 601), heads=2, kv_heads=2, head_dim=head_dim, dtype=dtype)
        run = FeatureRun(call, device=device, programs=1, num_ctas=num_ctas)
    return checked_once(run, run.bits)


def of_gradients_with_feature(name: str, head_dim: int, deterministic: bool, shared: bool) -> Twin:
    """`of_gradients`, or `of_shared`, with a feature; the former with four key blocks, none of which is shared."""
    q_len, kv_len, *programs = SHARED[head_dim] if shared else (*FOUR_KEY_BLOCKS[head_dim], 2, 2)
    call = FeatureCall(name, (q_len, kv_len), heads=2, kv_heads=1, head_dim=head_dim)
    run = FeatureBackwardRun(call, deterministic=deterministic, programs=programs[deterministic])
    assert run.shared_parts == (programs[deterministic] if shared else 0)
    return checked_once(run, run.bits)


FOUR_KEY_BLOCKS = {64: (400, 400), 128: (200, 400), 256: (200, 220)}
FP8 = torch.float8_e4m3fn
OF_FEATURES: dict[str, tuple[Device, int, int, torch.dtype]] = {  # head dim, CTAs, dtype
    "Hopper, D=64": (HOPPER, 64, 1, torch.float16),
    "Hopper, D=128": (HOPPER, 128, 1, torch.float16),
    "Hopper, D=256": (HOPPER, 256, 1, torch.float16),
    "Hopper, D=64, 2 CTAs": (HOPPER, 64, 2, torch.float16),
    "Hopper, D=64, e4m3": (HOPPER, 64, 1, FP8),
    "Hopper, D=256, e4m3": (HOPPER, 256, 1, FP8),  # V is transposed before
    "Blackwell, D=64": (BLACKWELL, 64, 1, torch.float16),
    "Blackwell, D=128, 2 CTAs": (BLACKWELL, 128, 2, torch.float16),
    "Blackwell, D=64, 4 CTAs": (BLACKWELL, 64, 4, torch.float16),
    "Blackwell, D=128, e4m3": (BLACKWELL, 128, 1, FP8),
}
# Under these no key block is shared: too few rows see each, or it is not known how many.
NEVER_SHARED = {name for name in FEATURES if name.startswith(("window", "wide", "chunk", "packed"))}
NEVER_SHARED |= {"documents", "documents, alternating"}


def with_features() -> dict[str, Callable[[], Twin]]:
    found: dict[str, Callable[[], Twin]] = {}
    for name, (kind, of) in itertools.product(FEATURES, OF_FEATURES.items()):
        found[f"feature {name}: {kind}"] = functools.partial(of_feature, name, *of)
    for name, head_dim, deterministic in itertools.product(FEATURES, (64, 128, 256), (False, True)):
        order = ", in order" * deterministic
        of_kind = functools.partial(of_gradients_with_feature, name, head_dim, deterministic)
        found[f"feature {name}: backward, D={head_dim}{order}"] = functools.partial(of_kind, False)
        if name not in NEVER_SHARED and head_dim == 128:
            found[f"feature {name}: backward, D={head_dim}, shared{order}"] = functools.partial(of_kind, True)
    return found


def gradients() -> dict[str, Callable[[], Twin]]:
    """With the configs in code, and with those of files, each with and without a mask."""
    configs: list[tuple[str, int, HopperBackward | None]] = [("", head_dim, None) for head_dim in LENGTHS]
    for row_name, row in gradient_kernels_of_cards().items():
        configs.append((f" {row_name}", row.head_dims[0], row.config))
    found: dict[str, Callable[[], Twin]] = {}
    for (name, of_kind), (of_row, head_dim, config), causal, deterministic in itertools.product(
        (("", of_gradients), (", shared", of_shared)), configs, (False, True), (False, True)
    ):
        kind = f"{'causal' if causal else 'full'}{' in order' if deterministic else ''}{name}{of_row}"
        found[f"gradients D={head_dim} {kind}"] = functools.partial(of_kind, head_dim, causal, deterministic, config)
    for head_dim, deterministic in itertools.product(IN_FOUR_PARTS, (False, True)):
        name = f"gradients D={head_dim} full{' in order' * deterministic}, several parts"
        found[name] = functools.partial(of_several_parts, head_dim, deterministic)
    for head_dim in MORE_PARTS:
        found[f"gradients D={head_dim} causal, more parts than programs"] = functools.partial(of_more_parts, head_dim)
    return found


def watch(
    name: str,
    run: Twin,
    chosen: Iterable[gluon_cpu.Schedule],
    seconds: float = float("inf"),
    mode: str | None = None,
) -> int:
    """Run a kernel under these schedules, or for some seconds: under how many. Raises what is found."""
    start, first, runs = time.time(), None, 0
    for schedule in chosen:
        numbers = run(schedule=schedule, mode=mode)
        first = numbers if first is None else first
        for got, want in zip(numbers, first, strict=True):
            assert torch.equal(bytes_of(got), bytes_of(want)), f"{name}: other numbers under {schedule}"
        runs += 1
        if time.time() > start + seconds:
            break
    print(f"{name:<60} {runs} schedules, no finding, {time.time() - start:.0f} s", flush=True)
    return runs


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """For a comparison in which NaN equals itself."""
    return tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor


def name_of(row: Row, dtype: torch.dtype) -> str:
    config, mask = row.config, "causal" if row.causal else "full"
    roles = f" {config.softmax_roles} roles" if isinstance(config, HopperConfig) else ""
    kind = f"{config.num_ctas} CTAs{roles} {str(dtype).removeprefix('torch.')}"
    return f"sm_{config.archs[0]} D={row.padded_head_dim} {mask} {kind}"


def kernels() -> dict[str, Callable[[], Twin]]:
    """Every kernel by its name; what runs it is made when it is its turn, as it holds the inputs."""
    table: dict[str, Callable[[], Twin]] = {}
    for i, row in enumerate(TIMED):
        for dtype in DTYPES[row.element_bytes]:
            # Rows may differ in no more than slots or registers, so each has its number in the table.
            table[f"{name_of(row, dtype)} row {i}"] = functools.partial(of_the_table, row, dtype)
    for name, row in kernels_of_cards().items():
        for dtype in DTYPES[row.element_bytes]:
            table[f"{name_of(row, dtype)} {name}"] = functools.partial(of_the_table, row, dtype)
    return {
        **table,
        **gradients(),
        **with_bias(),
        **with_features(),
        **with_unlike_head_dims(),
        **{name: functools.partial(TWINS.__getitem__, name) for name in TWINS},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=at_least_one, default=200, help="schedules of each policy")
    parser.add_argument("--first", type=int, default=0, help="seed, to go on where an earlier run ended")
    parser.add_argument("--policies", nargs="+", choices=gluon_cpu.POLICIES, default=gluon_cpu.POLICIES)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most, for each kernel and dtype")
    parser.add_argument("--lowered", action="store_true", help="kernels of one CTA in lowered mode, as the others are")
    parser.add_argument("--only", default="", help="only names with this in them, as in 'sm_100 D=64' or 'twins'")
    parser.add_argument("--shard", type=shard, default=(1, 1), help="I/N: part I of N, to run on several machines")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    part, parts = options.shard
    chosen = {name: make for name, make in kernels().items() if options.only in name}
    if not chosen:
        print(f"no kernel has {options.only!r} in its name; the first is {next(iter(kernels()))!r}")
        return 2
    seeds, mode = range(options.first, options.first + options.seeds), "lowered" if options.lowered else None
    mine = list(chosen)[part - 1 :: parts]
    if not mine:
        print(f"part {part} of {parts} has no kernel: there are {len(chosen)}")
        return 2
    runs = 0
    for name in mine:
        try:
            runs += watch(name, chosen[name](), schedules(seeds, options.policies), options.seconds, mode)
        except gluon_cpu.Finding as finding:
            print(f"{name}: replay with {finding.schedule!r}:\n{finding}")
            return 1
    print(f"{len(mine)} kernels, {runs} schedules, no finding")
    return 0


if __name__ == "__main__":
    sys.exit(main())
