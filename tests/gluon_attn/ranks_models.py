"""Models whose ranks are wrapped as torch wraps them, and which kernels they call: what ranks.py runs of these."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from gluon_attn import attention, torch_sdpa
from gluon_attn.device import Device

HOPPER = Device.hopper()
BF16 = torch.bfloat16


# What modules call attention and its gradients, and which of its arguments is q.
SPIED = {
    "attention": ("attention", 0),
    "attend": ("attention", 0),
    "forward_pass": ("attention", 0),
    "attention_backward": ("attention_backward", 2),
    "backward_pass": ("attention_backward", 1),
}


class Spy:
    """Within it, what a module calls attention and its gradients with: rows, keys, whether causal. Calls of torch's
    operators that are left to torch do not count."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __enter__(self) -> "Spy":
        self.calls: list[tuple[str, int, int, bool]] = []
        names = filter(functools.partial(hasattr, self.module), SPIED)
        self.originals = {name: getattr(self.module, name) for name in names}
        for name, original in self.originals.items():
            setattr(self.module, name, self.watched(name, original))
        return self

    def watched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            what, first = SPIED[name]
            q, k = args[first : first + 2]
            given = args[4]._asdict() if name == "attend" else options
            sequence = 2 if given.get("layout", "bhsd") == "bhsd" else 1
            computed = original(*args, **options)
            if computed is not None:
                self.calls.append((what, q.shape[sequence], k.shape[sequence], given["causal"]))
            return computed

        return call

    def __exit__(self, *_: object) -> None:
        for name, original in self.originals.items():
            setattr(self.module, name, original)


@contextlib.contextmanager
def sdpa_is_ours(place: torch.device, backend: str = "cudnn") -> Iterator[None]:
    """On a card it is torch that chooses cuDNN. On the CPU torch's attention calls others, so operators are called by
    name there."""
    if place.type != "cpu":
        only = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if backend == "flash" else contextlib.nullcontext()
        with torch_sdpa.enabled(), only:
            yield
        return
    name = f"_scaled_dot_product_{backend}_attention"

    def of_cpu(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: None = None, dropout_p: float = 0.0, is_causal: bool = False
    ) -> Tensor:
        with_lse = (None, True) if backend == "cudnn" else ()
        return getattr(torch.ops.aten, name)(q, k, v, *with_lse, 0.0, is_causal)[0]

    with contextlib.ExitStack() as stack:
        of_cpu.__name__ = "scaled_dot_product_attention"
        stack.callback(setattr, F, of_cpu.__name__, F.scaled_dot_product_attention)
        F.scaled_dot_product_attention = of_cpu  # type: ignore[assignment]
        none_there = torch.library.Library("aten", "IMPL", "CPU")  # something to replace
        stack.callback(none_there._destroy)
        for operator in (name, f"{name}_backward"):
            none_there.impl(operator, of_cpu)
        stack.callback(torch_sdpa.override("CPU", HOPPER).remove)
        yield


class Small(nn.Module):
    """Projections, causal attention of (B, H, S, D), and what joins the heads."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.attend = attend
        self.qkv, self.out = (nn.Linear(128, width, bias=False, dtype=BF16) for width in (3 * 128, 128))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 64).transpose(1, 3).unbind(2)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


def by_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_ddp(model: nn.Module, place: torch.device) -> DistributedDataParallel:
    return DistributedDataParallel(model, device_ids=None if place.type == "cpu" else [place])


def by_fsdp(model: nn.Module, place: torch.device, **options: Any) -> Any:
    return fully_shard(model, mesh=init_device_mesh(place.type, (dist.get_world_size(),)), **options)


def step(model: nn.Module, x: Tensor) -> tuple[float, list[Tensor]]:
    """A step of training: the loss here, and the gradients."""
    loss = model(x).float().square().mean()
    loss.backward()
    return loss.item(), whole_gradients(model)


def whole_gradients(model: nn.Module) -> list[Tensor]:
    grads: list[Any] = [p.grad for p in model.parameters()]
    return [(g.full_tensor() if isinstance(g, DTensor) else g).float() for g in grads]


def wrapped(size: int, place: torch.device, device: Device | None) -> dict[str, list[Tensor]]:
    """Gradients of a model's weights: of one process with all of a batch; by DDP and FSDP2, a sequence in each rank."""
    torch.manual_seed(0)
    plain = Small(functools.partial(attention, causal=True, device=device)).to(place)
    x = torch.randn(size, 40, 128, dtype=BF16).to(place)
    mine = x[dist.get_rank() :][:1]
    return {
        "plain": step(copy.deepcopy(plain), x)[1],
        "DDP": step(by_ddp(copy.deepcopy(plain), place), mine)[1],
        "FSDP2": step(by_fsdp(copy.deepcopy(plain), place), mine)[1],
    }


def switched(size: int, place: torch.device, length: int) -> dict[str, dict[str, Any]]:
    """A step of a model that calls torch's SDPA: of one process with torch's kernels, in fp32 and in bf16; and with
    ours, by each way that torch has to spread it. Of the latter a rank has a sequence, or a share of each."""
    torch.manual_seed(0)
    plain, x = Small(by_sdpa).to(place), torch.randn(size, length, 128, dtype=BF16).to(place)
    mine = x[dist.get_rank() :][:1]
    mixed = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    found: dict[str, dict[str, Any]] = {}

    def run(name: str, model: nn.Module, x: Tensor, *contexts: contextlib.AbstractContextManager[Any]) -> None:
        with Spy(torch_sdpa) as spy, contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            loss, grads = step(model, x)
        mean = torch.tensor(loss, device=place)
        dist.all_reduce(mean)
        found[name] = {"loss": mean.item() / size, "grads": grads, "calls": spy.calls}

    def copied() -> nn.Module:
        return copy.deepcopy(plain)

    run("fp32", copied().float(), x.float())
    run("bf16", copied(), x)
    run("DDP", by_ddp(copied(), place), mine, sdpa_is_ours(place))
    run("FSDP2", by_fsdp(copied(), place), mine, sdpa_is_ours(place))
    run("FSDP2, mixed", by_fsdp(copied().float(), place, mp_policy=mixed), mine, sdpa_is_ours(place))
    shares, mesh = x.clone(), init_device_mesh(place.type, (size,))
    in_shares = context_parallel(mesh, buffers=[shares], buffer_seq_dims=[1])
    run("context_parallel, FSDP2", by_fsdp(copied(), place), shares, sdpa_is_ours(place), in_shares)
    if place.type == "cuda" or size > 2:  # compiling takes seconds
        compiled: Any = torch.compile(by_ddp(copied(), place), backend="aot_eager")
        run("DDP, compiled", compiled, mine, sdpa_is_ours(place))
    return found


def falls_through(size: int, place: torch.device) -> dict[str, list[Any]]:
    """Of a model in fp32, which is not ours: a step with our kernels turned off, and on. On cards."""
    torch.manual_seed(0)
    plain, x = Small(by_sdpa).float().to(place), torch.randn(size, 128 * size, 128, device=place)
    dist.broadcast(x, 0)
    mesh = init_device_mesh(place.type, (size,))
    found: dict[str, list[Any]] = {}
    for switch in (contextlib.nullcontext, torch_sdpa.enabled):
        with Spy(torch_sdpa) as spy, switch():
            by = step(by_ddp(copy.deepcopy(plain), place), x[dist.get_rank() :][:1])
            found.setdefault("DDP", []).append((*by, spy.calls))
        shares = x.clone()
        with Spy(torch_sdpa) as spy, switch(), context_parallel(mesh, buffers=[shares], buffer_seq_dims=[1]):
            by = step(by_fsdp(copy.deepcopy(plain), place), shares)
            found.setdefault("context_parallel, FSDP2", []).append((*by, spy.calls))
    return found
