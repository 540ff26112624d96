"""A small Llama that learns repeated text, to compare kernels of attention by the losses of a training run."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "WINDOW",
    "Attend",
    "Model",
    "Shape",
    "averaged",
    "disagreement",
    "farthest",
    "losses_of",
    "table",
    "text",
    "train",
]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # causal, of (B, H, S, D), fewer KV heads than query heads

WINDOW = 20  # steps over which losses are averaged


@dataclass(frozen=True, kw_only=True)
class Shape:
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocabulary: int = 256
    batch: int = 8
    length: int = 256


class Block(nn.Module):
    def __init__(self, shape: Shape, attend: Attend) -> None:
        super().__init__()
        self.shape, self.attend = shape, attend
        width = shape.heads * shape.head_dim
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        attended = self.attend(rotated(q, turn), rotated(k, turn), v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, shape: Shape, attend: Attend) -> None:
        super().__init__()
        width = shape.heads * shape.head_dim
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, width)
        self.blocks = nn.ModuleList(Block(shape, attend) for _ in range(shape.layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        half = self.shape.head_dim // 2
        rates = 10000.0 ** (-torch.arange(half, device=tokens.device) / half)
        turn = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * rates
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, turn)
        return self.head(self.norm(x))


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary positions: pairs of columns turned by an angle for each position, in x's dtype."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * turn.cos() - b * turn.sin(), a * turn.sin() + b * turn.cos()], dim=-1).to(x.dtype)


def text(shape: Shape, step: int) -> Tensor:
    """Phrases of a fixed dictionary in random order, each said twice: [batch, length + 1], the same for each step."""
    phrases = torch.randint(shape.vocabulary, (64, 8), generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1000 + step)
    said = torch.randint(len(phrases), (shape.batch, shape.length // 16 + 1), generator=generator)
    return phrases[said.repeat_interleave(2, dim=1)].flatten(1)[:, : shape.length + 1]


def train(attend: Attend, shape: Shape, steps: int, device: str, runs: int = 1) -> Tensor:
    """The loss at each step, [runs, steps]. The same start each time."""
    losses = []
    for _ in range(runs):
        torch.manual_seed(0)
        model = Model(shape, attend).to(device)
        losses.append(losses_of(model, model, shape, steps, device))
    return torch.stack(losses)


def losses_of(
    model: nn.Module,
    logits_of: Callable[[Tensor], Tensor],
    shape: Shape,
    steps: int,
    device: str,
    learning_rate: float = 1e-3,
) -> Tensor:
    """The loss at each step, under bf16 autocast. The same text each time; weights are changed in place.

    logits_of: what the model makes of tokens, (B, S), as (B, S, vocabulary).
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    losses = torch.zeros(steps)
    for step in range(steps):
        tokens = text(shape, step).to(device)
        with torch.autocast(device, torch.bfloat16):
            logits = logits_of(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses[step] = loss.detach()
    return losses


def averaged(losses: Tensor) -> Tensor:
    """By window, of runs from the same start, [runs, steps]: the median of the runs' means. Where losses fall fast, a
    run may leave the others for a while, with torch's kernels too (docs/lab_log.md, "Losses that stray"). What is left
    over belongs to no window."""
    return means(losses).median(0).values


def means(losses: Tensor) -> Tensor:
    """Of each run by window, [runs, windows]."""
    return losses.unfold(1, WINDOW, WINDOW).mean(-1)


def farthest(losses: Tensor) -> float:
    """How far any run's mean is from the median of all."""
    return float((means(losses) - averaged(losses)).abs().max())


def disagreement(judged: dict[str, Tensor], peers: dict[str, Tensor], falls_to: float = 0.7) -> str | None:
    """None if each judged one is as near to the nearest peer as peers are to each other: in each window at most twice
    as far as any two peers are in any. Else what is further off. Losses have to fall to that part, too. All are [runs,
    steps], see `averaged`."""
    noise = max(float((averaged(a) - averaged(b)).abs().max()) for a, b in itertools.combinations(peers.values(), 2))
    limit = 2 * noise + 1e-3
    for name, losses in judged.items():
        far = min(float((averaged(losses) - averaged(peer)).abs().max()) for peer in peers.values())
        if not far <= limit:  # true of NaN
            return f"{name}: expected losses within {limit:.4f} of another kernel's, got {far:.4f}"
        start, end = float(losses[:, 0].median()), float(averaged(losses)[-1])
        if not end < falls_to * start:
            return f"{name}: expected the loss to fall from {start:.2f} to less than {falls_to} of it, got {end:.2f}"
    return None


def table(runs: dict[str, Tensor]) -> str:
    """Losses of each window, `averaged`, and how far one run is off at most."""
    windows = range(WINDOW, WINDOW * (1 + len(averaged(next(iter(runs.values()))))), WINDOW)
    lines = ["up to step".ljust(22) + "".join(f"{step:>8}" for step in windows) + "  one run"]
    for name, of_one in runs.items():
        losses = "".join(f"{loss:8.4f}" for loss in averaged(of_one).tolist())
        lines.append(f"{name.ljust(22)}{losses}{farthest(of_one):9.4f}")
    return "\n".join(lines)
