"""`python -m gluon_attn explain`: which row of the tuning table serves a problem, and why; what its launch is."""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from . import tuning
from .backward import table as backward
from .backward.configs import label as backward_label
from .backward.launch import main_kernels
from .backward.plan import BackwardPlan
from .backward.table import BackwardRow
from .bias import row_stride
from .demo import card, say, while_read
from .device import Device
from .explain_times import measured_lines, rows_like
from .forward.configs import REGISTERS_PER_SM, BlackwellConfig, ForwardConfig, HopperConfig, label
from .forward.launch import compiled_for
from .forward.plan import Plan
from .forward.table import Row, all_take_the_same, pick_config, pick_row
from .problem import Problem
from .resources import resources
from .runtime.compat import CompiledKernel
from .score_mod import alibi, kind_of, softcap
from .sizes import as_asked
from .tensors import FP8_DTYPES, NAMED_DTYPES

DEVICES = {
    "h200": Device.hopper(),
    "h100": Device(name="NVIDIA H100 80GB HBM3", capability=(9, 0), sm_count=132, smem_bytes=232448),
    "b200": Device.blackwell(),
    "b300": Device.blackwell_ultra(),
}
LARGEST_NUMEL = 2**60  # of a tensor, whose bytes torch counts in int64
RESULTS = Path(__file__).parents[1] / "bench" / "results"  # in a checkout
EXAMPLES = """examples:
  python -m gluon_attn explain --shape 4,16,4096,128 --causal --device h200
  python -m gluon_attn explain --shape 3,12,3000,96 --kv-heads 4 --device h100
  python -m gluon_attn explain --shape 1,32,1,128 --kv-length 8192 --dtype fp16
  python -m gluon_attn explain --shape 4,16,4096,128 --table my_card.json --compile
  python -m gluon_attn explain --shape 4,16,4096,128 --causal --device h200 --backward
"""


def main(arguments: Sequence[str]) -> None:
    command = parser()
    options = command.parse_args(arguments)
    device = DEVICES[options.device] if options.device else card()
    if device is None:
        command.error(f"--device: expected one of {', '.join(DEVICES)}, as there is no card")
    if options.backward and options.num_ctas is not None:
        command.error("--num-ctas: expected none with --backward, whose kernels have one CTA; leave it out")
    try:
        problem = problem_of(options.shape, options)
        if options.table:
            tuning.load(options.table)
        if options.backward:
            lines = explained_backward(problem, device, RESULTS)
        else:
            lines = explained(problem, device, options.num_ctas, RESULTS)
        with while_read():
            for line in lines:
                say(line)
            if options.compile:
                for name, kernel in compiled_here(problem, device, options.num_ctas, options.backward).items():
                    for line in machine_code(name, kernel):
                        say(line)
    except (OSError, ValueError, NotImplementedError) as error:
        command.error(str(error))


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="python -m gluon_attn explain",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--shape", type=shape, required=True, metavar="B,H,S,D", help="of q: batch, query heads, queries, head dim"
    )
    add_problem_options(command)
    command.add_argument("--backward", action="store_true", help="of its gradients")
    command.add_argument("--num-ctas", type=int, metavar="N", help="insist on so many CTAs to a cluster")
    command.add_argument("--device", choices=DEVICES, help="default: the card here")
    command.add_argument("--table", metavar="FILE", help="with that table file in front, as tuning.load puts it")
    command.add_argument("--compile", action="store_true", help="compile the kernel, and say what it takes")
    return command


def add_problem_options(command: argparse.ArgumentParser) -> None:
    """What a problem has besides the shape of q."""
    command.add_argument("--kv-heads", type=int, metavar="N", help="default: as many as query heads")
    command.add_argument("--kv-length", type=int, metavar="N", help="keys; default: as many as queries")
    command.add_argument("--head-dim-v", type=int, metavar="D", help="of V; default: Q's")
    command.add_argument("--dtype", choices=NAMED_DTYPES, default="bf16", help="of q, k and v (default: bf16)")
    command.add_argument("--causal", action="store_true", help="with a causal mask")
    command.add_argument(
        "--window",
        type=window,
        default=(None, None),
        metavar="LEFT,RIGHT",
        help="keys before a query's own and after it, a side without a limit left empty; 1023,0: 1024 keys, causal",
    )
    command.add_argument("--chunk", type=int, metavar="N", help="keys of a chunk, of which a query sees its own")
    scores = command.add_mutually_exclusive_group()
    scores.add_argument("--softcap", type=float, metavar="CAP", help="scores are capped softly")
    scores.add_argument("--alibi", action="store_true", help="scores fall with distance, by a slope of each head")
    scores.add_argument("--bias", action="store_true", help="a bias (1, 1, Sq, Sk) is added to scores")


def window(text: str) -> tuple[int | None, int | None]:
    """(left, right) as L,R, where a side without a limit is left empty."""
    sides = [side.strip() for side in text.split(",")]
    if len(sides) != 2 or not all(side.isdecimal() or not side for side in sides):
        raise argparse.ArgumentTypeError(
            f"expected LEFT,RIGHT, as '1023,0', or '1023,' for no limit after a query, got {text!r}"
        )
    left, right = (int(side) if side else None for side in sides)
    return left, right


def shape(text: str) -> tuple[int, ...]:
    """(B, H, Sq, D) as B,H,Sq,D."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != 4 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected four numbers from 1 on, as 4,16,4096,128, got {text!r}")
    return numbers


def problem_of(of_q: Sequence[int], options: argparse.Namespace) -> Problem:
    """Raises ValueError for what attention() refuses."""
    batch, heads, q_len, head_dim = of_q
    kv_heads = heads if options.kv_heads is None else options.kv_heads
    kv_len = q_len if options.kv_length is None else options.kv_length
    for option, given in {"--kv-heads": kv_heads, "--kv-length": kv_len, "--head-dim-v": options.head_dim_v}.items():
        if given is not None and given < 1:
            raise ValueError(f"{option}: expected 1 or more, got {given}")
    dtype = NAMED_DTYPES[options.dtype]
    head_dim_v = head_dim if options.head_dim_v is None else options.head_dim_v
    sizes = {
        "q": (batch, heads, q_len, head_dim),
        "k": (batch, kv_heads, kv_len, head_dim),
        "v": (batch, kv_heads, kv_len, head_dim_v),
    }
    if options.bias and q_len == 1:
        raise ValueError("--bias: expected several queries, as a bias that all share has no rows, got 1; leave it out")
    if options.bias:
        sizes["bias"] = (1, 1, q_len, row_stride(kv_len))
    for name, size in sizes.items():
        if math.prod(size) > LARGEST_NUMEL:
            raise ValueError(f"{name}: expected at most 2^60 elements, got shape {size}; give smaller sizes")
    q, k, v, *biases = (torch.empty(size, dtype=dtype, device="meta") for size in sizes.values())
    bias = biases[0][..., :kv_len] if biases else None
    score_mod = None
    if options.softcap is not None:
        score_mod = softcap(options.softcap)
    elif options.alibi:
        score_mod = alibi(torch.empty(heads, device="meta"))
    return Problem.of(
        q, k, v, causal=options.causal, window=options.window, chunk=options.chunk, score_mod=score_mod, bias=bias
    )


def explained(problem: Problem, device: Device, num_ctas: int | None, results: Path) -> Iterator[str]:
    """Raises what `pick_config` raises. results: the folder of result files, which need not be there."""
    rows = tuning.rows_for(device)
    row = pick_row(problem, device, num_ctas, rows)
    config = pick_config(problem, device, num_ctas, rows)
    yield heading(problem, device)
    yield ""
    of_row = f", made of the row's {label(row.config)}" * (label(row.config) != label(config))
    yield f"served by {named(row, device)}: {label(config)}{of_row}"
    yield from (f"  {line}" for line in conditions(row, problem))
    yield from not_asked(device, {t: any(r.is_of_kind(problem, device) for r in t.rows) for t in tuning.active()})
    asked = as_asked(rows, problem)
    earlier = [r for r in asked[: asked.index(row)] if r.is_of_kind(problem, device)]
    if earlier:
        yield "asked before it, and passed over"
        yield from (
            f"  {label(r.config)}{of_file(r, device)}: {why_not(r, problem, device, num_ctas)}" for r in earlier
        )
    yield ""
    yield from launch_lines(Plan.of(problem, config, device))
    yield ""
    yield from measured_lines(row, problem, device, results)


def explained_backward(problem: Problem, device: Device, results: Path) -> Iterator[str]:
    """Likewise of its gradients. NotImplementedError where there are none."""
    if problem.dtype in FP8_DTYPES:
        raise NotImplementedError("--backward: expected --dtype fp16 or bf16, as fp8 has no gradients")
    if device.arch != 90:
        raise NotImplementedError(f"--backward: expected a Hopper card, as no other has gradients, got {device.name}")
    rows = tuning.backward_rows_for(device)
    row = backward.pick_row(problem, rows)
    yield f"gradients of {heading(problem, device)}"
    yield ""
    config = backward.pick_config(problem, rows)
    of_row = f", made of the row's {label_of(row)}" * (label_of(row) != backward_label(config))
    yield f"served by {named(row, device)}: {backward_label(config)}{of_row}"
    yield f"  {dims(problem, row.head_dims)}"
    if row.causal is not None:
        yield "  causal" if row.causal else "  no mask"
    yield from (f"  {asks}: it has {has}" for asks, has in limits(row, problem))
    yield from not_asked(device, {t: any(r.is_of_kind(problem) for r in t.backward_rows) for t in tuning.active()})
    asked = as_asked(rows, problem)
    earlier = [r for r in asked[: asked.index(row)] if r.is_of_kind(problem)]
    if earlier:
        yield "asked before it, and passed over"
        of_bias = "with a bias the rows in code serve" if problem.bias is not None else None
        yield from (f"  {label_of(r)}{of_file(r, device)}: {of_bias or why_not_of_sizes(r, problem)}" for r in earlier)
    yield ""
    yield from backward_launch_lines(BackwardPlan.of(problem, config, device))
    yield ""
    yield from measured_lines(row, problem, device, results)


def not_asked(device: Device, loaded: Mapping[tuning.Table, bool]) -> Iterator[str]:
    """The files that have nothing to say, and why. loaded: whether each has a row of the problem's kind."""
    for table, is_of_kind in loaded.items():
        if not table.serves(device):
            yield f"not asked: {table.source}, which is for {table.cards}, and this is an {device.title}"
        elif not is_of_kind:
            yield f"not asked: {table.source}, which has no row for such a head dim, mask and dtype"


def heading(problem: Problem, device: Device) -> str:
    return f"{described(problem)}, on {device.name} (sm_{device.arch}, {device.sm_count} processors)"


def label_of(row: Row | BackwardRow) -> str:
    return label(row.config) if isinstance(row, Row) else backward_label(row.config)


def described(problem: Problem) -> str:
    q = f"q ({problem.batch}, {problem.heads}, {problem.q_len}, {problem.head_dim})"
    kv = f"k ({problem.batch}, {problem.kv_heads}, {problem.kv_len}, {problem.head_dim})"
    v = f", v's head dim {problem.head_dim_v}" * (problem.head_dim_v != problem.head_dim)
    dtype = next(name for name, of in NAMED_DTYPES.items() if of == problem.dtype)
    scores = f", {problem.scores}" * (problem.scores is not None)
    if problem.score_mod is not None and kind_of(problem.score_mod) == "softcap":
        scores += f" {problem.score_mod.after:g}"
    return f"{q}, {kv}{v}, {dtype}, {masked(problem)}{scores}"


def masked(problem: Problem) -> str:
    """Its limits, but for those that hide nothing at its lengths."""
    mask = problem.mask
    limits = {
        "causal": mask.causal,
        f"{mask.left} keys before": mask.left is not None,
        f"{mask.right} keys after": mask.right is not None,
        f"chunks of {mask.chunk}": mask.chunk is not None,
    }
    return ", ".join(limit for limit, is_there in limits.items() if is_there) or "no mask"


def named(row: Row | BackwardRow, device: Device) -> str:
    """Which row of which table."""
    found = file_of(row, device)
    if found:
        elsewhere = f" (measured on an {row.card})" if row.card != device.name else ""
        return f"{found}{elsewhere}"
    packaged: Sequence[Row | BackwardRow] = tuning.PACKAGED if isinstance(row, Row) else backward.PACKAGED
    number = next(i for i, own in enumerate(packaged) if own is row)
    measured = f"measured on an {row.card}, {row.date}" if row.card else "not measured"
    return f"row {number} of the packaged table ({measured})"


def file_of(row: Row | BackwardRow, device: Device) -> str | None:
    """Which row of which table file that serves the device; None for one in code."""
    for table in tuning.serving(device):
        for i, own in enumerate(rows_like(row, table)):
            if own is row:
                return f"row {i} of {table.source}"
    return None


def of_file(row: Row | BackwardRow, device: Device) -> str:
    """Likewise, behind a name."""
    found = file_of(row, device)
    return "" if found is None else f" ({found})"


def conditions(row: Row, problem: Problem) -> Iterator[str]:
    """What the row asks for, and what the problem has."""
    yield dims(problem, row.head_dims)
    yield f"{'causal' if row.causal else 'no mask'}, {8 * row.element_bytes} bits"
    yield from (f"{asks}: it has {has}" for asks, has in limits(row, problem))


def dims(problem: Problem, padded: tuple[int, int]) -> str:
    own, of_kernel = (
        f"{d}" + f" (v's: {d_v})" * (d != d_v) for d, d_v in ((problem.head_dim, problem.head_dim_v), padded)
    )
    return f"head dim {own}: the kernel of {of_kernel}"


def limits(row: Row | BackwardRow, problem: Problem) -> Iterator[tuple[str, str]]:
    """What the row asks of the sizes, where it does, and what they are."""
    keys = problem.mask.most_keys(problem.kv_len)
    heads = problem.batch * problem.heads
    group = problem.heads // problem.kv_heads
    if row.min_kv_len > 1:
        yield f"at least {row.min_kv_len} keys that a query sees", f"{keys}"
    if row.max_kv_len is not None:
        yield f"at most {row.max_kv_len} keys that a query sees", f"{keys}"
    if row.in_limits:
        yield "a window or chunks, which limit how many these are", "one of them"
    if row.min_reuse > 1:
        yield f"at least {row.min_reuse} queries to a KV head", f"{problem.q_len * group}"
    if row.q_lens is not None:
        yield f"{between(row.q_lens)} queries", f"{problem.q_len}"
    if row.sequence_heads is not None:
        yield f"{between(row.sequence_heads)} heads times batch", f"{heads}"
    if row.heads_per_kv_head is not None:
        yield f"{counted(row.heads_per_kv_head, 'query head')} to a KV head", f"{group}"
    if row.scores is not None:
        yield f"scores with {row.scores}", row.scores
    if isinstance(row, Row) and row.one_round and not (row.row_blocks and all_take_the_same(problem)):
        yield "no program with more than one item", "none"
    elif isinstance(row, Row) and row.row_blocks:
        yield f"row blocks of {row.config.block_m} rows end soonest", "so many queries and heads"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def between(sizes: tuple[int, int] | None) -> str:
    return "any" if sizes is None else f"{sizes[0]} to {sizes[1]}"


def why_not(row: Row, problem: Problem, device: Device, num_ctas: int | None) -> str:
    """Why a row of the problem's kind does not serve it."""
    unmet = row.unmet(problem, device, num_ctas)
    if problem.bias is not None and row.config.num_ctas > 1:
        return "for more than one CTA to a cluster, which no bias has"
    if unmet == "num_ctas":
        return f"has {counted(row.config.num_ctas, 'CTA')} to a cluster, asked for are {num_ctas}"
    if unmet == "one_round":
        plan = Plan.of(problem, row.config, device)
        return f"for little work only, and here {plan.programs} programs have {plan.items} items"
    if unmet == "row_blocks" and not all_take_the_same(problem):
        return "for calls whose row blocks take the same time each"
    if unmet == "row_blocks":
        return f"row blocks of {row.ends_soonest(problem, device)} rows end sooner than its own of {row.config.block_m}"
    if unmet == "smem_bytes":
        needed = row.config.smem_bytes(row.padded_head_dim, row.element_bytes, row.padded_head_dim_v)
        return f"needs {needed} bytes of shared memory, there are {device.smem_bytes}"
    return why_not_of_sizes(row, problem)


def why_not_of_sizes(row: Row | BackwardRow, problem: Problem) -> str:
    """Likewise, by what the row asks of the sizes."""
    heads, group = problem.batch * problem.heads, problem.heads // problem.kv_heads
    keys = problem.mask.most_keys(problem.kv_len)
    return {
        "min_kv_len": f"from {row.min_kv_len} keys on, a query sees {keys}",
        "max_kv_len": f"up to {row.max_kv_len} keys, a query sees {keys}",
        "in_limits": "for windows and chunks alone",
        "min_reuse": f"from {row.min_reuse} queries to a KV head on, there are {problem.q_len * group}",
        "q_lens": f"for {between(row.q_lens)} queries, there are {problem.q_len}",
        "sequence_heads": f"for {between(row.sequence_heads)} heads times batch, there are {heads}",
        "heads_per_kv_head": f"for {counted(row.heads_per_kv_head or 0, 'query head')} to a KV head, there are {group}",
        "scores": f"for scores with {row.scores}, here is {problem.scores or 'none of these'}",
        None: "for a batch of equal lengths",
    }[row.unmet_size(problem)]


def launch_lines(plan: Plan) -> Iterator[str]:
    problem, config = plan.problem, plan.config
    rounds = plan.items / plan.programs
    item = "a row block" if plan.blocks_per_item == 1 else "two row blocks, a heavy one with a light one"
    programs, ctas = counted(plan.programs, "program"), counted(config.num_ctas, "CTA")
    yield f"launch: {programs} of {ctas}, for {counted(plan.items, 'item')}, {rounds:.2f} each"
    yield f"  an item is {item}, of {config.block_m} queries; key blocks of {config.block_n}"
    if plan.heads_longest_first and isinstance(config, HopperConfig):
        yield f"  the last {plan.heads_longest_first} heads one row block at a time, those with most keys first"
    if config.transposes_before(problem.dtype.itemsize):
        yield f"  before it, {plan.transpose_programs} programs transpose V"
    smem = config.smem_bytes(problem.padded_head_dim, problem.dtype.itemsize, problem.padded_head_dim_v)
    smem += 0 if problem.bias is None else config.bias_bytes(problem.bias)
    yield f"shared memory: at most {smem} bytes to a CTA"
    yield f"registers: {registers(config)} of {REGISTERS_PER_SM}"


def backward_launch_lines(plan: BackwardPlan) -> Iterator[str]:
    problem, config = plan.problem, plan.config
    item = "a key block" if plan.blocks_per_item == 1 else "two key blocks, one that many queries see with one that few"
    yield f"launch: {counted(plan.programs, 'program')}, for {counted(plan.key_blocks, 'key block')} of {config.keys}"
    yield f"  an item is {item}; it walks row blocks of {config.block_m}"
    if plan.shared:
        yield f"  the last {plan.shared} key blocks are divided into {plan.shared_parts} parts"
    if len(config.launches) > 1:
        yield "  dV has a launch of its own, and then dK and dQ another, each of so many programs"
    if plan.finishes:
        yield f"  before it, {plan.row_programs} programs, one for each row block; it makes dQ of its sums itself"
    else:
        yield f"  before and after it, {plan.row_programs} programs, one for each row block; the last ones make dQ"
    head_dims = backward.padded_head_dims(problem.head_dim, problem.head_dim_v)
    smem = config.smem_bytes(*head_dims, problem.bias, finishes=plan.finishes)
    yield f"shared memory: at most {smem} bytes to a CTA"
    others = "loads, adds up dQ or finishes it" if plan.finishes else "loads or adds up dQ"
    yield f"registers: {config.load_registers} a thread that {others}; two warpgroups have the rest"


def registers(config: ForwardConfig) -> str:
    """Per thread of each role, and of all together."""
    if isinstance(config, HopperConfig):
        transpose = f", {config.transpose_registers} a thread that transposes" * (config.transpose_registers > 0)
        softmax = f"{config.softmax_registers} a thread of {counted(config.softmax_roles, 'softmax warpgroup')}"
        return f"{softmax}{transpose}, {config.load_registers} that loads; {config.registers}"
    assert isinstance(config, BlackwellConfig)
    return (
        f"{config.softmax_registers} a thread of two softmax warpgroups, {config.correction_registers} that corrects, "
        f"{config.load_registers} that loads; {REGISTERS_PER_SM}"
    )


def compiled_here(
    problem: Problem, device: Device, num_ctas: int | None, of_gradients: bool
) -> dict[str, CompiledKernel]:
    """The kernel; of gradients, the main one, or each of its parts, by name."""
    if of_gradients:
        config = backward.pick_config(problem, tuning.backward_rows_for(device))
        found = main_kernels(BackwardPlan.of(problem, config, device))
        return {f"compiled for {grads}" if len(found) > 1 else "compiled": kernel for grads, kernel in found.items()}
    of_forward = pick_config(problem, device, num_ctas, tuning.rows_for(device))
    return {"compiled": compiled_for(problem, of_forward, device.arch)}


def machine_code(name: str, kernel: CompiledKernel) -> Iterator[str]:
    found = resources(kernel)
    in_loops = sum(loop.spills for loop in found.loops)
    yield ""
    yield f"{name}: {found.smem_bytes} bytes of shared memory, {found.instructions} instructions"
    yield f"  spills: {in_loops} in the loops over blocks, {found.spills - in_loops} elsewhere"
