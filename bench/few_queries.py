"""Times each height of a row block where a call has few queries: with which is it ended soonest?

    python -m bench.few_queries --out FILE     # on a Hopper card, two minutes
    python -m bench.few_queries --show FILE    # anywhere

Programs take row blocks in rounds, as many at a time as there are processors. High row blocks compute more in the same
time. But with few queries some rows of them are of no query, and the last round may have work for few processors.
"""

import itertools
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.ahead import cores
from bench.gradients import save
from bench.provenance import SEED, provenance
from bench.report import markdown
from bench.switched import capture, is_to_time, parser_of
from bench.timing import time_interleaved
from gluon_attn import attention
from gluon_attn.forward.configs import HopperConfig
from gluon_attn.forward.table import HOPPER

QUERIES = (64, 128, 192, 256, 384, 512, 768, 1024)
HEADS = (32, 64, 128, 256, 512)  # of all batches
KEYS = (1024, 8192)
KV_HEADS = 8  # to 32 query heads


def configs(head_dim: int) -> dict[str, HopperConfig]:
    """Of calls without a mask in 16 bits, on one CTA, by the rows of a row block."""
    rows = [row for row in HOPPER if row.head_dims == (head_dim, head_dim) and not row.causal]
    found: dict[str, HopperConfig] = {}
    for row in rows:
        if isinstance(row.config, HopperConfig) and (row.element_bytes, row.config.num_ctas) == (2, 1):
            found.setdefault(f"{row.config.block_m} rows", row.config)
    return found


def shapes() -> list[dict[str, int]]:
    names = ("head_dim", "heads", "q_len", "kv_len")
    return [dict(zip(names, of, strict=True)) for of in itertools.product((64, 128), HEADS, QUERIES, KEYS)]


def inputs(head_dim: int, heads: int, q_len: int, kv_len: int) -> list[Tensor]:
    torch.manual_seed(SEED)
    batch = heads // 32
    keys = (batch, KV_HEADS, kv_len, head_dim)
    of = ((batch, 32, q_len, head_dim), keys, keys)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in of]


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph = capture(call, stream)
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def measure(shape: dict[str, int], rounds: int) -> dict[str, Any]:
    q, k, v = inputs(**shape)
    calls: dict[str, Callable[[], object]] = {
        name: partial(attention, q, k, v, config=config) for name, config in configs(shape["head_dim"]).items()
    }
    calls |= {"chosen": partial(attention, q, k, v)}
    graphs = {name: captured(call) for name, call in calls.items()}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        graphs["cudnn"] = captured(partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=True))
    timings = time_interleaved({name: graph.replay for name, graph in graphs.items()}, rounds=rounds, runs=5, warmup=2)
    return {"shape": shape, "results": {n: {"us": t.median * 1e6, "spread": t.spread} for n, t in timings.items()}}


def compile_ahead(head_dim_and_name: tuple[int, str]) -> None:
    head_dim, name = head_dim_and_name
    attention(*inputs(head_dim, 32, 64, 1024), config=configs(head_dim)[name])
    torch.cuda.synchronize()


def show(found: dict[str, Any]) -> None:
    names = list(dict.fromkeys(name for point in found["points"] for name in point["results"]))
    rows = {
        "D={head_dim}, {heads} heads, {q_len} of {kv_len}".format(**point["shape"]): [
            f"{point['results'][name]['us']:.1f}" if name in point["results"] else "–" for name in names
        ]
        for point in found["points"]
    }
    print(markdown(["µs", *names], rows))


def main() -> None:
    args = parser_of("bench.few_queries", __doc__).parse_args()
    if not is_to_time("bench.few_queries", args, show):
        return
    wanted = [(head_dim, name) for head_dim in (64, 128) for name in configs(head_dim)]
    with ProcessPoolExecutor(cores(), mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_ahead, wanted))
    found: dict[str, Any] = {"provenance": provenance(args.commit), "points": []}
    for shape in shapes():
        found["points"].append(measure(shape, args.rounds))
    save(found, args.out)
    show(found)


if __name__ == "__main__":
    main()
