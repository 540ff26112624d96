"""What each process of test_distributed.py runs: every case, by gluon_cpu over gloo, or on a card each over NCCL.

python -m tests.gluon_attn.ranks every_case|script|on_cards RANK SIZE FOLDER
"""

import contextlib
import datetime
import functools
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from gluon_attn import attention, distributed, torch_sdpa
from gluon_attn.device import Device
from gluon_attn.distributed import (
    ring,
    ring_attention,
    shard,
    ulysses,
    ulysses_attention,
    ulysses_attention_varlen,
    unshard,
)
from tests.gluon_attn.ranks_models import Spy, falls_through, sdpa_is_ours, switched, whole_gradients, wrapped

ROOT = Path(__file__).parents[2]
LIMIT_S = 400  # for a machine that is busy; they take 30
HOPPER = Device.hopper()
BF16 = torch.bfloat16
# Lengths are for each chunk, of which a rank has two.
RING: dict[str, dict[str, Any]] = {
    "full": {},
    "causal, grouped heads": {"causal": True, "heads": 4, "kv_heads": 2},
    "causal, bshd, both outputs": {"causal": True, "layout": "bshd", "dlse": True, "kv_heads": 1},
    "full, bshd, other lengths": {"layout": "bshd", "kv_chunk": 9, "batch": 2, "dtype": torch.float16},
    "causal, deterministic, D=72": {"causal": True, "deterministic": True, "head_dim": 72, "scale": 0.2},
    "shares of odd length": {"chunk": 3.5},
    "LSE alone": {"causal": True, "dlse": True, "dout": False},
    "strides of a packed tensor": {"causal": True, "layout": "bshd", "packed": True},
}
ULYSSES: dict[str, dict[str, Any]] = {
    "causal, grouped heads": {"causal": True, "heads": 8, "kv_heads": 4},
    "full, bshd, both outputs": {"layout": "bshd", "heads": 4, "dlse": True, "batch": 2},
    "causal, more keys than queries": {"causal": True, "heads": 4, "kv_chunk": 9, "scale": 0.2},
}
CASES = {f"ring: {name}": case for name, case in RING.items()} | {
    f"ulysses: {name}": case for name, case in ULYSSES.items()
}
BY_TORCH: dict[str, Any] = {"causal": True, "heads": 2, "chunk": 5}  # what context_parallel can do
BACKENDS = ("cudnn", "flash")  # whose operators it calls


def run_ranks(size: int, folder: Path, what: str = "every_case") -> list[Any]:
    """What each rank found. No process is left behind."""
    command = [sys.executable, "-m", "tests.gluon_attn.ranks", what]
    paths = (str(ROOT), os.environ.get("PYTHONPATH"))  # where this process found Triton, ranks do too
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    processes = []
    for rank in range(size):
        with open(folder / f"{rank}.log", "w") as log:
            arguments = [str(rank), str(size), str(folder)]
            processes.append(
                subprocess.Popen(
                    [*command, *arguments], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
                )
            )
    try:
        ended = [process.wait(LIMIT_S) for process in processes]
        logs = [(folder / f"{rank}.log").read_text() for rank in range(size)]
        assert not any(ended), "\n".join(logs)  # who failed first, the others do not say
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [torch.load(folder / f"{rank}.pt", map_location="cpu") for rank in range(size)]


def whole_tensors(case: dict[str, Any], size: int) -> tuple[Tensor, ...]:
    """q, k, v, dO and dLSE of the sequence that `size` ranks share."""
    generator = torch.Generator().manual_seed(size)
    heads, chunk = case.get("heads", 2), case.get("chunk", 5)
    q_len, kv_len = (int(2 * size * c) for c in (chunk, case.get("kv_chunk", chunk)))

    def normal(h: int, s: int) -> Tensor:
        middle = (h, s) if case.get("layout", "bhsd") == "bhsd" else (s, h)
        shape = (case.get("batch", 1), *middle, case.get("head_dim", 64))
        return torch.randn(shape, generator=generator).to(case.get("dtype", BF16))

    kv_heads = case.get("kv_heads", heads)
    q, k, v, dout = normal(heads, q_len), normal(kv_heads, kv_len), normal(kv_heads, kv_len), normal(heads, q_len)
    return q, k, v, dout, torch.randn(q.shape[0], heads, q_len, generator=generator)


def options_of(case: dict[str, Any]) -> dict[str, Any]:
    return {name: case[name] for name in ("causal", "scale", "layout") if name in case}


def longer(case: dict[str, Any]) -> dict[str, Any]:
    """So that a share has several blocks of queries and of keys."""
    return case | {name: 61 * case.get(name, 5) for name in ("chunk", "kv_chunk") if name == "chunk" or name in case}


def run_case(name: str, size: int) -> dict[str, Any]:
    return run_of(name, CASES[name], size, torch.device("cpu"), HOPPER)


def on_cards(size: int) -> dict[str, Any]:
    place = torch.device("cuda", torch.cuda.current_device())
    found: dict[str, Any] = {name: run_of(name, longer(case), size, place, None) for name, case in CASES.items()}
    return found | {
        "by_torch": {backend: by_torch(longer(BY_TORCH), size, place, backend) for backend in BACKENDS},
        "wrapped": wrapped(size, place, None),
        "switched": switched(size, place, 512 * size),
        "falls_through": falls_through(size, place),
        "packed_rows": packed_rows(600 * size, place, None),
    }


def run_of(name: str, case: dict[str, Any], size: int, place: torch.device, device: Device | None) -> dict[str, Any]:
    """O, LSE and the gradients, of the whole sequence, and what was computed here."""
    sequence = 2 if case.get("layout", "bhsd") == "bhsd" else 1
    *qkv, dout, dlse = (t.to(place) for t in whole_tensors(case, size))
    odd = qkv[0].shape[sequence] % (2 * size)

    def share(t: Tensor, dim: int) -> Tensor:
        return t.chunk(size, dim)[dist.get_rank()].contiguous() if odd else shard(t, dim=dim)

    def whole(t: Tensor, dim: int) -> Tensor:
        if not odd:
            return unshard(t.detach(), dim=dim)
        shares = [torch.empty_like(t) for _ in range(size)]
        dist.all_gather(shares, t.detach().contiguous())
        return torch.cat(shares, dim)

    shares = [share(t, sequence) for t in qkv]
    if case.get("packed"):
        shares = list(torch.stack(shares, dim=2).unbind(2))
    q, k, v = (t.requires_grad_() for t in shares)
    function: Any = ring_attention if name.startswith("ring") else ulysses_attention
    with Spy(ring if name.startswith("ring") else ulysses) as spy:
        out, lse = function(
            q, k, v, return_lse=True, deterministic=case.get("deterministic"), device=device, **options_of(case)
        )
        outputs = ([out] if case.get("dout", True) else []) + ([lse] if case.get("dlse") else [])
        grads = ([share(dout, sequence)] if case.get("dout", True) else []) + (
            [share(dlse, 2)] if case.get("dlse") else []
        )
        dq, dk, dv = torch.autograd.grad(outputs, (q, k, v), grads)
    with torch.no_grad():
        assert torch.equal(function(q, k, v, device=device, **options_of(case)), out)
    return {
        "out": whole(out, sequence), "lse": whole(lse, 2), "grads": [whole(t, sequence) for t in (dq, dk, dv)],
        "calls": spy.calls,
    }  # fmt: skip


def packed_lengths(rows: int) -> list[int]:
    """Of sequences of so many rows: one of each rank at least, one of none, some rows after the last."""
    return [7, 0, rows - 20, 9]


def packed_tensors(rows: int) -> list[Tensor]:
    """q, k, v, dO (rows, H, D) and dLSE (H, rows)."""
    generator = torch.Generator().manual_seed(rows)
    heads = 8, 4, 4, 8
    qkv_dout = [torch.randn(rows, h, 64, generator=generator).to(BF16) for h in heads]
    return [*qkv_dout, torch.randn(8, rows, generator=generator)]


def packed_rows(rows: int, place: torch.device, device: Device | None) -> dict[str, Any]:
    """O, LSE and the gradients of packed sequences by Ulysses, of all rows."""
    *qkv, dout, dlse = (t.to(place) for t in packed_tensors(rows))
    lengths = packed_lengths(rows)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=place)
    q, k, v = (shard(t, dim=0).requires_grad_() for t in qkv)
    function: Any = functools.partial(
        ulysses_attention_varlen, q, k, v, starts, starts, max(lengths), max(lengths), causal=True, device=device
    )
    out, lse = function(return_lse=True)
    grads = torch.autograd.grad((out, lse), (q, k, v), (shard(dout, dim=0), shard(dlse, dim=1)))
    whole = unshard(out.detach(), dim=0)
    with torch.no_grad():
        end = sum(lengths)
        assert torch.equal(unshard(function(), dim=0)[:end], whole[:end])
    return {"out": whole, "lse": unshard(lse.detach(), dim=1), "grads": [unshard(t, dim=0) for t in grads]}


def by_torch(case: dict[str, Any], size: int, place: torch.device, backend: str) -> dict[str, Any]:
    """O and gradients by torch's context_parallel, whose shares are those of `shard`, one backend's operators ours."""
    *whole, _ = (t.to(place) for t in whole_tensors(case, size))
    buffers: list[Any] = [t.clone() for t in whole]
    mesh = init_device_mesh(place.type, (size,))
    shares = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers))
    with Spy(torch_sdpa) as spy, sdpa_is_ours(place, backend), shares:
        q, k, v, dout = (t.detach() for t in buffers)
        inputs = [t.requires_grad_() for t in (q, k, v)]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        grads = torch.autograd.grad(out, inputs, dout)
    return {
        "shares": all(torch.equal(t.detach(), shard(whole, dim=2)) for t, whole in zip(buffers, whole, strict=True)),
        "out": unshard(out.detach(), dim=2), "grads": [unshard(t, dim=2) for t in grads], "calls": spy.calls,
    }  # fmt: skip


def hidden_keys(size: int) -> dict[str, Any]:
    """Keys whose scores are -inf: those of one share in the first head, all of them in the second."""
    q, k, v, *_ = whole_tensors({}, size)
    q[..., 0] = 1.0
    k[:, 0, :5, 0] = k[:, 0, -5:, 0] = k[:, 1, :, 0] = float("-inf")  # the first rank's share
    out, lse = ring_attention(*(shard(t, dim=2) for t in (q, k, v)), return_lse=True, device=HOPPER)
    return {"inputs": (q, k, v), "out": unshard(out, dim=2), "lse": unshard(lse, dim=2)}


def half_of_the_ranks(size: int) -> dict[str, Any]:
    """Two groups, each with a sequence of its own: this rank's, and what its group has for it."""
    halves = [list(range(size))[: size // 2], list(range(size))[size // 2 :]]
    groups = [dist.new_group(ranks) for ranks in halves]
    mine = int(dist.get_rank() >= size // 2)
    group: Any = groups[mine]
    q, k, v, dout, _ = whole_tensors({"chunk": 5 + mine}, size)
    found: dict[str, Any] = {"inputs": (q, k, v, dout)}
    for function in (ring_attention, ulysses_attention):
        q_share, k_share, v_share = (shard(t, dim=2, group=group).requires_grad_() for t in (q, k, v))
        out: Any = function(q_share, k_share, v_share, group=group, causal=True, device=HOPPER)
        grads = torch.autograd.grad(out, (q_share, k_share, v_share), shard(dout, dim=2, group=group))
        found[function.__name__] = [unshard(t.detach(), dim=2, group=group) for t in (out, *grads)]
    return found


def no_keys(size: int) -> list[Any]:
    q, k = torch.ones(1, 4, 6, 64, dtype=BF16), torch.ones(1, 4, 0, 64, dtype=BF16)
    return [f(q, k, k, return_lse=True, device=HOPPER) for f in (ring_attention, ulysses_attention)]


def bad_calls(size: int) -> dict[str, str]:
    """What each of them raises; with nothing sent, as a rank that waited would not get to the next."""
    q = torch.ones(1, 4, 6, 64, dtype=BF16)
    others: Any = dist.new_group([size - 1])
    mesh: Any = dist.device_mesh.init_device_mesh("cpu", (size,))
    text: Any = "all"
    starts = torch.tensor([0, 2 * size], dtype=torch.int32)

    def packed(q: Tensor, **options: Any) -> Any:
        return ulysses_attention_varlen(q, q, q, starts, starts, 9, 9, device=HOPPER, **options)

    calls: dict[str, Callable[[], Any]] = {
        "lengths": lambda: ring_attention(q, q[:, :, :4], q[:, :, :4], causal=True, device=HOPPER),
        "odd": lambda: ring_attention(*(q[:, :, :5],) * 3, causal=True, device=HOPPER),
        "odd keys": lambda: ulysses_attention(q, q[:, :, :5], q[:, :, :5], device=HOPPER),
        "heads": lambda: ulysses_attention(*(q[:, :3],) * 3, device=HOPPER),
        "KV heads": lambda: ulysses_attention(q, q[:, :1], q[:, :1], device=HOPPER),
        "packed heads": lambda: packed(q[0, :3].transpose(0, 1)),
        "packed, bshd": lambda: packed(q),
        "packed window": lambda: packed(q[0].transpose(0, 1), window=(3, 0)),
        "fp8": lambda: ring_attention(*(q.to(torch.float8_e4m3fn),) * 3, device=HOPPER),
        "shapes": lambda: ring_attention(q, q, q[:, :, :4], device=HOPPER),
        "dtype": lambda: ulysses_attention(*(q.float(),) * 3, device=HOPPER),
        "window": lambda: ring_attention(q, q, q, window=(3, 0), device=HOPPER),
        "bias": lambda: ring_attention(q, q, q, bias=q, device=HOPPER),
        "documents": lambda: ulysses_attention(q, q, q, segment_ids=q, device=HOPPER),
        "unknown": lambda: ring_attention(q, q, q, num_ctas=1, device=HOPPER),
        "card": lambda: ring_attention(*(q.clone().requires_grad_(),) * 3, device=Device.blackwell()),
        "mesh": lambda: ring_attention(q, q, q, group=mesh, device=HOPPER),
        "group": lambda: ring_attention(q, q, q, group=text, device=HOPPER),
        "other group": lambda: ulysses_attention(q, q, q, group=others, device=HOPPER),
        "shard": lambda: shard(q, dim=2),
        "unshard": lambda: unshard(q.clone().requires_grad_(), dim=2),
        "twice": lambda: twice(q),
    }
    raised = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            raised[name] = f"{type(error).__name__}: {error}"
    return raised


def twice(q: Tensor) -> None:
    q = q.clone().requires_grad_()
    out, _ = ring_attention(q, q, q, return_lse=True, device=HOPPER)
    torch.autograd.grad(torch.autograd.grad(out.sum(), q, create_graph=True)[0].sum(), q)


def broken_graphs(size: int) -> dict[str, Any]:
    """By function, O and the gradient of one input, compiled without fullgraph and not compiled."""
    q = torch.randn(1, size, 12, 64, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
    found: dict[str, Any] = {}
    for function in (ring_attention, ulysses_attention):

        def model(q: Tensor, function: Any = function) -> Any:
            x = q * 2
            return function(x, x, x, causal=True, device=HOPPER) + 1

        found[function.__name__] = []
        for run in (torch.compile(model, backend="aot_eager"), model):
            given = q.clone().requires_grad_()
            out = run(given)
            found[function.__name__].append((out.detach(), *torch.autograd.grad(out.float().square().sum(), given)))
    return found


def every_case(size: int) -> dict[str, Any]:
    found: dict[str, Any] = {name: run_case(name, size) for name in CASES}
    for check in (hidden_keys, half_of_the_ranks, no_keys, bad_calls, broken_graphs):
        found[check.__name__] = check(size)
    found["by_torch"] = {backend: by_torch(BY_TORCH, size, torch.device("cpu"), backend) for backend in BACKENDS}
    found["packed_rows"] = packed_rows(20 * size, torch.device("cpu"), HOPPER)
    found["wrapped"] = wrapped(size, torch.device("cpu"), HOPPER)
    found["switched"] = switched(size, torch.device("cpu"), 20 * size)
    whole = torch.arange(4 * size * 3).view(3, 4 * size)
    found["shard"] = shard(whole, dim=1)
    assert torch.equal(unshard(found["shard"], dim=-1), whole)
    return found


def check_script(text: str, device: Device | None = None) -> None:
    """Run one of the page's for several cards: its gradients are those of one process."""
    size = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    names: dict[str, Any] = {}
    with Spy(torch_sdpa) as spy:
        exec(text.replace('"cuda", (2,)', f'"cuda", ({size},)'), names)
    parts = size if "context_parallel" in text else int("model" in names)
    assert [call[0] for call in spy.calls] == ["attention"] * parts + ["attention_backward"] * parts
    if "model" in names:
        alone = re.sub(r"(fully_shard|DistributedDataParallel)\(layer", "(layer", text)
        alone = alone.replace("gluon_attn.torch_sdpa.enabled()", "contextlib.nullcontext()")
        plain: dict[str, Any] = {"contextlib": contextlib}
        exec("\n".join(line for line in alone.splitlines() if "init_device_mesh" not in line), plain)
        got, want = (whole_gradients(of["model"]) for of in (names, plain))
        for g, w in zip(got, want, strict=True):
            assert (g - w).norm() < 0.03 * w.norm()
        return
    q, k, v = (names[name].detach() for name in "qkv")
    grads = [t.grad for t in names["shares"]] if "shares" in names else [names["q"].grad]
    if "shares" not in names:
        q, k, v = (unshard(t, dim=2) for t in (q, k, v))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out: Any = attention(*inputs, causal=True, device=device)
    for grad, of_one in zip(grads, torch.autograd.grad(out.sum(), inputs), strict=False):
        assert (unshard(grad, dim=2).float() - of_one.float()).abs().max() <= 2**-6 * of_one.abs().max()


def script(size: int, folder: Path) -> None:
    """That in the folder, with all cards on the CPU and fewer queries and keys."""
    randn = torch.randn

    def smaller(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
        assert device == "cuda"
        middle = (min(n, 2 if n < 100 else 40) for n in shape[1:-1])
        return randn(shape[0], *middle, shape[-1]).to(dtype)

    stand_ins = (
        (torch, "randn", smaller),
        (torch.cuda, "set_device", range(size).index),
        (dist, "init_process_group", ["nccl"].index),  # there is one already
        (dist, "get_node_local_rank", dist.get_rank),
        (dist, "init_device_mesh", lambda device, shape: init_device_mesh("cpu", shape)),
        (distributed, "ring_attention", functools.partial(ring_attention, device=HOPPER)),
        (torch_sdpa, "enabled", functools.partial(sdpa_is_ours, torch.device("cpu"))),
        (nn.Module, "to", lambda module, device, dtype: module.type(dtype)),
    )
    for module, name, stand_in in stand_ins:
        setattr(module, name, stand_in)
    check_script((folder / "script.py").read_text(encoding="utf-8"), HOPPER)


def main(what: str, rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    if what == "on_cards":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if what == "on_cards" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=90),
    )
    run: dict[str, Callable[[int], Any]] = {
        "every_case": every_case,
        "script": functools.partial(script, folder=folder),
        "on_cards": on_cards,
    }
    torch.save(run[what](size), folder / f"{rank}.pt")
    dist.destroy_process_group()
    # Not by way of torch's own end: on a busy machine a process once ended by std::terminate there, for a thread of
    # torch's that was still going.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
