"""Attention in PyTorch: the reference, softmax by blocks of keys, and two orders of the loops."""

import math

import torch
from torch import Tensor


def reference(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(output, LSE). q: [queries, D], k and v: [keys, D]."""
    scores = q @ k.T * q.shape[1] ** -0.5
    return torch.softmax(scores, dim=1) @ v, torch.logsumexp(scores, dim=1)


def online_step(scores: Tensor, v: Tensor, high: Tensor, total: Tensor, acc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One block of keys. scores: [queries, keys of the block], in base 2."""
    new_high = torch.maximum(high, scores.amax(1))
    factor = torch.exp2(high - new_high)
    p = torch.exp2(scores - new_high[:, None])
    return new_high, factor * total + p.sum(1), factor[:, None] * acc + p @ v


Counts = dict[str, int]


def flash_1(q: Tensor, k: Tensor, v: Tensor, block: int) -> tuple[Tensor, Counts]:
    """Keys outside, queries inside; the output is finished after every step."""
    scale = q.shape[1] ** -0.5 * math.log2(math.e)
    out, high, total = torch.zeros_like(q), torch.full((len(q),), -math.inf), torch.zeros(len(q))
    counts = {"divisions of a row": 0, "output blocks written": 0}
    for key in range(0, len(k), block):
        for row in range(0, len(q), block):
            rows, keys = slice(row, row + block), slice(key, key + block)
            scores = q[rows] @ k[keys].T * scale
            acc = out[rows] * total[rows, None]
            high[rows], total[rows], acc = online_step(scores, v[keys], high[rows], total[rows], acc)
            out[rows] = acc / total[rows, None]
            counts["divisions of a row"] += block
            counts["output blocks written"] += 1
    return out, counts


def flash_2(q: Tensor, k: Tensor, v: Tensor, block: int) -> tuple[Tensor, Tensor, Counts]:
    """Queries outside, keys inside: (output, LSE, counts)."""
    scale = q.shape[1] ** -0.5 * math.log2(math.e)
    outs, lses = [], []
    counts = {"divisions of a row": 0, "output blocks written": 0}
    for row in range(0, len(q), block):
        rows = q[row : row + block]
        high, total, acc = torch.full((block,), -math.inf), torch.zeros(block), torch.zeros_like(rows)
        for key in range(0, len(k), block):
            scores = rows @ k[key : key + block].T * scale
            high, total, acc = online_step(scores, v[key : key + block], high, total, acc)
        outs.append(acc / total[:, None])
        lses.append((high + torch.log2(total)) * math.log(2))
        counts["divisions of a row"] += block
        counts["output blocks written"] += 1
    return torch.cat(outs), torch.cat(lses), counts


def main() -> None:
    scores, v = torch.tensor([[0.0, 1, 2, 1]]), torch.tensor([[10.0], [40], [20], [50]])
    high, total, acc = torch.tensor([-math.inf]), torch.zeros(1), torch.zeros(1, 1)
    for keys in (slice(0, 2), slice(2, 4)):
        high, total, acc = online_step(scores[:, keys], v[keys], high, total, acc)
        print(f"by hand: high = {high.item():g}, total = {total.item():g}, acc = {acc.item():g}")
    print(f"output {(acc / total[:, None]).item():g}")

    q, k, v = torch.randn(3, 256, 64, generator=torch.Generator().manual_seed(0))
    out, lse = reference(q, k, v)
    first, first_counts = flash_1(q, k, v, 64)
    second, second_lse, second_counts = flash_2(q, k, v, 64)
    for got, want in ((first, out), (second, out), (second_lse, lse)):
        torch.testing.assert_close(got, want)
    print("FlashAttention-1:", first_counts)
    print("FlashAttention-2:", second_counts)


if __name__ == "__main__":
    main()
